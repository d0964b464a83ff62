"""Three models with blocks of 0.35, 2 and 16 MiB in one region, while the load shifts between them.

    python tests/bench/mixed.py [--size 8GiB] [--requests 60000]
    python tests/bench/mixed.py --device cuda|npu [--mib 1024]

Without `--device`: the hit ratio, by bytes, of one region for all three, and of three regions that have its size
together, divided as is best for this very load; refusals for want of room; and how the blocks lie.
With `--device`: the rate of copies of the blocks of each model, as they lie, beside one contiguous copy of pinned
memory.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from insights import answer

from kvcache_client.session.region import Region
from kvcache_proto import messages as m
from kvcache_proto.region import plan_geometry
from kvcache_proto.sizes import parse_size
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome, PoolGeometry, Refusal
from kvcache_server.core.cache import Cache
from kvcache_server.core.limits import Limits

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (352 * KIB, 2 * MIB, 16 * MIB)
PHASES = ((6, 3, 1), (1, 6, 3), (3, 1, 6), (1, 1, 1))  # the models' shares of the bytes that are asked for
CHAIN = 16  # blocks at most
ROOM = 0.6  # of what is asked for again and again, by bytes, fits


class Asked(NamedTuple):
    """A prompt of a model: its first blocks."""

    model: int
    chain: int
    blocks: int


def load(size: int, requests: int) -> Iterator[Asked]:
    """Prompts of three models; some chains of each are asked for far more often than others."""
    draw = random.Random(7)
    known = [max(2, int(size / ROOM / len(SIZES) / (CHAIN * each / 2))) for each in SIZES]
    for number in range(requests):
        shares = PHASES[number * 2 * len(PHASES) // requests % len(PHASES)]
        (model,) = draw.choices(range(len(SIZES)), [share / each for share, each in zip(shares, SIZES, strict=True)])
        chain = int(known[model] ** draw.random()) - 1
        yield Asked(model, chain, 1 + (chain * 7 + model) % CHAIN)


class Pool:
    """A cache over a mapped file, and a session for each model."""

    def __init__(self, size: int, models: tuple[int, ...] = (0, 1, 2)) -> None:
        self.geometry: PoolGeometry = plan_geometry(b"r" * 16, size)
        self.file = os.memfd_create("region", os.MFD_CLOEXEC)
        os.ftruncate(self.file, self.geometry.region_bytes)
        self.memory = memoryview(mmap.mmap(self.file, self.geometry.region_bytes))
        self.cache = Cache(self.memory, self.geometry, Limits(), seed=11)
        self.session = self.cache.open_session("engine", "", 0.0)
        self.number = {model: self._attach(model) for model in models}
        self.now = 0.0
        self.asked, self.hit = Counter[int](), Counter[int]()

    def _attach(self, model: int) -> int:
        spec = NamespaceSpec(f"model {model}", (GroupSpec(16, SIZES[model]),), hash_bytes=16)
        return int(answer(self.cache, self.session, m.Attach(1, b"", spec, (0,)), 0.0).namespace)

    def ask(self, asked: Asked) -> None:
        """Look a prompt up, and store what is missing."""
        self.now += 0.01
        number, run = self.number[asked.model], names(asked)
        hits = self.look_up(number, run).hits
        self.asked[asked.model] += asked.blocks
        self.hit[asked.model] += hits
        if hits < len(run):
            missing = m.Run(run[hits:], run[hits - 1] if hits else None)
            reserved = self._answer(m.Reserve(1, b"", number, [missing]))
            if reserved.reservation:
                settle = m.Settle(1, b"", self.geometry.region_id, reserved.reservation, (0,), Outcome.COMMITTED, [])
                self._answer(settle)

    def look_up(self, number: int, run: list[bytes]) -> Any:
        return self._answer(m.Acquire(1, b"", number, run, pin=False))

    def _answer(self, request: Any) -> Any:
        self.cache.tick(self.now)
        self.cache.sweeper.finish()
        return answer(self.cache, self.session, request, self.now)

    @property
    def ratio(self) -> float:
        """The hit ratio by bytes."""
        return sum(self.hit[each] * SIZES[each] for each in self.hit) / max(
            1, sum(self.asked[each] * SIZES[each] for each in self.asked)
        )

    def runs(self) -> dict[int, list[int]]:
        """By model: in how many runs of pages each visible block lies."""
        found: dict[int, list[int]] = {model: [] for model in self.number}
        for model, number in self.number.items():
            for block in self.cache.namespaces[number].groups[0].visible.values():
                found[model].append(len(self.cache.pool.runs_of(block)))
        return found

    def close(self) -> None:
        os.close(self.file)


def names(asked: Asked) -> list[bytes]:
    return [f"{asked.model} {asked.chain} {number}".encode().ljust(16, b".") for number in range(asked.blocks)]


def play(size: int, requests: list[Asked], models: tuple[int, ...] = (0, 1, 2)) -> Pool:
    pool = Pool(size, models)
    for asked in requests:
        if asked.model in models:
            pool.ask(asked)
    return pool


def compare(size: int, requests: list[Asked]) -> None:
    shared = play(size, requests)
    no_room = shared.cache.refusals[Refusal.NO_SPACE.name.lower()]
    print(f"one region: {shared.ratio:.1%} of the bytes hit, {no_room} blocks refused for want of room")
    for model, counts in shared.runs().items():
        runs = Counter(counts)
        print(f"  blocks of {SIZES[model] / MIB:.2f} MiB, by runs: {dict(sorted(runs.items()))}")
    shared.close()
    total = sum(SIZES[each.model] * each.blocks for each in requests)
    hit: dict[tuple[int, int], int] = {}
    parts = 12
    for model, part in itertools.product(range(3), range(1, parts - 1)):
        pool = play(size * part // parts, requests, (model,))
        hit[model, part] = pool.hit[model] * SIZES[model]
        pool.close()
    best, division = max(
        (sum(hit[model, part] for model, part in enumerate(division)) / total, division)
        for division in itertools.product(range(1, parts - 1), repeat=3)
        if sum(division) == parts
    )
    print(f"three regions, divided as is best: {best:.1%}, with {division} of {parts} parts")


def copy(kind: str, size: int, requests: list[Asked], total: int, rounds: int) -> None:
    import torch
    from device_copies import Case, Limit, Machine, statistics

    machine = Machine(kind)
    pool = play(size, requests)
    region, limit = Region(pool.file, pool.geometry), Limit(machine, total)
    for model, number in pool.number.items():
        blocks = list(pool.cache.namespaces[number].groups[0].visible.values())
        random.Random(model).shuffle(blocks)
        packed = b"".join(block.ref for block in blocks[: total // SIZES[model]])
        placed = region.place(packed, SIZES[model])
        assert placed is not None
        layers = 32
        case = Case(machine, region, SIZES[model] // (2 * layers), layers, len(packed) // 16 * SIZES[model])
        case.slots, case.runs = placed.offsets, placed.runs
        case.register()
        runs = [len(pool.cache.pool.runs_of(pool.cache.pool.blocks[at])) for at in first_pages(pool, packed)]
        for saves in (True, False):
            pairs = [(case.copy(saves)[0], limit.copy(saves, case.total)) for _ in range(rounds + 1)][1:]
            ours, theirs = (case.total / statistics.median(each) / 1e9 for each in zip(*pairs, strict=True))
            print(
                f"{torch.cuda.get_device_name() if kind == 'cuda' else kind}: {'save' if saves else 'load'} of "
                f"{case.count} blocks of {SIZES[model] / MIB:.2f} MiB in {sum(runs)} runs: {ours:.1f} GB/s, one pinned "
                f"copy {theirs:.1f}: {ours / theirs:.1%}",
                flush=True,
            )
        case.close()


def first_pages(pool: Pool, packed: bytes) -> list[int]:
    offsets = np.frombuffer(packed, np.uint64)[::2].astype(np.int64)
    return [int(each) for each in (offsets - pool.geometry.data_offset) // pool.geometry.page_bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=8 * GIB)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--device", choices=["cuda", "npu"])
    parser.add_argument("--mib", type=int, default=1024, help="MiB per job")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    requests = list(load(options.size, options.requests))
    if options.device:
        copy(options.device, options.size, requests, options.mib << 20, options.rounds)
    else:
        compare(options.size, requests)


if __name__ == "__main__":
    main()
