"""Which engines are served: kinds of KV cache groups, of every version."""

from __future__ import annotations

from typing import Any

import pytest

BLOCK = 32
pytestmark = pytest.mark.parametrize("runner", ["v1"], indirect=True)


def declined(lines: list[str]) -> list[str]:
    prefix = "this engine runs without the KV cache server: "
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def test_one_group_of_full_attention_is_served(engines: Any, prompt: Any, lines: list[str]) -> None:
    one = engines("one")
    one.generate(prompt(BLOCK))
    assert not declined(lines)
    assert "blocks of 32 tokens, 12.0 KiB in 1 shards" in "\n".join(lines)


def test_a_scheduler_and_its_ranks_have_one_namespace(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Also if ranks are processes: before 0.32, the layout of KV is known only where the model is."""
    tokens = prompt(3 * BLOCK + 1)
    one, two = (engines(name, distributed_executor_backend="mp") for name in ("one", "two"))
    for engine, loaded in ((one, 0), (two, 3 * BLOCK)):
        assert engine.generate(tokens) == sim.expected(tokens, 1)
        assert engine.prefills["r0"] == (3 * BLOCK + 1 - loaded, 0, loaded)
        idle()


@pytest.mark.parametrize("model", ["Gemma 3", "Granite 4"])
def test_full_attention_beside_another_kind_is_declined(
    engines: Any, sim: Any, prompt: Any, lines: list[str], model: str
) -> None:
    """Gemma 3 has windows beside full attention, Granite 4 has states."""
    if model == "Gemma 3":
        one = engines("one", specs=sim.full(1) | sim.windows(2, window=2 * BLOCK, first=1))
    else:
        one = engines("one", specs=sim.full(1) | sim.states(2, first=1), enable_prefix_caching=False)
    tokens = prompt(9 * BLOCK)
    for _ in range(2):
        assert one.generate(tokens, 3) == sim.expected(tokens, 3)
    groups = len(one.scheduler.kv_cache_config.kv_cache_groups)
    assert groups > 1
    assert declined(lines) == [f"{groups} KV cache groups: this version caches models with one"]


def test_windows_alone_are_declined(engines: Any, sim: Any, prompt: Any, lines: list[str]) -> None:
    one = engines("one", specs=sim.windows(3, window=2 * BLOCK))
    tokens = prompt(9 * BLOCK)
    for _ in range(2):
        assert one.generate(tokens, 3) == sim.expected(tokens, 3)
    assert declined(lines) == ["SlidingWindowSpec: this version caches only full attention"]


def test_an_engine_without_a_daemon_runs(engines: Any, sim: Any, prompt: Any, tmp_path: Any) -> None:
    one = engines("one", endpoint=f"ipc://{tmp_path}/nobody.sock")
    tokens = prompt(3 * BLOCK)
    for _ in range(2):
        assert one.generate(tokens, 3) == sim.expected(tokens, 3)
    assert not one.received
