"""`python -m kvcache_tiers URL`: run one tier. `kvcache-server tier` does the same."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading

from kvcache_proto.errors import KVCacheError, NotPermitted
from kvcache_proto.messages import SECOND, WRITE_POLICIES
from kvcache_tiers.process import TierProcess


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvcache-server tier", description=__doc__)
    parser.add_argument("url", help="the store, as in disk:/var/cache/kvcache?size=500GiB")
    parser.add_argument("--endpoint", help="the daemon's, as for the other commands")
    parser.add_argument("--name", help="what `status` and metrics call it; the URL's scheme if it is left out")
    parser.add_argument("--writes", choices=WRITE_POLICIES, default=SECOND, help="when blocks are written to it")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)  # ends with its standard input
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    name = given.name or given.url.partition(":")[0]
    try:
        process = TierProcess(given.url, given.endpoint, name, given.writes)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: process.stop())
        if given.child:
            threading.Thread(target=_watch_parent, args=(process,), daemon=True).start()
        return process.run()
    except KVCacheError as error:
        print(f"kvcache-server tier: {error}", file=sys.stderr)
        return 6 if isinstance(error, NotPermitted) else 2


def _watch_parent(process: TierProcess) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    process.stop()


if __name__ == "__main__":
    sys.exit(main())
