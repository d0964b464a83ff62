"""Engines of several ranks: the second one loads what the first one has computed, and no token differs from those of
an engine of one rank without the connector."""

from __future__ import annotations

from typing import Any

import pytest
from cache_state import BLOCK, wait_idle

LONGEST = 4096
# Without compilation, vLLM makes no memory on a CPU for what a stage hands to the next one.
COMPILED = {"enforce_eager": False, "compilation_config": {"mode": 1, "backend": "eager"}}
pytestmark = [pytest.mark.timeout(600), pytest.mark.long]  # test_troubles.py has two ranks


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any) -> Any:
    return start_module_daemon(size="128MiB")


@pytest.fixture
def hits_of(engines: Any, daemon: Any, reference: Any) -> Any:
    """`hits_of(name, prompts, **options)` has a new engine answer, and returns its hits once all is saved."""

    def ask(name: str, prompts: list[list[int]], **options: Any) -> int:
        before = daemon.status()["counters"].get("blocks_hit", 0)
        engine = engines(name, daemon.endpoint, max_model_len=LONGEST, **options)
        assert engine.generate(*prompts) == reference(prompts)
        hits = int(daemon.status()["counters"].get("blocks_hit", 0)) - before
        wait_idle(daemon, engine)
        engine.close()
        return hits

    return ask


def test_pipeline_stages_of_different_size(hits_of: Any, prompt: Any) -> None:
    prompts = [prompt(n) for n in (BLOCK, BLOCK + 1, 9 * BLOCK + 5, 2100)]
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_PP_LAYER_PARTITION": "3,1"}
    for name, hits in (("staged-a", 0), ("staged-b", 0 + 1 + 9 + 65)):
        assert hits_of(name, prompts, env=env, pipeline_parallel_size=2, **COMPILED) == hits


def test_engines_of_one_rank_and_of_two(hits_of: Any, prompt: Any) -> None:
    prompts = [prompt(n) for n in (BLOCK + 1, 9 * BLOCK + 5, 2100)]
    found = []
    for ranks in (1, 2, 1):
        options = {"tensor_parallel_size": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}} if ranks > 1 else {}
        found.append(hits_of(f"heads-{len(found)}", prompts, extra={"share_tp": True}, **options))
        prompts = [prompt(len(each) + 2 * BLOCK, each) for each in prompts]
    assert found == [0, 1 + 9 + 65, 3 + 11 + 67]
