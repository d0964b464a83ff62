"""How often somebody may do something. Pure; time is an argument."""

from __future__ import annotations

from collections.abc import Hashable

_MANY = 1024  # keys, above which those that have rested long enough are forgotten


class Rate:
    """At most `burst` at once and `per_second` in the long run, for each key by itself."""

    def __init__(self, per_second: float, burst: float) -> None:
        self._apart = 1 / per_second
        self._slack = burst / per_second
        self._paid_until: dict[Hashable, float] = {}  # by key: when all that was allowed has had its time

    def allow(self, key: Hashable, now: float) -> bool:
        """Whether `key` may now; what is refused costs it nothing. O(1) on average."""
        until = max(self._paid_until.get(key, now), now) + self._apart
        if until - now > self._slack + self._apart / 2:  # half a turn: sums of floats
            return False
        if len(self._paid_until) >= _MANY:
            self._paid_until = {each: end for each, end in self._paid_until.items() if end > now}
        self._paid_until[key] = until
        return True
