"""The recent past: a bounded list of the differences between consecutive reports of the daemon. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

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


class History:
    """The points of the last hour, which are numbered consecutively."""

    def __init__(self, most: int = round(SECONDS / EVERY)) -> None:
        self._points: deque[Point] = deque(maxlen=most)
        self._made = 0
        self._last: tuple[float, dict[str, Any]] | None = None

    def add(self, at: float, report: dict[str, Any]) -> None:
        """Add a report received at `at`. The first one of a daemon makes no point: there is none to compare with."""
        before, self._last = self._last, (at, report)
        if before is None or at <= before[0] or _process(before[1]) != _process(report):
            return
        counters, earlier = report["counters"], before[1]["counters"]

        def counted(name: str) -> int:
            gained: int = counters.get(name, 0) - earlier.get(name, 0)
            return gained

        self._points.append(
            Point(
                at=round(at, 3),
                seconds=round(at - before[0], 3),
                requested_blocks=counted("blocks_requested"),
                hit_blocks=counted("blocks_hit"),
                lost_blocks=_gained(before[1], report, "lost_blocks"),
                loaded_bytes=_told(report, "loaded_bytes") - _told(before[1], "loaded_bytes"),
                saved_bytes=_gained(before[1], report, "saved_bytes"),
                evicted_blocks=counted("blocks_evicted"),
                used_bytes=report["pool"]["used_bytes"],
            )
        )
        self._made += 1

    def since(self, number: int) -> dict[str, Any]:
        """Return the points from `number` on, as far as they are kept, and the number of the next one."""
        first = self._made - len(self._points)
        if not first <= number <= self._made:
            number = first
        points = list(self._points)[number - first :]
        return {"fields": Point._fields, "points": points, "next": self._made}


def _process(report: dict[str, Any]) -> tuple[Any, ...]:
    """Return the identity of the daemon's process: counters restart from 0 with it."""
    return report["daemon"]["pid"], report["life"], report["pool"]["region_id"]


def _told(report: dict[str, Any], name: str) -> int:
    told: int = report["told"].get(name, 0)
    return told


def _gained(before: dict[str, Any], report: dict[str, Any], name: str) -> int:
    """Return the increase summed over namespaces: those that are gone count as 0, new ones in full."""
    earlier = {space["id"]: space[name] for space in before["namespaces"]}
    return sum(max(0, space[name] - earlier.get(space["id"], 0)) for space in report["namespaces"])
