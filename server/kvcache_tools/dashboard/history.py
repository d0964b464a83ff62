"""The recent past: a bounded list of the differences between consecutive reports of the daemon. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import msgspec

SECONDS = 3600  # of history
EVERY = 2.0  # seconds between two reports


class Daemon(msgspec.Struct):
    pid: int
    region: str


class Pool(msgspec.Struct):
    region_id: str
    used_bytes: int


class Namespace(msgspec.Struct):
    id: str
    lost_blocks: int
    saved_bytes: int


class Report(msgspec.Struct):
    """The part of a daemon's report that the dashboard itself reads; the page reads more, if present."""

    daemon: Daemon
    life: int
    pool: Pool
    counters: dict[str, int]
    namespaces: list[Namespace]
    told: dict[str, int] = {}

    @property
    def process(self) -> tuple[int, int, str]:
        """The identity of the daemon's process: counters restart from 0 with it."""
        return self.daemon.pid, self.life, self.pool.region_id


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
        self._last: tuple[float, Report] | None = None

    def add(self, at: float, report: Report) -> None:
        """Add a report received at `at`. The first one of a daemon makes no point: there is none to compare with."""
        last, self._last = self._last, (at, report)
        if last is None or at <= last[0] or last[1].process != report.process:
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
                lost_blocks=_gained(before, report, "lost_blocks"),
                loaded_bytes=report.told.get("loaded_bytes", 0) - before.told.get("loaded_bytes", 0),
                saved_bytes=_gained(before, report, "saved_bytes"),
                evicted_blocks=counted("blocks_evicted"),
                used_bytes=report.pool.used_bytes,
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


def _gained(before: Report, report: Report, name: str) -> int:
    """Return the increase summed over namespaces: those that are gone count as 0, new ones in full."""
    earlier = {space.id: getattr(space, name) for space in before.namespaces}
    return sum(max(0, getattr(space, name) - earlier.get(space.id, 0)) for space in report.namespaces)
