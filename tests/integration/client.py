"""A client process for tests with a daemon: `python client.py ENDPOINT ENGINE what...`.

`reach STATE` gets into that state, says so, and waits to be killed. `traffic SIZE SECONDS SEED` stores and loads blocks
of SIZE bytes, each filled with what its hash says, checks every byte that it is given, and prints its counts.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.types import Outcome

REACH_SPEC = NamespaceSpec(model="victim", groups=[GroupSpec(16, (4096, 4096))])
CHAINS, CHAIN = 24, 16


def block_hash(*what: int) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in what).ljust(32, b"\0")


def run_of(chain: int, count: int) -> list[bytes]:
    return [block_hash(chain + 1, number) for number in range(count)]


def reach(session: Session, state: str) -> None:
    namespace = session.attach(REACH_SPEC, shards=(0, 1))
    held: list[object] = []
    if state == "lease":
        held.append(namespace.acquire(run_of(0, 8)))
    if state in ("reserved", "half", "settled"):
        reservation = namespace.reserve(run_of(1, 8))
        held.append(reservation)
        assert len(reservation.granted) == 8, reservation.refused
        if state == "half":  # two blocks whole, two with one shard, four untouched
            namespace.settle(reservation.id, Outcome.COMMITTED, [0, 1], (0, 1))
            namespace.settle(reservation.id, Outcome.COMMITTED, [2, 3], (0,))
        if state == "settled":
            reservation.commit()
    session.ping()
    print(state, flush=True)
    while True:
        signal.pause()


def traffic(session: Session, size: int, seconds: float, seed: int) -> None:
    namespace = session.attach(NamespaceSpec(model=f"blocks of {size}", groups=[GroupSpec(16, size)]), shards=(0,))
    draw, counts = random.Random(seed), {"stored": 0, "hit": 0, "wrong": 0, "refused": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hashes = run_of(draw.randrange(CHAINS), draw.randint(1, CHAIN))
        with namespace.acquire(hashes) as lease:
            for block, slot in zip(hashes, lease.slots, strict=False):
                counts["hit"] += 1
                counts["wrong"] += bytes(session.view(slot)) != block * (size // len(block))
        at = lease.hits
        reservation = namespace.reserve(hashes[at:], hashes[at - 1] if at else None) if at < len(hashes) else None
        if reservation is None:
            continue
        counts["refused"] += len(reservation.refused)
        for position, slot in zip(reservation.granted, reservation.slots, strict=True):
            for view in slot.views():
                view[:] = hashes[at + position] * (len(view) // 32)
        if draw.random() < 0.1:
            reservation.abort()
        else:
            counts["stored"] += sum(verdict == 0 for verdict in reservation.commit())
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    _, endpoint, engine, what, *rest = sys.argv
    with Session.connect(endpoint, engine=engine, deadline=20.0) as session:
        if what == "reach":
            reach(session, rest[0])
        else:
            traffic(session, int(rest[0]), float(rest[1]), int(rest[2]))
