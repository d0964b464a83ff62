"""Decides when to stop sending requests to an unhealthy daemon, and when to try again. Pure: time is an argument."""

from __future__ import annotations

import math
import random
from collections.abc import Callable


class Backoff:
    """Delays that double from `first` to `longest` seconds, each randomly shortened by up to a half.

    This jitter keeps the engines of a host from reconnecting all at once after a restart of the daemon.
    """

    def __init__(self, first: float = 0.1, longest: float = 5.0, draw: Callable[[], float] = random.random) -> None:
        self.first, self.longest = first, longest
        self._draw = draw
        self._base = first

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        delay = self._base * (0.5 + self._draw() / 2)
        self._base = min(self._base * 2, self.longest)
        return delay

    def reset(self) -> None:
        self._base = self.first


class CircuitBreaker:
    """Opens after one missed deadline, so that an unhealthy daemon costs no more; a probe answered in time closes it.

    While it is open, probes are due after the delays of a Backoff. If it soon opens again, it stays open longer: a
    daemon that answers probes in time, but lookups too late, does not cost a deadline in every step.
    """

    def __init__(self, backoff: Backoff | None = None) -> None:
        self._backoff = backoff or Backoff()
        self.probe_at: float | None = None  # when the next probe is due; None while closed
        self._failed_at = -math.inf

    @property
    def closed(self) -> bool:
        return self.probe_at is None

    def failed(self, now: float) -> bool:
        """Note a missed deadline. Return True if it opened the breaker.

        The first probe is due at once, or after the backoff if the last miss was recent.
        """
        if self.probe_at is not None:
            return False
        if now - self._failed_at > 2 * self._backoff.longest:
            self._backoff.reset()
            self.probe_at = now
        else:
            self.probe_at = now + self._backoff.next()
        self._failed_at = now
        return True

    def answered(self) -> bool:
        """Note an answer in time. Return True if it closed the breaker."""
        opened, self.probe_at = self.probe_at is not None, None
        return opened

    def answered_late(self, now: float) -> None:
        """Note an answer that came too late: the daemon is alive, so the next probe is soon."""
        if self.probe_at is not None:
            self._backoff.reset()
            self.probe_at = now + self._backoff.next()

    def probe_due(self, now: float) -> bool:
        """Return True if a probe is due; the next one is then due after the backoff."""
        if self.probe_at is None or now < self.probe_at:
            return False
        self.probe_at = now + self._backoff.next()
        return True
