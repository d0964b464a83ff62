"""`python -m kvcache_tiers`: run one tier; `kvcache-server tier` does the same.

The URL is an argument or, to hide it from `ps`, in $KVCACHE_TIER_URL.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from pathlib import Path

from kvcache_proto.errors import ClientError, ConfigError, KVCacheError, NotPermitted
from kvcache_proto.messages import SECOND, WRITE_POLICIES
from kvcache_tiers.process import RESTART, STOP_SECONDS, URL, TierProcess

MOST_FILES = 1 << 18  # closing more would take too long
OOM_SCORE = 500  # the kernel kills a tier, which is restarted, before an engine or the daemon (which may have -900)


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvcache-server tier")
    parser.add_argument("url", nargs="?", help=f"such as disk:/var/cache/kvcache?size=500GiB (default: ${URL})")
    parser.add_argument("--endpoint")
    parser.add_argument("--name", help="name of the tier (default: the URL's scheme)")
    parser.add_argument("--writes", choices=WRITE_POLICIES, default=SECOND)
    parser.add_argument("--child", action="store_true", help="exit when standard input is closed")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.raiseExceptions = False  # no process reads the log of a tier whose daemon was killed
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the daemon's threads block signals
    _be_killed_first()
    try:
        url = args.url or os.environ.get(URL, "")
        if not url:
            raise ConfigError(f"no URL: pass it as an argument or in ${URL}")
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = min(files, MOST_FILES) if files >= 0 else MOST_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # a large folder has thousands of files
        process = TierProcess(url, args.endpoint, args.name or url.partition(":")[0], args.writes)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: _stop(process))
        if args.child:
            threading.Thread(target=_watch_parent, args=(process,), daemon=True).start()
        status = process.run()
    except KVCacheError as error:
        logging.error("%s", error)
        return 6 if isinstance(error, NotPermitted) else 2 if isinstance(error, ClientError) else 1
    if status == RESTART:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # also descriptors that a client library has left open
        os.execv(sys.executable, [sys.executable, "-m", "kvcache_tiers", *sys.argv[1:]])
    return status


def _be_killed_first() -> None:
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    except OSError as error:
        logging.warning("the tier keeps the OOM score that it inherits: %s", error)


def _stop(process: TierProcess) -> None:
    """Stop the tier; after STOP_SECONDS, end the process even if the store does not answer."""
    process.stop()
    timer = threading.Timer(STOP_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _watch_parent(process: TierProcess) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    _stop(process)


if __name__ == "__main__":
    sys.exit(main())
