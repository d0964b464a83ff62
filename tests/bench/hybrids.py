"""How well models with windows or states are cached: replay a trace, and look at what is in the full pool.

    python tests/bench/hybrids.py TRACE [--capacities 0.02,0.05,0.1] [--requests 12000] [--engines 8]

Each row is one kind of model and capacity: hit ratios of the pool, and of one of the same size in which suffix groups
take no room and are never evicted; the part of the pool that suffix groups have; and the part that no lookup could ever
use, on average and at most, of samples since the pool was full.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import islice
from statistics import mean
from typing import NamedTuple

from kvcache_proto.types import SUFFIX, GroupSpec
from kvcache_server.core.cache import Cache
from kvcache_tools.replay.simulated_daemon import SimulatedDaemon, block_hash
from kvcache_tools.replay.simulation import Setup, distinct, make_rooms, routes, size_for
from kvcache_tools.replay.trace import TraceRequest, read_trace

BYTES = 1 << 20  # of a block of full attention
EVERY = 100  # requests between two samples of what is in the pool


class Kind(NamedTuple):
    """A kind of model: what a block of its suffix group has, in blocks of full attention, and how many are needed."""

    name: str
    size: float
    window_blocks: int
    checkpoint: int  # blocks between two
    divergences: bool = False  # whether suffix groups are saved where a prompt parts from what is cached


KINDS = (
    Kind("full attention alone", 0, 0, 1 << 30),
    Kind("window of 2 blocks", 5, 2, 1 << 30),  # five layers with a window for each with full attention
    Kind("window of 2, checkpoints", 5, 2, 8),
    Kind("window of 2, divergences", 5, 2, 1 << 30, True),
    Kind("window of 2, both", 5, 2, 32, True),
    Kind("small state", 1, 1, 1 << 30),
    Kind("small state, checkpoints", 1, 1, 8),
    Kind("large state", 6, 1, 1 << 30),
    Kind("large state, checkpoints", 6, 1, 8),
)


def useless(cache: Cache) -> tuple[float, float]:
    """Return which part of the used bytes suffix groups have, and which part no lookup could use."""
    (namespace,) = cache.namespaces.values()
    full, *suffixes = namespace.groups
    used: set[int] = set()
    for block in full.visible.values():
        above = {each: list(islice(block.ancestors(), each.spec.window_blocks)) for each in suffixes}
        needed = [suffix.visible.get(each.hash) for suffix, blocks in above.items() for each in blocks]
        if all(needed):
            used |= {id(each) for each in needed}
            for each in block.ancestors():
                if id(each) in used:
                    break
                used.add(id(each))
    blocks = [block for group in namespace.groups for block in group.visible.values()]
    total = sum(block.account.group.allocated_bytes for block in blocks)
    suffix_bytes = sum(block.account.group.allocated_bytes for block in blocks if block.account.group.is_suffix)
    wasted = sum(block.account.group.allocated_bytes for block in blocks if id(block) not in used)
    return suffix_bytes / total, wasted / total


def play(requests: list[TraceRequest], blocks: int, kind: Kind, engines: int) -> tuple[int, float, float, float]:
    """Return the hits, the part of the pool that suffix groups have, and the useless part: on average, and at most."""
    daemon, setup = make(blocks, kind, engines, True)
    hits, samples = 0, []
    for number, (request, engine) in enumerate(zip(requests, routes(requests, setup), strict=True), 1):
        names = [block_hash(each) for each in full_blocks(request, kind)]
        hits += daemon.ask(engine, names, request.at, time.perf_counter)[0]
        if number % EVERY == 0 and daemon.cache.eviction.evictions:
            samples.append(useless(daemon.cache))
    of_suffixes, wasted = zip(*samples or [(0.0, 0.0)], strict=True)
    return hits, mean(of_suffixes), mean(wasted), max(wasted)


def play_unlimited(requests: list[TraceRequest], blocks: int, kind: Kind, engines: int) -> float:
    """Return the hits if suffix groups took no room, and stayed for ever."""
    daemon, setup = make(blocks, kind, engines, False)
    hits, saved = 0, set()
    for request, engine in zip(requests, routes(requests, setup), strict=True):
        names = full_blocks(request, kind)
        found = daemon.ask(engine, [block_hash(each) for each in names], request.at, time.perf_counter)[0]
        divergence = found if kind.divergences else 0
        for suffix in suffixes_of(kind):
            while found and not saved.issuperset(names[found - suffix.needed(found) : found]):
                found -= 1
            saved |= {names[at] for at in daemon.saved(suffix, len(names), found, len(names), divergence)}
        hits += found
    return hits


def full_blocks(request: TraceRequest, kind: Kind) -> Sequence[int | str]:
    """Return a prompt's blocks; with suffix groups without the last one, which is rarely full and so no boundary."""
    return request.blocks[:-1] if kind.window_blocks and len(request.blocks) > 1 else request.blocks


def suffixes_of(kind: Kind) -> list[GroupSpec]:
    return [GroupSpec(512, int(kind.size * BYTES), SUFFIX, kind.window_blocks)] if kind.window_blocks else []


def make(blocks: int, kind: Kind, engines: int, with_suffixes: bool) -> tuple[SimulatedDaemon, Setup]:
    setup = Setup(engines=engines, block_bytes=BYTES)
    room, _ = make_rooms(size_for(blocks, setup), setup)
    suffixes = suffixes_of(kind) if with_suffixes else []
    saved = {"checkpoint": kind.checkpoint, "divergences": kind.divergences}
    daemon = SimulatedDaemon(room, 512, engines, suffixes=suffixes, **saved)
    return daemon, setup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--capacities", default="0.02,0.05,0.1")
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--engines", type=int, default=8)
    options = parser.parse_args()
    requests = read_trace(options.trace)[: options.requests]
    asked, different = sum(len(each.blocks) for each in requests), distinct(requests)
    print(f"{'model':26} {'blocks':>7} {'hits':>7} {'all free':>10} {'suffixes':>9} {'useless':>8} {'at most':>8}")
    for part in map(float, options.capacities.split(",")):
        for kind in KINDS:
            blocks = int(part * different)
            hits, of_suffixes, wasted, most = play(requests, blocks, kind, options.engines)
            free = play_unlimited(requests, blocks, kind, options.engines)
            row = f"{kind.name:26} {blocks:7} {hits / asked:7.1%} {free / asked:10.1%} {of_suffixes:9.1%}"
            print(f"{row} {wasted:8.1%} {most:8.1%}", flush=True)


if __name__ == "__main__":
    main()
