"""A proxy between a client and the daemon: `python proxy.py FRONT BACK SEED`, two endpoints. It passes descriptors.

It forwards everything until a line on standard input says otherwise: `delay PART SECONDS`, `drop PART`, `twice PART` (a
part of the messages, in both directions), `cut` (every handshake connection), `still` (nothing passes until the next
line), `clear`.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import socket
import sys
import time
from collections import OrderedDict

import zmq

from kvcache_proto.endpoint import handshake_path

PEERS = 8  # ZeroMQ connections of clients that are kept; a client has one, and leaves the others behind


class Proxy:
    def __init__(self, front: str, back: str, seed: int) -> None:
        self.back, self.draw = back, random.Random(seed)
        self.delay = self.drop = self.twice = self.late = 0.0
        self.still = False
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.front.linger = 0
        self.front.bind(front)
        self.backs: OrderedDict[bytes, zmq.Socket[bytes]] = OrderedDict()
        self.queue: list[tuple[float, int, zmq.Socket[bytes], list[bytes]]] = []
        self.count = 0
        self.doors: dict[socket.socket, socket.socket] = {}
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(handshake_path(front))
        self.listener.listen(16)
        self.poller = zmq.Poller()
        for each in (self.front, self.listener, sys.stdin):
            self.poller.register(each, zmq.POLLIN)

    def run(self) -> None:
        while True:
            wait = max(0.0, self.queue[0][0] - time.monotonic()) if self.queue and not self.still else 1.0
            ready = dict(self.poller.poll(wait * 1000 + 1))
            for fd in [each for each in ready if isinstance(each, int)]:
                if fd == sys.stdin.fileno():
                    line = os.read(fd, 4096).decode()
                    if not line:
                        return
                    self.obey(*line.splitlines()[-1].split())
                elif fd == self.listener.fileno():
                    self.let_in()
            for door in [each for each in self.doors if each.fileno() in ready]:
                if door in self.doors:
                    self.relay(door)
            if self.still:
                time.sleep(0.01)
                continue
            for identity, each in list(self.backs.items()):
                if each in ready:
                    with contextlib.suppress(zmq.Again):
                        while True:
                            self.pass_on(self.front, [identity, *each.recv_multipart(zmq.NOBLOCK)])
            if self.front in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        identity, *frames = self.front.recv_multipart(zmq.NOBLOCK)
                        self.pass_on(self.towards(identity), frames)
            while self.queue and self.queue[0][0] <= time.monotonic():
                _, _, where, frames = heapq.heappop(self.queue)
                with contextlib.suppress(zmq.ZMQError):  # its end has gone
                    where.send_multipart(frames, zmq.NOBLOCK)

    def obey(self, what: str, *values: str) -> None:
        self.still = what == "still"
        if what == "cut":
            for door in list(self.doors):
                self.shut(door)
        elif what == "clear":
            self.delay = self.drop = self.twice = 0.0
        elif what == "delay":
            self.delay, self.late = map(float, values)
        elif what in ("drop", "twice"):
            setattr(self, what, float(values[0]))

    def pass_on(self, where: zmq.Socket[bytes], frames: list[bytes]) -> None:
        chance = self.draw.random
        if chance() < self.drop:
            return
        for _ in range(2 if chance() < self.twice else 1):
            self.count += 1
            due = time.monotonic() + (self.late * chance() if chance() < self.delay else 0.0)
            heapq.heappush(self.queue, (due, self.count, where, frames))

    def towards(self, identity: bytes) -> zmq.Socket[bytes]:
        if identity not in self.backs:
            back = self.context.socket(zmq.DEALER)
            back.linger = 0
            back.connect(self.back)
            self.poller.register(back, zmq.POLLIN)
            self.backs[identity] = back
            if len(self.backs) > PEERS:
                _, oldest = self.backs.popitem(last=False)
                self.poller.unregister(oldest)
                oldest.close()
        return self.backs[identity]

    # The door.

    def let_in(self) -> None:
        visitor, _ = self.listener.accept()
        behind = socket.socket(socket.AF_UNIX)
        try:
            behind.connect(handshake_path(self.back))
        except OSError:
            visitor.close()
            behind.close()
            return
        self.doors |= {visitor: behind, behind: visitor}
        for each in (visitor, behind):
            self.poller.register(each, zmq.POLLIN)

    def relay(self, door: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(door, 1 << 17, 4)
            if data:
                socket.send_fds(self.doors[door], [data], descriptors)
        except OSError:
            data, descriptors = b"", []
        for descriptor in descriptors:
            os.close(descriptor)
        if not data:
            self.shut(door)

    def shut(self, door: socket.socket) -> None:
        other = self.doors.pop(door, None)
        if other is not None:
            self.poller.unregister(door)
            door.close()
            self.shut(other)


if __name__ == "__main__":
    _, front, back, seed = sys.argv
    Proxy(front, back, int(seed)).run()
