"""Models of several kinds, each in two real engines with one daemon: the second one loads what the first one has
computed, and no token differs from those of an engine without the connector."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from cache_state import BLOCK, full, hits, wait_idle
from model_configs import COMMON, MODELS

from kvcache_server.admin_client import AdminClient

ATTEMPTS = 5  # where the machine is busy, a tier may answer later than an engine waits
KINDS = (pytest.param("gemma", marks=pytest.mark.long), "gpt-oss", "mla")  # both of the first have windows
GROUPS = 2  # full attention, and windows
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its tier has nothing in it until the engines of a test let the blocks go."""
    return start_module_daemon(size="128MiB", tier=f"disk:{tmp_path_factory.mktemp('tier')}?size=128MiB")


@pytest.fixture(scope="module")
def start(name: str, processes: Any, daemon: Any, write_model: Any) -> Any:
    """`start(engine)` starts an engine in the place of the last one, without the connector if it has no name."""
    folder = write_model(name, COMMON | MODELS[name])
    process = processes()  # of its own: what vLLM sets up for experts stays
    options = {"model": folder, "kv_cache_memory_bytes": 64 << 20}
    if name == "mla":
        options["attention_backend"] = "CPU_MLA"  # with AMX, vLLM would choose another one
    return lambda engine="": process(engine, daemon.endpoint if engine else None, **options)


def saved_hits(daemon: Any, engine: Any) -> int:
    """Return the hits so far, once all is saved."""
    wait_idle(daemon, engine)
    return hits(daemon)


def test_the_second_engine_continues_and_no_token_differs(name: str, start: Any, daemon: Any) -> None:
    """MLA is declined: with CPU_MLA, vLLM could not continue."""
    draw = random.Random(name)
    prompts = [[draw.randrange(3, 512) for _ in range(length)] for length in (BLOCK - 1, 4 * BLOCK, 9 * BLOCK + 7, 700)]
    alone = start()
    expected = [alone.generate(prompt)[0] for prompt in prompts]
    longer = [prompt + answer + [5, 6, 7] for prompt, answer in zip(prompts, expected, strict=True)]
    continued = [alone.generate(prompt)[0] for prompt in longer]
    assert len({tuple(answer) for answer in expected}) == len(prompts), "every prompt has the same answer"

    found = [saved_hits(daemon, alone)]
    for engine, asked, answers in (
        ("first", prompts, expected),
        ("second", prompts, expected),
        ("third", longer, continued),
    ):
        running = start(engine)
        for number, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
            assert running.generate(prompt) == [answer], (engine, number)
        found.append(saved_hits(daemon, running))
    if name == "mla":
        assert "runs without the KV cache server: vLLM computes a prompt of this model without" in running.log
        assert name not in [space["model"] for space in daemon.status()["namespaces"]]
        return
    one, two, three = (after - before for before, after in pairwise(found))
    assert one == 0
    assert two == full(prompts, left=1)
    assert three == full([prompt + answer for prompt, answer in zip(prompts, expected, strict=True)], left=1)
    assert len(daemon.status()["namespaces"][-1]["block_bytes"]) == GROUPS


def test_the_third_prompt_that_begins_alike_continues_where_the_second_parted(
    name: str, start: Any, daemon: Any
) -> None:
    if name == "mla":
        pytest.skip("declined with CPU_MLA, see above")
    draw = random.Random(name + " parts")
    shared = [draw.randrange(3, 512) for _ in range(11 * BLOCK + 5)]
    prompts = [shared + [draw.randrange(3, 512) for _ in range(5 * BLOCK)] for _ in range(3)]
    alone = start()
    expected = [alone.generate(prompt) for prompt in prompts]
    running = start("parts")
    cached = []
    for prompt, answer in zip(prompts, expected, strict=True):
        running.ask("reset")
        found = running.ask("generate", prompts=[prompt])
        assert found["tokens"] == answer
        cached += found["cached"]
        saved_hits(daemon, running)
    assert cached == [0, 0, 11 * BLOCK]


def test_an_engine_continues_with_what_a_tier_has(name: str, start: Any, daemon: Any) -> None:
    """Windows, too, come back from the disk: the region has forgotten all, and no token differs."""
    if name == "mla":
        pytest.skip("declined with CPU_MLA, see above")
    draw = random.Random(name + " below")
    running = start("below")
    for _ in range(ATTEMPTS):
        prompts = [[draw.randrange(3, 512) for _ in range(length)] for length in (4 * BLOCK, 9 * BLOCK + 7, 700)]
        answers = [running.generate(prompt)[0] for prompt in prompts]
        for _ in range(2):  # found once, they are written
            running.ask("reset")
            assert [running.generate(prompt)[0] for prompt in prompts] == answers
        daemon.wait_status(lambda status: not status["daemon"]["tiers"][0]["to_write_blocks"], "the last write")
        with AdminClient(daemon.endpoint) as admin:
            assert admin.clear()
        running.ask("reset")
        before = saved_hits(daemon, running)
        assert [running.generate(prompt)[0] for prompt in prompts] == answers
        if saved_hits(daemon, running) - before == full(prompts, left=1):
            break
    else:
        pytest.fail(f"not all blocks came from the tier: {daemon.status()['daemon']['tiers']}")
