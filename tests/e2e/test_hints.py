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
    return start_module_daemon(size=str(POOL * BLOCK_BYTES * 33 // 32), retain_quota=0.2)


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


def flood(daemon: Any, server: Any, blocks: int) -> None:
    """Prompts that are each asked for twice, at once: a block that is not asked for again for longer is worth less."""
    for number in range(-(-blocks // (4 * PROMPT))):
        draw = random.Random(f"flood {number}")
        asked = [draw.randrange(3, 512) for _ in range(4 * PROMPT * BLOCK + 1)]
        for _ in range(2):
            server.complete(asked, 1)
            wait_idle(daemon)


def test_a_retained_prompt_survives_a_flood_of_ten_times_the_pool(daemon: Any, server: Any, prompt: Any) -> None:
    hint(server, prompt("kept"), retain={"seconds": 600})
    hint(server, prompt("plain"))
    daemon.wait_status(lambda s: s["hints"]["retained_bytes"] == PROMPT * BLOCK_BYTES, "the retention")
    flood(daemon, server, 10 * POOL)
    assert hit_blocks(daemon, server, prompt("kept")) == PROMPT
    assert hit_blocks(daemon, server, prompt("plain")) == 0


def test_a_refusal_by_the_quota_is_counted_and_explained(daemon: Any, server: Any, prompt: Any) -> None:
    before = daemon.status()["hints"]["retained_bytes"] // BLOCK_BYTES  # by other tests
    for name in ("more", "even more"):  # 12 blocks are a fifth of 64
        hint(server, prompt(name), retain={"seconds": 600})
    refused = before + 2 * PROMPT - 12
    told = daemon.wait_status(lambda s: s["hints"]["refused"].get("quota") == refused, "all refusals")["hints"]
    assert told["retained_bytes"] == 12 * BLOCK_BYTES <= told["quota_bytes"]
    (engine,) = [each["engine"] for each in told["engines"]]
    assert engine.startswith("hints-")


def test_a_bad_hint_is_named_in_the_log_and_harms_nothing(daemon: Any, server: Any, prompt: Any) -> None:
    for bad in ({"retain": {"secnods": 60}}, {"retain": 5}):
        hint(server, prompt("bad"), **bad)
    wait_idle(daemon)
    assert hit_blocks(daemon, server, prompt("bad")) == PROMPT
    assert "the hint of a request is ignored: kv_transfer_params, kvcache: Object contains unknown field" in server.log
    assert "/kvcache_client/" not in server.log, "a traceback of ours"
