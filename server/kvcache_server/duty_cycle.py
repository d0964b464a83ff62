"""A part of a loop's time, for what may wait. Pure; time is an argument."""

from __future__ import annotations


class DutyCycle:
    """At most `share` of the time in the long run: after each piece of work the loop is the others' for a while."""

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1
        self._not_before = 0.0

    def wait(self, now: float) -> float:
        """Return the seconds until the next piece may begin."""
        return max(0.0, self._not_before - now)

    def spent(self, began: float, ended: float) -> None:
        """Note a piece of work."""
        self._not_before = ended + (ended - began) * self._rest
