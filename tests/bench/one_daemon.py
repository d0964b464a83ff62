"""A daemon for a benchmark."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

from conftest import Daemon, a_short_folder  # noqa: E402


@contextmanager
def one_daemon(env: dict[str, str] | None = None, **flags: object) -> Iterator[Daemon]:
    """Yield a daemon that is ready, with `env` beside our own; `flags` are those of `Daemon`."""
    with a_short_folder() as folder:
        daemon = Daemon(folder, os.environ | (env or {}), **flags)
        try:
            yield daemon.wait_ready()
        finally:
            try:
                daemon.stop(300)  # of a large region, the unmapping takes its time
            finally:
                daemon.kill()
                daemon.tidy()
