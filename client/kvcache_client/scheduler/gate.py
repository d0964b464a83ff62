"""Whether a hit is worth its load, or a wait for blocks that are being written: the break-even gate. Pure.

It lets every load through until enough is known, and where the difference is small. While it declines loads it would
learn nothing of them any more: so it lets one through now and then, for a fixed share of the time that requests spend
computing because of it. What became of its decisions is compared with what it predicted: where loads would have been
faster, it turns itself off for a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.cache import Counts
from kvcache_client.scheduler.pace import Pace
from kvcache_client.scheduler.request_state import RequestState
from kvcache_client.scheduler.views import StepView

MARGIN = 1.1  # a load that takes no longer than so many times the computation is let through
LEAST = 0.0002  # seconds: and one that takes hardly longer
EXPLORES = 0.02  # of the time that declined requests take, what loads may cost that are let through nevertheless
EXPLORED = 16  # how many loads such a one counts as
JUDGED = 8  # decisions that are compared with what was measured before the gate may turn itself off
LOSS = 0.2  # of the time that they were about, which they must have lost
FADE = 0.9  # from one of them to the next
OFF = 600.0  # seconds for which it turns itself off


@dataclass(slots=True)
class _Declined:
    """A request that computes a hit up to token `end`; `load` seconds were predicted, `spent` has been computed."""

    end: int
    load: float
    spent: float = 0.0


class Gate:
    """Of one engine. `pace` is what it knows."""

    def __init__(self, counters: Counts, is_on: bool, block_tokens: int = 1) -> None:
        self.pace = Pace(block_tokens)
        self._counters, self._is_on = counters, is_on
        self._off_until = -math.inf
        self._allowance = 0.0  # seconds that loads may cost which are let through nevertheless
        self._declined: dict[str, _Declined] = {}
        self._explored: dict[str, float] = {}  # by request, seconds that its hit was predicted to take to compute
        self._gained = self._judged_seconds = 0.0  # by its decisions of late, as measured, and what they were about
        self._judged = 0

    # Decisions.

    def admits(self, state: RequestState, begin: int, end: int, now: float) -> bool:
        """Return whether tokens `begin` to `end` of a request are to be loaded. It is decided once a request."""
        if state.admitted is None:
            state.admitted = self._decide(state.id, begin, end, now)
            self._counters.add("lookups_declined_slow", int(not state.admitted))
        return state.admitted

    def patience(self, begin: int, end: int, now: float) -> float:
        """Return how many seconds a request may wait for its tokens `begin` to `end` before it loads them."""
        compute = self.pace.computing(begin, end) if self._decides(now) else None
        return math.inf if compute is None else max(0.0, compute - (self.pace.loading(end - begin) or 0.0))

    def _decide(self, request: str, begin: int, end: int, now: float) -> bool:
        if not self._decides(now):
            return True
        load, compute = self.pace.loading(end - begin), self.pace.computing(begin, end)
        if load is None:
            return True
        if compute is None:
            return not self.pace.is_carried
        if load <= MARGIN * compute + LEAST:
            return True
        self._allowance += EXPLORES * (compute + self.pace.step_seconds)
        if self._allowance >= load - compute:
            self._allowance = 0.0
            self._explored[request] = compute
            self._counters.add("gate_explored")
            return True
        self._declined[request] = _Declined(end, load)
        return False

    def _decides(self, now: float) -> bool:
        return self._is_on and now >= self._off_until

    # What becomes of them.

    def step(self, number: int, step: StepView, now: float, learns: bool = True) -> bool:
        """As `Pace.step`."""
        return self.pace.step(number, step, now, learns)

    def ended(self, numbers: Sequence[int], now: float) -> None:
        """Note that a step has ended, and that it is one of those whose end is to be noted."""
        for timed in self.pace.ended(numbers, now):
            tokens = sum(chunk.end - chunk.begin for chunk in timed.chunks)
            for chunk in timed.chunks if self._declined else ():
                if (declined := self._declined.get(chunk.request)) is not None:
                    part = max(0, min(chunk.end, declined.end) - chunk.begin)
                    declined.spent += timed.seconds * part / tokens
                    if chunk.end >= declined.end:
                        del self._declined[chunk.request]
                        self._judge(declined.load - declined.spent, declined.load, now)

    def load_began(self, request: str, tokens: int, now: float) -> None:
        """Note that a load begins, before the `step` that it begins in."""
        self.pace.load_began(request, tokens, now)

    def load_ended(self, request: str, failed: bool, now: float) -> None:
        """Note that a load has ended."""
        compute = self._explored.pop(request, None)
        seconds = self.pace.load_ended(request, failed, now, times=1 if compute is None else EXPLORED)
        if seconds is not None and compute is not None:
            self._judge(seconds - compute, compute, now)

    def finished(self, request: str) -> None:
        """Note that a request has ended."""
        self._declined.pop(request, None)
        self._explored.pop(request, None)

    def _judge(self, gain: float, most: float, now: float) -> None:
        """Note what a decision about `most` seconds has gained."""
        self._gained = FADE * self._gained + max(-most, min(gain, most))
        self._judged_seconds = FADE * self._judged_seconds + most
        self._judged += 1
        if self._judged >= JUDGED and self._gained < -LOSS * self._judged_seconds and self._decides(now):
            lost = -self._gained
            self._gained, self._judged_seconds, self._judged = 0.0, 0.0, 0
            self._off_until, self._allowance = now + OFF, 0.0
            self.pace.forget()
            self._counters.warn(
                "gate_disabled",
                f"hits that were computed because their loads seemed slower took {lost * 1e3:,.0f} ms longer: for "
                f"{OFF / 60:.0f} minutes, every hit is loaded",
            )
