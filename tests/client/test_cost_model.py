"""How long computing and loading take, as learned from steps and loads of a simulated engine."""

from __future__ import annotations

import pytest

from kvcache_client.scheduler.cost_model import FARTHEST, LEAST_LOADS, LEAST_STEPS, WINDOW_SECONDS, CostModel
from kvcache_client.scheduler.views import NewTable, StepView

STEP, TOKEN = 0.004, 2e-5  # seconds
LOAD, LOADED = 0.003, 2e-6


class Paced:
    """An engine, and what it knows of itself."""

    def __init__(self) -> None:
        self.costs = CostModel(block_tokens=16)
        self.now, self._steps, self._loads = 100.0, 0, 0

    def compute(self, begin: int, end: int, decoding: int = 0, told: float = 0.0) -> float:
        """Compute a part of a prompt beside requests that generate; the engine hears of the end `told` later."""
        seconds = STEP + TOKEN * (end - begin) + 1e-6 * decoding
        self._steps += 1
        scheduled = {"r": end - begin, **{f"d{number}": 1 for number in range(decoding)}}
        names = [name for name in scheduled if name != "r"]
        step = StepView(
            sum(scheduled.values()),
            scheduled,
            [NewTable("r", [[]], begin)],
            names,
            [9000] * decoding,
            [None] * decoding,
        )
        timed = self.costs.step(self._steps, step, self.now)
        self.now += seconds
        self.costs.ended([self._steps] if timed else [], self.now + told)
        return seconds

    def load(self, tokens: int, at_once: int = 1, busy: bool = False, failed: bool = False) -> None:
        """Load as much for several requests at once, one after the other."""
        began = self.now
        for number in range(at_once):
            self.costs.load_began(f"l{number}", tokens, began)
        if busy:
            self._steps += 1
            self.costs.step(self._steps, StepView(1, {"d": 1}, [], ["d"], [9000], [None]), began)
            self.now += 0.05
        self.now += LOAD
        for number in range(at_once):
            self.now += LOADED * tokens
            self.costs.load_ended(f"l{number}", failed, self.now)

    def learn(self) -> Paced:
        for tokens in (100, 700, 2000, 50, 1500, 300, 900, 1200, 400, 250, 1000, 600):
            self.compute(0, tokens)
            self.compute(4000, 4000 + tokens)
            self.load(tokens)
        return self


def test_nothing_is_predicted_from_a_few_samples() -> None:
    paced = Paced()
    for number in range(LEAST_STEPS - 1):
        paced.compute(0, 100 + number)
    for number in range(LEAST_LOADS - 1):
        paced.load(100 + number)
    assert paced.costs.computing(0, 500) is None and paced.costs.loading(500) is None
    paced.compute(0, 50)
    paced.load(50)
    assert paced.costs.computing(0, 500) and paced.costs.loading(500)


def test_tokens_cost_what_they_take_in_full_steps() -> None:
    costs = Paced().learn().costs
    assert costs.computing(0, 1000) == pytest.approx(1000 * (TOKEN + STEP / 1000))
    assert costs.computing(3000, 3100) == pytest.approx(100 * (TOKEN + STEP / 1000))


def test_steps_beside_others_are_no_cost_of_a_prompt() -> None:
    paced = Paced().learn()
    before = paced.costs.computing(0, 1000)
    for tokens in (100, 700, 2000):
        paced.compute(0, tokens, decoding=20)
    assert paced.costs.computing(0, 1000) == pytest.approx(before, rel=0.05)


def test_steps_that_only_generate_are_not_timed() -> None:
    costs = CostModel()
    decode = StepView(40, {f"d{n}": 1 for n in range(40)}, [], [f"d{n}" for n in range(40)], [9] * 40, [None] * 40)
    assert not costs.step(1, decode, 1.0)
    drafts = StepView(160, {f"d{n}": 4 for n in range(40)}, [], [f"d{n}" for n in range(40)], [9] * 40, [None] * 40)
    assert not costs.step(2, drafts, 2.0)


def test_a_step_that_begins_while_another_runs() -> None:
    """With asynchronous scheduling, the device begins it when the other one has ended."""
    costs, ends = CostModel(), [100.0, 100.0]
    sizes = [100, 700, 2000, 50, 1500, 300, 900, 1200, 400, 250, 1000, 600]
    for number, tokens in enumerate(sizes):
        if number > 1:
            costs.ended([number - 2], ends[-2])
        costs.step(number, StepView(tokens, {"r": tokens}, [NewTable("r", [[]], 0)]), ends[-2])
        ends.append(ends[-1] + STEP + TOKEN * tokens)
    assert costs.computing(0, 1000) == pytest.approx(1000 * (TOKEN + STEP / 1200), rel=0.01)


def test_a_step_seems_short_after_one_whose_end_was_seen_late() -> None:
    paced = Paced().learn()
    before = paced.costs.computing(0, 1000)
    step = StepView(2000, {"r": 2000}, [NewTable("r", [[]], 0)])
    for number in (1001, 1002):
        paced.costs.step(number, step, paced.now)
        paced.costs.ended([number], paced.now + 0.5)
    assert paced.costs.computing(0, 1000) == pytest.approx(before, rel=0.1)


def test_a_load_takes_what_the_fastest_took_that_was_as_large() -> None:
    costs = Paced().learn().costs
    assert costs.loading(16) == pytest.approx(LOAD + 50 * LOADED)  # the smallest one: a step passes before its end
    assert costs.loading(500) == pytest.approx(LOAD + 600 * LOADED)
    assert costs.loading(10_000) == pytest.approx(5 * (LOAD + 2000 * LOADED))
    assert costs.loading(FARTHEST * 2000 + 1) is None, "it is not known what as large a load takes"


def test_waiting_for_others_is_no_cost_of_a_load() -> None:
    paced = Paced()
    for tokens in (100, 700, 2000) * 4:
        paced.load(tokens, busy=True)
    assert paced.costs.loading(1000) is None
    paced.learn()
    before = paced.costs.loading(1000)
    for tokens in (100, 700, 2000):
        paced.load(tokens, busy=True)
        paced.load(tokens, at_once=8)
    assert paced.costs.loading(1000) == pytest.approx(before, rel=0.01)
    paced.costs.load_began("other", 5000, paced.now)
    assert paced.costs.loading(1000) == pytest.approx(before, rel=0.01), "nor those that run now"


def test_loads_that_fail_teach_nothing() -> None:
    paced = Paced().learn()
    before = paced.costs.loading(1000)
    paced.load(1, failed=True)
    assert paced.costs.loading(1000) == before


def test_what_was_measured_is_forgotten_after_some_minutes() -> None:
    paced = Paced().learn()
    paced.now += WINDOW_SECONDS + 1
    paced.compute(0, 1000)
    assert paced.costs.computing(0, 1000) is None and paced.costs.loading(1000) is None


def test_what_a_thread_carries_takes_at_least_as_long_as_the_slowest_rank() -> None:
    costs = Paced().learn().costs
    costs.carried({0: 0.001})
    costs.carried({1: 0.002})
    assert costs.is_carried and costs.loading(64 * 16) == pytest.approx(0.128)
    costs.carried({0: 0.0, 1: 0.0})
    assert not costs.is_carried and costs.loading(64 * 16) is None  # measured again
