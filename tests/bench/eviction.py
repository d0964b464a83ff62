"""Compare eviction by worth with eviction by age, on traces that nobody tuned it for. No engine runs.

    python tests/bench/eviction.py [--traces loop,zipf,conversations] [--seeds 1,2,3] [--prompts 60,200]
                                   [--capacities 0.01,0.05] [--files TRACE ...] [--engines 8]
    python tests/bench/eviction.py --sensitivity --files TRACE ... --capacities 0.01,0.05

Each row is one trace (see eviction_traces.py, or files in Mooncake's format) and capacity: hit ratios of a plain LRU
cache, of the daemon's own index by age and by worth, and of the offline optimum; the hits by worth relative to those by
age; and the share of requests before which the guard chose age. Stress traces have `--prompts` prompts of capacity;
realistic traces and files have `--capacities` times their distinct blocks. The last line names the worst row that has
room for more than 50 prompts.

With --sensitivity, each constant of the policy is halved and doubled instead, and what that changes is shown in
percentage points.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from eviction_traces import PROMPT, REALISTIC, STRESS, blocks_of

from kvcache_server.core.eviction.policy import LRU, WORTH
from kvcache_tools.plan.room import Room
from kvcache_tools.replay.simulated_daemon import SimulatedDaemon, block_hash
from kvcache_tools.replay.simulation import Setup, distinct, make_rooms, optimum, routes, size_for
from kvcache_tools.replay.trace import TraceRequest, read_trace

FEW_PROMPTS = 50  # of capacity: with fewer, neither policy has enough to choose from
SESSIONS = {"conversations": 2000, "agents": 150}
PARTS = ("worth", "monitor", "guard", "learner")  # modules with constants
CONSTANTS = (
    *(
        "PRIOR_HAZARD",
        "PRIOR_BLOCKS",
        "MOST_COUNTED",
        "FACTOR_PRIOR",
        "FACTOR_IGNORED",
        "FACTOR_ONE_OFF",
        "FACTOR_COUNTED",
    ),
    *("WATCHED", "REACH", "PROMPTS", "_SMOOTH", "SPACING", "FEWEST", "_REFRESHES", "_FEWEST", "_MOST_EXPECTED"),
)


class Case(NamedTuple):
    name: str
    requests: list[TraceRequest]
    capacities: list[int]  # blocks


class Row(NamedTuple):
    """Hit ratios. `capacity` is in blocks, `prompts` how many average prompts that is."""

    name: str
    capacity: int
    prompts: float
    part: float  # of the distinct blocks
    lru: float
    by_age: float
    by_worth: float
    optimum: float
    guarded: float  # the share of requests before which the guard chose age
    switches: int

    @property
    def gain(self) -> float:
        """Hits by worth, relative to those by age."""
        return self.by_worth / self.by_age - 1 if self.by_age else float(self.by_worth > 0)


def plain_lru(requests: Sequence[TraceRequest], capacity: int) -> int:
    """Return the hits of one LRU cache for all engines. Of a prompt, the last block is evicted first."""
    cached: OrderedDict[int | str, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += next((at for at, block in enumerate(request.blocks) if block not in cached), len(request.blocks))
        for block in reversed(request.blocks):
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def by_daemon(
    requests: Sequence[TraceRequest], prompts: Sequence[list[bytes]], room: Room, setup: Setup, policy: str
) -> tuple[int, float, int]:
    """Return the hits of the daemon, the share of requests before which the guard chose age, and how often it did."""
    daemon = SimulatedDaemon(room, setup.block_tokens, setup.engines, policy=policy)
    guard = daemon.cache.eviction.learner.guard
    hits = guarded = 0
    for request, prompt, engine in zip(requests, prompts, routes(requests, setup), strict=True):
        guarded += guard.by_age
        hits += daemon.ask(engine, prompt, request.at, time.perf_counter)[0]
    return hits, guarded / len(requests), guard.switches


def hashed(requests: Sequence[TraceRequest]) -> list[list[bytes]]:
    known = {block: block_hash(block) for request in requests for block in request.blocks}
    return [[known[block] for block in request.blocks] for request in requests]


def compare(case: Case, setup: Setup) -> Iterator[Row]:
    """Yield a row per capacity."""
    asked, different, prompts = blocks_of(case.requests), distinct(case.requests), hashed(case.requests)
    for capacity in case.capacities:
        room, _ = make_rooms(size_for(capacity, setup), setup)
        by_age, _, _ = by_daemon(case.requests, prompts, room, setup, LRU)
        by_worth, guarded, switches = by_daemon(case.requests, prompts, room, setup, WORTH)
        yield Row(
            case.name,
            room.blocks,
            room.blocks * len(case.requests) / asked,
            room.blocks / different,
            plain_lru(case.requests, room.blocks) / asked,
            by_age / asked,
            by_worth / asked,
            optimum(case.requests, room.blocks) / asked,
            guarded,
            switches,
        )


def cases(
    names: Sequence[str], seeds: Sequence[int], prompts: Sequence[int], parts: Sequence[float], files: Sequence[str]
) -> Iterator[Case]:
    """Yield the traces with these names or in these files."""
    for name in names:
        for seed in seeds:
            if name in STRESS:
                for each in prompts:
                    yield Case(f"{name} {seed}", STRESS[name](each, random.Random(seed)), [each * PROMPT])
            else:
                requests = REALISTIC[name](SESSIONS[name], random.Random(seed))
                yield Case(f"{name} {seed}", requests, _parts_of(requests, parts))
    for path in files:
        requests = read_trace(path)
        yield Case(Path(path).name.split(".")[0], requests, _parts_of(requests, parts))


def _parts_of(requests: Sequence[TraceRequest], parts: Sequence[float]) -> list[int]:
    different = distinct(requests)
    return [max(round(part * different), 1) for part in parts]


HEAD = (
    f"{'trace':>24}{'blocks':>8}{'prompts':>9}{'part':>8}{'LRU':>8}{'by age':>8}{'by worth':>9}{'optimum':>9}"
    f"{'gain':>9}{'guarded':>9}{'switches':>9}"
)


def line(row: Row) -> str:
    return (
        f"{row.name:>24}{row.capacity:>8,}{row.prompts:>9.0f}{row.part:>8.1%}{row.lru:>8.2%}{row.by_age:>8.2%}"
        f"{row.by_worth:>9.2%}{row.optimum:>9.2%}{row.gain:>+9.1%}{row.guarded:>9.0%}{row.switches:>9}"
    )


# Sensitivity.


@contextmanager
def scaled(name: str, factor: float) -> Iterator[None]:
    """Multiply a constant in each module of the policy that has it."""
    modules = [importlib.import_module(f"kvcache_server.core.eviction.{part}") for part in PARTS]
    having = [each for each in modules if hasattr(each, name)]
    if not having:
        sys.exit(f"no module of the policy has a constant {name}: {', '.join(CONSTANTS)}")
    before = getattr(having[0], name)
    try:
        for each in having:
            setattr(each, name, type(before)(before * factor))
        yield
    finally:
        for each in having:
            setattr(each, name, before)


def sensitivity(chosen: Sequence[Case], setup: Setup) -> None:
    """Print the hit ratios by worth with each constant halved and doubled."""
    runs = []
    for case in chosen:
        prompts = hashed(case.requests)
        for capacity in case.capacities:
            runs.append((case, prompts, make_rooms(size_for(capacity, setup), setup)[0]))

    def ratios() -> list[float]:
        return [
            100 * by_daemon(case.requests, prompts, room, setup, WORTH)[0] / blocks_of(case.requests)
            for case, prompts, room in runs
        ]

    def say(name: str, found: Sequence[float], most: str = "") -> None:
        print(f"{name:>24}" + "".join(f"{each:>14.2f}" for each in found) + most, flush=True)

    print(f"{'hits in %':>24}" + "".join(f"{f'{case.name[:6]} {room.blocks:,}':>14}" for case, _, room in runs))
    usual, greatest = ratios(), (0.0, "")
    say("as they are", usual)
    for name in CONSTANTS:
        for factor in (0.5, 2.0):
            with scaled(name, factor):
                found = ratios()
            change = max((one - other for one, other in zip(found, usual, strict=True)), key=abs)
            say(f"{name} x {factor:g}", found, f"{change:>+8.2f}")
            greatest = max(greatest, (abs(change), f"{name} x {factor:g}"))
    print(f"greatest change: {greatest[0]:.2f} points, by {greatest[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*STRESS, *REALISTIC]
    parser.add_argument("--traces", help=f"of {', '.join(known)} (default: all, or none with --files)")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--prompts", default="60,200", help="capacities for stress traces (default: %(default)s)")
    parser.add_argument("--capacities", default="0.01,0.02,0.05,0.1,0.2", help="for others (default: %(default)s)")
    parser.add_argument("--files", nargs="+", default=[], metavar="TRACE", help="traces in Mooncake's format")
    parser.add_argument("--engines", type=int, default=8, help="that share the cache (default: %(default)s)")
    parser.add_argument("--sensitivity", action="store_true", help="halve and double the constants")
    given = parser.parse_args()
    names = [] if given.files and given.traces is None else (given.traces or ",".join(known)).split(",")
    if unknown := set(names) - set(known):
        parser.error(f"--traces: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    seeds, prompts = ([int(each) for each in text.split(",")] for text in (given.seeds, given.prompts))
    chosen = cases(names, seeds, prompts, [float(each) for each in given.capacities.split(",")], given.files)
    setup = Setup(given.engines)
    if given.sensitivity:
        sensitivity(list(chosen), setup)
        return
    print(HEAD)
    rows = []
    for case in chosen:
        for row in compare(case, setup):
            rows.append(row)
            print(line(row), flush=True)
    large = [row for row in rows if row.prompts > FEW_PROMPTS]
    if large:
        print(f"\nworst of {len(large)} rows with room for more than {FEW_PROMPTS} prompts:")
        print(line(min(large, key=lambda row: row.gain)))


if __name__ == "__main__":
    main()
