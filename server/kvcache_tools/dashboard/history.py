"""The recent past: a bounded list of the differences between consecutive reports of the daemon. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvcache_server.status import Namespace, Status

SECONDS = 3600  # of history
EVERY = 2.0  # seconds between two reports


class Point(NamedTuple):
    """The events in the `seconds` before `at` (seconds since 1970), and the memory used then.

    `loaded_bytes` are those that ranks have copied, as far as reported.
    """

    at: float
    seconds: float
    requested_blocks: int
    hit_blocks: int
    lost_blocks: int
    loaded_bytes: int
    saved_bytes: int
    evicted_blocks: int
    used_bytes: int


class Points(msgspec.Struct):
    """Points, the names of their fields, and the number of the next one."""

    fields: tuple[str, ...]
    points: list[Point]
    next: int


class History:
    """The points of the last hour, which are numbered consecutively."""

    def __init__(self, most: int = round(SECONDS / EVERY)) -> None:
        self._points: deque[Point] = deque(maxlen=most)
        self._made = 0
        self._last: tuple[float, Status] | None = None

    def add(self, at: float, report: Status) -> None:
        """Add a report received at `at`. The first one of a daemon makes no point: there is none to compare with."""
        last, self._last = self._last, (at, report)
        if last is None or at <= last[0] or _process(last[1]) != _process(report):
            return
        before = last[1]

        def counted(name: str) -> int:
            return report.counters.get(name, 0) - before.counters.get(name, 0)

        self._points.append(
            Point(
                at=round(at, 3),
                seconds=round(at - last[0], 3),
                requested_blocks=counted("blocks_requested"),
                hit_blocks=counted("blocks_hit"),
                lost_blocks=_gained(before, report, lambda space: space.lost_blocks),
                loaded_bytes=report.client_counts.get("loaded_bytes", 0) - before.client_counts.get("loaded_bytes", 0),
                saved_bytes=_gained(before, report, lambda space: space.saved_bytes),
                evicted_blocks=counted("blocks_evicted"),
                used_bytes=report.pool.used_bytes,
            )
        )
        self._made += 1

    def since(self, number: int) -> Points:
        """Return the points from `number` on, as far as they are kept."""
        first = self._made - len(self._points)
        if not first <= number <= self._made:
            number = first
        return Points(Point._fields, list(self._points)[number - first :], self._made)


def _process(report: Status) -> tuple[int, int, str]:
    """Return the identity of the daemon's process: counters restart from 0 with it."""
    return report.daemon.pid, report.life, report.pool.region_id


def _gained(before: Status, report: Status, of: Callable[[Namespace], int]) -> int:
    """Return the increase summed over namespaces: those that are gone count as 0, new ones in full."""
    earlier = {space.id: of(space) for space in before.namespaces}
    return sum(max(0, of(space) - earlier.get(space.id, 0)) for space in report.namespaces)
