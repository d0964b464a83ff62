"""Almost valid frames and handshakes on a real daemon.

    python tests/fuzz/run.py --frames 1000000 --handshakes 10000 --seed 1

During the run, the daemon must stay alive, and answer every frame that has an answer, none of them with an internal
error; its memory and descriptors must not grow. What violates a rule is written to the folder given by `--keep`. Put it
into `corpus/` under a name that says what it found. (In tests/attack, an honest engine is served beside attackers.)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import zmq

HERE = Path(__file__).parent
sys.path[:0] = [each for each in (str(HERE), str(HERE.parent)) if each not in sys.path]

from conftest import Daemon  # noqa: E402
from nearly import Maker  # noqa: E402

from kvcache_proto import messages as m  # noqa: E402
from kvcache_proto.codec import decode_handshake, decode_reply, encode  # noqa: E402
from kvcache_proto.endpoint import handshake_path  # noqa: E402
from kvcache_proto.errors import ServerError  # noqa: E402
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome  # noqa: E402
from kvcache_server.admin_client import AdminClient  # noqa: E402

BATCH = 50  # frames between two pings, whose answer says that all of them were handled
SESSION = 2000  # frames of one session; with the next one, all that it held has ended
LINGERING = 20  # visitors that never finish, at one time
# Small, so that the pool is soon full; the fuzzer shakes hands more often than anybody may.
FLAGS = {"size": "16MiB", "page_size": "4KiB", "quarantine": 0.2, "attach_rate": 1_000_000, "log_level": "warning"}


class Finding(AssertionError):
    """A rule was broken by what was sent last."""

    def __init__(self, told: str, sent: list[bytes]) -> None:
        super().__init__(told)
        self.sent = sent


class Session:
    """An engine that sends whatever the maker makes, and learns from the answers what is worth naming next."""

    def __init__(self, endpoint: str, draw: random.Random) -> None:
        self._admin = AdminClient(endpoint, "fuzz", engine=f"fuzz-{draw.randrange(3)}", timeout=30.0)
        chains = [[draw.randbytes(32) for _ in range(40)] for _ in range(6)]
        specs = [[f"m{n}", [[16, [64] * shards, "full"]], {}, 32] for n, shards in ((0, 1), (1, 1), (2, 2))]
        self.known: dict[str, list[Any]] = {
            "token": [self._admin._token],
            "region": [self._admin.geometry.region_id],
            "spec": specs,
            "shards": [[0], [], [0, 1]],
            "hashes": [chain[: draw.randrange(1, 40)] for chain in chains for _ in range(4)],
            "parent": [None, None, *(chain[0] for chain in chains)],
            "group": [0],
            "outcome": [0, 0, 1, 2],
            "positions": [[], [0], [1, 0]],
            "namespace": [],
            "reservation": [],
            "heard": [1 << 62],
            "leases": [],
        }
        self._maker = Maker(m.REQUESTS, draw, self.known)
        self.answers: Counter[str] = Counter()
        self._attach = [
            m.Attach(0, self._admin._token, msgspec.convert(spec, m.NamespaceSpec), tuple(range(len(spec[1][0][1]))))
            for spec in specs
        ]

    def batch(self, count: int) -> None:
        """Send `count` frames. Raises Finding where the daemon does not answer as it must."""
        self.known["namespace"].clear()
        self.send([encode(attach) for attach in self._attach])  # it may have left them
        self.send([self._maker.frame() for _ in range(count)])

    def send(self, frames: list[bytes]) -> None:
        wire = self._admin._socket
        for frame in frames:
            wire.send(frame)
        last = self._admin.tell(m.Ping(0, b""))
        while True:
            try:
                heard = wire.recv()
            except zmq.Again:
                raise Finding("no answer", frames) from None
            reply = decode_reply(heard)
            self.answers[type(reply).__name__ if not isinstance(reply, m.Error) else reply.code] += 1
            if isinstance(reply, m.Error) and reply.code == ServerError.code:
                raise Finding(reply.message, frames)
            if isinstance(reply, m.Pong) and reply.id == last:
                return
            self._learn(reply)

    def _learn(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Attached) and len(self.known["namespace"]) < len(self._attach):
            self.known["namespace"].append(reply.namespace)
        if isinstance(reply, m.Reserved) and reply.reservation:
            self.known["reservation"] = [*self.known["reservation"][-8:], reply.reservation]
        if isinstance(reply, m.Acquired) and reply.lease:
            self.known["leases"] = [*self.known["leases"][-8:], [reply.lease]]

    def close(self) -> None:
        self._admin.close()


class Knocker:
    """Shakes hands in every way but, mostly, the right one."""

    def __init__(self, endpoint: str, draw: random.Random) -> None:
        self._path = handshake_path(endpoint)
        self._draw = draw
        known = {"version": [1, 1, 2], "engine": ["e", "engine 7"]}
        self._maker = Maker(m.Hello | m.Welcome | m.Error, draw, known)
        self._hello = Maker(m.Hello, draw, known)
        self._lingering: list[socket.socket] = []
        self.answers: Counter[str] = Counter()

    def draw_one(self) -> list[bytes]:
        """Return what one visitor says, write by write."""
        draw = self._draw
        frame = (self._hello if draw.random() < 0.8 else self._maker).frame()[:200_000]
        length = len(frame) if draw.random() < 0.8 else draw.choice((0, 1, len(frame) + 3, 65_536, 65_537, 2**32 - 1))
        said = struct.pack("<I", length & 0xFFFFFFFF) + frame
        if draw.random() < 0.2:
            said = self._maker.spoil_bytes(said)
        if draw.random() < 0.1:
            said += draw.randbytes(draw.choice((1, 4, 5000)))
        cuts = sorted(draw.randrange(len(said) + 1) for _ in range(draw.choice((0, 0, 1, 3))))
        return [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True) if a < b]

    def shake_hands(self, writes: list[bytes], files: int = 0) -> None:
        """Be one visitor. Raises Finding where the door's answer is none of its messages."""
        visitor = socket.socket(socket.AF_UNIX)
        visitor.settimeout(30)
        visitor.connect(self._path)
        descriptors = []
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for write in writes:
                    if files:
                        with open(os.devnull) as file:
                            socket.send_fds(visitor, [write], [file.fileno()] * files)
                    else:
                        visitor.sendall(write)
            way = self._draw.random()
            if way < 0.1 and len(self._lingering) < LINGERING:
                self._lingering.append(visitor)
                return
            if way < 0.9:
                visitor.shutdown(socket.SHUT_WR)  # so that an unfinished hello has an end
            elif way < 0.99:
                return  # the rest waits until it is shown out
            heard = b""
            with contextlib.suppress(ConnectionResetError, TimeoutError):
                while len(heard) < 4 or len(heard) < 4 + struct.unpack_from("<I", heard)[0]:
                    data, found, _, _ = socket.recv_fds(visitor, 1 << 17, 8)
                    descriptors += found
                    if not data:
                        break
                    heard += data
            answer = decode_handshake(heard[4:]) if heard else None
            self.answers[answer.code if isinstance(answer, m.Error) else type(answer).__name__] += 1
            if isinstance(answer, m.Hello) or (isinstance(answer, m.Error) and answer.code == ServerError.code):
                raise Finding(f"the door answered {answer}", writes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            if visitor not in self._lingering:
                visitor.close()
            elif len(self._lingering) == LINGERING:
                self.tidy()

    def tidy(self) -> None:
        while self._lingering:
            self._lingering.pop().close()


class Result(msgspec.Struct):
    """What a run found. `sizes` are bytes of the daemon's own memory at the end of each session."""

    frames: int = 0
    handshakes: int = 0
    seconds: float = 0.0
    sizes: list[int] = []
    answers: Counter[str] = Counter()
    knocks: Counter[str] = Counter()
    descriptors: tuple[int, int] = (0, 0)

    @property
    def settled(self) -> list[int]:
        """The sizes without the first fifth: until then the pool and all tables fill for the first time."""
        return self.sizes[len(self.sizes) // 5 :]

    @property
    def growth(self) -> int:
        """The bytes by which the last third of the sizes is larger than the first third of what had settled."""
        sizes = self.settled
        third = max(len(sizes) // 3, 1)
        return int(statistics.median(sizes[-third:]) - statistics.median(sizes[:third]))


def long_reply(endpoint: str) -> None:
    """Have the daemon send one: for the first that it sends without a copy, pyzmq makes a context and a thread."""
    with AdminClient(endpoint) as admin:
        namespace = admin.ask(m.Attach(0, b"", NamespaceSpec("long", (GroupSpec(16, 64),)))).namespace
        since = admin.ask(m.TraceLookups(0, b"")).next
        admin.ask(m.Acquire(0, b"", namespace, [number.to_bytes(32, "big") for number in range(4000)]))
        assert len(admin.ask(m.TraceLookups(0, b"", since)).lookups) == 1


class Honest:
    """An engine that is served beside the fuzzer, as if it were alone."""

    HASHES = tuple(number.to_bytes(32, "big") for number in range(64))

    def __init__(self, endpoint: str) -> None:
        self.checked = 0
        self._engine = AdminClient(endpoint, engine="honest", timeout=20.0)
        spec = NamespaceSpec("honest", (GroupSpec(16, 4096),))
        self._namespace = self._engine.ask(m.Attach(0, b"", spec, (0,))).namespace

    def check(self) -> None:
        """Look a prompt up: it finds all of its blocks, or none, because the fuzzer has cleared or evicted them."""
        found = self._engine.ask(m.Acquire(0, b"", self._namespace, list(self.HASHES)))
        if not found.hits:
            region = self._engine.geometry.region_id
            reserved = self._engine.ask(m.Reserve(0, b"", self._namespace, [m.Run(list(self.HASHES))]))
            full = any(reserved.answers)  # there is no room for all at present
            if reserved.reservation:
                outcome = Outcome.FAILED if full else Outcome.COMMITTED
                self._engine.ask(m.Settle(0, b"", region, reserved.reservation, (0,), outcome))
            if full:
                return
            found = self._engine.ask(m.Acquire(0, b"", self._namespace, list(self.HASHES)))
        assert found.hits == len(self.HASHES) or found.withheld, found
        self.checked += found.hits > 0
        self._engine.tell(m.Release(0, b"", [found.lease]))

    def close(self) -> None:
        self._engine.close()


def fuzz(daemon: Daemon, frames: int, handshakes: int, seed: int) -> Result:
    """Send so much and return what came of it. Raises Finding, or AssertionError where the daemon ended."""
    draw, result, began = random.Random(seed), Result(), time.monotonic()
    knocker = Knocker(daemon.endpoint, random.Random(seed + 1))
    long_reply(daemon.endpoint)
    first = daemon.descriptors
    honest = Honest(daemon.endpoint)
    while result.frames < frames:
        session = Session(daemon.endpoint, draw)
        for _ in range(0, SESSION, BATCH):
            session.batch(BATCH)
            result.frames += BATCH
            while result.handshakes * frames < handshakes * result.frames:  # both kinds end together
                knocker.shake_hands(knocker.draw_one(), files=draw.choice((0, 0, 0, 1, 100)))
                result.handshakes += 1
            honest.check()
        session.close()
        result.answers += session.answers
        result.sizes.append(daemon.own_bytes)
        assert daemon.process.poll() is None, daemon.log
    assert honest.checked, "no prompt was ever found"
    honest.close()
    knocker.tidy()
    result.knocks = knocker.answers
    status = daemon.wait_status(lambda status: not status["sessions"], "the end of the fuzzer's sessions")
    assert "internal" not in status["daemon"]["errors"], daemon.log
    daemon.wait_status(lambda status: daemon.descriptors <= first, "the close of every descriptor")
    result.descriptors = (first, daemon.descriptors)
    daemon.check_integrity()
    result.seconds = time.monotonic() - began
    return result


def describe(result: Result) -> str:
    sizes = result.settled
    return "\n".join(
        (
            f"{result.frames:,} frames and {result.handshakes:,} handshakes in {result.seconds:.0f} s, no finding",
            "answers: " + ", ".join(f"{name} {count:,}" for name, count in result.answers.most_common()),
            "at the door: " + ", ".join(f"{name} {count:,}" for name, count in result.knocks.most_common()),
            f"memory of the daemon: {sizes[0] >> 10:,} KiB once settled, {sizes[-1] >> 10:,} KiB at the end, at most "
            f"{max(sizes) >> 10:,} KiB; growth {result.growth / 1024:,.0f} KiB; descriptors {result.descriptors}",
        )
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--frames", type=int, default=1_000_000)
    options.add_argument("--handshakes", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--keep", type=Path, default=Path("."), help="folder for the frames of a finding")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder:
        daemon = Daemon(Path(folder), **FLAGS).wait_ready()
        try:
            print(describe(fuzz(daemon, given.frames, given.handshakes, given.seed)))
        except Finding as finding:
            for number, sent in enumerate(finding.sent):
                (given.keep / f"finding-{given.seed}-{number}.bin").write_bytes(sent)
            raise SystemExit(f"finding: {finding}; what was sent is in {given.keep}\n{daemon.log[-4000:]}") from None
        finally:
            daemon.stop()
            daemon.tidy()


if __name__ == "__main__":
    main()
