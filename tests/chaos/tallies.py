"""Counters of one process that survive its kill: words of a mapped file, which the driver can read at any time."""

from __future__ import annotations

import mmap
from pathlib import Path

NAMES = (
    *("steps", "lookups", "hits", "verified", "wrong", "gone", "torn_leases", "failed_calls"),
    *("granted", "visible", "not_visible", "unanswered", "refused"),
    *("sessions", "sessions_resumed", "leases_lost", "settles_sent_again"),
)
_SIZE = 8 * len(NAMES)


class Tallies:
    def __init__(self, path: Path) -> None:
        """Open the file, or create it: the successor of a killed process continues to count."""
        with path.open("a+b") as file:
            file.truncate(_SIZE)
            self._words = memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("q")

    def add(self, name: str, count: int = 1) -> None:
        self._words[_PLACES[name]] += count

    def read(self) -> dict[str, int]:
        return {name: self._words[place] for name, place in _PLACES.items()}


_PLACES = {name: place for place, name in enumerate(NAMES)}
