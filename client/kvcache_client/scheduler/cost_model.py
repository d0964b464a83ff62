"""Predicts how long an engine takes to compute or load tokens, from its own steps and loads. Decides whether to load a
hit, how long a request waits for blocks, and which loads overlap computation. Pure.

The model compares service times: how long a load occupies the bus, and how long a computation occupies the device. It
ignores waiting: a busy engine is short of device time, and a load saves that time even if it has to wait. So it uses
values near the minimum of the last minutes, which were disturbed least; a mean would grow with the engine's load.
Loading is only slower if the prompt is computed in less than the time of a step, or if memory is not page-locked.

While there are too few measurements, everything is loaded. Measurements expire after some minutes, so an engine that
declines its hits measures loads again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvcache_client.scheduler.cache import Counts
from kvcache_client.scheduler.requests import RequestState
from kvcache_client.scheduler.views import StepView

PROMPT_TOKENS = 16  # a request with fewer tokens in a step generates; otherwise it computes its prompt
LEAST_STEPS, LEAST_LOADS = 8, 4  # samples before anything is predicted
SAMPLES, WINDOW_SECONDS = 32, 300.0  # only this many samples are used, and none that are older than this
FARTHEST = 8  # no load of more than this many times the tokens of the largest measured load is predicted
MOST_STEPS = 16  # timed steps whose end has not been reported
MARGIN = 1.1  # a load may take this many times as long as the computation
MARGIN_SECONDS = 0.0002  # in addition to MARGIN
OFF_PATIENCE = 0.25  # seconds that a request may always wait if the gate is off
LEAST_SAVED = 0.002  # seconds that an overlap must save
LONGEST_OVERLAP = 2.0  # an overlapping load may take this many times as long as the computation


class Samples:
    """The latest samples: when they were taken, their tokens, and their seconds."""

    def __init__(self, enough: int) -> None:
        """Fewer than `enough` samples count as none."""
        self._enough = enough
        self._samples: deque[tuple[float, int, float]] = deque(maxlen=SAMPLES)

    def forget(self) -> None:
        self._samples.clear()

    def add(self, tokens: int, seconds: float, now: float) -> None:
        self._samples.append((now, tokens, seconds))

    def recent(self, now: float) -> Collection[tuple[float, int, float]]:
        """Return the samples within the window; none if there are too few."""
        while self._samples and now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()
        return self._samples if len(self._samples) >= self._enough else ()


class _Load(NamedTuple):
    tokens: int
    began: float
    steps: int  # number of steps that had begun before it
    alone: bool  # whether no other load was running


class CostModel:
    """Measures and predicts the speed of one engine. Times are in seconds."""

    def __init__(self, block_tokens: int = 1) -> None:
        """The engine's blocks have `block_tokens` tokens."""
        self._block_tokens = block_tokens
        self._now = 0.0
        self._carried: dict[int, float] = {}  # seconds for which host threads copy one engine block, by rank
        self._computed, self._loaded = Samples(LEAST_STEPS), Samples(LEAST_LOADS)
        self._loading: dict[str, _Load] = {}
        self._steps = 0
        self._running: dict[int, tuple[float, int]] = {}  # timed steps, by number: start and prompt tokens
        self._ended = 0.0  # when the last step ended

    # Computing.

    def step(self, number: int, step: StepView, now: float, learns: bool = True) -> bool:
        """Note that a step begins, and measure it if `learns`. Return True if its end must be reported."""
        self._now = now
        self._steps += bool(step.tokens)
        if step.tokens < len(step.scheduled) + PROMPT_TOKENS:  # no request computes its prompt, as in most steps
            return False
        tokens = sum(count for count in step.scheduled.values() if count >= PROMPT_TOKENS)
        if not tokens:
            return False
        if learns:
            self._running[number] = now, tokens
            if len(self._running) > MOST_STEPS:  # the end of the oldest one was not reported
                del self._running[next(iter(self._running))]
        return True

    def ended(self, numbers: Sequence[int], now: float) -> None:
        """Note that a step has ended; `numbers` are those of timed steps. The step before it ended at the last call.

        With asynchronous scheduling, a step begins while the one before it runs.
        """
        last, self._ended = self._ended, now
        for number in sorted({*numbers}):
            if timed := self._running.pop(number, None):
                began, tokens = timed
                self._computed.add(tokens, now - max(began, last), now)

    def computing(self, begin: int, end: int) -> float | None:
        """Return the seconds that tokens `begin` to `end` of a prompt add to a step; None while that is unknown.

        This is the lower quartile, not the minimum: after a step whose end was seen late, the next one seems too short.
        """
        rates = sorted(seconds / tokens for _, tokens, seconds in self._computed.recent(self._now))
        return rates[len(rates) // 4] * (end - begin) if rates else None

    # Loading.

    @property
    def is_carried(self) -> bool:
        """Whether host threads copy the bytes of loads, because memory is not page-locked."""
        return any(self._carried.values())

    def carried(self, changed: Mapping[int, float]) -> None:
        """Note the seconds for which a rank's threads copy one engine block; 0 for a rank that copies directly."""
        if changed:
            self._carried |= changed
            self._loaded.forget()

    def load_began(self, request: str, tokens: int, now: float) -> None:
        """Note that a load begins. Called before `step` for the same step."""
        self._loading[request] = _Load(tokens, now, self._steps, not self._loading)

    def load_ended(self, request: str, failed: bool, now: float) -> None:
        """Note that a load has ended. It is no sample if it had to wait for computation or for another load."""
        load = self._loading.pop(request, None)
        if load is not None and not failed and load.alone and load.steps == self._steps:
            self._loaded.add(load.tokens, now - load.began, now)

    def arrived(self, tokens: int, seconds: float) -> None:
        """Note the copy time of a load that was reported as ended when it began."""
        if seconds:
            self._loaded.add(tokens, seconds, self._now)

    def loading(self, tokens: int) -> float | None:
        """Return the seconds that a load of `tokens` tokens takes; None while that is unknown.

        This is the minimum of the measured times, because they include the wait for the step that sees the end. Times
        of smaller loads are scaled up in proportion, at most by FARTHEST.
        """
        carried = max(self._carried.values(), default=0.0) * tokens / self._block_tokens
        loads = self._loaded.recent(self._now)
        if tokens > FARTHEST * max((count for _, count, _ in loads), default=0):
            return carried or None
        return max(carried, min(seconds * max(1.0, tokens / count) for _, count, seconds in loads))


class Gate:
    """Decides whether to load a hit, and how long to wait for blocks that are being written or fetched."""

    def __init__(self, counters: Counts, is_on: bool, block_tokens: int = 1) -> None:
        self.costs = CostModel(block_tokens)
        self._counters, self._is_on = counters, is_on

    def admits(self, state: RequestState, begin: int, end: int) -> bool:
        """Return True if tokens `begin` to `end` of a request are to be loaded. Decided once per request."""
        if state.admitted is None:
            state.admitted = not self._is_on or self._decide(begin, end)
            self._counters.add("lookups_declined_slow", int(not state.admitted))
        return state.admitted

    def patience(self, begin: int, end: int) -> float:
        """Return the seconds that a request may wait for its tokens `begin` to `end` before it loads them."""
        compute = self.costs.computing(begin, end)
        if compute is None:
            return math.inf
        return max(0.0 if self._is_on else OFF_PATIENCE, compute - (self.costs.loading(end - begin) or 0.0))

    def _decide(self, begin: int, end: int) -> bool:
        load, compute = self.costs.loading(end - begin), self.costs.computing(begin, end)
        if load is None:
            return True
        if compute is None:
            return not self.costs.is_carried
        return load <= MARGIN * compute + MARGIN_SECONDS


class Overlap:
    """Decides which loads run while the rest of their requests is computed.

    A request that has the engine to itself would first load, and then compute its rest. If both overlap, it takes only
    as long as the slower one. Requests that arrive meanwhile wait for the step, which the load may prolong: so a load
    must not take much longer than the computation.
    """

    def __init__(self, costs: CostModel, is_on: bool, ranks: int, step_tokens: int) -> None:
        """`step_tokens` is the maximum number of tokens per step; `ranks` is the number of ranks."""
        self._costs, self._is_on, self._step_tokens = costs, is_on, step_tokens
        self.ranks = ranks
        self._ready: dict[int, bool] = {}

    def ranks_ready(self, changed: Mapping[int, bool]) -> None:
        """Note, by rank, whether the engine announces its layers."""
        self._ready |= changed

    def wins(self, begin: int, end: int, tokens: int) -> bool:
        """Return True if tokens `begin` to `end` of a request are to be loaded while those up to `tokens` are computed.

        Return False until both times are known, and if host threads copy the bytes: the engine would wait for them.
        """
        if not self._is_on or sum(self._ready.values()) < self.ranks or self._costs.is_carried:
            return False
        load, compute = (
            self._costs.loading(end - begin),
            self._costs.computing(end, min(tokens, end + self._step_tokens)),
        )
        if load is None or compute is None:
            return False
        return min(load, compute) >= LEAST_SAVED and load <= LONGEST_OVERLAP * compute
