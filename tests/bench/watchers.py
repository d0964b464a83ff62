"""Measure what watchers cost an engine: its lookups alone and beside them, alternating in one run.

    python tests/bench/watchers.py [--cases tops,all,slow,flood,why] [--rounds 10] [--blocks 200000]

`none` has no watchers: it shows the noise of the host. `tops` are ten `kvcache-server top`, `scrape` reads /metrics
once per second, `all` is both. `slow` holds 200 connections that never finish a request, `flood` requests /metrics as
fast as possible. `why` has no watchers: the engine names its requests, so that misses are remembered, or not.

The watchers are suspended (SIGSTOP) between their turns, so each turn with them has one without them directly before
it. They are processes: if there are fewer cores than they need, the host takes time from the daemon, and both figures
of a pair show it.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from rig import Daemon, one_daemon

from kvcache_tools.bench import PAGE, Writer, fill, size_for

WIDTH = 64
TOPS = 10
SCRAPE = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1] + "/metrics").read()
    time.sleep(1)
"""
SLOW = """
import socket, sys, time
from urllib.parse import urlsplit
address = urlsplit(sys.argv[1])
held = []
while True:
    try:
        held.append(socket.create_connection((address.hostname, address.port)))
        held[-1].send(b"GET /metrics HTTP/1.1\\r\\nHost: local")
    except OSError:
        time.sleep(0.01)
    while len(held) > 200:
        held.pop(0).close()
"""
FLOOD = """
import sys, threading, urllib.request
def ask():
    while True:
        try:
            urllib.request.urlopen(sys.argv[1] + "/metrics").read()
        except OSError:
            pass
for _ in range(7):
    threading.Thread(target=ask).start()
ask()
"""


def commands(case: str, endpoint: str, address: str) -> list[list[str]]:
    top = [sys.executable, "-m", "kvcache_server", "top", "--endpoint", endpoint]
    scripts = {"scrape": SCRAPE, "slow": SLOW, "flood": FLOOD}
    if case in ("none", "why"):
        return []
    if case in scripts:
        return [[sys.executable, "-c", scripts[case], address]]
    return [top] * TOPS + ([[sys.executable, "-c", SCRAPE, address]] if case == "all" else [])


@contextlib.contextmanager
def watchers(case: str, endpoint: str, address: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start them, see that they work, and leave them stopped."""
    made = []
    for command in commands(case, endpoint, address):
        made.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL))
    try:
        time.sleep(3)  # they import what they need
        assert all(each.poll() is None for each in made), case
        for each in made:
            each.send_signal(signal.SIGSTOP)
        yield made
    finally:
        for each in made:
            each.kill()
            each.wait()


class Turn(NamedTuple):
    """Seconds of each lookup, and how many messages they were."""

    seconds: list[float]
    messages: int

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]


def turn_alone(writer: Writer, seconds: float, *_: object) -> Turn:
    """Look up for so long, one question after the other."""
    questions = [writer.prompts.question(WIDTH) for _ in range(256)]
    took: list[float] = []
    messages, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        hits, each = writer.acquire(questions[len(took) % len(questions)])
        took.append(each)
        messages += 1 + (hits > 0)
    return Turn(took, messages)


def turn_beside(writer: Writer, seconds: float, others: list[subprocess.Popen[bytes]]) -> Turn:
    for each in others:
        each.send_signal(signal.SIGCONT)
    found = turn_alone(writer, seconds)
    for each in others:
        each.send_signal(signal.SIGSTOP)
    return found


def measure(case: str, daemon: Daemon, writer: Writer, rounds: int, seconds: float) -> dict[str, Any]:
    """Return medians of the turns, in microseconds, and the median of what a pair's second was of its first."""
    address = daemon.status()["daemon"]["http"]["address"]
    pairs: list[tuple[Turn, Turn]] = []
    with watchers(case, daemon.endpoint, address) as others:
        before = daemon.status()["daemon"]["messages"]
        for number in range(rounds):
            took = {}
            for is_beside in (True, False) if number % 2 else (False, True):  # a host may grow busier, or calmer
                writer.names = is_beside or case != "why"
                took[is_beside] = (turn_beside if is_beside else turn_alone)(writer, seconds, others)
            pairs.append((took[False], took[True]))
        status = daemon.status()["daemon"]
    ours = sum(each.messages for pair in pairs for each in pair)
    return {
        "case": case,
        "alone_p50_us": statistics.median(alone.p50 for alone, _ in pairs) * 1e6,
        "beside_p50_us": statistics.median(beside.p50 for _, beside in pairs) * 1e6,
        "p50_ratio": statistics.median(beside.p50 / alone.p50 for alone, beside in pairs),
        "p99_ratio": statistics.median(beside.p99 / alone.p99 for alone, beside in pairs),
        "messages": ours,
        "messages_of_others": status["messages"] - before - ours,
        "http": status["http"]["answers"] | status["http"]["cuts"],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--cases", default="none,tops,scrape,all,slow,flood,why")
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--seconds", type=float, default=3.0, help="seconds per turn")
    options.add_argument("--blocks", type=int, default=200_000)
    given = options.parse_args()
    size = size_for(given.blocks)
    with one_daemon(size=size, page_size=PAGE, http="127.0.0.1:0") as daemon, Writer(daemon.endpoint, 0) as writer:
        fill(writer, given.blocks, lambda text: print(text, file=sys.stderr))
        for case in given.cases.split(","):
            print(describe(measure(case, daemon, writer, given.rounds, given.seconds)), flush=True)


def describe(found: dict[str, Any]) -> str:
    return (
        f"{found['case']:<7} acquire + release of {WIDTH}, p50: alone {found['alone_p50_us']:.0f} us, beside "
        f"{found['beside_p50_us']:.0f} us, {found['p50_ratio']:.3f} x; p99 {found['p99_ratio']:.2f} x; "
        f"{found['messages']:,} messages beside {found['messages_of_others']:,} of others; http so far {found['http']}"
    )


if __name__ == "__main__":
    main()
