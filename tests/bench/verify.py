"""Measure what checksums cost: the rates of saves and loads of a rank, and a lookup, for each value of `verify`.

    python tests/bench/verify.py [--mib 512] [--block-kib 2048] [--rounds 7]

The rank has its KV in host memory, and a real daemon. A rate counts from the plan to the settlement of the last block,
or to the report of the load; the modes alternate. A lookup is acquire and release of 64 hashes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from one_daemon import one_daemon

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.session.checksums import chosen, pick_sums
from kvcache_client.settings import VERIFY_MODES, ConnectorSettings
from kvcache_client.step_plan import LoadJob, SaveJob, StepPlan
from kvcache_client.worker.places import RankFacts, Shards
from kvcache_client.worker.worker import Worker

LAYERS = 32
BATCH = 64  # hashes of a lookup


class Rank:
    """A worker of its own engine, with a namespace of its own."""

    def __init__(self, endpoint: str, mode: str, block_bytes: int, blocks: int) -> None:
        self.mode = mode
        spec = NamespaceSpec("bench", (GroupSpec(128, block_bytes),), {"mode": mode})
        self.session = Session.connect(endpoint, engine=mode, deadline=10.0)
        rank = Session.connect(endpoint, engine=mode, label="rank", deadline=10.0)
        self.worker = Worker(
            rank, spec, ConnectorSettings(endpoint, canary_every=0), Shards(1, 1), 0, RankFacts(block_bytes)
        )
        fragment = block_bytes // LAYERS
        tensors = {str(layer): torch.randn(blocks, fragment // 4) for layer in range(LAYERS)}
        self.worker.register(tensors, blocks)
        self.namespace = self.session.attach(spec)
        self.blocks = list(range(blocks))
        self.plans = 0

    def plan(self, **jobs: Any) -> StepPlan:
        self.plans += 1
        return StepPlan(self.plans, **jobs)

    def save(self) -> float:
        """Return the seconds until all blocks, saved under new hashes, are visible."""
        self.hashes = [random.randbytes(32) for _ in self.blocks]
        reservation = self.namespace.reserve(self.hashes)
        assert len(reservation.granted) == len(self.blocks), reservation.refused
        reservation._open = False
        summed = chosen(self.mode, self.hashes, reservation.region_id)
        job = SaveJob("r", reservation.region_id, reservation.id, self.blocks, reservation.packed, self.blocks, summed)
        begin = time.perf_counter()
        self.worker.begin(self.plan(saves=[job]))
        while self.worker._saves._stored["r"].jobs:
            time.sleep(0.0001)
        self.worker._session.ping()  # answered after the settlement
        return time.perf_counter() - begin

    def load(self) -> float:
        with self.namespace.acquire(self.hashes, verify=self.mode != "off") as lease:
            assert lease.hits == len(self.blocks)
            sums = pick_sums(self.mode, self.hashes, lease.sums, 1, lease.region_id)
            job = LoadJob("r", lease.region_id, lease.packed, self.blocks, 0, sums)
            begin = time.perf_counter()
            self.worker.load(self.plan(loads=[job]))
            while not self.worker.received():
                time.sleep(0.0001)
            seconds = time.perf_counter() - begin
            assert not self.worker.take_errors()
            return seconds

    def look_up(self) -> float:
        hashes = self.hashes[:BATCH]
        begin = time.perf_counter()
        lease = self.namespace.acquire(hashes, verify=self.mode != "off")
        pick_sums(self.mode, hashes, lease.sums, 1, lease.region_id)
        lease.release()
        return time.perf_counter() - begin


def measure(mib: int, block_kib: int, rounds: int) -> None:
    blocks = (mib << 10) // block_kib
    with one_daemon(size=f"{mib * 5}MiB", pin_quota=1) as daemon:
        ranks = [Rank(daemon.endpoint, mode, block_kib << 10, blocks) for mode in VERIFY_MODES]
        figures: dict[str, dict[str, list[float]]] = {
            rank.mode: {"save": [], "load": [], "look up": []} for rank in ranks
        }
        for turn in range(rounds + 1):
            for rank in ranks if turn % 2 else ranks[::-1]:
                row = [rank.save(), rank.load(), statistics.median(rank.look_up() for _ in range(500))]
                if turn:  # the first one warms up
                    for name, seconds in zip(figures[rank.mode], row, strict=True):
                        figures[rank.mode][name].append(seconds)
                rank.session.clear(rank.namespace.id)
        for rank in ranks:
            rank.worker.close()
            rank.session.close()
    size = mib << 20
    print(f"{mib} MiB in blocks of {block_kib} KiB, {LAYERS} fragments each; best of {rounds}")
    for mode, row in figures.items():
        save, load, look_up = map(min, row.values())
        print(
            f"  verify {mode:7} save {size / save / 1e9:6.2f} GB/s   load {size / load / 1e9:6.2f} GB/s   "
            f"acquire + release of {min(BATCH, blocks)} hashes {look_up * 1e6:6.0f} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    measure(options.mib, options.block_kib, options.rounds)


if __name__ == "__main__":
    main()
