"""A daemon that is sick in the way that a test chooses: it stands before a real one and spoils what that says.

    python sick_daemon.py REAL_ENDPOINT ENDPOINT

A line of JSON on stdin, {"door": HOW, "wire": HOW, "hang_up": bool}, says what is spoiled from now on, "" for nothing,
and whether those who are attached are thrown out. It is answered by
a line with what was seen since the start: {"visits": [second, ...], "asked": {tag: count}}. The region, the
descriptors and the locks that it hands on are the real daemon's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvcache_proto.endpoint import handshake_path

LENGTH = struct.Struct("<I")
REF = 24
FAR = 1 << 50
decode, encode = msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode


# What becomes of a reply, [tag, id, ...]: a list of frames in its place. Replies that a way does not concern pass.


def _moved(slots: bytes, offset: int) -> bytes:
    return offset.to_bytes(8, "little") + slots[8:]


def _lookup(change: Callable[[list[Any]], object]) -> Callable[[list[Any], random.Random], list[bytes]]:
    return _only("acquired", change)


def _only(tag: str, change: Callable[[list[Any]], object]) -> Callable[[list[Any], random.Random], list[bytes]]:
    def spoil(reply: list[Any], draw: random.Random) -> list[bytes]:
        if reply[0] == tag:
            change(reply)
        return [encode(reply)]

    return spoil


def _set(field: int, value: Any) -> Callable[[list[Any]], object]:
    return lambda reply: reply.__setitem__(field, value)


def _mutated(reply: list[Any], draw: random.Random) -> list[bytes]:
    """A quarter of the replies with one field that is something else."""
    if draw.random() < 0.75:
        return [encode(reply)]
    field = draw.randrange(1, len(reply))
    old = reply[field]
    others = [0, 1, -1, 7, 1 << 31, (1 << 64) - 1, -(1 << 63), None, b"", "", [], {}, True, 0.5, draw.randbytes(24)]
    if isinstance(old, bytes) and old:
        at = draw.randrange(len(old))
        others += [old[:at], old + old, old[:at] + draw.randbytes(1) + old[at + 1 :], draw.randbytes(len(old))] * 3
    elif isinstance(old, int):
        others += [old + 1, old - 1, old * 2, -old] * 3
    reply[field] = draw.choice(others)
    return [encode(reply)]


WIRE: dict[str, Callable[[list[Any], random.Random], list[bytes]]] = {
    "": lambda reply, draw: [encode(reply)],
    # Whatever it is asked.
    "bytes": lambda reply, draw: [draw.randbytes(draw.randrange(1, 300))],
    "empty": lambda reply, draw: [b""],
    "map": lambda reply, draw: [encode({"hits": 1})],
    "short": lambda reply, draw: [encode(reply[:2] if len(reply) > 3 else reply[:1])],
    "cut": lambda reply, draw: [encode(reply)[:-1]],
    "tag": lambda reply, draw: [encode(["promoted", *reply[1:]])],
    "id": lambda reply, draw: [encode([reply[0], reply[1] + (1 << 40), *reply[2:]])],
    "zero": lambda reply, draw: [encode(["error", 0, "bad_frame", "not understood"])],
    "type": lambda reply, draw: [
        encode(["settled", reply[1], b""] if reply[0] == "pong" else ["pong", reply[1], False])
    ],
    "long": lambda reply, draw: [encode(["report", reply[1], {"much": "." * (5 << 20)}])],
    "longer": lambda reply, draw: [encode(["report", reply[1], {"more": "." * (9 << 20)}])],
    "token": lambda reply, draw: [encode(["error", reply[1], "bad_token", "who are you?"])],
    "thrice": lambda reply, draw: [encode(reply)] * 3,
    "mutated": _mutated,
    # Lookups alone; the rest is well.
    "many": _lookup(_set(3, 1 << 40)),
    "more": _lookup(lambda reply: reply.__setitem__(3, reply[3] + 1)),
    "fewer": _lookup(lambda reply: reply.__setitem__(3, reply[3] - 1)),
    "negative": _lookup(_set(3, -1)),
    "pending": _lookup(_set(4, 1 << 40)),
    "withheld": _lookup(_set(6, -5)),
    "coming": _lookup(_set(8, -1)),
    "coming at once": _lookup(lambda reply: reply.__setitem__(slice(8, 10), [1, 0])),
    "unpinned": _lookup(_set(2, 0)),
    "no slots": _lookup(_set(5, b"")),
    "odd slots": _lookup(lambda reply: reply.__setitem__(5, reply[5][:-1])),
    "far": _lookup(lambda reply: reply.__setitem__(5, _moved(reply[5], FAR))),
    "farthest": _lookup(lambda reply: reply.__setitem__(5, _moved(reply[5], (1 << 64) - 64))),
    "header": _lookup(lambda reply: reply.__setitem__(5, _moved(reply[5], 0))),
    # Reservations and settlements alone.
    "answers": _only("reserved", _set(3, bytes([0, 9, 200, 0]))),
    "few answers": _only("reserved", lambda reply: reply.__setitem__(3, reply[3][:-1])),
    "all refused": _only("reserved", lambda reply: reply.__setitem__(3, b"\4" * len(reply[3]))),
    "no reservation": _only("reserved", _set(2, 0)),
    "reserved far": _only("reserved", lambda reply: reply.__setitem__(4, _moved(reply[4], FAR))),
    "reserved nowhere": _only("reserved", _set(4, b"")),
    "verdicts": _only("settled", lambda reply: reply.__setitem__(2, b"\x63" * len(reply[2]))),
    # Handled below: it reads and says nothing; it reads nothing; it talks without end.
    "mute": lambda reply, draw: [encode(reply)],
    "deaf": lambda reply, draw: [encode(reply)],
    "flood": lambda reply, draw: [],
}


# What becomes of a welcome: another frame and other descriptors. None: nothing is said.


def _geometry(**changes: int | bytes) -> Callable[[bytes, list[int]], tuple[bytes, list[int]]]:
    names = ("region_id", "region_bytes", "page_bytes", "pages", "data_offset")

    def spoil(frame: bytes, descriptors: list[int]) -> tuple[bytes, list[int]]:
        welcome = decode(frame)
        for name, value in changes.items():
            welcome[4][names.index(name)] = value
        return encode(welcome), descriptors

    return spoil


def _memory(size: int) -> int:
    descriptor = os.memfd_create("no region")
    os.ftruncate(descriptor, size)
    return descriptor


def _pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


DOOR: dict[str, Callable[[bytes, list[int]], tuple[bytes, list[int]]]] = {
    "": lambda frame, fds: (frame, fds),
    "leave": lambda frame, fds: (frame, fds),  # and closes at once
    "speak": lambda frame, fds: (frame, fds),  # and says more
    "bytes": lambda frame, fds: (random.Random(1).randbytes(200), fds),
    "other": lambda frame, fds: (encode(["hello", 1, "e"]), fds),
    "no session": lambda frame, fds: (encode(decode(frame)[:2]), fds),
    "region too small": lambda frame, fds: (frame, [_memory(4096), fds[1]]),
    "region of zeros": lambda frame, fds: (frame, [_memory(decode(frame)[4][1]), fds[1]]),
    "region is a pipe": lambda frame, fds: (frame, [_pipe(), fds[1]]),
    "region is a folder": lambda frame, fds: (frame, [os.open("/tmp", os.O_RDONLY), fds[1]]),
    "swapped": lambda frame, fds: (frame, fds[::-1]),
    "no descriptor": lambda frame, fds: (frame, []),
    "many descriptors": lambda frame, fds: (frame, fds * 20),
    "other id": _geometry(region_id=b"another region.."),
    "no id": _geometry(region_id=b""),
    "size 0": _geometry(region_bytes=0),
    "negative size": _geometry(region_bytes=-4096),
    "huge": _geometry(region_bytes=1 << 63, pages=1 << 42),
    "huger": _geometry(region_bytes=(1 << 64) - 1),
    "pages of 0": _geometry(page_bytes=0),
    "no pages": _geometry(pages=0),
    "negative pages": _geometry(pages=-(1 << 62)),
    "begins late": _geometry(data_offset=1 << 40),
}
# Without a word of the real daemon's: it accepts and says nothing; closes; promises too much; says a byte.
RUDE: dict[str, bytes | None] = {"silent": None, "shut": b"", "too long": b"\xff\xff\xff\xff", "trickle": b"\x40"}


class Sick:
    def __init__(self, real: str, endpoint: str) -> None:
        self.real = real
        self.door = self.wire = ""
        self.draw = random.Random(7)
        self.visits: list[float] = []
        self.asked: Counter[str] = Counter()
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.bind(endpoint)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(handshake_path(endpoint))
        self.listener.listen()
        self.dealers: dict[bytes, Any] = {}
        self.kept: list[tuple[bytes, bytes]] = []  # requests heard and not handed on
        self.visitors: dict[socket.socket, socket.socket | None] = {}  # and the real door behind each

    def run(self) -> None:
        while True:
            poller = zmq.Poller()
            for each in (0, self.listener, *self.visitors, *filter(None, self.visitors.values())):
                poller.register(each, zmq.POLLIN)
            for dealer in (*self.dealers.values(), *([] if self.wire == "deaf" else [self.router])):
                poller.register(dealer, zmq.POLLIN)
            ready = dict(poller.poll(0 if self.wire == "flood" else None))
            if 0 in ready and not self.obey():
                return
            if self.listener.fileno() in ready:
                self.meet()
            for ours, theirs in list(self.visitors.items()):
                if ours.fileno() in ready or (theirs is not None and theirs.fileno() in ready):
                    self.part(ours)
            if self.router in ready and self.wire != "deaf":
                self.hear()
            for identity, dealer in self.dealers.items():
                if dealer in ready:
                    reply = decode(dealer.recv())
                    for frame in WIRE[self.wire](reply, self.draw):
                        self.say(identity, frame)
                if self.wire == "flood":
                    self.say(identity, encode(["pong", 1 << 41, False]))

    def obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        wanted = json.loads(line)
        self.door, self.wire = wanted.get("door", self.door), wanted.get("wire", self.wire)
        if wanted.get("hang_up"):
            for visitor in list(self.visitors):
                self.part(visitor)
        if self.wire != "mute":
            while self.kept:
                self.dealers[self.kept[0][0]].send(self.kept.pop(0)[1])
        print(json.dumps({"visits": self.visits, "asked": self.asked}), flush=True)
        return True

    def say(self, identity: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self.router.send_multipart([identity, frame], zmq.NOBLOCK)

    def hear(self) -> None:
        identity, frame = self.router.recv_multipart()
        self.asked[decode(frame)[0]] += 1
        if identity not in self.dealers:
            self.dealers[identity] = self.context.socket(zmq.DEALER)
            self.dealers[identity].linger = 0
            self.dealers[identity].connect(self.real)
        if self.wire == "mute":
            self.kept.append((identity, frame))
        else:
            self.dealers[identity].send(frame)

    def meet(self) -> None:
        visitor, _ = self.listener.accept()
        self.visits.append(time.monotonic())
        if self.door in RUDE:
            said = RUDE[self.door]
            if said:
                visitor.sendall(said)
            if said == b"":
                visitor.close()
            else:
                self.visitors[visitor] = None
            return
        behind = socket.socket(socket.AF_UNIX)
        behind.connect(handshake_path(self.real))
        behind.sendall(_frame(visitor))
        data, descriptors, _, _ = socket.recv_fds(behind, 1 << 16, 2)
        frame, handed = DOOR[self.door](data[LENGTH.size :], descriptors)
        with contextlib.suppress(BrokenPipeError):  # it did not wait so long; its end is seen like any other's
            socket.send_fds(visitor, [LENGTH.pack(len(frame)) + frame], handed)
        for descriptor in {*descriptors, *handed}:
            os.close(descriptor)
        self.visitors[visitor] = behind
        if self.door == "speak":
            visitor.sendall(b"and another thing")
        if self.door == "leave":
            self.part(visitor)

    def part(self, visitor: socket.socket) -> None:
        if self.visitors[visitor] is None and _more(visitor):
            return  # its hello, to which nothing is said
        behind = self.visitors.pop(visitor)
        visitor.close()
        if behind is not None:
            behind.close()


def _frame(visitor: socket.socket) -> bytes:
    heard = b""
    while len(heard) < LENGTH.size or len(heard) < LENGTH.size + LENGTH.unpack_from(heard)[0]:
        heard += visitor.recv(1 << 16)
    return heard


def _more(visitor: socket.socket) -> bool:
    try:
        return bool(visitor.recv(1 << 16))
    except OSError:
        return False


if __name__ == "__main__":
    Sick(*sys.argv[1:]).run()
