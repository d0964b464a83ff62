"""Limits on the rate of events, and on the share of a loop's time. Pure; the time is an argument."""

from __future__ import annotations

from collections.abc import Hashable

_MANY = 1024  # keys; above that, those that are not limited at the moment are forgotten


class Rate:
    """Allows each key a burst of `burst` events, and `per_second` events per second in the long run."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._apart = 1 / per_second
        self._slack = burst / per_second
        self._paid_until: dict[Hashable, float] = {}  # by key: the time at which its allowed events are paid off

    def allow(self, key: Hashable, now: float) -> bool:
        """Return True if an event of `key` is allowed now. A refused one does not count. O(1) on average."""
        until = max(self._paid_until.get(key, now), now) + self._apart
        if until - now > self._slack + self._apart / 2:  # half an event of tolerance: sums of floats
            return False
        if len(self._paid_until) >= _MANY:
            self._paid_until = {each: end for each, end in self._paid_until.items() if end > now}
        self._paid_until[key] = until
        return True


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
