"""Pure: how long an engine takes to compute tokens, and to load them, learned from its own steps and loads.

Only what the tokens add to a step is computing: an engine that generates takes its steps anyway. A load takes a fixed
time, for at least one step passes before the engine learns of its end, and time for each token that it brings. Of loads
during which the engine had something to compute, the fixed time says how long steps were, not how long a load takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvcache_client.scheduler.views import StepView

CHUNK = 16  # least tokens of a request in a step that are a part of its prompt, and not generated or drafts
SMALL = 256  # tokens: samples of fewer count alike, those of more by their relative error
UNCOUNTED = 2  # first samples: kernels are compiled, and memory is touched for the first time
LEAST_STEPS, LEAST_LOADS = 8, 4  # samples before anything is predicted
MEMORY = 16  # samples after which one counts 1/e as much
CLIP = 4.0  # how many times what was predicted a sample counts at most: a host may stall
RIDGE = 1e-6  # tells features that cannot be told apart from each other by the samples
RUNNING = 16  # steps that an engine has under way, at most


class Fit:
    """What each feature costs, by least squares; never less than nothing. Old samples count less and less."""

    def __init__(self, features: int, least: int) -> None:
        """Predict nothing before there are `least` samples."""
        self._features, self._least = features, least
        self.forget()

    def forget(self) -> None:
        self._count = -UNCOUNTED
        self._squares = np.zeros((self._features, self._features))
        self._products = np.zeros(self._features)
        self._costs: np.ndarray | None = None

    @property
    def known(self) -> bool:
        return self._count >= self._least

    def add(self, sample: Sequence[float], tokens: int, seconds: float, times: int = 1) -> None:
        """Learn that `sample`, which is about so many tokens, took `seconds`; it counts as if it came so many times."""
        self._count += 1
        if self._count <= 0:
            return
        weight = 1 / (tokens + SMALL)
        row = np.asarray(sample) * weight
        if self.known and self._squares.diagonal()[row > 0].all():
            seconds = min(seconds, CLIP * self.predict(sample))
        fade = np.exp(-times / MEMORY)
        self._squares = fade * self._squares + times * np.outer(row, row)
        self._products = fade * self._products + times * row * seconds * weight
        self._costs = None

    def predict(self, sample: Sequence[float]) -> float:
        if self._costs is None:
            self._costs = self._solve()
        return float(self._costs @ sample)

    def _solve(self) -> np.ndarray:
        costs = np.zeros(self._features)
        scale = np.sqrt(self._squares.diagonal())
        used = np.flatnonzero(scale)
        while len(used):
            squares = self._squares[np.ix_(used, used)] / np.outer(scale[used], scale[used])
            found = np.linalg.solve(squares + RIDGE * np.eye(len(used)), self._products[used] / scale[used])
            if found.min() >= 0:
                costs[used] = found / scale[used]
                break
            used = np.delete(used, found.argmin())
        return costs


class Chunk(NamedTuple):
    """Tokens `begin` to `end` of a request's prompt, which a step computes."""

    request: str
    begin: int
    end: int

    @property
    def pairs(self) -> float:
        """Return how many pairs of tokens attention looks at, one of them in the chunk."""
        return (self.end - self.begin) * (self.begin + self.end) / 2


class Timed(NamedTuple):
    """A step that has chunks of prompts, and how long it took beyond what it takes for being a step."""

    chunks: Sequence[Chunk]
    seconds: float


class _Load(NamedTuple):
    tokens: int
    ahead: int  # tokens that others loaded when it began
    began: float
    steps: int  # that the engine had begun to compute before it


class Pace:
    """Of one engine. Times are seconds."""

    def __init__(self, block_tokens: int = 1) -> None:
        """The engine's blocks have `block_tokens` tokens."""
        self._block_tokens = block_tokens
        self._carried: dict[int, float] = {}  # to carry the bytes of one of the engine's blocks, by rank
        self._computes = Fit(3, LEAST_STEPS)  # a step, a token, a pair of tokens
        self._loads = Fit(3, LEAST_LOADS)  # a load of an idle engine, one of a busy engine, a token
        self._loading: dict[str, _Load] = {}
        self._steps = 0
        self._running: dict[int, tuple[float, list[Chunk]]] = {}  # timed steps, by number
        self._ended = 0.0  # when the last step ended

    def forget(self) -> None:
        """Learn everything anew."""
        self._computes.forget()
        self._loads.forget()

    # Computing.

    def step(self, number: int, step: StepView, now: float, learns: bool = True) -> bool:
        """Note that a step begins, from which something is learned or not; return whether its end is to be noted."""
        if not step.tokens:
            return False
        self._steps += 1
        chunks = _chunks(step)
        if not chunks:
            return False
        if not learns:
            return True
        self._running[number] = now, chunks
        if len(self._running) > RUNNING:  # their ends are not told
            del self._running[next(iter(self._running))]
        return True

    def ended(self, numbers: Sequence[int], now: float) -> list[Timed]:
        """Note that a step has ended, the one before it having ended at the last call; return what was timed.

        With asynchronous scheduling a step begins while the one before it runs.
        """
        last, self._ended = self._ended, now
        found = []
        for number in sorted({*numbers}):
            began, chunks = self._running.pop(number, (0.0, []))
            if not chunks:
                continue
            seconds, tokens = now - max(began, last), sum(each.end - each.begin for each in chunks)
            self._computes.add((1, tokens, sum(each.pairs for each in chunks)), tokens, seconds)
            found.append(Timed(chunks, max(0.0, seconds - self.step_seconds)))
        return found

    def computing(self, begin: int, end: int) -> float | None:
        """Return how long tokens `begin` to `end` of a prompt take to compute; None while that is unknown."""
        if not self._computes.known:
            return None
        return self._computes.predict((0, end - begin, Chunk("", begin, end).pairs))

    @property
    def step_seconds(self) -> float:
        """Return how long a step takes for being a step, where that is known."""
        return self._computes.predict((1, 0, 0))

    # Loading.

    @property
    def is_carried(self) -> bool:
        """Whether threads carry the bytes of loads, because memory is not page-locked."""
        return any(self._carried.values())

    def carried(self, changed: Mapping[int, float]) -> None:
        """Note how long ranks take to carry one of the engine's blocks; 0 for one whose copies go straight."""
        if changed:
            self._carried |= changed
            self._loads.forget()

    def load_began(self, request: str, tokens: int, now: float) -> None:
        """Note that a load begins, before the `step` that it begins in."""
        ahead = sum(load.tokens for load in self._loading.values())
        self._loading[request] = _Load(tokens, ahead, now, self._steps)

    def load_ended(self, request: str, failed: bool, now: float, times: int = 1) -> float | None:
        """Note that a load has ended. Return how long it took; None where it failed, or the engine was busy.

        It counts as if there had been so many.
        """
        load = self._loading.pop(request, None)
        if load is None or failed:
            return None
        seconds, tokens, idle = now - load.began, load.tokens + load.ahead, load.steps == self._steps
        self._loads.add((idle, not idle, tokens), tokens, seconds, times)
        return seconds if idle else None

    def arrived(self, tokens: int, seconds: float) -> None:
        """Note how long the copy of a load took that was reported when it began."""
        if seconds and self._loads.known:
            self._loads.add((1, 0, tokens), tokens, self._loads.predict((1, 0, 0)) + seconds)

    def loading(self, tokens: int) -> float | None:
        """Return how long a load of so many tokens takes, behind those that run; None while that is unknown."""
        carried = max(self._carried.values(), default=0.0) * tokens / self._block_tokens
        if not self._loads.known:
            return carried or None
        ahead = sum(load.tokens for load in self._loading.values())
        return max(carried, self._loads.predict((1, 0, tokens + ahead)))


def _chunks(step: StepView) -> list[Chunk]:
    scheduled = step.scheduled
    if step.tokens < len(scheduled) + CHUNK:  # all generate: this is most steps
        return []
    begins = [(new.request, new.computed) for new in step.started]
    begins += zip(step.running, step.computed, strict=True)
    found = (Chunk(request, begin, begin + scheduled[request]) for request, begin in begins)
    return [chunk for chunk in found if chunk.end - chunk.begin >= CHUNK]
