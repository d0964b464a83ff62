"""The break-even gate, with vLLM's own schedulers: which steps are timed, and what becomes of hits."""

from __future__ import annotations

import time
from typing import Any

import pytest

BLOCK = 32
SIZES = (3, 9, 5, 12, 2, 7, 10, 4, 6, 11, 8, 3)


def slowed(engine: Any, monkeypatch: Any, token: float) -> None:
    """Have the engine take so many seconds for each token that it computes."""
    runner = engine.runners[0]
    forward = runner._forward

    def slow(step: Any) -> Any:
        time.sleep(token * step.total_num_scheduled_tokens)
        return forward(step)

    monkeypatch.setattr(runner, "_forward", slow)


@pytest.mark.parametrize("overlaps", [False, True])
def test_hits_that_are_computed_faster_are_not_loaded(
    engines: Any, sim: Any, prompt: Any, idle: Any, monkeypatch: Any, overlaps: bool
) -> None:
    one = engines("one")
    two = engines("two", extra={"gate": "auto"}, async_scheduling=overlaps)
    slowed(two, monkeypatch, 1e-5)
    two.delay(0.1)  # of loads: computing a prompt takes at most 4 ms
    for blocks in SIZES:
        tokens = prompt(blocks * BLOCK + 3)
        two.generate(tokens)  # its saves take as long, and end beside the next requests
        one.generate(found := prompt(blocks * BLOCK + 3))
        idle()
        assert two.generate(found) == sim.expected(found, 1)
    pace = two.connector._scheduler.gate.costs
    assert pace.loading(100) > pace.computing(0, 100)
    loaded, declined = len(two.received), two.counters.get("lookups_declined_slow", 0)
    assert loaded + declined == len(SIZES) and declined
    one.generate(tokens := prompt(10 * BLOCK))
    idle()
    assert two.generate(tokens) == sim.expected(tokens, 1)
    assert two.prefills[max(two.prefills, key=lambda name: int(name[1:]))] == (len(tokens), 0, 0)
    assert len(two.received) == loaded


def test_hits_that_are_loaded_faster_are_loaded(
    engines: Any, sim: Any, prompt: Any, idle: Any, monkeypatch: Any
) -> None:
    one, two = engines("one"), engines("two", extra={"gate": "auto"})
    slowed(two, monkeypatch, 2e-3)
    for blocks in SIZES:
        two.generate(prompt(blocks * BLOCK + 3))
        one.generate(found := prompt(blocks * BLOCK + 3))
        idle()
        assert two.generate(found) == sim.expected(found, 1)
    pace = two.connector._scheduler.gate.costs
    assert pace.computing(0, 100) > pace.loading(100)
    assert len(two.received) == len(SIZES)
