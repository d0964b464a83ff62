"""Counts, and lines that are logged once in a while however often there is a reason."""

from __future__ import annotations

import logging
import time

from kvcache_client.session.counters import Counters

WARN_EVERY = 60.0


class Tally(Counters):
    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._warned: dict[str, float] = {}

    def warn(self, what: str, line: str) -> None:
        """Count `what`, and log `line` unless that was done within the last minute."""
        self.add(what)
        now = time.monotonic()
        if now - self._warned.get(what, -WARN_EVERY) >= WARN_EVERY:
            self._warned[what] = now
            self._logger.warning("%s", line)
