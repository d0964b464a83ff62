"""Processes that keep a host busy beside a measurement. They send a message when they are ready, and after each run."""

from __future__ import annotations

import itertools
import os
import time
from multiprocessing.connection import Connection

from rig import save

from kvcache_client import GroupSpec, Namespace, NamespaceSpec, Session
from kvcache_client.scheduler.lookups import LEAST_WAIT

AT_ONCE = 4  # chains that the engine waits for
STORE_SECONDS = 120.0
SLICE = 0.0005  # seconds of burning or resting


class Engine:
    """Its chains have `length` blocks. `chains` of them are in the tier, and not in the region."""

    def __init__(self, session: Session, namespace: Namespace, chains: int, length: int) -> None:
        self._session, self._namespace, self._length = session, namespace, length
        self._new = itertools.count(chains)
        self._chains = [self._hashes(number) for number in range(chains)]
        self._order = itertools.cycle(range(chains))

    def prepare(self) -> None:
        """Store the chains, and leave them only in the tier."""
        data = os.urandom(self._namespace.spec.groups[0].block_bytes)
        for chain in self._chains:
            save(self._namespace, chain, data=data)
        until, blocks = time.monotonic() + STORE_SECONDS, len(self._chains) * self._length
        while self._tier().get("blocks_written", 0) < blocks:
            assert time.monotonic() < until, f"{blocks} blocks are not in the tier: {self._tier()}"
            time.sleep(0.05)
        self._session.clear(self._namespace.id)

    def run(self, seconds: float) -> None:
        now = time.monotonic()
        until = now + seconds
        waits = {next(self._order): now for _ in range(min(AT_ONCE, len(self._chains) - 1))}  # until when, by chain
        while now < until:
            for number, due in list(waits.items()):
                if due <= now:
                    del waits[number]
                    wait = self._ask(self._chains[number])
                    waits[number if wait else self._next()] = time.monotonic() + wait
            now = time.monotonic()
            time.sleep(max(0.0, min(until, *waits.values()) - now))
            now = time.monotonic()

    def _ask(self, chain: list[bytes]) -> float:
        """Return in how many seconds to ask again; 0.0 for a chain that is cached now."""
        lease = self._namespace.acquire(chain, pin=False)
        if lease.hits < len(chain):
            if lease.eta or lease.pending:
                return max(lease.eta, LEAST_WAIT)
            save(self._namespace, chain)  # no tier has the rest
        save(self._namespace, self._hashes(next(self._new)))
        return 0.0

    def _next(self) -> int:
        number = next(self._order)
        if not number:
            self._session.clear(self._namespace.id)
        return number

    def _hashes(self, number: int) -> list[bytes]:
        return [number.to_bytes(16, "big") + at.to_bytes(16, "big") for at in range(self._length)]

    def _tier(self) -> dict[str, int]:
        tiers = self._session.stats()["daemon"]["tiers"]
        return dict(tiers[0]) if tiers else {}


def keep_at_work(pipe: Connection, endpoint: str, block: int, chains: int, length: int) -> None:
    """Be an engine that keeps its daemon's tier at work in both directions, for as many seconds as it is told.

    It asks for chains that only the tier has, and stores a new one for each that has come, which is written out.
    """
    spec = NamespaceSpec("bench-load", (GroupSpec(16, block),))
    with Session.connect(endpoint, engine="load", deadline=10.0) as session:
        engine = Engine(session, session.attach(spec, (0,)), chains, length)
        engine.prepare()
        pipe.send("ready")
        while True:
            engine.run(pipe.recv())
            pipe.send("done")


def burn(pipe: Connection) -> None:
    """Use a share of a core, if the host has that much left, for as many seconds as it is told."""
    pipe.send("ready")
    while True:
        share, seconds = pipe.recv()
        begin, used = time.monotonic(), time.process_time()
        while (elapsed := time.monotonic() - begin) < seconds:
            if time.process_time() - used < share * elapsed:
                end = time.monotonic() + SLICE
                while time.monotonic() < end:
                    pass
            else:
                time.sleep(SLICE)
        pipe.send("done")
