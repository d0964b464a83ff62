"""A malicious process of another user: `attacker.py UID ENDPOINT REGION_DIR SEED` attacks until its input is closed.

It prints how often it did what, and what came of it, as JSON. Every act leaves nothing open, but for what it holds on
purpose; what is refused is an answer, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import zmq

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_handshake, encode
from kvcache_proto.endpoint import handshake_path, routing_id, socket_path
from kvcache_proto.errors import KVCacheError, from_wire
from kvcache_proto.types import REF_BYTES, GroupSpec, NamespaceSpec

GREETING = b"\xff".ljust(9, b"\0") + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MANY = 60_000
SECONDS = 0.5  # of one act
ENGINE = "evil\n2026-01-01T00:00:00.000Z INFO session 1 ended: all is well\x1b[2J\u202e"


class Session:
    """A session with its descriptors, to be misused."""

    def __init__(self, endpoint: str, engine: str) -> None:
        self.door = socket.socket(socket.AF_UNIX)
        self.door.settimeout(10)
        self.door.connect(handshake_path(endpoint))
        frame = encode(m.Hello(m.PROTOCOL_VERSION, engine, "rank 0", "evil 1.0"))
        self.door.sendall(struct.pack("<I", len(frame)) + frame)
        heard, self.descriptors = b"", list[int]()
        while len(heard) < 4 or len(heard) < 4 + struct.unpack_from("<I", heard)[0]:
            data, found, _, _ = socket.recv_fds(self.door, 1 << 16, 4)
            self.descriptors += found
            if not data:
                raise ConnectionError("the daemon closed the connection")
            heard += data
        answer = decode_handshake(heard[4:])
        if isinstance(answer, m.Error):
            raise from_wire(answer.code, answer.message)
        assert isinstance(answer, m.Welcome)
        self.token, self.region = answer.token, answer.geometry.region_id

    def close(self) -> None:
        self.door.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


class Attacker:
    def __init__(self, endpoint: str, region_dir: str, draw: random.Random) -> None:
        self.endpoint, self.region_dir, self.draw = endpoint, region_dir, draw
        self.came: Counter[str] = Counter()
        self.held: list[Session] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    @contextlib.contextmanager
    def session(self) -> Iterator[Session]:
        session = Session(self.endpoint, f"{ENGINE} {self.draw.randrange(3)}")
        try:
            yield session
        finally:
            session.close()

    def raw(self, token: bytes = b"") -> socket.socket:
        """A connection to the request socket that is past the ZMTP handshake."""
        wire = socket.socket(socket.AF_UNIX)
        wire.settimeout(1)
        wire.connect(socket_path(self.endpoint))
        name = routing_id(token) if token else b""
        ready = b"\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity" + len(name).to_bytes(4, "big") + name
        wire.sendall(GREETING + bytes((4, len(ready))) + ready)
        return wire

    # The acts.

    def crowd_the_wire(self) -> None:
        self._crowd(socket_path(self.endpoint))

    def crowd_the_door(self) -> None:
        self._crowd(handshake_path(self.endpoint))

    def _crowd(self, path: str) -> None:
        with contextlib.ExitStack() as leave:
            for _ in range(300):
                idle = leave.enter_context(socket.socket(socket.AF_UNIX))
                idle.setblocking(False)
                idle.connect(path)
                if self.draw.random() < 0.5:
                    idle.send(self.draw.choice((GREETING, b"\xff", b"\5\0\0\0", bytes(200), b"GET / HTTP/1.1\r\n")))
            time.sleep(SECONDS / 2)  # to be in the way for a while is the attack

    def endless_parts(self) -> None:
        self._say_on(b"\1\0" * 1000)

    def endless_frame(self) -> None:
        self._say_on(bytes(1 << 16), first=b"\2" + (1 << 22).to_bytes(8, "big"))

    def endless_commands(self) -> None:
        self._say_on(b"\4\x09\4PING\0\1ab" * 100)

    def endless_empty_frames(self) -> None:
        self._say_on(b"\0\0" * 1000)

    def _say_on(self, said: bytes, first: bytes = b"") -> None:
        with self.session() as session, self.raw(self.draw.choice((b"", session.token))) as wire:
            until = time.monotonic() + SECONDS
            wire.sendall(first)
            while time.monotonic() < until:
                wire.sendall(said)

    def read_nothing(self) -> None:
        """Ask on and on for long replies, by several connections with one token."""
        with self.session() as session, contextlib.ExitStack() as leave:
            dealers = []
            for _ in range(8):
                dealer = leave.enter_context(self.context.socket(zmq.DEALER))
                for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.ROUTING_ID, routing_id(session.token))):
                    dealer.setsockopt(option, value)
                dealer.connect(self.endpoint)
                dealers.append(dealer)
            until = time.monotonic() + SECONDS
            for number in range(100_000):
                if time.monotonic() > until:
                    break
                with contextlib.suppress(zmq.Again):
                    self.draw.choice(dealers).send(encode(m.Stats(number, session.token)), zmq.NOBLOCK)

    def say_much(self) -> None:
        """Long requests, one behind the other."""
        hashes = [self.draw.randbytes(32) for _ in range(MANY)]
        with self.session() as session, self.context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.ROUTING_ID, routing_id(session.token))
            dealer.connect(self.endpoint)
            dealer.setsockopt(zmq.RCVTIMEO, 5000)
            spec = NamespaceSpec(f"evil {self.draw.randrange(4)}", (GroupSpec(16, 1024),))
            dealer.send(encode(m.Attach(1, session.token, spec, (0,))))
            dealer.recv()
            refs = b"".join(self.draw.randbytes(REF_BYTES) for _ in range(MANY // 10)) * 10
            for number in range(2, 2 + self.draw.randrange(1, 8)):
                for request in (
                    m.Acquire(number, session.token, 1, hashes),
                    m.Reserve(number, session.token, 1, [m.Run(hashes)]),
                    m.Invalidate(number, session.token, session.region, refs, 0, 0),
                    m.Reclaim(number, session.token, 0, [(each, bytes(REF_BYTES)) for each in range(MANY)]),
                    m.Release(number, session.token, list(range(MANY))),
                ):
                    if self.draw.random() < 0.6:
                        dealer.send(encode(request))
            time.sleep(SECONDS)  # what is never read stays with the daemon meanwhile

    def take_all_sessions(self) -> None:
        for _ in range(40):
            try:
                self.held.append(Session(self.endpoint, ENGINE))
            except (KVCacheError, OSError):
                self.leave_all()
                raise
        if len(self.held) > 200:
            self.leave_all()

    def leave_all(self) -> None:
        while self.held:
            self.held.pop().close()

    def misuse_descriptors(self) -> None:
        with self.session() as session:
            region, *others = session.descriptors
            fcntl.flock(region, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is kept until the session ends
            for descriptor in others:
                for what in (
                    lambda fd: os.pwrite(fd, bytes(1 << 20), 0),
                    lambda fd: os.ftruncate(fd, 1 << 30),
                    lambda fd: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR)),
                    lambda fd: os.fchmod(fd, 0o777),
                ):
                    try:
                        what(descriptor)
                        self.came["session file written to"] += 1
                    except OSError:
                        self.came["session file refused"] += 1
            time.sleep(SECONDS / 4)  # the descriptors are held, and the locks with them

    def plant_files(self) -> None:
        folder = os.path.dirname(socket_path(self.endpoint))
        stem = os.path.basename(socket_path(self.endpoint)).removesuffix(".sock")
        for name in ("sessions", "state", "state.new", "lock", "door", "sock", "sums", "token"):
            path = f"{folder}/{stem}.{name}"
            for act in (os.unlink, lambda at: os.rename(at, at + ".away"), lambda at: os.symlink("/etc", at)):
                try:
                    act(path)
                    self.came["planted in the endpoint's folder"] += 1
                except OSError:
                    self.came["planting refused"] += 1

    def resume_another_s(self) -> None:
        for number in range(1, 30):
            with socket.socket(socket.AF_UNIX) as door:
                door.settimeout(5)
                door.connect(handshake_path(self.endpoint))
                frame = encode(m.Hello(m.PROTOCOL_VERSION, "victim", "", "", number, self.draw.randbytes(16)))
                door.sendall(struct.pack("<I", len(frame)) + frame)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    data, descriptors, _, _ = socket.recv_fds(door, 1 << 16, 4)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    answer = decode_handshake(data[4:]) if data else None
                    if isinstance(answer, m.Welcome) and answer.resumed:
                        self.came["another's session resumed"] += 1

    ACTS: tuple[Callable[[Attacker], None], ...] = (
        *(crowd_the_wire, crowd_the_door, endless_parts, endless_frame, endless_commands, endless_empty_frames),
        *(read_nothing, say_much, take_all_sessions, misuse_descriptors, plant_files, resume_another_s),
    )

    def act(self) -> None:
        act = self.draw.choice(self.ACTS)
        try:
            act(self)
            self.came[f"{act.__name__}: done"] += 1
        except KVCacheError as error:
            self.came[f"{act.__name__}: {error.code}"] += 1
        except (OSError, zmq.ZMQError) as error:
            self.came[f"{act.__name__}: {type(error).__name__}"] += 1


def main(uid: int, endpoint: str, region_dir: str, seed: int) -> None:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    attacker = Attacker(endpoint, region_dir, random.Random(seed))
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        attacker.act()
    attacker.leave_all()
    attacker.context.destroy(linger=0)
    print(json.dumps(attacker.came), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
