"""Requests that vLLM treats in a way of their own, while others' blocks are saved and loaded."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest

from kvcache_client.engines.vllm.compat import stops_before_loading_requests

BLOCK = 32
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@MODES
def test_structured_output(engines: Any, sim: Any, prompt: Any, idle: Any, is_async: bool) -> None:
    """A request is asked about once its grammar is compiled; then it is like any other."""
    from vllm.sampling_params import StructuredOutputsParams

    tokens = prompt(4 * BLOCK + 9)
    output = StructuredOutputsParams(json="{}")
    output._backend = "xgrammar"  # as vLLM's front end resolves it; what it compiles is simulated
    sampling = {"structured_outputs": output}
    one, two = (engines(name, async_scheduling=is_async) for name in ("one", "two"))
    for engine, hit in ((one, 0), (two, 4 * BLOCK)):
        sim.AnyTokens.ready.clear()
        request = engine.add("r", tokens, 2 * BLOCK, sampling)
        engine.add("compiles", tokens, 9, sampling)
        try:
            for _ in range(3):
                engine.step()
            assert "GRAMMAR" in request.status.name or "FSM" in request.status.name
            assert not engine.computed and not engine.received
            engine.abort("compiles")
        finally:
            sim.AnyTokens.ready.set()
        engine.run()
        assert engine.outputs["r"] == sim.expected(tokens, 2 * BLOCK)
        assert engine.prefills["r"] == (len(tokens) - hit, 0, hit)
        engine.step()
        idle()


@MODES
def test_several_answers_to_one_prompt(engines: Any, sim: Any, prompt: Any, idle: Any, is_async: bool) -> None:
    """`n` requests are the same to the scheduler but for their names: one saves the prompt, and one loads it."""
    tokens = prompt(6 * BLOCK + 3)
    one, two = (engines(name, async_scheduling=is_async, max_num_batched_tokens=512) for name in ("one", "two"))
    for engine, hit in ((one, 0), (two, 6 * BLOCK)):
        for child in range(4):
            engine.add(f"{child}_parent", tokens, 5)
        engine.run()
        assert engine.outputs == {f"{child}_parent": sim.expected(tokens, 5) for child in range(4)}
        external = [loaded for _, _, loaded in engine.prefills.values()]
        assert sorted(external) == [0, 0, 0, hit]
        engine.step()
        idle()
    assert one.counters["saved_bytes"] == two.counters["loaded_bytes"] == 6 * 3 * sim.PAGE


@MODES
def test_a_more_important_request_takes_the_blocks_of_another(
    engines: Any, sim: Any, prompt: Any, idle: Any, is_async: bool
) -> None:
    """Priority scheduling preempts a running request, and gives its blocks away in the same step."""
    options = {"blocks": 16, "max_model_len": 480, "scheduling_policy": "priority", "async_scheduling": is_async}
    one = engines("one", **options)
    prompts = {"low": prompt(6 * BLOCK + 2), "high": prompt(5 * BLOCK)}
    low = one.add("low", prompts["low"], 4 * BLOCK, priority=5)
    one.run(lambda: len(one.outputs["low"]) > 9)
    one.add("high", prompts["high"], 5 * BLOCK, priority=1)
    one.run()
    assert one.outputs == {"low": sim.expected(prompts["low"], 128), "high": sim.expected(prompts["high"], 160)}
    assert low.num_preemptions
    if stops_before_loading_requests():  # then nothing important may have to wait for the blocks of a load
        assert not one.received and one.counters["loads_without_room"]
    else:
        assert one.received == ["low"], "what it had saved comes back from the host"


def test_prompt_logprobs_need_every_token_computed(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Such a request reads no cache, and fills it for others."""
    tokens = prompt(5 * BLOCK + 3)
    one, two = engines("one"), engines("two")
    for engine in (one, two):
        engine.add("logprobs", tokens, 4, {"prompt_logprobs": 1})
        engine.run()
        assert engine.outputs["logprobs"] == sim.expected(tokens, 4)
        assert engine.prefills["logprobs"] == (len(tokens), 0, 0)
        engine.step()
        idle()
    assert two.reset()
    assert two.generate(tokens, 4) == sim.expected(tokens, 4)
    assert two.prefills["r1"] == (3, 0, 5 * BLOCK)


@pytest.mark.parametrize("every_token", [True, False], ids=["token_embed", "embed"])
def test_pooling(engines: Any, sim: Any, prompt: Any, idle: Any, every_token: bool) -> None:
    """A pooler of all tokens needs all hidden states; one of the last token does not."""
    from vllm.pooling_params import PoolingParams

    tokens = prompt(5 * BLOCK + 3)
    task = "token_embed" if every_token else "embed"
    options = {"runner": "pooling", "enable_prefix_caching": True, "enable_chunked_prefill": True}
    one, two = engines("one", **options), engines("two", **options)
    for engine, hit in ((one, 0), (two, 0 if every_token else 5 * BLOCK)):
        pooling = PoolingParams(task=task, skip_reading_prefix_cache=every_token)
        engine.add("r", tokens, pooling=pooling)
        engine.run()
        assert engine.finished == {"r": "stop"}
        assert engine.computed == len(tokens) - hit
        engine.step()
        idle()


@MODES
def test_a_request_is_aborted_at_every_point_of_its_life(
    engines: Any, sim: Any, prompt: Any, idle: Any, is_async: bool
) -> None:
    """It waits, loads, is computed in chunks, and generates; the abort comes before a step, or within it."""
    shared = prompt(4 * BLOCK)
    one = engines("one")
    one.generate(shared)
    idle()
    two = engines("two", async_scheduling=is_async, max_num_batched_tokens=100)
    seen = set()
    for steps, within in itertools.product(range(10), (False, True)):
        name, tokens, other = f"{steps} {within}", prompt(6 * BLOCK + 70, shared), prompt(BLOCK)
        with contextlib.ExitStack() as held:
            held.enter_context(two.held_copies())
            request = two.add(name, tokens, 40)
            two.add(f"other {name}", other, 3)
            for _ in range(min(steps, 2)):
                two.step()
            if steps > 2:
                held.close()
                two.run(lambda name=name: name in two.received)
                for _ in range(3, steps):
                    two.step()
            seen.add((request.status.name, request.num_computed_tokens // 100, bool(two.outputs[name])))
            if within:
                two.core.aborts_queue.put([name])
                two.step()
            else:
                two.abort(name)
        two.run()
        assert two.outputs[f"other {name}"] == sim.expected(other, 3)
        assert two.free_blocks == two.blocks - 1
        assert two.reset()
    assert {"WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING"} <= {name for name, _, _ in seen}
    assert {("RUNNING", 2, False), ("RUNNING", 2, True)} <= seen, "in a chunk of the prompt, and in the answer"
    idle()
    assert two.generate(tokens, 3, "last") == sim.expected(tokens, 3)
    assert two.prefills["last"][2] >= 4 * BLOCK
