"""`share_tp`: each KV head is a shard, so that engines with any number of tensor-parallel ranks share blocks."""

from __future__ import annotations

from typing import Any

import pytest

BLOCK = 32
HEADS = 4


@pytest.fixture
def by_head(engines: Any) -> Any:
    """`by_head(name, ranks, **options)` makes an engine of so many ranks that shares blocks with those of others."""

    def make(name: str, ranks: int, **options: Any) -> Any:
        extra = {"share_tp": True, "block_size": 2 * BLOCK, **options.pop("extra", {})}
        return engines(name, heads=HEADS, tensor_parallel_size=ranks, extra=extra, **options)

    return make


def test_engines_with_other_numbers_of_ranks_load_what_each_has_saved(
    by_head: Any, daemon: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    """Each continues what the ones before it have saved. Of eight ranks, two have the same head."""
    tokens = prompt(6 * BLOCK + 7)
    for ranks, loaded in ((1, 0), (2, 6), (4, 8), (1, 10), (8, 12), (2, 14)):
        engine = by_head(f"e{ranks}-{loaded}", ranks)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded * BLOCK, 0, loaded * BLOCK)
        idle()
        assert {tuple(runner.received) for runner in engine.runners} == {("r0",) if loaded else ()}
        tokens = prompt(len(tokens) + 2 * BLOCK, tokens)
    (size,) = daemon.status()["namespaces"][-1]["block_bytes"]
    assert size == 2 * 3 * 2 * sim.PAGE


def test_the_device_has_the_first_block_of_a_slot(by_head: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """What it has is not loaded again, neither as a whole nor in parts."""
    tokens = prompt(6 * BLOCK + 7)
    one, two = by_head("one", 2), by_head("two", 1)
    one.generate(tokens)
    idle()
    two.generate(tokens[: BLOCK + 1])
    assert two.generate(tokens, 3, "r") == sim.expected(tokens, 3)
    assert two.prefills["r"] == (7, BLOCK, 5 * BLOCK)


def test_checksums_are_those_of_heads(by_head: Any, daemon: Any, sim: Any, prompt: Any, idle: Any, spoil: Any) -> None:
    tokens = prompt(6 * BLOCK + 7)
    one, two = (by_head(name, ranks, extra={"verify": "all"}) for name, ranks in (("one", 1), ("two", 2)))
    one.generate(tokens)
    idle()
    spoil(two, tokens, block=2, rank=1)
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.counters["loads_failed"] == 1
    assert two.computed == len(tokens) - 2 * BLOCK + 2, "the slot before it is kept"


def test_canaries_compare_all_heads(by_head: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(6 * BLOCK + 7)
    one, two = (by_head(name, ranks, extra={"canary_every": 1}) for name, ranks in (("one", 4), ("two", 2)))
    one.generate(tokens)
    idle()
    two.generate(tokens)
    idle()
    assert two.counters["canary_requests"] == 1 and not two.counters.get("canary_mismatches")


def test_blocks_are_given_to_others_while_heads_are_saved(by_head: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Each rank saves its heads on its own."""
    prompts = {f"r{number}": prompt(9 * BLOCK + number) for number in range(8)}
    one, two = by_head("one", 2, blocks=36), by_head("two", 4, blocks=36)
    one.delay(0.003)
    one.generate_all(prompts, 40)
    idle()
    two.generate_all(prompts, 40)
    for engine in (one, two):
        assert engine.outputs == {name: sim.expected(tokens, 40) for name, tokens in prompts.items()}


def test_stages_of_heads(by_head: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(6 * BLOCK + 7)
    for name, ranks, loaded in (("one", 2, 0), ("two", 1, 6 * BLOCK)):
        engine = by_head(name, ranks, stages=(2, 1))
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


def test_without_it_or_with_tokens_before_heads_nothing_is_shared(
    by_head: Any, sim: Any, prompt: Any, idle: Any, lines: list[str], monkeypatch: Any
) -> None:
    tokens = prompt(6 * BLOCK + 7)
    options: dict[str, Any] = {"layout": "LBNHC"} if sim.HAS_GROUPS else {}
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    engines = [by_head("one", 1, **options), by_head("two", 2, **options), by_head("three", 2, **options)]
    said = [line for line in lines if line.startswith("share_tp has no effect")]
    assert len(said) == 3 and "in which the heads of a token are together" in said[0]
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT")
    engines += [by_head(name, ranks, extra={"share_tp": False}) for name, ranks in (("four", 1), ("five", 4))]
    for engine, loaded in zip(engines, (0, 0, 6 * BLOCK, 0, 0), strict=True):
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()
