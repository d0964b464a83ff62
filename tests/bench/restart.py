"""Measure how long the cache of a killed daemon is away: from the start of the next daemon to its first answer.

    python tests/bench/restart.py [--blocks 100000,1000000] [--rounds 3]

It alternates with a daemon that begins with an empty region of the same size.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.errors import KVCacheError
from kvcache_tools.bench import PAGE, size_for

SPEC = NamespaceSpec(model="bench", groups=[GroupSpec(16, 64)], hash_bytes=16)
CHAIN = 100  # blocks of a prompt


def chain(number: int) -> list[bytes]:
    return [number.to_bytes(8, "big") + at.to_bytes(8, "big") for at in range(CHAIN)]


def start(folder: Path, size: int, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvcache_server", "serve", "--endpoint", f"ipc://{folder}/kv.sock", *flags]
    command += ["--size", str(size), "--page-size", str(PAGE), "--log-level", "warning", "--grace", "0"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def first_answer(folder: Path, number: int, since: float) -> tuple[float, int]:
    """Return the seconds from `since` to the answer to a lookup, and its hits."""
    while True:
        try:
            with Session.connect(f"ipc://{folder}/kv.sock", engine="bench", deadline=10.0) as session:
                hits = session.attach(SPEC, (0,)).acquire(chain(number), pin=False).hits
                return time.monotonic() - since, hits
        except KVCacheError:
            time.sleep(0.002)


def measure(blocks: int, rounds: int) -> dict[str, float]:
    chains = blocks // CHAIN
    size = size_for(blocks + blocks // 10)
    warm, empty = [], []
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as name:
        folder = Path(name)
        daemon = start(folder, size, "--fresh")
        first_answer(folder, 0, 0.0)
        with Session.connect(f"ipc://{folder}/kv.sock", engine="bench", deadline=30.0) as session:
            namespace = session.attach(SPEC, (0,))
            for number in range(chains):
                namespace.reserve(chain(number)).commit()
        for number in range(rounds):
            daemon.kill()
            daemon.wait()
            since = time.monotonic()
            daemon = start(folder, size)
            seconds, hits = first_answer(folder, chains - 1 - number, since)
            assert hits == CHAIN, f"{hits} of {CHAIN} blocks were found"
            warm.append(seconds)
        daemon.kill()
        daemon.wait()
        for _ in range(rounds):
            since = time.monotonic()
            daemon = start(folder, size, "--fresh", "--keep", "false")
            empty.append(first_answer(folder, 0, since)[0])
            daemon.terminate()
            daemon.wait()
    return {"warm_s": statistics.median(warm), "empty_s": statistics.median(empty)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="100000,1000000")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    for blocks in map(int, chosen.blocks.split(",")):
        found = measure(blocks, chosen.rounds)
        print(f"{blocks:>9,} blocks: {found['warm_s']:.2f} s; an empty region of that size {found['empty_s']:.2f} s")


if __name__ == "__main__":
    main()
