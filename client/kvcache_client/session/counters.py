"""Counts by name, from any thread, and their increases since the last report."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

WARN_EVERY = 60.0  # seconds


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return all counts that are not 0."""
        with self._lock:
            return dict(self._counts)


class LoggedCounters(Counters):
    """Counts that are also logged with their reasons, each at most once in WARN_EVERY seconds."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self._warned: dict[str, float] = {}

    def warn(self, name: str, line: str) -> None:
        """Count `name`, and log `line` unless a line was logged for it lately."""
        self.add(name)
        now = time.monotonic()
        if now - self._warned.get(name, -WARN_EVERY) >= WARN_EVERY:
            self._warned[name] = now
            self._logger.warning("%s", line)


class Gains:
    """The increases of several counts since they were last noted. `sources` may grow."""

    def __init__(self, *sources: Callable[[], Mapping[str, int]]) -> None:
        self.sources = list(sources)
        self._noted: Counter[str] = Counter()

    def look(self) -> tuple[dict[str, int], Counter[str]]:
        """Return the increases, and the sums to be noted once these have been reported."""
        sums: Counter[str] = Counter()
        for source in list(self.sources):
            sums.update(source())
        return {name: count - self._noted[name] for name, count in sums.items() if count != self._noted[name]}, sums

    def note(self, sums: Counter[str]) -> None:
        self._noted = sums

    def take(self) -> dict[str, int]:
        """Return the increases, and note the sums."""
        gained, sums = self.look()
        self.note(sums)
        return gained
