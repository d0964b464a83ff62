"""Limits low-priority work to a share of a loop's time. Pure; the time is an argument."""

from __future__ import annotations


class DutyCycle:
    """Grants at most `share` of the time in the long run: each piece of work is followed by a pause."""

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._not_before = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next piece of work may begin."""
        return max(0.0, self._not_before - now)

    def spent(self, began: float, ended: float) -> None:
        """Account for a piece of work."""
        self._not_before = ended + (ended - began) * self._rest
