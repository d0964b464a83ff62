"""Whether a hit is worth its load, and how long it is worth waiting for blocks that are on their way. Pure.

Service times are compared: how long a load keeps the bus busy, and how long computing keeps the device busy. Waiting is
left out: a busy engine is short of device time, and a load saves that time even if it has to wait. So a load only loses
if the prompt is computed sooner than a step passes, or if its path has no page-locked memory. While too little is
known, everything is loaded, and measurements are forgotten after some minutes: so an engine that declines its hits
measures loads again.
"""

from __future__ import annotations

import math

from kvcache_client.scheduler.cache import Counts
from kvcache_client.scheduler.pace import Pace
from kvcache_client.scheduler.request_state import RequestState

MARGIN = 1.1  # a load may take this many times as long as the computation
LEAST = 0.0002  # seconds that it may take in addition
OFF_PATIENCE = 0.25  # seconds that a request may wait at least if the gate is off


class Gate:
    """The gate of one engine. `pace` has its measurements."""

    def __init__(self, counters: Counts, is_on: bool, block_tokens: int = 1) -> None:
        self.pace = Pace(block_tokens)
        self._counters, self._is_on = counters, is_on

    def admits(self, state: RequestState, begin: int, end: int) -> bool:
        """Return True if tokens `begin` to `end` of a request are to be loaded. Decided once per request."""
        if state.admitted is None:
            state.admitted = not self._is_on or self._decide(begin, end)
            self._counters.add("lookups_declined_slow", int(not state.admitted))
        return state.admitted

    def patience(self, begin: int, end: int) -> float:
        """Return how many seconds a request may wait for its tokens `begin` to `end` before it loads them."""
        compute = self.pace.computing(begin, end)
        if compute is None:
            return math.inf
        return max(0.0 if self._is_on else OFF_PATIENCE, compute - (self.pace.loading(end - begin) or 0.0))

    def _decide(self, begin: int, end: int) -> bool:
        load, compute = self.pace.loading(end - begin), self.pace.computing(begin, end)
        if load is None:
            return True
        if compute is None:
            return not self.pace.is_carried
        return load <= MARGIN * compute + LEAST
