"""Measure what KV events cost: the same requests to caches with and without them, alternating, in one process.

    python tests/bench/events.py [--rounds 4000]

The caches are full, so that each block that is stored evicts another one.
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import time

from kvcache_proto import messages as m
from kvcache_proto.region import plan_geometry
from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_server.core.cache import Cache
from kvcache_server.events.batches import Batches

MIB = 1 << 20


class Rig:
    """A cache that one session writes and reads; times are microseconds."""

    def __init__(self, told: bool) -> None:
        geometry = plan_geometry(bytes(16), 64 * MIB)
        self.cache = Cache(memoryview(bytearray(geometry.region_bytes)), geometry, seed=1)
        self.stream = Batches(self.cache, "kv@{namespace}", 10_000, 1) if told else None
        self.session = self.cache.open_session("one", "", 0.0)
        spec = NamespaceSpec("m", (GroupSpec(16, 4096),))
        self.namespace = self.cache.handle(self.session, m.Attach(1, b"", spec, (0,)), 0.0).namespace
        self.store: list[float] = []
        self.acquire: list[float] = []
        self.batch: list[float] = []

    def round(self, hashes: list[bytes]) -> None:
        region = self.cache.geometry.region_id
        begin = time.perf_counter()
        run = [m.Run(hashes)]
        reserved = self.cache.handle(self.session, m.Reserve(1, b"", self.namespace, run), 0.0)
        self.cache.handle(self.session, m.Settle(1, b"", region, reserved.reservation, (0,), 0), 0.0)
        changes = self.cache.effects.take()[1]
        if self.stream is not None:
            self.stream.follow(changes)
        stored = time.perf_counter()
        self.cache.handle(self.session, m.Acquire(1, b"", self.namespace, hashes, pin=False), 0.0)
        acquired = time.perf_counter()
        if self.stream is not None:
            self.stream.due(0.0)
            self.batch.append((time.perf_counter() - acquired) * 1e6 / len(hashes))
        self.store.append((stored - begin) * 1e6 / len(hashes))
        self.acquire.append((acquired - stored) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4000)
    rounds = parser.parse_args().rounds
    print("medians, us   reserve + commit a block    acquire of all       events a block")
    for count in (1, 64):
        rigs = [Rig(False), Rig(True)]
        for _ in range(300):
            for rig in rigs:
                rig.round([secrets.token_bytes(32) for _ in range(64)])
        for rig in rigs:
            rig.store, rig.acquire, rig.batch = [], [], []
        for _ in range(rounds):
            hashes = [secrets.token_bytes(32) for _ in range(count)]
            for rig in random.sample(rigs, 2):
                rig.round(hashes)
        off, on = rigs
        median = statistics.median
        print(
            f"runs of {count:3}   {median(off.store):8.2f} -> {median(on.store):8.2f}"
            f"       {median(off.acquire):8.2f} -> {median(on.acquire):8.2f}   {median(on.batch):8.2f}"
        )


if __name__ == "__main__":
    main()
