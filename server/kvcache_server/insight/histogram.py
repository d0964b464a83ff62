"""Counts of values by size, like a Prometheus histogram. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class Histogram:
    """`counts[i]` values are at most `bounds[i]` and above the previous bound; the last count is above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def figures(self) -> dict[str, Any]:
        """Return the figures for `status`."""
        return {"bounds": self.bounds, "counts": list(self.counts), "sum": self.sum}
