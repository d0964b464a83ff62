"""A chain of blocks that a test stores and loads by a rank of its own, and faults that spoil one in the region."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from typing import Any

import numpy as np
from steps import BLOCK, LAYERS, PAGE, PATIENCE, Rig

from kvcache_client import Lease, Namespace, Session
from kvcache_client.scheduler.groups import Found, FullAttention
from kvcache_client.session.checksums import pick_sums
from kvcache_client.step_plan import SaveJob, StepPlan
from kvcache_proto.types import unpack_refs

SIZE = LAYERS * PAGE
KINDS = ("bit", "foreign", "torn", "old weights")


def spoil(buffer: memoryview, at: int, foreign: bytes, kind: str, draw: random.Random) -> None:
    """Change the block at `at` of the region as a fault of that kind does; `foreign` is a whole other block."""
    mine = bytes(buffer[at : at + SIZE])
    assert mine != foreign
    if kind == "bit":
        buffer[at + draw.randrange(SIZE)] ^= 1 << draw.randrange(8)
    elif kind == "foreign":
        buffer[at : at + SIZE] = foreign
    elif kind == "torn":
        half = SIZE // 2
        buffer[at : at + half] = foreign[:half]
    else:  # like its own, all of it, and not quite
        values = np.frombuffer(mine, np.float32)
        other = np.frombuffer(foreign, np.float32)
        buffer[at : at + SIZE] = (0.9 * values + 0.1 * other).astype(np.float32).tobytes()
    assert bytes(buffer[at : at + SIZE]) != mine


class Chain:
    """Blocks of one chain, stored and loaded by one rank, whose plans a test writes."""

    def __init__(self, rig: Rig, session: Session, namespace: Namespace, length: int) -> None:
        self.rig, self.session, self.namespace = rig, session, namespace
        self.hashes = [secrets.token_bytes(32) for _ in range(length)]
        self.numbers = itertools.count(rig.worker._begun + 1)

    def save(self, first: int, blocks: list[int]) -> None:
        """Store the hashes from `first` on; they hold what the device `blocks` do."""
        parent = self.hashes[first - 1] if first else None
        reservation = self.namespace.reserve(self.hashes[first:], parent)
        assert len(reservation.granted) == len(blocks), reservation.refused
        every = list(range(len(blocks)))
        job = SaveJob("r", reservation.region_id, reservation.id, every, reservation.packed, blocks, every)
        reservation._open = False
        self.rig.worker.begin(StepPlan(self.number(), saves=[job]))
        assert self.rig.worker._device.drain(30)

    def number(self) -> int:
        return max(self.rig.worker._begun, self.rig.worker._loaded) + 1

    def acquire(self, hits: int, until: Any) -> Lease:
        """Return a lease on all that are cached, once these are `hits`."""
        found: list[Lease] = []

        def there() -> bool:
            lease = self.namespace.acquire(self.hashes, verify=True)
            found.append(lease)
            if lease.hits != hits:
                lease.release()
            return lease.hits == hits

        until(there, f"{hits} hits")
        return found[-1]

    def load(self, lease: Lease, blocks: list[int]) -> set[int]:
        """Load what is leased to the device's `blocks`; return those that failed."""
        sums = pick_sums("all", self.hashes, lease.sums, 1, lease.region_id)
        assert sums.count(b"\0" * 8) == 0 and len(sums) == 8 * lease.hits, "a block without a sum"
        found = Found(lease.region_id, lease.packed, lease.hits, sums=sums)
        jobs = FullAttention(BLOCK, 1).cut_loads("r", found, [blocks], 0, lease.hits)
        self.rig.worker.load(StepPlan(self.number(), loads=jobs))
        end = time.monotonic() + PATIENCE
        while not self.rig.worker.received():
            assert time.monotonic() < end, "the load has not ended"
            time.sleep(0.0002)
        return self.rig.worker.take_errors()


def offsets(packed: bytes) -> list[int]:
    return [ref.offset for ref in unpack_refs(packed)]
