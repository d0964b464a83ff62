"""An engine that saves some blocks, and tells at each line it reads how many of them it finds: `engine.py ENDPOINT`.

After `N` it waits until it finds N of them, and prints "found N", or how many there were after half a minute. Half of
them are of a model that only this engine has, by its name (a second argument, "engine" if there is none), the others of
one that all engines share. From the beginning it holds a lease on some: `held` prints what became of that. `why`
prints why there is no daemon, as far as it knows.
With a third argument, `patient`, it begins without a daemon, prints "waiting", and goes on when there is one.
"""

from __future__ import annotations

import logging
import sys
import time

from kvcache_client import GroupSpec, Namespace, NamespaceSpec, Session
from kvcache_proto.errors import KVCacheError

BLOCK = 256 << 10
HASHES = [bytes([n + 1]) * 32 for n in range(4)]


class Engine:
    def __init__(self, session: Session, name: str) -> None:
        self.session = session
        self.namespaces = [self._join(name), self._join("llama")]

    def _join(self, model: str) -> Namespace:
        return self.session.attach(NamespaceSpec(model=model, groups=[GroupSpec(16, (BLOCK,))]), shards=(0,))

    def save(self) -> None:
        for number, namespace in enumerate(self.namespaces):
            reservation = namespace.reserve(HASHES, parent=None)
            for at, slot in zip(reservation.granted, reservation.slots, strict=True):
                self.session.view(slot)[:] = self._content(number, at)
            reservation.commit()

    def hold(self) -> None:
        self.lease = self.namespaces[0].acquire(HASHES[:2])

    def look(self, wanted: int) -> str:
        until = time.monotonic() + 30
        while True:
            hits, sound = 0, True
            for number, namespace in enumerate(self.namespaces):
                with namespace.acquire(HASHES) as lease:
                    hits += lease.hits
                    sound &= all(
                        bytes(self.session.view(slot)) == self._content(number, at)
                        for at, slot in enumerate(lease.slots)
                    )
            if hits == wanted or time.monotonic() > until:
                return f"{'found' if sound else 'spoilt'} {hits}"
            time.sleep(0.02)

    def held(self) -> str:
        counts = self.session.counters
        sound = all(bytes(self.session.view(slot)) == self._content(0, at) for at, slot in enumerate(self.lease.slots))
        reclaimed = "reclaimed" if counts.get("leases_reclaimed") else "never reclaimed"  # how often is the host's load
        lost = counts.get("leases_lost", 0)
        return f"{'held' if sound else 'spoilt'} {self.lease.hits}, {reclaimed}, lost {lost}"

    def _content(self, namespace: int, at: int) -> bytes:
        return bytes([at + 1 + 16 * namespace]) * BLOCK


class Why(logging.Handler):
    """Remembers why there is no daemon."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        _, found, why = record.getMessage().partition("no cache until the daemon is there: ")
        self.said = why if found else self.said


def main() -> None:
    endpoint, name, patient = (*sys.argv[1:], "", "")[:3]
    why = Why()
    logging.getLogger("kvcache_client").addHandler(why)
    begin = Session.open if patient else Session.connect
    try:
        session = begin(endpoint, engine=name or "engine", deadline=5.0, connect_timeout=20.0)
    except KVCacheError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return
    with session:
        if patient:
            print("waiting", flush=True)
            while not session.up:
                time.sleep(0.02)
        engine = Engine(session, name or "engine")
        engine.save()
        engine.hold()
        print(engine.look(2 * len(HASHES)).replace("found", "saved"), flush=True)
        for line in map(str.strip, sys.stdin):
            if line == "held":
                print(engine.held(), flush=True)
            elif line == "why":
                print(why.said, flush=True)
            else:
                print(engine.look(int(line)), flush=True)


if __name__ == "__main__":
    main()
