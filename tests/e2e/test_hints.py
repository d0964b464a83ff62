"""Hints of requests through vLLM's OpenAI server."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cache_state import BLOCK, BLOCK_BYTES, hits, wait_idle

POOL = 64  # blocks; rows take a 32nd part of their size
PROMPT = 8  # blocks
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]  # tests/server and tests/client have hints of all kinds


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any) -> Any:
    return start_module_daemon(size=str(POOL * BLOCK_BYTES * 33 // 32))


@pytest.fixture(scope="module")
def server(openai_servers: Any, daemon: Any) -> Any:
    """A server whose own prefix cache is off: what it does not compute, the daemon had."""
    return openai_servers("hints", daemon.endpoint, {}, "--max-model-len", "4096", "--no-enable-prefix-caching")


@pytest.fixture
def prompt() -> Any:
    """`prompt(name)` is always the same one for that name, of PROMPT blocks and one token."""
    return lambda name: [random.Random(f"{name} {at}").randrange(3, 512) for at in range(PROMPT * BLOCK + 1)]


def hint(server: Any, prompt: list[int], **hints: Any) -> None:
    """Have a prompt computed, with hints in the request's JSON."""
    server.complete(prompt, 1, kv_transfer_params={"kvcache": hints})


def hit_blocks(daemon: Any, server: Any, prompt: list[int]) -> int:
    """How many blocks of a prompt the daemon has."""
    wait_idle(daemon)
    before = hits(daemon)
    hint(server, prompt, drop=True)  # asking must not store it
    wait_idle(daemon)
    return hits(daemon) - before


def test_a_dropped_prompt_is_not_saved_and_one_that_is_over_goes_first(daemon: Any, server: Any, prompt: Any) -> None:
    """It is first: into a full pool, prompts are stored only if they are worth more than what is there."""
    hint(server, prompt("once"), drop=True)
    assert hit_blocks(daemon, server, prompt("once")) == 0
    hint(server, prompt("older"))
    hint(server, prompt("conversation"))
    wait_idle(daemon)
    hint(server, prompt("conversation"), done=True)
    daemon.wait_status(lambda s: s["hints"]["dropped_blocks"] == PROMPT, "the drop")
    free = daemon.status()["pool"]["free_bytes"] // BLOCK_BYTES
    draw = random.Random("a little")
    for blocks in (free // 2, free - free // 2, PROMPT):
        server.complete([draw.randrange(3, 512) for _ in range(blocks * BLOCK + 1)], 1)
        wait_idle(daemon)
    assert hit_blocks(daemon, server, prompt("conversation")) == 0
    assert daemon.status()["evictions"] == {"dropped": PROMPT}
    assert hit_blocks(daemon, server, prompt("older")) == PROMPT
