"""Measure tiers: their stores' rates, lookups beside them, and what they bring.

    python tests/bench/tiers.py [--parts disk,redis,mooncake,acquire,ratio] [--folder /var/tmp] [--toy]

`disk` compares the disk tier with fio: equal values, threads, directness and folder. Then it opens a tier that has many
values. `redis` compares the tier of Redis and Valkey with redis-py, and with the client of LMCache if there is one;
`mooncake` that of Mooncake Store with its library. These move values without a daemon.

`acquire` times lookups of blocks in the region while an engine keeps a tier at work in both directions; beside the same
without a tier, and beside processes that use as much CPU. `ratio` compares the hits of a pool for a quarter of the
blocks, above a disk, with those of a pool for all of them.

Variants take turns in one run. A part whose store is not installed is left out, with the reason: `apt-get install fio
redis-server`; `pip install --no-deps --target FOLDER lmcache`, then `--lmcache FOLDER`.

Run it on an idle host. `acquire` needs a region of 1.5 GiB per tier, and up to 2.3 GiB for Redis and for Mooncake.
Disks of virtual machines are often limited to a rate, and faster after they were idle: choose a large `--total` and
`--rest`. With `--toy`, the figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import tier_daemons as daemons
import tier_rates as rates
from rig import a_short_folder

from kvcache_client.scheduler.lookups import TIER_WAIT
from kvcache_proto.sizes import parse_size

PARTS = ("disk", "redis", "mooncake", "acquire", "ratio")
TIERS = ("disk", "redis", "s3", "mooncake")
TOY = {
    "total": "64MiB",
    "values": 5000,
    "rounds": 2,
    "seconds": 1.0,
    "rest": 0.1,
    "load_block": "256KiB",
    "small_block": "4KiB",
}
TOY |= {"conversations": 20, "rate": 0.0}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--toy", action="store_true", help="small sizes, to try it in seconds")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the disk (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--block", default="2MiB", help="disk, redis, mooncake: size of a value (default: %(default)s)")
    parser.add_argument("--total", default="1GiB", help="how much is written and read (default: %(default)s)")
    parser.add_argument("--direct", choices=("on", "off"), default="on", help="disk: past the page cache")
    parser.add_argument("--rest", type=float, default=2.0, help="disk: seconds before each measurement")
    parser.add_argument("--values", type=int, default=100_000, help="disk: values that a restart finds, of 4 KiB")
    parser.add_argument("--lmcache", metavar="FOLDER", help="redis: where LMCache is, if it is not installed")
    parser.add_argument("--tiers", default=",".join(TIERS), help="acquire (default: %(default)s)")
    parser.add_argument("--load-block", default="2MiB", help="acquire: size of a block (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="acquire: of a turn (default: %(default)s)")
    parser.add_argument("--small-block", default="64KiB", help="ratio (default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=80, help="ratio (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="ratio (default: %(default)s)")
    parser.add_argument("--traces", nargs="+", default=[], metavar="FILE", help="ratio: instead, in Mooncake's format")
    parser.add_argument("--rate", type=float, default=10.0, help="ratio: requests per second (default: %(default)s)")
    parser.add_argument("--patience", type=float, default=TIER_WAIT, help="ratio: seconds that a request waits at most")
    if "--toy" in sys.argv[1:]:
        parser.set_defaults(**TOY)
    given = parser.parse_args()
    for what, known in (("parts", PARTS), ("tiers", TIERS)):
        if unknown := set(getattr(given, what).split(",")) - set(known):
            parser.error(f"--{what}: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return given


def measure(given: argparse.Namespace, part: str, disk: Path, folder: Path) -> Iterator[str]:
    """Yield the lines of a part. The tiers of `disk` are there, and other stores' files in `folder`."""
    amount = rates.Amount(parse_size(given.block), parse_size(given.total), given.rounds)
    small = parse_size(given.small_block)
    match part:
        case "disk":
            yield from rates.disk(disk, amount, given.direct == "on", given.rest)
            yield from rates.disk_restart(disk, given.values, given.rounds)
        case "redis":
            yield from rates.redis_and_valkey(folder, amount, given.lmcache)
        case "mooncake":
            yield from rates.mooncake_store(folder, amount)
        case "acquire":
            load = daemons.Load(parse_size(given.load_block), 16, 16)
            yield from daemons.acquire(disk, folder, given.tiers.split(","), load, given.rounds, given.seconds)
        case "ratio":
            prompts = daemons.prompts_of(given.traces) or daemons.conversations(
                given.conversations, given.turns, random.Random(1)
            )
            yield from daemons.ratio(disk, prompts, small, given.rate, given.patience)


def main() -> None:
    given = parse()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}", flush=True)
    for part in given.parts.split(","):
        print()
        with TemporaryDirectory(prefix="kvcache-bench-", dir=given.folder) as disk, a_short_folder() as folder:
            for line in measure(given, part, Path(disk), folder):
                print(line, flush=True)


if __name__ == "__main__":
    main()
