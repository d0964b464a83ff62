"""Pauses of a kind of work that a store has failed at: reading, writing or removing."""

from __future__ import annotations

import logging
import time

from kvcache_tiers.backend import Failed

RETRY, MOST_RETRY = 0.5, 30.0  # seconds until it is tried again: twice as long after each failure in a row

log = logging.getLogger("kvcache_tiers")


class Pause:
    """The pause of one kind of work; `state` names it in the log, as in "the store is not written to"."""

    def __init__(self, state: str) -> None:
        self._state = state
        self._failures = 0  # in a row
        self._until = 0.0
        self._why = ""

    @property
    def left(self) -> float:
        """Seconds until the work is tried again; 0 if there is no pause."""
        return max(0.0, self._until - time.monotonic())

    @property
    def why(self) -> str:
        """The store's error; "" if there is no pause."""
        return self._why if self.left else ""

    def begin(self, error: Failed) -> bool:
        """Begin a pause; return False if there is one already: the work had begun before it."""
        if self.left:
            return False
        seconds = min(RETRY * 2**self._failures, MOST_RETRY)
        self._failures = min(self._failures + 1, 16)
        self._why, self._until = str(error), time.monotonic() + seconds
        log.warning("%s for %.1f s: %s", self._state, seconds, error)
        return True

    def worked(self) -> None:
        """Note that the store has done such work: the next pause is short."""
        self._failures = 0
