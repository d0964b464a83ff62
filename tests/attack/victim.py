"""An honest engine: `victim.py ENDPOINT SEED` stores chains of blocks and loads them, and knows every byte of them.

It goes on until its standard input is closed, then prints what it has seen, as JSON. Latencies are microseconds.
"""

from __future__ import annotations

import hashlib
import json
import random
import select
import sys
import time
from collections import Counter

from kvcache_client import GroupSpec, NamespaceSpec, Session

BYTES = 4096
CHAINS, LENGTH = 200, 48
PAUSE = 0.002  # between two lookups: an engine's steps are no shorter
SPEC = NamespaceSpec("victim", (GroupSpec(16, BYTES),))


def chain(number: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (number, place)).digest() for place in range(LENGTH)]


def payload(block: bytes) -> bytes:
    return hashlib.shake_128(block).digest(BYTES)


def main(endpoint: str, seed: int) -> None:
    draw, seen, took = random.Random(seed), Counter[str](), list[float]()
    chains = [chain(number) for number in range(CHAINS)]
    content = {block: payload(block) for blocks in chains for block in blocks}
    with Session.open(endpoint, engine="victim", deadline=5.0) as session:
        namespace = session.attach(SPEC, (0,), wait=True)
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], PAUSE)[0]:
            blocks = draw.choice(chains)
            began = time.perf_counter()
            lease = namespace.acquire(blocks)
            if lease.failed:
                seen["lookups_failed"] += 1
                continue
            took.append(time.perf_counter() - began)
            with lease:
                right = [
                    bytes(session.view(slot, 0)) == content[block]
                    for slot, block in zip(lease.slots, blocks, strict=False)
                ]
                # What was read counts if its slot is still what it was: a lease ends with its daemon.
                region = session.region
                same = region.current(lease.packed) if region is not None and region.id == lease.region_id else []
                for fine in [each for each, now in zip(right, same, strict=False) if now]:
                    seen["blocks_right" if fine else "blocks_wrong"] += 1
            if lease.hits < LENGTH:
                above = blocks[lease.hits - 1] if lease.hits else None
                reservation = namespace.reserve(blocks[lease.hits :], above)
                for place, slot in zip(reservation.granted, reservation.slots, strict=True):
                    session.view(slot, 0)[:] = content[blocks[lease.hits + place]]
                reservation.commit()
                seen["blocks_stored"] += len(reservation.slots)
            seen["lookups"] += 1
    took.sort()
    figures = {f"p{share:g}": took[int(len(took) * share / 100)] * 1e6 for share in (50, 99, 99.9)}
    print(json.dumps({**seen, **figures}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
