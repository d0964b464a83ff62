"""Creates and ends everything that a daemon has, again and again: `python tests/chaos/churn.py --rounds 1000`.

In each round, engines with new names attach new namespaces, change their weights, save, look up, hold leases, report
what they could not use, invalidate blocks, and leave or die; ranks fail and die; blocks are superseded; sizes take
each other's pages; operators watch, ask why, follow the events and request a replay; HTTP requests are sent and cut
off; invalid messages are sent; the configuration is read again. Then everything is released and cleared, so that every
round ends in the same state.

There is one line of JSON per period: what the daemon's memory has gained per round since the first period. The last
line names the types of objects that have grown, and those that were left to the garbage collector: it only looks at new
objects, so an object that survives its first look and becomes part of a cycle later is never freed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from fleet import HERE, LOOK, START_SECONDS, Broken, Daemon
from run import quiet

from kvcache_proto import messages as m
from kvcache_proto.endpoint import handshake_path
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import REF_BYTES, Finding, GroupSpec, NamespaceSpec, Outcome, Refusal
from kvcache_server.admin_client import AdminClient

MIB = 1 << 20
SMALL, LARGE = GroupSpec(16, 8192), GroupSpec(16, 65536)
TWO_RANKS = GroupSpec(16, (4096, 4096))
SUPERSEDE = 0.05
WARM_UP = 8  # rounds until what is bounded is full
FLAGS = {
    "size": 16 * MIB,
    "keep": "false",
    "attach-rate": 100_000,
    "http": "127.0.0.1:0",
    "supersede-after": SUPERSEDE,
    "quarantine": 0.05,
    "events": "tcp://127.0.0.1:*",
    "events-replay": "tcp://127.0.0.1:*",
    "events-buffer": 64,
    "log-level": "error",
}


class Engine(AdminClient):
    """An engine that only sends messages: it maps nothing."""

    def attach(self, group: GroupSpec, weights: str, shards: tuple[int, ...] = (0,)) -> int:
        spec = NamespaceSpec("churn", (group,), {"weights": weights, "layout": str(group.shards)})
        return int(self.ask(m.Attach(0, b"", spec, shards)).namespace)

    def reserve(self, namespace: int, hashes: list[bytes], parent: bytes | None = None) -> Any:
        return self.ask(m.Reserve(0, b"", namespace, [m.Run(hashes, parent)]))

    def settle(self, reservation: int, outcome: Outcome = Outcome.COMMITTED, shards: tuple[int, ...] = (0,)) -> Any:
        return self.ask(m.Settle(0, b"", self.geometry.region_id, reservation, shards, outcome))

    def store(self, namespace: int, hashes: list[bytes], parent: bytes | None = None) -> None:
        reserved = self.reserve(namespace, hashes, parent)
        if reserved.reservation:
            self.settle(reserved.reservation)

    def acquire(self, namespace: int, hashes: list[bytes], request: str = "") -> Any:
        return self.ask(m.Acquire(0, b"", namespace, hashes, request=request, tokens=16 * len(hashes)))


class Living(Engine):
    """Holds the lock of its session until it dies, whatever becomes of its door."""

    def _shake_hands(self, hello: m.Hello) -> m.Welcome:
        self._held: list[int] = []
        close, os.close = os.close, self._held.append
        try:
            return super()._shake_hands(hello)
        finally:
            os.close = close

    def die(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)


class Churn:
    """Rounds at one daemon; nothing is kept from one to the next but numbers."""

    def __init__(self, endpoint: str, status: dict[str, Any], token: str, daemon: int) -> None:
        self.endpoint, self._daemon = endpoint, daemon
        self.rounds = 0
        self._events = status["daemon"]["events"]
        self._web = urlsplit(status["daemon"]["http"]["address"])
        self._token = token
        self._hashes = 0

    def engine(self, name: str, label: str = "") -> Engine:
        return Engine(self.endpoint, label, engine=f"{name}-{self.rounds}")

    def new(self, count: int) -> list[bytes]:
        self._hashes += count
        return [number.to_bytes(32, "little") for number in range(self._hashes - count, self._hashes)]

    def round(self) -> None:
        self.rounds += 1
        for part in (
            *(self.save_and_look_up, self.ranks, self.dead_writers, self.away, self.supersession, self.sizes),
            *(self.watchers, self.followers, self.web, self.nonsense),
        ):
            part()
        os.kill(self._daemon, signal.SIGHUP)
        with AdminClient(self.endpoint, "clear") as admin:
            admin.clear()

    def save_and_look_up(self) -> None:
        with self.engine("saves") as engine:
            for weights in "ab":  # it moves to other weights, and the first ones are nobody's
                namespace = engine.attach(SMALL, f"{weights}{self.rounds}")
                chain = self.new(64)
                engine.store(namespace, chain)
                engine.store(namespace, self.new(16), chain[31])
                leases = [engine.acquire(namespace, chain[:n], f"request-{self.rounds}-{n}").lease for n in (64, 8)]
                engine.tell(m.Release(0, b"", leases[:1]))
                asked = engine.acquire(namespace, [*chain[:32], *self.new(4)], f"miss-{self.rounds}")
                engine.tell(
                    m.ReportMisses(0, b"", namespace, [m.MissNote(f"miss-{self.rounds}", "deadline", 3, chain[:2])])
                )
                engine.ask(m.Why(0, b"", f"miss-{self.rounds}"))
                slot = asked.slots[-REF_BYTES:]
                engine.ask(m.Invalidate(0, b"", engine.geometry.region_id, slot, 0, Finding.CORRUPT))
                engine.tell(m.ReportClient(0, b"", 0, {"probes": 1, f"unknown-{self.rounds}": 1}))
                engine.tell(m.Detach(0, b"", namespace))
            engine.status()

    def ranks(self) -> None:
        """One of two ranks fails; one never starts; one dies, and the other settles."""
        with self.engine("ranks") as first, contextlib.ExitStack() as stack:
            second = stack.enter_context(self.engine("ranks"))
            namespace = first.attach(TWO_RANKS, f"{self.rounds}", (0,))
            second.attach(TWO_RANKS, f"{self.rounds}", (1,))
            for outcome in (Outcome.COMMITTED, Outcome.FAILED, Outcome.NEVER_STARTED):
                reservation = first.reserve(namespace, self.new(8)).reservation
                first.settle(reservation)
                second.settle(reservation, outcome, (1,))
            reservation = first.reserve(namespace, self.new(8)).reservation
            stack.close()
            first.settle(reservation)

    def dead_writers(self) -> None:
        with self.engine("dies") as engine:
            namespace = engine.attach(SMALL, f"{self.rounds}")
            chain = self.new(8)
            engine.reserve(namespace, chain)
            engine.reserve(namespace, self.new(4), chain[-1])
            engine.acquire(namespace, chain)

    def away(self) -> None:
        """Its door closes, its process lives on for a while and keeps what it was writing."""
        with Living(self.endpoint, engine=f"lives-{self.rounds}") as engine:
            engine.reserve(engine.attach(SMALL, f"{self.rounds}"), self.new(8))
        with AdminClient(self.endpoint, "looks") as admin:
            until = time.monotonic() + START_SECONDS
            while not admin.status().away:
                if time.monotonic() > until:
                    raise Broken("nobody is away")
                time.sleep(LOOK)
        engine.die()

    def supersession(self) -> None:
        with self.engine("slow") as slow, self.engine("quick") as quick:
            namespace = slow.attach(SMALL, f"{self.rounds}")
            quick.attach(SMALL, f"{self.rounds}")
            chain = self.new(8)
            late = slow.reserve(namespace, chain).reservation
            below = slow.reserve(namespace, self.new(4), chain[-1]).reservation
            until = time.monotonic() + START_SECONDS
            while (taken := quick.reserve(namespace, chain)).answers[0] != Refusal.GRANTED:
                if time.monotonic() > until:
                    raise Broken(f"not superseded: {taken}")
                time.sleep(SUPERSEDE / 4)
            quick.settle(taken.reservation)
            slow.settle(late)
            slow.settle(below, Outcome.FAILED)

    def sizes(self) -> None:
        """Each size of block fills the pool in its turn."""
        with self.engine("sizes") as engine:
            for group, count in ((LARGE, 220), (SMALL, 1500)):
                namespace = engine.attach(group, f"sizes-{self.rounds}")
                for _ in range(0, count, 100):
                    engine.store(namespace, self.new(100))

    def watchers(self) -> None:
        with self.engine("watched") as engine, self.engine("watches") as watcher:
            since = watcher.ask(m.TraceLookups(0, b"")).next
            namespace = engine.attach(SMALL, f"{self.rounds}")
            chain = self.new(20)
            engine.store(namespace, chain)
            for count in (5, 10, 20):
                engine.tell(m.Release(0, b"", [engine.acquire(namespace, chain[:count], f"w-{count}").lease]))
            watcher.ask(m.TraceLookups(0, b"", since))

    def followers(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        try:
            sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(self._events["endpoint"])
            dealer.connect(self._events["replay"])
            dealer.send_multipart([b"", bytes(8), b""])
            if not dealer.poll(START_SECONDS * 1000):
                raise Broken("no replay")
            with self.engine("told") as engine:
                engine.store(engine.attach(SMALL, f"{self.rounds}"), self.new(8))
            dealer.send_multipart([b"", b"nonsense"])
        finally:
            context.destroy(linger=0)  # with most of it unread

    def web(self) -> None:
        for method, path, body in (
            *(("GET", path, None) for path in ("/metrics", "/api/v1/status", "/healthz", "/openapi.json", "/nowhere")),
            ("POST", "/api/v1/clear", {"namespace": "nobody's"}),
        ):
            connection = self._connect()
            with contextlib.closing(connection):
                text = json.dumps(body) if body is not None else None
                connection.request(method, path, text, {"Authorization": f"Bearer {self._token}"})
                connection.getresponse().read()
        with contextlib.closing(self._connect()) as kept:
            for _ in range(3):
                kept.request("GET", "/api/v1/sessions")
                kept.getresponse().read()
        for begun in (b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 64 + b"\r\n\r\n"):
            with socket.create_connection((self._web.hostname, self._web.port), START_SECONDS) as cut:
                cut.sendall(begun)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._web.hostname or "", self._web.port, timeout=START_SECONDS)

    def nonsense(self) -> None:
        with self.engine("nonsense") as engine:
            for asked in (
                m.Acquire(0, b"", 999, [bytes(32)]),
                m.Settle(0, b"", bytes(16), 1, (0,), 0),
                m.Fence(0, b"", 999),
            ):
                with contextlib.suppress(KVCacheError):
                    engine.ask(asked)
            for parts in ([b""], [b"\xc1"], [os.urandom(64)], [b"two", b"parts"]):
                engine._socket.send_multipart(parts)
                with contextlib.suppress(KVCacheError):  # what it says to that
                    engine.ping()
        for said in (b"", b"\xff\xff\xff\xff", b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1"):
            with socket.socket(socket.AF_UNIX) as door:
                door.connect(handshake_path(self.endpoint))
                door.sendall(said)


class Counted(Daemon):
    """A daemon that counts its objects."""

    def __init__(self, endpoint: str, folder: Path, **flags: object) -> None:
        self._told = folder / "census.json"
        super().__init__(endpoint, folder, program=(str(HERE / "census.py"), str(self._told)), **flags)

    def census(self) -> dict[str, Any]:
        """Return its objects once no session is open and nothing is held."""
        self.wait("the end of all that was held", settled)
        self._told.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR2)
        until = time.monotonic() + START_SECONDS
        while not self._told.exists():
            if not self.alive or time.monotonic() > until:
                raise Broken(f"no census:\n{self.log}")
            time.sleep(LOOK)
        found: dict[str, Any] = json.loads(self._told.read_text())
        return found


def settled(status: dict[str, Any]) -> bool:
    return quiet(status) and not status["pool"]["blocks"]


def churn(rounds: int, period: int) -> dict[str, Any]:
    """Run it, print the periods, and return the last line. Raises Broken."""
    folder = Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))
    endpoint = f"ipc://{folder}/kv.sock"
    daemon = Counted(endpoint, folder, **FLAGS)
    try:
        if not daemon.ready():
            raise Broken(f"it ended at its start:\n{daemon.log}")
        engines = Churn(endpoint, daemon.status(), (folder / "kv.token").read_text().strip(), daemon.process.pid)
        for _ in range(WARM_UP):
            engines.round()
        cycles: Counter[str] = Counter()
        first = last = daemon.census()
        while engines.rounds < WARM_UP + rounds:
            done = engines.rounds
            for _ in range(min(period, WARM_UP + rounds - done)):
                engines.round()
            before, last = last, daemon.census()
            done = engines.rounds - done
            cycles.update(last["cycles"])
            print(json.dumps({"rounds": engines.rounds - WARM_UP, **a_round(before, last, done)}), flush=True)
        daemon.sound()
        if "Traceback" in daemon.log:
            raise Broken(daemon.log)
        grown = Counter(last["objects"])
        grown.subtract(first["objects"])
        return {
            "rounds": rounds,
            **a_round(first, last, rounds),
            "grown": {name: count for name, count in grown.items() if count >= rounds},
            "in_cycles": round(cycles.total() / rounds, 2),
            "cycles": dict(cycles),
        }
    finally:
        daemon.end(signal.SIGTERM)
        daemon.tidy()
        shutil.rmtree(folder, ignore_errors=True)


def a_round(before: dict[str, Any], after: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return what a round has added, on average."""
    objects = (sum(census["objects"].values()) for census in (before, after))
    gained = {"objects": -next(objects) + next(objects)}
    gained |= {name: after[name] - before[name] for name in ("allocated", "anonymous")}
    gained["in_cycles"] = sum(after["cycles"].values())
    return {name: round(count / rounds, 2) for name, count in gained.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--period", type=int, default=100, help="rounds per line of output")
    options = parser.parse_args()
    print(json.dumps(churn(options.rounds, options.period)))
