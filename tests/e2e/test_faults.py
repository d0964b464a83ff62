"""Whatever of ours raises, in a hook, a constructor or a thread: the engine answers as if it had no connector."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cache_state import BLOCK, wait_idle

pytestmark = pytest.mark.long  # minutes

OFF = "this engine runs without the KV cache server"

# What raises, and in how many lines the engine says that it runs without a cache.
FAULTS = {
    "setup.parse_settings": 1,
    "setup.unsupported_reason": 1,
    "setup.namespace_spec": 1,
    "scheduler_side.open_session": 1,
    "rank_side.open_session": 1,
    "rank_side.rank_in_engine": 1,
    "Scheduler.__init__": 1,
    "Scheduler.matched_tokens": 1,
    "Scheduler.allocated": 1,
    "Scheduler.plan": 1,
    "Scheduler.ended": 1,
    "Scheduler.finished": 1,
    "Scheduler.reset": 1,
    "Scheduler.close": 1,
    "Worker.__init__": 1,
    "Worker.register": 1,
    "Worker.begin": 1,
    "Worker.load": 1,
    "Worker.received": 1,
    "Worker.take_errors": 1,
    "Worker.take_report": 1,
    "Worker.close": 0,  # at the end nobody hears what a rank reports
    "Saves._settle_end": 0,  # of threads: what they were at has failed, and they go on
    "Loads._not_filled": 0,
    "Daemon.call": 1,
    "Daemon.post": 1,
    "Supervisor._watch": 0,
    "CpuDevice._copy": 1,
    "CpuDevice.poll": 1,
}


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any) -> Any:
    return start_module_daemon(size="64MiB")


@pytest.fixture(scope="module")
def stored(reopened: Any, daemon: Any) -> list[list[int]]:
    """Prompts whose blocks are in the cache."""
    draw = random.Random("stored")
    prompts = [[draw.randrange(3, 512) for _ in range(6 * BLOCK + n)] for n in range(1, 4)]
    engine = reopened("sound", daemon.endpoint)
    engine.generate(*prompts)
    wait_idle(daemon, engine)
    engine.ask("close")
    return prompts


@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_answers_without_what_raises(
    reopened: Any, daemon: Any, stored: list[list[int]], prompt: Any, reference: Any, fault: str
) -> None:
    prompts = [*stored, prompt(4 * BLOCK + 1)]
    expected = reference(prompts)
    engine = reopened(fault, daemon.endpoint, module="faulty_connector", env={"KVCACHE_FAULT": fault})
    begin = engine.log.rindex("non-default args")  # the last engine's first line
    try:
        for connector in (False, True):
            assert engine.generate(*prompts) == expected
            assert engine.ask("reset", connector=connector)["reset"]
        assert engine.generate(*prompts) == expected
    finally:
        engine.ask("close")
        engine.ask("environ", KVCACHE_FAULT="")
    log = engine.log[begin:]
    assert log.count(OFF) == FAULTS[fault], log[-5000:]
    assert "a fault planted in" in log
    daemon.wait_status(lambda s: not s["sessions"], "no session")
