"""Measure how long the cache of a killed daemon is away: from the start of the next daemon to its first answer.

    python tests/bench/restart.py [--blocks 100000,1000000] [--rounds 3] [--pages 16384,65536] [--json]

It alternates with a daemon that begins with an empty region of the same size.

With --pages, it measures instead how long it takes to read the rows of as many blocks of 1 MiB with pages of this many
bytes. The region is a sparse file in this process: 1 TiB in pages of 256 KiB needs 1 GiB of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto import messages as m
from kvcache_proto.errors import KVCacheError
from kvcache_proto.region import plan_geometry
from kvcache_proto.types import Outcome
from kvcache_server.core import journal
from kvcache_server.core.cache import Cache
from kvcache_server.core.limits import Limits
from kvcache_server.core.recovery.snapshot import Snapshot
from kvcache_tools.bench import PAGE, size_for
from kvcache_tools.replay.simulated_daemon import sparse_region

SPEC = NamespaceSpec(model="bench", groups=[GroupSpec(16, 64)], hash_bytes=16)
CHAIN = 100  # blocks of a prompt
BLOCK_BYTES = 1 << 20  # of a block whose row is read back


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
    return {"blocks": blocks, "warm_s": statistics.median(warm), "empty_s": statistics.median(empty)}


def read_back(blocks: int, page_bytes: int, rounds: int) -> dict[str, float]:
    size = blocks * BLOCK_BYTES * 9 // 8
    geometry = plan_geometry(secrets.token_bytes(16), size, page_bytes)
    buffer, limits = sparse_region(geometry), Limits(write_quota=1.0)
    records: list[journal.Record] = [journal.Began(geometry.region_id, 1)]
    cache = Cache(buffer, geometry, limits, 11)
    session = cache.open_session("bench", "", 0.0)
    spec = NamespaceSpec(model="bench", groups=[GroupSpec(16, BLOCK_BYTES)], hash_bytes=16)
    namespace = cache.handle(session, m.Attach(1, b"", spec, (0,)), 0.0).namespace
    for number in range(blocks // CHAIN):
        reserved = cache.handle(session, m.Reserve(1, b"", namespace, [m.Run(chain(number))]), 0.0)
        cache.handle(session, m.Settle(1, b"", geometry.region_id, reserved.reservation, (0,), Outcome.COMMITTED), 0.0)
    records += cache.effects.take()[0]
    del cache
    seconds = []
    for epoch in range(2, 2 + rounds):
        manifest = journal.read(journal.MAGIC + b"".join(map(journal.pack, records)))
        manifest.epoch = epoch
        gc.collect()
        gc.disable()  # as the daemon does
        since = time.monotonic()
        cache = Cache(buffer, geometry, limits, epoch=epoch)
        cache.restore(Snapshot(cache.rows, manifest, set()), 0.0)
        seconds.append(time.monotonic() - since)
        gc.enable()
        found = sum(len(each.visible) for each in cache.namespaces[namespace].groups)
        assert found == blocks // CHAIN * CHAIN, f"{found} of {blocks} blocks were found"
        del cache
    return {"blocks": blocks, "page_bytes": page_bytes, "read_back_s": statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="100000,1000000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pages", default="")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    sizes, pages = ([int(each) for each in given.split(",") if each] for given in (chosen.blocks, chosen.pages))
    if pages:
        found = [read_back(blocks, each, chosen.rounds) for blocks in sizes for each in pages]
    else:
        found = [measure(blocks, chosen.rounds) for blocks in sizes]
    if chosen.json:
        print(json.dumps(found))
        return
    for each in found:
        if pages:
            print(f"{each['blocks']:>9,} blocks in pages of {each['page_bytes']:,}: {each['read_back_s']:.2f} s")
            continue
        print(
            f"{each['blocks']:>9,} blocks: {each['warm_s']:.2f} s; an empty region of that size {each['empty_s']:.2f} s"
        )


if __name__ == "__main__":
    main()
