"""Real engines in the middle of a batch while the daemon and one of them are killed: every request is answered, and
no token differs from the run without faults.

KVCACHE_CHAOS_REQUESTS sets how many requests the batch has: 24 where it is not set; the full batch is 64.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cache_state import BLOCK, hits, wait_attached, wait_idle

REQUESTS = int(os.environ.get("KVCACHE_CHAOS_REQUESTS", "24"))
TOKENS = 24
PATIENCE = 60.0


class Batch:
    """Requests under way in an engine, stepped until something is to happen."""

    def __init__(self, engine: Any, prompts: list[list[int]]) -> None:
        self._engine = engine
        self._names = engine.ask("add", prompts=prompts, max_tokens=TOKENS)["names"]
        self._tokens: dict[str, list[int]] = {}

    @property
    def left(self) -> int:
        return len(self._names) - len(self._tokens)

    def step(self, steps: int) -> None:
        self._tokens |= self._engine.ask("finish", steps=steps)["tokens"]

    def until(self, left: int) -> None:
        """Step until at most `left` requests are unanswered."""
        while self.left > left:
            self.step(1)

    def end(self) -> list[list[int] | None]:
        self._tokens |= self._engine.ask("finish")["tokens"]
        return [self._tokens.get(name) for name in self._names]


@pytest.fixture(scope="module")
def start(start_module_daemon: Any) -> Callable[..., Any]:
    """`start()` starts a daemon, the next one at the same endpoint, which goes on with the region of the last one."""
    return lambda **flags: start_module_daemon(quarantine=1, keep="true", **flags)


@pytest.fixture(scope="module")
def daemon(start: Callable[..., Any]) -> Iterator[list[Any]]:
    """The daemons, the present one last."""
    return [start()]


@pytest.fixture(scope="module")
def engine(engines: Any, daemon: list[Any]) -> Any:
    return engines("batch", daemon[-1].endpoint, extra={"deadline_ms": 500})


@pytest.fixture
def prompts(prompt: Any) -> list[list[int]]:
    """A system prompt that all share, then a few blocks of their own."""
    shared = prompt(3 * BLOCK)
    return [prompt((4 + n % 5) * BLOCK + n, shared) for n in range(REQUESTS)]


def in_use_again(engine: Any, daemon: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Ask until there are hits: on a busy machine an answer may come too late, and the breaker opens for a while."""
    before, until = hits(daemon), time.monotonic() + PATIENCE
    while hits(daemon) == before:
        assert time.monotonic() < until, "the cache is not in use again"
        assert engine.ask("reset")["reset"]
        assert engine.generate(*prompts, max_tokens=TOKENS) == expected
        wait_idle(daemon)


def test_a_batch_with_the_daemon_killed_twice_and_an_engine_once(
    engines: Any, engine: Any, daemon: list[Any], start: Callable[..., Any], prompts: list[list[int]], reference: Any
) -> None:
    expected = reference(prompts, TOKENS)
    # Half of the prompts are cached already, so that the batch loads and saves.
    assert engine.generate(*prompts[: REQUESTS // 2], max_tokens=TOKENS) == expected[: REQUESTS // 2]
    wait_idle(daemon[-1])
    assert engine.ask("reset")["reset"]
    neighbour = engines("neighbour", daemon[-1].endpoint, extra={"deadline_ms": 500})

    batch, beside = Batch(engine, prompts), Batch(neighbour, prompts[::-1])
    batch.step(4)
    beside.step(6)
    assert hits(daemon[-1]) > 0
    daemon[-1].kill()  # with loads and saves in flight
    batch.step(4)  # nobody is there
    daemon.append(start())
    batch.until(REQUESTS * 2 // 3)
    neighbour.kill()  # in the middle of a batch of its own
    wait_attached(daemon[-1], "batch")
    batch.until(REQUESTS // 3)
    daemon[-1].kill()
    batch.step(2)
    daemon.append(start())
    answers = batch.end()
    assert [answer is None for answer in answers] == [False] * REQUESTS, "all are answered"
    assert answers == expected

    wait_attached(daemon[-1], "batch")
    in_use_again(engine, daemon[-1], prompts, expected)
    assert "/kvcache_client/" not in engine.log, "a traceback of ours"
