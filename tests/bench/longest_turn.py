"""Measure how long a lookup of 64 hashes waits while another client sends the longest legal requests.

    python tests/bench/longest_turn.py [--blocks 1000000] [--tree DIRECTORY]

The daemon is filled with this number of blocks of 64 bytes. One process looks up 64 of them again and again, in pairs
of acquire and release. This process sends one long request after the other, and prints for each how long its answer
took and how long the other process waited at most. `--tree` measures the daemon of another checkout, to compare two
commits. The waiting time includes that for a core: on a quiet host there are more cores than the three processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from against import daemon_of
from rig import raw_figures

from kvcache_proto import messages as m
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome
from kvcache_server.admin_client import AdminClient

SPEC = NamespaceSpec("model", (GroupSpec(16, 64),))
MOST, BLOCKS = 16_384, 256  # hashes of a lookup, and of a reservation
LARGE = NamespaceSpec("large blocks", (GroupSpec(16, 64 * 4096),))
LEASES = 4000


def names(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


class Client(AdminClient):
    def __init__(self, endpoint: str, engine: str) -> None:
        super().__init__(endpoint, engine, 120.0, engine)
        self.namespace = self.ask(m.Attach(0, b"", SPEC, (0,))).namespace

    def reserve(self, runs: list[m.Run]) -> m.Reserved:
        reserved: m.Reserved = self.ask(m.Reserve(0, b"", self.namespace, runs))
        return reserved

    def store(self, hashes: list[bytes]) -> None:
        for at in range(0, len(hashes), BLOCKS):
            parent = hashes[at - 1] if at else None
            self.settle(self.reserve([m.Run(hashes[at : at + BLOCKS], parent)]))

    def settle(self, reserved: m.Reserved, outcome: Outcome = Outcome.COMMITTED) -> None:
        if reserved.reservation:
            self.ask(m.Settle(0, b"", self.geometry.region_id, reserved.reservation, (0,), outcome))


def look_up(endpoint: str, worst: Any, count: Any) -> None:
    """Be the honest engine: note the longest wait."""
    client = Client(endpoint, "honest")
    asked = names(1 << 60, 64)
    client.settle(client.reserve([m.Run(asked)]))
    while True:
        begin = time.perf_counter()
        lease = client.ask(m.Acquire(0, b"", client.namespace, asked)).lease
        worst.value = max(worst.value, time.perf_counter() - begin)
        count.value += 1
        if lease:
            client.tell(m.Release(0, b"", [lease]))


def cases(client: Client, again: Callable[[], Client], pid: int) -> Any:
    """Yield (what, how to do it); what comes before a yield is not measured."""
    reserved: list[m.Reserved] = []
    many, few = names(2 << 60, MOST), names(3 << 60, MOST)
    yield "nothing, for a second", lambda: time.sleep(1.0)
    yield "reserve of 256, full pool", lambda: reserved.append(client.reserve([m.Run(many[:BLOCKS])]))
    yield "settle of 256, committed", lambda: client.settle(reserved[-1])
    yield "reserve of 256, present", lambda: client.reserve([m.Run(many[:BLOCKS])])
    runs = [m.Run([each]) for each in few[:BLOCKS]]
    yield "reserve of 256 runs", lambda: reserved.append(client.reserve(runs))
    yield "settle of 256, failed", lambda: client.settle(reserved[-1], Outcome.FAILED)
    large = client.ask(m.Attach(0, b"", LARGE, (0,))).namespace
    yield "reserve of 256 large blocks", lambda: client.ask(m.Reserve(0, b"", large, [m.Run(many[:BLOCKS])]))
    client.store(many)
    yield "acquire of 16,384, all hits", lambda: client.ask(m.Acquire(0, b"", client.namespace, many, 0, False))
    below = [client.reserve([m.Run(few[:BLOCKS])])]
    for at in range(BLOCKS, MOST, BLOCKS):
        below.append(client.reserve([m.Run(few[at : at + BLOCKS], few[at - 1])]))
        client.settle(below[-1])
    yield "settle that shows 16,384", lambda: client.settle(below[0])
    slots = client.ask(m.Acquire(0, b"", client.namespace, few, 0, False)).slots
    region = client.geometry.region_id
    yield "invalidate of the first of 16,384", lambda: client.ask(m.Invalidate(0, b"", region, slots[:16], 0, 0))
    orphans = names(7 << 60, MOST)
    root = client.reserve([m.Run(orphans[:1])])
    for at in range(1, MOST, BLOCKS):
        client.reserve([m.Run(orphans[at : at + BLOCKS], orphans[at - 1])])
    yield "settle, failed, above 16,383", lambda: client.settle(root, Outcome.FAILED)
    holder = again()
    for number in range(LEASES):
        holder.ask(m.Acquire(0, b"", holder.namespace, many[: 1 + number % MOST]))
    yield "the end of 4,000 leases", lambda: (holder.close(), time.sleep(2.0))
    notes = [m.MissNote("request", "cause", 0, names(4 << 60, MOST))]
    yield "misses of 16,384", lambda: (client.tell(m.ReportMisses(0, b"", client.namespace, notes)), client.ping())
    gone = again()
    writing = names(5 << 60, MOST)
    for at in range(0, MOST, BLOCKS):
        gone.reserve([m.Run(writing[at : at + BLOCKS], writing[at - 1] if at else None)])
    again_named = m.Acquire(0, b"", client.namespace, names(6 << 60, MOST), 0, False, request="asked about")
    client.ask(again_named)
    yield "why, of 16,384 misses", lambda: client.ask(m.Why(0, b"", "asked about"))
    yield "the end of a writer of 16,384", lambda: (gone.close(), time.sleep(2.0))
    yield "its quarantine", lambda: time.sleep(12.0)
    yield "stats", lambda: raw_figures(client)
    yield "check", lambda: check(client, pid)
    yield "clear", lambda: client.clear()


def check(client: Client, pid: int) -> None:
    before = raw_figures(client)["daemon"]["integrity"]["checks"]
    os.kill(pid, signal.SIGUSR1)
    while raw_figures(client)["daemon"]["integrity"]["checks"] == before:
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    chosen = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder,
        daemon_of(chosen.tree, Path(folder), chosen.blocks + chosen.blocks // 10) as (endpoint, pid),
    ):
        measure(endpoint, chosen.blocks, pid)


def measure(endpoint: str, blocks: int, pid: int) -> None:
    client = Client(endpoint, "greedy")
    for first in range(0, blocks, BLOCKS):
        client.settle(client.reserve([m.Run(names(first, BLOCKS))]))
    spawn = multiprocessing.get_context("spawn")
    worst, count = spawn.Value("d", 0.0), spawn.Value("q", 0)
    honest = spawn.Process(target=look_up, args=(endpoint, worst, count), daemon=True)
    honest.start()
    while not count.value:
        time.sleep(0.01)
    print(f"{'request':34} {'answered, ms':>13} {'longest wait, ms':>17}")
    for what, do in cases(client, lambda: Client(endpoint, "gone"), pid):
        time.sleep(0.2)
        worst.value = 0.0
        begin = time.perf_counter()
        do()
        took, seen = time.perf_counter() - begin, count.value
        while count.value < seen + 2:  # a wait that has begun counts
            time.sleep(0.001)
        print(f"{what:34} {took * 1e3:13,.1f} {worst.value * 1e3:17,.1f}", flush=True)
    honest.terminate()


if __name__ == "__main__":
    main()
