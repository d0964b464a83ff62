"""Engines with any number of tensor-parallel ranks share blocks: with `share_tp`, where each KV head is a shard, and
with MLA, where each rank has all KV and saves some stripes of it."""

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


def test_the_layout_that_is_asked_for_is_one_that_vllm_has(by_head: Any, sim: Any) -> None:
    """By its older name before 0.32: vLLM then passes a connector's wish to attention backends as it is."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    with set_current_vllm_config(by_head("one", 1).core.vllm_config):
        wanted = get_kv_connector_cache_layout()
    if hasattr(sim.layouts, "is_valid_kv_cache_layout"):
        assert sim.layouts.is_valid_kv_cache_layout(wanted) and wanted == "HND"
    else:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        assert wanted in KVCacheLayout.__members__


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


def test_blocks_are_given_to_others_while_heads_are_saved(by_head: Any, prompt: Any, one_by_one: Any) -> None:
    """Each prompt takes blocks of the one before it, whose save has just begun."""
    prompts = [prompt(20 * BLOCK + at) for at in range(10)]
    small = {"blocks": 30, "max_model_len": 800, "max_num_seqs": 1}
    one, two = by_head("one", 2, **small), by_head("two", 1, **small)
    one_by_one((one, two), prompts)
    assert two.received


def test_stages_of_heads(by_head: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(6 * BLOCK + 7)
    for name, ranks, loaded in (("one", 2, 0), ("two", 1, 6 * BLOCK)):
        engine = by_head(name, ranks, stages=(2, 1))
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


def test_without_it_nothing_is_shared(by_head: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(6 * BLOCK + 7)
    for name, ranks, share in (("one", 1, False), ("two", 4, False), ("three", 1, True), ("four", 4, False)):
        engine = by_head(name, ranks, extra={"share_tp": share})
        loaded = 6 * BLOCK if name == "four" else 0
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


def test_with_tokens_before_heads_ranks_share_with_their_like(
    by_head: Any, sim: Any, prompt: Any, idle: Any, lines: list[str]
) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, a CPU has one layout, that of heads before tokens")
    tokens = prompt(6 * BLOCK + 7)
    for name, ranks, loaded in (("one", 1, 0), ("two", 2, 0), ("three", 1, 6 * BLOCK)):
        engine = by_head(name, ranks, layout="LBNHC")
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()
    said = [line for line in lines if line.startswith("share_tp has no effect")]
    assert len(said) == 3 and "in which the heads of a token are together" in said[0]


def grouped(sim: Any, name: str, ranks: int, window_heads: int = HEADS) -> dict[str, Any]:
    """Return the layers of a rank's share of a model with several KV cache groups."""
    full, window = ({"heads": -(-total // ranks), "total": total} for total in (HEADS, window_heads))
    return {
        "Gemma 3": lambda: sim.full(1, **full) | sim.windows(2, 2 * BLOCK, 1, **window),
        "two windows": lambda: (
            sim.full(1, **full) | sim.windows(1, 2 * BLOCK + 1, 1, **window) | sim.windows(1, 20, 2, **window)
        ),
        "two sizes": lambda: sim.full(1, **full) | sim.windows(2, 2 * BLOCK, 1, dtype=sim.torch.bfloat16, **window),
        "a layer less": lambda: sim.full(3, **full) | sim.windows(2, 2 * BLOCK, 3, **window),
        "windows alone": lambda: sim.windows(3, 3 * BLOCK, **window),
        "states": lambda: sim.full(1, **full) | sim.states(2, 1, "align"),
    }[name]()


@pytest.mark.parametrize("name", ["Gemma 3", "two windows", "two sizes", "a layer less", "windows alone"])
def test_engines_with_several_groups_load_what_each_has_saved(
    by_head: Any, sim: Any, prompt: Any, idle: Any, lines: list[str], name: str
) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    tokens = prompt(6 * BLOCK + 7)
    for ranks, loaded in ((1, 0), (2, 6), (4, 8), (1, 10), (8, 12), (2, 14)):
        options = {"specs": grouped(sim, name, ranks), "blocks": 96, "extra": {"verify": "all"}}
        engine = by_head(f"e{ranks}-{loaded}", ranks, **options)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded * BLOCK, 0, loaded * BLOCK)
        nulls = [layer.pages[0] for runner in engine.runners for layer in runner.layers.values()]
        assert not any(page.any() for page in nulls), "vLLM's null block is written"
        idle()
        tokens = prompt(len(tokens) + 2 * BLOCK, tokens)
    assert not [line for line in lines if line.startswith("share_tp has no effect")]


def test_heads_of_windows_are_given_to_others_while_they_are_saved(
    by_head: Any, sim: Any, prompt: Any, one_by_one: Any
) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    prompts = [prompt(20 * BLOCK + at) for at in range(10)]
    small = {"blocks": 60, "max_model_len": 800, "max_num_seqs": 1}
    one, two = (
        by_head(name, ranks, specs=grouped(sim, "Gemma 3", ranks), **small) for name, ranks in (("one", 2), ("two", 1))
    )
    one_by_one((one, two), prompts)
    assert two.received


def test_stages_of_heads_in_several_groups(by_head: Any, sim: Any, prompt: Any, idle: Any) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    tokens = prompt(6 * BLOCK + 7)
    for ranks, loaded in ((2, 0), (1, 6 * BLOCK)):
        first = grouped(sim, "Gemma 3", ranks)
        specs = first | {f"model.layers.{3 + at}.attn": spec for at, spec in enumerate(first.values())}
        engine = by_head(f"e{ranks}", ranks, specs=specs, stages=(3, 3), blocks=96)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


@pytest.mark.parametrize(("name", "heads", "why"), [("states", 4, "states"), ("Gemma 3", 8, "different numbers")])
def test_groups_without_common_heads_are_shared_by_equal_numbers_of_ranks(
    by_head: Any, sim: Any, prompt: Any, idle: Any, lines: list[str], name: str, heads: int, why: str
) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    tokens = prompt(6 * BLOCK + 7)
    options = {"mamba_cache_mode": "align", "extra": {"block_size": BLOCK}} if name == "states" else {}
    for ranks, loaded in ((1, 0), (2, 0), (1, 6)):
        specs = grouped(sim, name, ranks, heads)
        engine = by_head(f"e{ranks}-{loaded}", ranks, specs=specs, blocks=96, **options)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded * BLOCK, 0, loaded * BLOCK)
        idle()
    said = [line for line in lines if line.startswith("share_tp has no effect")]
    assert len(said) == 3 and why in said[0]


@pytest.fixture
def latent(engines: Any, sim: Any) -> Any:
    """`latent(name, ranks)` makes an engine with MLA."""
    return lambda name, ranks, **options: engines(
        name, specs=sim.latent(), heads=8, tensor_parallel_size=ranks, **options
    )


def test_engines_with_mla_load_what_others_have_saved(
    latent: Any, daemon: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    """Each continues what the ones before it have saved; its ranks save as much each."""
    tokens = prompt(6 * BLOCK + 7)
    for ranks, loaded in ((1, 0), (2, 6), (4, 8), (1, 10), (8, 12)):
        engine = latent(f"e{ranks}-{loaded}", ranks)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded * BLOCK, 0, loaded * BLOCK)
        idle()
        (size,) = daemon.status()["namespaces"][-1]["block_bytes"]
        saved = [worker.counters["saved_bytes"] for worker in engine.workers]
        assert saved == [(len(tokens) // BLOCK - loaded) * size // ranks] * ranks
        tokens = prompt(len(tokens) + 2 * BLOCK, tokens)


def test_a_stripe_is_spoilt(latent: Any, sim: Any, prompt: Any, idle: Any, spoil: Any) -> None:
    """Each stripe has its own checksum, and every rank compares all."""
    tokens = prompt(12 * BLOCK + 7)
    extra = {"verify": "all", "block_size": 6 * BLOCK}
    one, two = latent("one", 2, extra=extra), latent("two", 4, extra=extra)
    one.generate(tokens)
    idle()
    spoil(two, tokens, block=7, token=9)
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert [worker.counters["blocks_corrupt"] for worker in two.workers] == [1] * 4
    assert two.computed == len(tokens) - 6 * BLOCK + 2, "the slot before it is kept"
