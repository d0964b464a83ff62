"""Counts by name, from any thread."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return every count that is not 0."""
        with self._lock:
            return dict(self._counts)
