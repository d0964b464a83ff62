"""Measure how long the cache of a killed daemon is away: from the start of the next daemon to its first answer.

    python tests/bench/restart.py [--blocks 100000,1000000] [--rounds 3]

It alternates with a daemon that begins with an empty region of the same size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from rig import Daemon, a_short_folder, save

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.errors import KVCacheError
from kvcache_tools.bench import PAGE, size_for

SPEC = NamespaceSpec(model="bench", groups=[GroupSpec(16, 64)], hash_bytes=16)
CHAIN = 100  # blocks of a prompt


def chain(number: int) -> list[bytes]:
    return [number.to_bytes(8, "big") + at.to_bytes(8, "big") for at in range(CHAIN)]


def first_answer(daemon: Daemon, number: int, since: float) -> tuple[float, int]:
    """Return the seconds from `since` to the answer to a lookup, and its hits."""
    while True:
        try:
            with Session.connect(daemon.endpoint, engine="bench", deadline=10.0) as session:
                hits = session.attach(SPEC, (0,)).acquire(chain(number), pin=False).hits
                return time.monotonic() - since, hits
        except KVCacheError:
            time.sleep(0.002)


def measure(blocks: int, rounds: int) -> tuple[float, float]:
    """Return the medians in seconds with the blocks of the last daemon, and with an empty region."""
    chains = blocks // CHAIN
    flags = {"size": size_for(blocks + blocks // 10), "page_size": PAGE, "log_level": "warning", "grace": 0}
    warm, empty = [], []
    with a_short_folder() as folder:

        def start(keep: str, fresh: bool = False) -> Daemon:
            return Daemon(folder, dict(os.environ), keep=keep, fresh=fresh, **flags)

        daemon = start("true", fresh=True)
        first_answer(daemon, 0, 0.0)
        with Session.connect(daemon.endpoint, engine="bench", deadline=30.0) as session:
            namespace = session.attach(SPEC, (0,))
            for number in range(chains):
                save(namespace, chain(number))
        for number in range(rounds):
            daemon.kill()
            since = time.monotonic()
            daemon = start("true")
            seconds, hits = first_answer(daemon, chains - 1 - number, since)
            assert hits == CHAIN, f"{hits} of {CHAIN} blocks were found"
            warm.append(seconds)
        daemon.kill()
        for _ in range(rounds):
            since = time.monotonic()
            daemon = start("false", fresh=True)
            empty.append(first_answer(daemon, 0, since)[0])
            daemon.stop(300)
        daemon.tidy()
    return statistics.median(warm), statistics.median(empty)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="100000,1000000")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    for blocks in map(int, chosen.blocks.split(",")):
        warm, empty = measure(blocks, chosen.rounds)
        print(f"{blocks:>9,} blocks: {warm:.2f} s; an empty region of that size {empty:.2f} s")


if __name__ == "__main__":
    main()
