"""Context parallelism: ranks with the same KV heads divide the tokens of each block among themselves (decode), or a
prompt (prefill), of which each then has all KV."""

from __future__ import annotations

from typing import Any

import pytest

BLOCK = 32


@pytest.fixture
def spread(engines: Any, sim: Any) -> Any:
    """`spread(name, ranks, contexts, **options)` makes an engine of a model with two KV heads, or with MLA."""

    def make(name: str, ranks: int, contexts: int, latent: bool = False, **options: Any) -> Any:
        options["extra"] = {"block_size": contexts * BLOCK} | options.get("extra", {})
        if latent:
            options["specs"] = sim.latent()
        if "prefill" not in options:
            options["decode_context_parallel_size"] = contexts
        return engines(name, heads=8 if latent else 2, tensor_parallel_size=ranks, **options)

    return make


CASES = [(4, 2, False, 1), (8, 4, False, 1), (8, 2, False, 16), (2, 2, True, 1), (4, 4, True, 8), (4, 2, True, 32)]


@pytest.fixture(params=CASES, ids=[f"tp{c[0]} dcp{c[1]}{' mla' * c[2]} i{c[3]}" for c in CASES])
def alike(spread: Any, request: pytest.FixtureRequest) -> Any:
    """`alike(name)` makes an engine of one of several kinds."""
    ranks, contexts, latent, interleave = request.param
    kind = {"ranks": ranks, "contexts": contexts, "latent": latent, "cp_kv_cache_interleave_size": interleave}
    return lambda name, **options: spread(name, **kind, **options)


def test_ranks_load_the_tokens_that_ranks_have_saved(alike: Any, daemon: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one, two = alike("one"), alike("two")
    tokens = prompt(3 * one.core.scheduler.block_size + 7)
    for engine, loaded in ((one, 0), (two, len(tokens) - 7)):
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


def test_each_slice_is_saved_once(spread: Any, prompt: Any, idle: Any) -> None:
    """Of eight ranks, four have the same heads, and two of these the same tokens: the first one of each saves."""
    one = spread("one", 8, 2)
    one.generate(prompt(4 * 2 * BLOCK))
    idle()
    shards = [worker._layout.reads for worker in one.workers]
    assert shards == [range(shard, shard + 1) for shard in (0, 1, 0, 1, 2, 3, 2, 3)]
    size = one.workers[0]._namespace.spec.groups[0].block_bytes
    saved = [worker.counters.get("saved_bytes", 0) for worker in one.workers]
    assert saved == [size, size, 0, 0] * 2, "a quarter of each of the four blocks"


@pytest.mark.parametrize("rank", range(4))
def test_the_load_of_one_slice_fails(spread: Any, sim: Any, prompt: Any, idle: Any, spoil: Any, rank: int) -> None:
    tokens = prompt(6 * 2 * BLOCK + 1)
    one, two = (spread(name, 4, 2, extra={"verify": "all"}) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    spoil(one, tokens, block=2 * 3, rank=rank, token=rank % 2)
    assert two.generate(tokens, 5) == sim.expected(tokens, 5)
    assert two.counters["loads_failed"] == 1 and two.workers[rank].counters["blocks_corrupt"] == 1
    assert two.computed == len(tokens) - 3 * 2 * BLOCK + 4, "what all ranks have loaded is kept"


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "mla"])
def test_preempted_requests_are_resumed(spread: Any, sim: Any, prompt: Any, latent: bool) -> None:
    prompts = {name: prompt(6 * BLOCK + at) for at, name in enumerate("abc")}
    one = spread("one", 4, 2, latent, blocks=15, max_model_len=640, cp_kv_cache_interleave_size=4)
    requests = [one.add(name, tokens, 240) for name, tokens in prompts.items()]
    one.run()
    one.step()
    assert one.outputs == {name: sim.expected(tokens, 240) for name, tokens in prompts.items()}
    assert sum(request.num_preemptions for request in requests)
    assert one.received, "what a preempted request had saved comes back from the host"


def test_blocks_are_given_to_others_while_they_are_saved(spread: Any, prompt: Any, one_by_one: Any) -> None:
    prompts = [prompt(20 * BLOCK + at) for at in range(8)]
    small = {"blocks": 16, "max_model_len": 800, "max_num_seqs": 1, "async_scheduling": True}
    one, two = spread("one", 4, 2, **small), spread("two", 4, 2, **small)
    one_by_one((one, two), prompts)
    assert two.received


def test_two_loads_that_just_fit(spread: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Where this side counts the device blocks that requests need, a block has the tokens of all slices."""
    prompts = {name: prompt(3 * 2 * BLOCK + 1) for name in "ab"}
    one, two = (spread(name, 4, 2, blocks=9, max_model_len=8 * BLOCK) for name in ("one", "two"))
    one.generate_all(prompts, 1)
    idle()
    with two.held_copies():
        for name, tokens in prompts.items():
            two.add(name, tokens)
        two.step()
    two.run()
    assert two.outputs == {name: sim.expected(tokens, 1) for name, tokens in prompts.items()}
    assert two.received == ["a", "b"] and not two.counters.get("loads_without_room")


def test_what_is_published(spread: Any, sim: Any, prompt: Any, idle: Any) -> None:
    config = {"enable_kv_cache_events": True, "publisher": "null"}
    one = spread("one", 4, 2, kv_events_config=config)
    tokens = prompt(2 * 2 * BLOCK + 7)
    one.generate(tokens)
    idle()
    for at in range(2):  # verdicts come with a step, and events with the one after
        one.generate(prompt(9), name=f"later {at}")
    found = {each.medium: (each.token_ids, each.block_size) for each in one.published if hasattr(each, "token_ids")}
    assert found == dict.fromkeys(("GPU", "CPU"), (tokens[: 4 * BLOCK], 2 * BLOCK))


def test_stages(spread: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(3 * 2 * BLOCK + 7)
    for name, loaded in (("one", 0), ("two", len(tokens) - 7)):
        engine = spread(name, 4, 2, stages=(2, 1))
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()
    assert engine.workers[0]._namespace.spec.groups[0].shards == (sim.PAGE,) * 4 + (sim.PAGE // 2,) * 4


def test_canaries_compare_all_slices(spread: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(3 * 2 * BLOCK + 7)
    one, two = (spread(name, 4, 2, extra={"canary_every": 1}) for name in ("one", "two"))
    one.generate(tokens)
    idle()
    two.generate(tokens)
    idle()
    assert two.counters["canary_requests"] == 1 and not two.counters.get("canary_mismatches")


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "mla"])
def test_who_shares(spread: Any, sim: Any, prompt: Any, idle: Any, latent: bool) -> None:
    """Engines with the same slices, whatever the number of ranks that have each."""
    tokens = prompt(4 * 4 * BLOCK + 7)
    kinds = [(4, 1, 1, 0), (4, 2, 1, 0), (4, 2, 2, 0), (8, 4, 1, 0), (8, 2, 2, 1), (8, 2, 1, 1), (8, 1, 1, 1)]
    for at, (ranks, contexts, interleave, shared) in enumerate(kinds):
        each = {"cp_kv_cache_interleave_size": interleave, "extra": {"block_size": 4 * BLOCK}}
        engine = spread(f"e{at}", ranks, contexts, latent, **each)
        loaded = shared * (len(tokens) - 7)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


@pytest.mark.parametrize(("prefill", "contexts"), [(2, 1), (2, 2), (2, 4)])
def test_prefill_context_parallelism(
    spread: Any, sim: Any, prompt: Any, idle: Any, lines: list[str], prefill: int, contexts: int
) -> None:
    """Without decode context parallelism, such engines share blocks with those that have neither."""
    tokens = prompt(3 * 4 * BLOCK + 7)
    if sim.SPREADS_PREFILL:
        engine = spread("one", 2, contexts, True, prefill=(prefill, contexts))
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        (said,) = (line for line in lines if "runs without" in line)
        assert "prefill_context_parallel_size 2 before vLLM 0.27" in said
        return
    engines = [spread(name, 2, contexts, True, prefill=(prefill, contexts)) for name in ("one", "two")]
    if contexts == 1:
        engines.append(spread("three", 1, 1, True))
    for at, engine in enumerate(engines):
        loaded = bool(at) * (len(tokens) - 7)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()
    assert len({worker.counters["saved_bytes"] for worker in engines[0].workers}) == 1, "each saves as much"
