"""Measure what it costs a lookup that misses are remembered for `kvcache-server why`.

    python tests/bench/why.py [--rounds 60] [--seconds 1] [--blocks 200000]

A single daemon alternates between remembering and forgetting. Two processes would differ by more than the cost, only
because of where their memory is. While it forgets, lookups do not contain names of requests either. With `--same` it
remembers in both turns, which shows the noise of the host.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from one_daemon import one_daemon
from watchers import WIDTH, turn

from kvcache_tools.bench import PAGE, Writer, fill, size_for

# Runs as the daemon's interpreter starts; a signal has it forget, or remember again.
SWITCH = """
import signal

kept = {}

def switch(*_):
    from kvcache_server.insight.insight import Insight
    from kvcache_server.insight.miss_log import MissLog

    for owner, name in ((Insight, "looked_up"), (MissLog, "left")):
        if name in kept:
            setattr(owner, name, kept.pop(name))
        else:
            kept[name] = getattr(owner, name)
            setattr(owner, name, lambda *_: None)

signal.signal(signal.SIGUSR2, switch)
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--seconds", type=float, default=1.0, help="seconds per turn")
    options.add_argument("--blocks", type=int, default=200_000)
    options.add_argument("--same", action="store_true", help="remember in both turns")
    given = options.parse_args()
    size = size_for(given.blocks)
    ratios: list[float] = []
    medians: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(SWITCH)
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        with (
            one_daemon({"PYTHONPATH": path}, size=size, page_size=PAGE) as daemon,
            Writer(daemon.endpoint, 0) as writer,
        ):
            fill(writer, given.blocks, lambda text: print(text, file=sys.stderr))

            def switch(remembers: bool) -> None:
                daemon.process.send_signal(signal.SIGUSR2)
                writer.names = remembers

            for number in range(given.rounds):
                took: dict[bool, float] = {}
                for remembers in (True, False) if number % 2 else (False, True):
                    if not (remembers or given.same):
                        switch(False)
                    took[remembers] = turn(writer, given.seconds).p50
                    if not (remembers or given.same):
                        switch(True)
                    medians[remembers].append(took[remembers])
                ratios.append(took[True] / took[False])
    found = {
        "forgets_p50_us": statistics.median(medians[False]) * 1e6,
        "remembers_p50_us": statistics.median(medians[True]) * 1e6,
        "p50_ratio": statistics.median(ratios),
        "p50_ratio_quartiles": statistics.quantiles(ratios)[::2],
    }
    low, high = found["p50_ratio_quartiles"]
    print(
        f"acquire + release of {WIDTH}, p50: {found['forgets_p50_us']:.0f} us where misses are forgotten, "
        f"{found['remembers_p50_us']:.0f} us where they are remembered, {found['p50_ratio']:.3f} x "
        f"(half of the pairs {low:.3f} to {high:.3f})"
    )


if __name__ == "__main__":
    main()
