"""Processes that keep a host busy beside a measurement, for a number of seconds that they read from standard input.

    python tests/bench/tier_load.py engine ENDPOINT BLOCK_BYTES CHAINS LENGTH
    python tests/bench/tier_load.py burner

An engine keeps its daemon's tier at work in both directions. It asks for chains that only the tier has, and stores a
new one for each that has come, which is written out. A burner reads a share of a core before the seconds, and uses that
much. Both write a line when they are ready, and one at the end of each run.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

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
            reservation = self._namespace.reserve(chain)
            for slot in reservation.slots:
                slot.view()[:] = data  # blocks of one size lie in one piece
            reservation.commit()
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
            self._save(chain)  # no tier has the rest
        self._save(self._hashes(next(self._new)))
        return 0.0

    def _next(self) -> int:
        number = next(self._order)
        if not number:
            self._session.clear(self._namespace.id)
        return number

    def _save(self, chain: list[bytes]) -> None:
        """Slots keep the bytes that they have: what is in a block makes no difference to a tier."""
        self._namespace.reserve(chain).commit()

    def _hashes(self, number: int) -> list[bytes]:
        return [number.to_bytes(16, "big") + at.to_bytes(16, "big") for at in range(self._length)]

    def _tier(self) -> dict[str, int]:
        tiers = self._session.stats()["daemon"]["tiers"]
        return dict(tiers[0]) if tiers else {}


def burn(share: float, seconds: float) -> None:
    """Use `share` of a core, if the host has that much left."""
    begin, used = time.monotonic(), time.process_time()
    while (elapsed := time.monotonic() - begin) < seconds:
        if time.process_time() - used < share * elapsed:
            end = time.monotonic() + SLICE
            while time.monotonic() < end:
                pass
        else:
            time.sleep(SLICE)


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "burner":
        print("ready", flush=True)
        for line in sys.stdin:
            burn(*map(float, line.split()))
            print("done", flush=True)
        return
    endpoint, (block, chains, length) = rest[0], map(int, rest[1:])
    spec = NamespaceSpec("bench-load", (GroupSpec(16, block),))
    with Session.connect(endpoint, engine="load", deadline=10.0) as session:
        engine = Engine(session, session.attach(spec, (0,)), chains, length)
        engine.prepare()
        print("ready", flush=True)
        for line in sys.stdin:
            engine.run(float(line))
            print("done", flush=True)


if __name__ == "__main__":
    main()
