"""The break-even gate: hits are loaded only where that is faster than computing them, as the engine itself measures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from toy_engine import BLOCK, SPEC, Cache, Engine, chain

from kvcache_client.scheduler.cost_model import LEAST_LOADS, OFF_PATIENCE, WINDOW_SECONDS, Gate
from kvcache_client.scheduler.requests import RequestState
from kvcache_client.scheduler.views import NewTable, RequestView, StepView
from kvcache_client.session.counters import Counters
from kvcache_client.step_plan import Report


class Host:
    """An engine that answers one request after the other; hits are loaded where the gate admits it."""

    def __init__(self, is_on: bool = True) -> None:
        self.counters = Counters()
        self.gate = Gate(self.counters, is_on)  # type: ignore[arg-type]
        self.now = 100.0
        self.step, self.token = 0.004, 2e-5
        self.load, self.loaded = 0.003, 2e-6
        self.computes: Callable[[int], float] = lambda tokens: self.step + self.token * tokens
        self._numbers = itertools.count(1)

    def state(self) -> RequestState:
        return RequestState(RequestView(f"r{next(self._numbers)}", 0, 0, ()))

    def compute(self, state: RequestState, begin: int, end: int) -> None:
        number = next(self._numbers)
        view = StepView(end - begin, {state.id: end - begin}, [NewTable(state.id, [[]], begin)])
        timed = self.gate.costs.step(number, view, self.now)
        self.now += self.computes(end - begin)
        self.gate.costs.ended([number] if timed else [], self.now)

    def answer(self, tokens: int, hit: int = 0) -> bool:
        """Answer a prompt of which `hit` tokens are cached; return whether they were loaded."""
        state = self.state()
        loads = hit > 0 and self.gate.admits(state, 0, hit)
        if loads:
            self.gate.costs.load_began(state.id, hit, self.now)
            self.now += self.load + self.loaded * hit
            self.gate.costs.load_ended(state.id, False, self.now)
        self.compute(state, hit if loads else 0, tokens)
        return loads

    def answer_at_once(self, tokens: int, hit: int, requests: int) -> int:
        """Answer prompts that arrive together, each load behind those before it and reported after a step of others.

        Return how many were loaded.
        """
        states = [self.state() for _ in range(requests)]
        loading = [state for state in states if self.gate.admits(state, 0, hit)]
        for state in loading:
            self.gate.costs.load_began(state.id, hit, self.now)
        for state in states:
            if state not in loading:
                self.compute(state, 0, tokens)
        for state in loading:
            self.compute(self.state(), 0, tokens)  # what other requests compute meanwhile
            self.gate.costs.load_ended(state.id, False, self.now)
        for state in loading:
            self.compute(state, hit, tokens)
        return len(loading)

    def learn(self) -> Host:
        """See new prompts, and hits while everything is loaded."""
        for tokens in (100, 700, 2000, 50, 1500, 300, 900, 1200):
            self.answer(tokens)
            self.answer(tokens, tokens - 20)
        return self

    def throttle(self, times: float) -> Host:
        """Let loads take so many times as long as computing."""
        self.load, self.loaded = 0.0, times * self.token
        return self


def test_hits_are_loaded_while_little_is_known() -> None:
    host = Host().throttle(50)
    assert all(host.answer(1000, 900) for _ in range(5))


def test_hits_whose_loads_are_faster_are_loaded() -> None:
    host = Host().learn()
    assert all(host.answer(1000, 900) for _ in range(100))
    assert host.counters.snapshot() == {}


def test_hits_whose_loads_are_slower_are_computed() -> None:
    host = Host().throttle(3).learn()
    assert not any(host.answer(1000, 900) for _ in range(50))


def test_short_hits_are_computed_where_a_load_alone_takes_longer() -> None:
    host = Host().learn()  # a load of 3 ms, a token of 20 us: 166 tokens
    assert not host.answer(120, 100) and host.answer(320, 300)


def test_differences_that_do_not_matter_are_not_acted_on() -> None:
    host = Host().throttle(1.05).learn()
    assert all(host.answer(1000, 900) for _ in range(20))


def test_a_gate_that_is_off_admits_everything() -> None:
    host = Host(is_on=False).throttle(50).learn()
    assert all(host.answer(1000, 900) for _ in range(20))


def test_a_request_is_judged_once() -> None:
    host = Host().throttle(3).learn()
    state = host.state()
    assert not host.gate.admits(state, 0, 900)
    host.throttle(0.001)
    assert not any(host.gate.admits(state, 0, 900) for _ in range(100))


def test_bytes_that_a_thread_must_carry_are_not_loaded_before_it_is_known_how_fast_the_engine_computes() -> None:
    host = Host()
    host.gate.costs.carried({0: 1e-9})
    assert not host.answer(1000, 900)
    for tokens in (100, 700, 2000, 50, 1500, 300, 900, 1200, 400, 250):
        host.answer(tokens)
    assert host.answer(1000, 900)


@pytest.mark.parametrize("requests", [8, 24])
def test_a_busy_engine_loads_all_that_an_idle_one_loads(requests: int) -> None:
    """A load that waits for others still saves the device's time, of which a busy engine has too little."""
    host = Host().learn()
    for _ in range(50):
        assert host.answer_at_once(1000, 900, requests) == requests
    assert host.counters.snapshot() == {}


def test_an_engine_that_was_never_idle_loads_everything() -> None:
    host = Host()
    assert all(host.answer_at_once(1000, 900, 8) == 8 for _ in range(50))


def test_large_hits_are_not_judged_by_small_loads() -> None:
    host = Host()
    for _ in range(20):
        host.answer(60, 40)  # each takes 3 ms, and computing 4.8: 75 us a token, where a token is loaded in 2
    assert host.answer(10_000, 9_000)


def test_loads_are_measured_again_after_some_minutes() -> None:
    host = Host().throttle(3).learn()
    answers = []
    while host.now < 100 + 4 * WINDOW_SECONDS:
        answers.append(host.answer(1000, 900))
    assert 3 * LEAST_LOADS <= sum(answers) <= 5 * LEAST_LOADS, "few of thousands are slow"
    host.throttle(0.1)
    while host.now < 100 + 6 * WINDOW_SECONDS:
        answers.append(host.answer(1000, 900))
    assert all(answers[-1000:]), "a bus that has become fast is used again"


def test_loads_that_have_become_slow_are_found_out() -> None:
    host = Host().learn()
    host.throttle(5)
    assert sum(host.answer(1000, 900) for _ in range(500)) < 50


def test_nobody_waits_longer_than_a_load_can_gain() -> None:
    for is_on in (True, False):
        host = Host(is_on).learn()
        compute, load = 30_000 * host.token, 0.003 + 30_000 * host.loaded
        assert compute - load < host.gate.patience(0, 30_000) < 1.5 * (compute - load)
        assert host.gate.patience(0, 10) == (0.0 if is_on else OFF_PATIENCE)
    assert Host().gate.patience(0, 50) == math.inf  # nothing is known


# In an engine.


def learned(engine: Engine) -> None:
    """Let the engine find that it computes a token in 20 us, and that a load takes 3 ms."""
    for number, blocks in enumerate((4, 40, 9, 80, 20, 60, 33, 6, 50, 70, 11, 2)):
        request = engine.request(f"learn {number}", chain(f"learn {number}", blocks))
        engine.ask(request)
        engine.admit(request)
        engine.step((request, request.tokens))
        engine.now += 0.001 + 2e-5 * request.tokens
        engine.scheduler.reported(Report(timed=[engine.scheduler._step]))
        engine.finish(request)
        engine.cache.answer()
        engine.step()
        again = engine.request(f"again {number}", chain(f"learn {number}", blocks))
        tokens, _ = engine.ask(again)
        if tokens:
            engine.admit(again, load=tokens)
            engine.step()
            engine.now += 0.003
            engine.scheduler.ended([again.id], set())
        engine.finish(again)
        engine.step()


def test_a_hit_that_is_not_worth_its_load_is_declined_counted_and_said() -> None:
    cache = Cache()
    engine = Engine(cache, gate="auto")
    learned(engine)
    cache.store(chain("short", 5))
    cache.store(chain("long", 40))
    before = engine.scheduler.counters.get("lookups_declined_slow", 0)
    short, long = engine.request("short", chain("short", 5)), engine.request("long", chain("long", 40))
    assert engine.ask(short) == (0, False) and engine.ask(long) == (40 * BLOCK, True)
    assert engine.ask(short) == (0, False)
    assert engine.scheduler.counters["lookups_declined_slow"] == before + 1
    assert len(cache.leases) == 1, "what is not loaded is not pinned"
    engine.finish(short)
    engine.finish(long)
    engine.step()
    assert ("short", "slow") in cache.notes


def test_a_request_does_not_wait_for_what_it_computes_faster() -> None:
    cache = Cache()
    engine = Engine(cache, gate="auto")
    learned(engine)
    space = cache.attach(SPEC, (), 0)
    space.writing.update({each: 900 + at for at, each in enumerate([*chain("short", 5), *chain("long", 40)])})
    assert engine.ask(engine.request("short", chain("short", 5))) == (0, False)
    assert engine.scheduler.counters["waits_declined_slow"] == 1
    long = engine.request("long", chain("long", 40))
    assert engine.ask(long) == (None, False)
    compute, load = (
        engine.scheduler.gate.costs.computing(0, 40 * BLOCK),
        engine.scheduler.gate.costs.loading(40 * BLOCK),
    )
    engine.now += compute - load - 1e-4
    assert engine.ask(long) == (None, False)
    engine.now += 2e-4  # as long as a load may gain
    assert engine.ask(long) == (0, False)
