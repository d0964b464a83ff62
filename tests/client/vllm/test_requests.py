"""What becomes of requests: the real scheduler and KV cache manager of this vLLM, our connector, a real daemon.

The simulated worker checks in every step that what attention reads is what those tokens have: a wrong byte anywhere
fails the test.
"""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest

BLOCK = 32


def device_hit(tokens: int) -> int:
    """Tokens of a prompt that a hit on the device may have: one at least is computed."""
    return (tokens - 1) // BLOCK * BLOCK


def host_hit(tokens: int) -> int:
    """The same for the host: it may be the whole prompt, but a single block that ends it is computed."""
    return tokens // BLOCK * BLOCK if device_hit(tokens) else 0


def test_what_one_engine_has_computed_a_second_one_loads(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one, two = engines("one"), engines("two")
    for length in (1, BLOCK, BLOCK + 1, 5 * BLOCK + 7, 8 * BLOCK):
        tokens, name, hit = prompt(length), str(length), host_hit(length)
        for engine, parts in ((one, (length, 0, 0)), (two, (length - hit, 0, hit))):
            assert engine.generate(tokens, 3, name) == sim.expected(tokens, 3)
            assert engine.prefills[name] == parts
            idle()


def test_blocks_are_loaded_byte_by_byte(engines: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(6 * BLOCK + 1)
    one, two = engines("one"), engines("two")
    held = []
    for engine in (one, two):
        engine.add("r", tokens, 2)
        engine.run(lambda engine=engine: engine.outputs["r"])
        table = engine.runners[0].held["r"].tables[0][:6]
        held.append([layer.cells[table].tobytes() for layer in engine.runners[0].layers.values()])
        engine.run()
        engine.step()
        idle()
    assert held[0] == held[1]
    assert len({*held[0]}) == len(held[0]), "layers differ"


def test_a_prefix_is_a_partial_hit(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    shared = prompt(3 * BLOCK + 5)
    one, two = engines("one"), engines("two")
    one.generate(shared)
    idle()
    longer = prompt(7 * BLOCK, shared)
    assert two.generate(longer) == sim.expected(longer, 1)
    assert two.prefills["r0"] == (4 * BLOCK, 0, 3 * BLOCK)
    idle()
    # What the device has is not loaded again, and what lies beyond it is.
    other = prompt(5 * BLOCK, longer[: 3 * BLOCK])
    assert one.generate(other) == sim.expected(other, 1)
    assert one.prefills["r1"] == (2 * BLOCK, 3 * BLOCK, 0)
    assert one.generate(longer) == sim.expected(longer, 1)
    assert one.prefills["r2"] == (0, 3 * BLOCK, 4 * BLOCK)


def test_prompts_that_part_within_a_cached_block(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """A cached block of several of the engine's has the hash of the last of them."""
    one, two = (engines(name, extra={"block_size": 3 * BLOCK}) for name in ("one", "two"))
    tokens = prompt(6 * BLOCK + 1)
    one.generate(tokens)
    idle()
    for shared, hit in ((5 * BLOCK, 3 * BLOCK), (4 * BLOCK, 3 * BLOCK), (2 * BLOCK, 0)):
        other = prompt(6 * BLOCK + 1, tokens[:shared])
        assert two.generate(other, name=f"{shared}") == sim.expected(other, 1)
        assert two.prefills[f"{shared}"] == (len(other) - hit, 0, hit)
        idle()
        assert two.reset()


def test_a_load_is_asynchronous_and_ends_once(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(6 * BLOCK + 3)
    one, two = engines("one"), engines("two")
    one.generate(tokens)
    idle()
    two.delay(0.05)
    request = two.add("r", tokens, 4)
    two.step()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert not two.computed and not two.received
    two.run()
    for _ in range(5):
        two.step()
    assert two.outputs["r"] == sim.expected(tokens, 4)
    assert two.received == ["r"]
    assert two.counters["needed_blocks"] == 6


def test_others_are_computed_while_a_request_loads(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    cached, fresh = prompt(9 * BLOCK), prompt(2 * BLOCK)
    one, two = engines("one"), engines("two")
    one.generate(cached)
    idle()
    two.add("loads", cached, 3)
    two.add("computes", fresh, 3)
    two.step()
    assert two.outputs["computes"], "the step that begins the load computes the other request"
    two.run()
    assert two.outputs == {"loads": sim.expected(cached, 3), "computes": sim.expected(fresh, 3)}


def test_a_load_begins_before_the_step_is_computed(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """It waits for all work that the device was given before: it would end a step later."""
    cached, fresh = prompt(9 * BLOCK), prompt(2 * BLOCK)
    one, two = engines("one"), engines("two")
    one.generate(cached)
    idle()
    (runner,) = two.runners
    forward, loading = runner._forward, []

    def watched(step: Any) -> Any:
        loading.append(len(runner.jobs.blocks("load")))
        return forward(step)

    runner._forward = watched
    with two.held_copies():
        two.add("loads", cached, 3)
        two.add("computes", fresh, 3)
        two.step()
    assert loading == [9]
    two.run()
    assert two.outputs == {"loads": sim.expected(cached, 3), "computes": sim.expected(fresh, 3)}


def test_a_prompt_in_chunks(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(11 * BLOCK + 9)
    chunks = {"max_num_batched_tokens": 50, "max_num_seqs": 4}
    one, two = engines("one", **chunks), engines("two", **chunks)
    one.add("a", tokens, 3)
    one.add("b", prompt(4 * BLOCK), 40)
    one.run()
    assert one.outputs["a"] == sim.expected(tokens, 3)
    one.step()
    idle()
    longer = prompt(15 * BLOCK, tokens)
    assert two.generate(longer, 3) == sim.expected(longer, 3)
    assert two.prefills["r0"] == (15 * BLOCK - 11 * BLOCK, 0, 11 * BLOCK)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_block_that_the_last_step_fills_is_saved(
    engines: Any, sim: Any, prompt: Any, idle: Any, is_async: bool
) -> None:
    """Asynchronous scheduling plans a step before it knows the tokens of the one before, and so a block's hash."""
    one, two = engines("one", async_scheduling=is_async), engines("two", async_scheduling=is_async)
    for length in (2 * BLOCK - 4, 2 * BLOCK):
        tokens, answer = prompt(length), 2 * BLOCK - length + 1  # the last token of the answer is never fed back
        one.generate(tokens, answer)
        idle()
        follow_up = [*tokens, *sim.expected(tokens, answer)]
        assert two.generate(follow_up, name=f"{length}") == sim.expected(follow_up, 1)
        assert two.prefills[f"{length}"] == (1, 0, 2 * BLOCK)


def test_asynchronous_scheduling(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    prompts = {str(at): prompt(2 * BLOCK + 31 * at) for at in range(6)}
    options = {"async_scheduling": True, "blocks": 30, "max_model_len": 800, "max_num_batched_tokens": 90}
    for engine in (engines("one", **options), engines("two", **options)):
        engine.generate_all(prompts, 50)
        assert engine.outputs == {name: sim.expected(tokens, 50) for name, tokens in prompts.items()}
        idle()
    assert engine.received


def test_what_a_step_brings_is_done_once(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Even if a runner binds it, and asks for what has ended, twice."""
    tokens = prompt(5 * BLOCK)
    one, two = engines("one"), engines("two")
    for engine in (one, two):
        engine.runners[0].repeats = True
        assert engine.generate(tokens, 2 * BLOCK) == sim.expected(tokens, 2 * BLOCK)
        idle()
    assert one.counters["saved_bytes"] == 6 * 3 * sim.PAGE
    assert two.counters["loaded_bytes"] == 5 * 3 * sim.PAGE
    assert two.received == ["r0"]


def test_a_runner_that_does_not_call_handle_preemptions(
    engines: Any, sim: Any, prompt: Any, idle: Any, monkeypatch: Any
) -> None:
    """Saves then begin where the step's metadata is bound, which is before its forward pass, too."""
    tokens = prompt(5 * BLOCK + 1)
    one, two = engines("one"), engines("two")
    for engine in (one, two):
        monkeypatch.setattr(engine.runners[0].connector, "handle_preemptions", lambda metadata: None)
        assert engine.generate(tokens, 2) == sim.expected(tokens, 2)
        idle()
    assert two.received == ["r0"]


def test_what_waits_in_the_queue_is_due(engines: Any, sim: Any, prompt: Any, idle: Any, daemon: Any) -> None:
    cached, aborted = prompt(5 * BLOCK + 1), prompt(5 * BLOCK + 1)
    two = engines("two")
    two.generate_all({"a": cached, "b": aborted}, 1)
    idle()

    def await_due(blocks: int) -> None:
        size = next(s["block_bytes"][0] for s in daemon.status()["namespaces"] if s["block_tokens"] == [BLOCK])
        daemon.wait_status(lambda s: s["eviction"]["due_bytes"] == blocks * size, f"{blocks} blocks that are due")

    one = engines("one", max_num_seqs=1)
    one.add("running", prompt(2 * BLOCK), 20)
    one.step()
    one.add("queued", cached, 2)
    one.add("aborted", aborted, 2)
    one.step()
    await_due(10)
    one.abort("aborted")
    one.step()
    await_due(5)
    one.run()
    await_due(0)
    assert one.received == ["queued"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_preempted_requests_are_resumed(engines: Any, sim: Any, prompt: Any, idle: Any, is_async: bool) -> None:
    """Others get their blocks in the step that preempts them."""
    prompts = {name: prompt(3 * BLOCK + at) for at, name in enumerate("abc")}
    one = engines("one", blocks=15, max_model_len=320, async_scheduling=is_async)
    requests = [one.add(name, tokens, 120) for name, tokens in prompts.items()]
    one.run()
    one.step()
    assert one.outputs == {name: sim.expected(tokens, 120) for name, tokens in prompts.items()}
    assert one.counters["prefetches"] == sum(request.num_preemptions for request in requests) > 0
    assert one.received, "what a preempted request had saved comes back from the host"
    assert one.free_blocks == 14, "the null block is never free"
    assert not getattr(one.scheduler, "requires_kv_delivery", False), "what is not saved is not computed again for that"
    idle()
    two = engines("two")
    for name, tokens in prompts.items():
        answered = prompt(9 * BLOCK, [*tokens, *one.outputs[name]])
        assert two.generate(answered, 2, name) == sim.expected(answered, 2)
        assert two.prefills[name][2]


@pytest.mark.parametrize("when", ["before its step", "between forward and update", "after its step"])
def test_a_request_is_aborted_while_it_loads(engines: Any, sim: Any, prompt: Any, idle: Any, when: str) -> None:
    tokens = prompt(12 * BLOCK)
    one, two = engines("one"), engines("two")
    one.generate(tokens)
    idle()
    before = two.free_blocks
    two.delay(0.05)
    two.add("r", tokens, 4)
    if when == "before its step":
        two.abort("r")
        two.step()
    elif when == "between forward and update":
        two.core.aborts_queue.put(["r"])
        two.step()
    else:
        two.step()
        two.abort("r")
    if when != "before its step":
        assert two.free_blocks < before, "the load writes into its blocks"
    two.run(lambda: two.free_blocks == before)
    for _ in range(3):
        two.step()
    assert two.received == ([] if when == "before its step" else ["r"])
    idle()
    assert two.generate(tokens, 4, "again") == sim.expected(tokens, 4)


def test_a_request_is_aborted_while_it_is_saved(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens, other = prompt(20 * BLOCK), prompt(30 * BLOCK)
    one, two = engines("one", blocks=34), engines("two")
    one.delay(0.02)
    for steps in range(4):
        one.add(f"r{steps}", tokens, 9)
        for _ in range(steps):
            one.step()
        one.abort(f"r{steps}")
        assert one.generate(other, 2, f"other {steps}") == sim.expected(other, 2)  # in the same device blocks
        idle()
        assert one.reset()
    assert two.generate(tokens, 2) == sim.expected(tokens, 2)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_that_fails(engines: Any, sim: Any, prompt: Any, idle: Any, spoil: Any, policy: str) -> None:
    tokens = prompt(6 * BLOCK + 1)
    extra = {"verify": "all", "kv_load_failure_policy": policy}
    one, two = engines("one", extra=extra), engines("two", extra=extra)
    one.generate(tokens)
    idle()
    spoil(one, tokens, block=3)
    two.add("r", tokens, 5)
    two.run()
    two.step()
    assert two.received == ["r"]
    assert two.counters["loads_failed"] == 1
    if policy == "fail":
        assert two.finished == {"r": "error"} and not two.outputs["r"]
        return
    assert two.outputs["r"] == sim.expected(tokens, 5)
    assert two.computed == 3 * BLOCK + 1 + 4, "what was loaded before the wrong block is kept"
    two.step()
    idle()
    three = engines("three", extra=extra)
    assert three.generate(tokens, 5) == sim.expected(tokens, 5)
    assert three.prefills["r0"] == (1, 0, 6 * BLOCK), "the daemon has forgotten the wrong block, and got it again"


def test_blocks_are_given_to_others_while_they_are_saved(engines: Any, prompt: Any, one_by_one: Any) -> None:
    """Each prompt takes blocks of the one before it, whose save has just begun, or is not yet answered."""
    prompts = [prompt(20 * BLOCK + at) for at in range(20)]
    small = {"blocks": 30, "max_model_len": 800, "max_num_seqs": 1}
    one, two = engines("one", **small), engines("two", **small)
    one.runners[0].writes_at_once = two.runners[0].writes_at_once = True
    one_by_one((one, two), prompts)
    assert two.received


def test_blocks_are_given_to_others_before_the_daemon_answers(
    engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    """What is answered too late is not saved: the blocks have another request's KV by then."""
    first, second = prompt(9 * BLOCK), prompt(5 * BLOCK)
    options = {"blocks": 16, "max_model_len": 480, "max_num_batched_tokens": 8 * BLOCK}
    one, two = engines("one", **options), engines("two")
    one.add("second", second, 5 * BLOCK)
    one.add("first", first)
    one.step()
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        one.run(lambda: len(one.outputs["second"]) > 4 * BLOCK)
        assert one.finished["first"]
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    one.run()
    one.step()
    idle()
    assert two.generate(first) == sim.expected(first, 1)
    assert two.prefills["r0"][2] < 8 * BLOCK


def test_a_request_whose_load_failed_is_offered_no_hit_again(
    engines: Any, sim: Any, prompt: Any, idle: Any, monkeypatch: Any
) -> None:
    tokens = prompt(7 * BLOCK)
    one, two = engines("one"), engines("two")
    one.generate(tokens)
    idle()
    worker = two.runners[0].connector._worker
    monkeypatch.setattr(worker.loads, "begin", lambda job, key: worker.loads._end(job, job.blocks))
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.received == ["r0"]
    assert two.counters["loads_failed"] == 1


def test_many_requests_of_shared_prefixes_on_little_memory(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    shared = prompt(4 * BLOCK)
    prompts = [prompt(4 * BLOCK + 17 * at, shared) for at in range(1, 9)] + [prompt(2 * BLOCK + at) for at in range(8)]
    options = {"blocks": 40, "max_num_batched_tokens": 100}
    for engine in (engines("one", **options), engines("two", **options)):
        for at, tokens in enumerate(prompts):
            engine.add(f"r{at}", tokens, 30)
        engine.run()
        engine.step()
        for at, tokens in enumerate(prompts):
            assert engine.outputs[f"r{at}"] == sim.expected(tokens, 30)
        assert engine.free_blocks == 39
        idle()


def test_what_vllm_counts(engines: Any, prompt: Any, idle: Any) -> None:
    """Every prompt token is computed, found on the device or loaded, and none of the three is negative.

    Of the connector it counts all tokens that the device lacks, and those that are loaded.
    """
    prompts = [prompt(count) for count in (BLOCK, 2 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK - 1)]
    one, two = engines("one"), engines("two")
    for engine, again in itertools.product((one, two), range(3)):
        for at, tokens in enumerate(prompts):
            engine.generate(tokens, 2, f"{again}.{at}")
            idle()
        if again == 1:
            assert engine.reset()
    for engine in (one, two):
        lacking = 0
        for again, (at, tokens) in itertools.product(range(3), enumerate(prompts)):
            computed, local, external = engine.prefills[f"{again}.{at}"]
            device, host = device_hit(len(tokens)), host_hit(len(tokens))
            where = (0, 0) if engine is one and not again else (device, 0) if again == 1 else (0, host)
            assert (local, external) == where
            assert computed + local + external == len(tokens)
            lacking += len(tokens) - local
        stats = [each.connector_prefix_cache_stats for each in engine.stats]
        hits, queries = sum(each.hits for each in stats), sum(each.queries for each in stats)
        loads = sum(host_hit(len(tokens)) for tokens in prompts) * (2 if engine is two else 1)
        assert (queries, hits) == (lacking, loads)
        assert engine.counters["needed_blocks"] * BLOCK == loads
