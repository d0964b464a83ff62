"""Counters of one process that survive its kill: words of a mapped file, which the driver can read at any time."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

NAMES = (
    *("steps", "lookups", "hits", "verified", "wrong", "gone", "torn_leases", "failed_calls"),
    *("granted", "visible", "not_visible", "unanswered", "refused"),
    *("sessions", "sessions_resumed", "leases_lost", "settles_sent_again"),
)
BUCKETS = 96  # of a call's time: each a fifth of an octave wider than the one before, from 16 us on
_SIZE = 8 * (len(NAMES) + BUCKETS)


class Tallies:
    """`add` counts; `took` notes the seconds of one call that has a deadline."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it: the successor of a killed process continues to count."""
        with path.open("a+b") as file:
            file.truncate(_SIZE)
            self._words = memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("q")

    def add(self, name: str, count: int = 1) -> None:
        self._words[_PLACES[name]] += count

    def took(self, seconds: float) -> None:
        bucket = int(5 * math.log2(max(seconds * 1e6 / 16, 1.0)))
        self._words[len(NAMES) + min(bucket, BUCKETS - 1)] += 1

    def read(self) -> dict[str, int]:
        return {name: self._words[place] for name, place in _PLACES.items()}

    def times(self) -> list[int]:
        return self._words[len(NAMES) :].tolist()


_PLACES = {name: place for place, name in enumerate(NAMES)}


def quantile(buckets: list[int], part: float) -> float:
    """Return the seconds below which `part` of the calls lie, to a fifth of an octave; 0 where there were none."""
    left = part * sum(buckets)
    for bucket, count in enumerate(buckets):
        left -= count
        if count and left <= 0:
            return 16e-6 * 2 ** ((bucket + 1) / 5)
    return 0.0
