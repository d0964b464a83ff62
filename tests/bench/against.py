"""Compare the daemon of this tree with that of another checkout, with the requests of `kvcache-server bench`.

    python tests/bench/against.py TREE [--blocks 200000] [--turns 30] [--starts 6]

Both daemons run at the same time with the same blocks, and one client alternates between them in short bursts. Two
processes of the same code differ by some per cent for as long as they live, so both are started several times. Each row
has the medians of both in microseconds, and the ratio (this tree / TREE): the median over all starts of the median over
all pairs of bursts, for the client's latency and for the daemon's CPU time, which is more reliable on a busy host. The
brackets have the least and the greatest ratio of a start. Use `.` as TREE to see the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rig import raw_figures

from kvcache_proto.errors import Unavailable
from kvcache_server.admin_client import AdminClient
from kvcache_tools.bench import BURST, PAGE, RUN, WIDTHS, Writer, cpu_seconds, fill, size_for

WRITES = 10  # runs that are written in a burst
HERE = Path(__file__).parents[2]


Work = Callable[[Writer], Iterator[float]]
Pair = tuple[tuple[float, float], tuple[float, float]]  # of ours and theirs: seconds waited, CPU seconds


@contextlib.contextmanager
def daemon_of(tree: Path, folder: Path, blocks: int) -> Iterator[tuple[str, int]]:
    """Run the daemon of a checkout with room for so many blocks; yield its endpoint and process id."""
    endpoint = f"ipc://{folder}/kvcache.sock"
    env = {**os.environ, "PYTHONPATH": ":".join(str(tree / part) for part in ("proto", "server", "client"))}
    flags = [
        "--endpoint",
        endpoint,
        "--lock=never",
        "--keep=false",
        f"--size={size_for(blocks)}",
    ]
    log = folder / "daemon.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "kvcache_server", "serve", *flags, f"--page-size={PAGE}"]
        daemon = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=tree)
    try:
        while True:
            assert daemon.poll() is None, log.read_text()
            with contextlib.suppress(Unavailable), AdminClient(endpoint):
                break
            time.sleep(0.1)
        yield endpoint, daemon.pid
    finally:
        daemon.terminate()
        daemon.wait()


class Side:
    """A daemon of one checkout, and the client that asks it."""

    def __init__(self, tree: Path, folder: Path, blocks: int, stack: contextlib.ExitStack) -> None:
        folder.mkdir()
        endpoint, self._pid = stack.enter_context(daemon_of(tree, folder, blocks))
        self.writer = stack.enter_context(Writer(endpoint, 0))

    def burst(self, work: Work, parts: int) -> tuple[float, float]:
        """Return the median of what `work` yields, in seconds, and the mean of the daemon's CPU seconds; of one part of
        so many."""
        before = cpu_seconds(self._pid)
        waits = list(work(self.writer))
        return statistics.median(waits) / parts, (cpu_seconds(self._pid) - before) / len(waits) / parts


def writes(writer: Writer) -> Iterator[float]:
    """Yield the seconds that each run took to be reserved and committed."""
    done = 0
    while done < WRITES:
        granted, seconds = writer.write()
        if granted == RUN:
            done += 1
            yield seconds


def evicted(writer: Writer) -> int:
    return int(raw_figures(writer)["counters"].get("blocks_evicted", 0))


def lookups(width: int) -> Work:
    """Return what yields the seconds of an acquire and release of so many hashes."""

    def work(writer: Writer) -> Iterator[float]:
        for question in [writer.prompts.question(width) for _ in range(BURST)]:
            yield writer.acquire(question)[1]

    return work


def compare(ours: Side, theirs: Side, turns: int, work: Work) -> list[Pair]:
    pairs = []
    for turn in range(turns):
        first, second = (ours, theirs) if turn % 2 else (theirs, ours)
        found = {side: side.burst(work, RUN if work is writes else 1) for side in (first, second)}
        pairs.append((found[ours], found[theirs]))
        if work is not writes:  # between two lookups the pool evicts
            ours.writer.write()
            theirs.writer.write()
    return pairs


def start(tree: Path, turn: int, blocks: int, turns: int) -> Iterator[tuple[str, list[Pair]]]:
    """Start both daemons, and yield (row, what was found)."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcache-against-")))
        sides = [
            Side(each, folder / str(at), blocks, stack)
            for at, each in enumerate((HERE, tree)[:: 1 if turn % 2 else -1])
        ]
        ours, theirs = sides[:: 1 if turn % 2 else -1]
        for count in (blocks // 10, blocks * 8 // 10):
            for side in sides:
                fill(side.writer, count, print)
            yield f"reserve + commit, {count:,} blocks", compare(ours, theirs, turns // 2, writes)
        for side in sides:
            while not evicted(side.writer):
                side.writer.write()
        yield "reserve + commit, evicting", compare(ours, theirs, turns, writes)
        for width in WIDTHS:
            yield f"acquire + release, {width:,} hashes", compare(ours, theirs, turns, lookups(width))


def describe(name: str, starts: list[list[Pair]]) -> str:
    line = f"{name:<34}"
    for at, what in enumerate(("p50", "CPU")):
        mine, other = (statistics.median(p[side][at] for pairs in starts for p in pairs) * 1e6 for side in (0, 1))
        ratios = [statistics.median(pair[0][at] / pair[1][at] for pair in pairs) for pairs in starts]
        line += f"  {what} {mine:7.2f} /{other:7.2f} us = {statistics.median(ratios):.3f}"
        line += f" [{min(ratios):.3f}, {max(ratios):.3f}]"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--starts", type=int, default=6)
    options = parser.parse_args()
    rows: dict[str, list[list[Pair]]] = {}
    for turn in range(options.starts):
        for name, pairs in start(options.tree.resolve(), turn, options.blocks, options.turns):
            rows.setdefault(name, []).append(pairs)
    for name, starts in rows.items():
        print(describe(name, starts))


if __name__ == "__main__":
    main()
