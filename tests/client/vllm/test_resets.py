"""Resets of the caches, with and without the connector's; sleep; new weights. Also while requests run."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from kvcache_client.engines.vllm.compat import SLEEPS
from kvcache_client.engines.vllm.wrapped import before_sleep

BLOCK = 32


def test_the_device_s_cache_is_reset_and_the_host_s_is_not(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(4 * BLOCK + 1)
    one = engines("one")
    one.generate(tokens)
    idle()
    assert one.reset()
    assert one.generate(tokens) == sim.expected(tokens, 1)
    assert one.prefills["r1"] == (1, 0, 4 * BLOCK)


def test_a_reset_of_the_connector_ends_what_was_saved(
    engines: Any, sim: Any, prompt: Any, idle: Any, until: Any
) -> None:
    tokens = prompt(4 * BLOCK + 1)
    one = engines("one")
    one.generate(tokens)
    idle()
    assert one.reset(connector=True)
    assert one.generate(tokens, name="computed") == sim.expected(tokens, 1)
    assert one.prefills["computed"] == (4 * BLOCK + 1, 0, 0)

    def found() -> bool:  # as soon as the ranks have joined the new namespace, it is saved again
        idle()
        assert one.reset()
        assert one.generate(tokens, name=f"r{len(one.outputs)}") == sim.expected(tokens, 1)
        return one.prefills[f"r{len(one.outputs) - 1}"] == (1, 0, 4 * BLOCK)

    until(found, "a hit of what was computed after the reset")


@pytest.mark.parametrize("connector", [False, True])
def test_a_reset_while_requests_run(engines: Any, sim: Any, prompt: Any, idle: Any, connector: bool) -> None:
    prompts = {"a": prompt(3 * BLOCK + 4), "b": prompt(6 * BLOCK), "c": prompt(BLOCK - 1)}
    one = engines("one")
    for name, tokens in prompts.items():
        one.add(name, tokens, 40)
    for _ in range(7):
        one.step()
    assert one.reset(running=True, connector=connector)
    one.run()
    one.step()
    assert one.outputs == {name: sim.expected(tokens, 40) for name, tokens in prompts.items()}
    idle()


def hits(engine: Any, sim: Any, tokens: list[int], idle: Any) -> int:
    """Return how many tokens of a prompt an engine loads that forgets its own cache."""
    idle()
    assert engine.reset()
    name = f"r{len(engine.outputs)}"
    assert engine.generate(tokens, 2, name) == sim.expected(tokens, 2)
    return int(engine.prefills[name][2])


def has_joined(engine: Any) -> bool:
    """Return whether the daemon knows that the ranks are in the namespace in which the scheduler's side is."""
    ours = engine.connector._scheduler._membership.namespace
    ranks = [worker._namespace for worker in engine.workers]
    return bool(ours.attached and all(rank.id == ours.id and rank.attached for rank in ranks))


def join(engine: Any, prompt: Any, idle: Any) -> None:
    """Run requests until the engine has moved, and asks for nothing: its ranks learn of the move with a step."""
    saves = engine.connector._scheduler._saves
    engine.run(lambda: engine.generate(prompt(3)) and has_joined(engine) and not saves.waiting)
    idle()


def test_requests_known_at_a_reset_are_neither_saved_nor_loaded(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """vLLM resets the connector and lets requests go on that have KV of the weights before."""
    cached, running = prompt(4 * BLOCK + 1), prompt(3 * BLOCK + 4)
    one, two = (engines(name, extra={"on_reset": "v2"}) for name in ("one", "two"))
    assert two.reset(connector=True)
    join(two, prompt, idle)
    two.generate(cached, name="v2")
    one.add("running", running, 600)
    one.run(lambda: one.counters.get("saved_bytes"))
    assert not one.reset(connector=True), "the device's cache cannot be reset while a request runs"
    saved = one.counters["saved_bytes"]
    one.run(lambda: has_joined(one))
    one.add("waiting", cached, 3)
    one.run(lambda: "waiting" in one.finished)
    assert one.prefills["waiting"] == (1, 0, 4 * BLOCK), "a request that comes later is served"
    one.run()
    one.step()
    idle()
    assert one.outputs["running"] == sim.expected(running, 600)
    assert one.counters["saved_bytes"] == saved
    assert hits(two, sim, running, idle) == 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_new_weights_while_requests_run(engines: Any, sim: Any, prompt: Any, idle: Any, is_async: bool) -> None:
    """What they have is computed again, and found by engines of the same weights alone."""
    prompts = {"a": prompt(3 * BLOCK + 4), "b": prompt(6 * BLOCK), "c": prompt(BLOCK - 1)}
    options = {"extra": {"on_reset": "v2"}, "async_scheduling": is_async}
    one, two, old = engines("one", **options), engines("two", **options), engines("old")
    two.update_weights()
    assert two.reset(connector=True)
    join(two, prompt, idle)
    for name, tokens in prompts.items():
        one.add(name, tokens, 200)
    one.run(lambda: one.counters.get("saved_bytes"))
    one.core.pause_scheduler("keep", clear_cache=False)
    one.run(lambda: not one.core.batch_queue)
    one.update_weights()
    assert one.reset(running=True, connector=True)
    one.core.resume_scheduler()
    one.run(lambda: has_joined(one))
    one.run()
    one.step()
    assert one.outputs == {name: sim.expected(tokens, 200) for name, tokens in prompts.items()}
    answered = [*prompts["b"], *sim.expected(prompts["b"], 200)]
    for engine in (one, two):
        assert hits(engine, sim, answered, idle) == len(answered) // BLOCK * BLOCK, "computed again, they were saved"
    assert hits(old, sim, answered, idle) <= 6 * BLOCK, "it finds only what was saved before the update"


@pytest.mark.parametrize("on_reset", ["new", "keep"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep(engines: Any, sim: Any, prompt: Any, idle: Any, level: int, on_reset: str) -> None:
    """From level 1 on vLLM resets the connector: the engine goes on with new weights, or keeps them if told so."""
    tokens = prompt(4 * BLOCK + 1)
    one = engines("one", extra={"on_reset": on_reset})
    one.generate(tokens)
    idle()
    one.core.sleep(level)
    assert one.core.is_sleeping()
    one.core.wake_up()
    assert hits(one, sim, tokens, idle) == (0 if level and on_reset == "new" else 4 * BLOCK)
    join(one, prompt, idle)
    later = prompt(3 * BLOCK + 1)
    one.generate(later, name="later")
    assert hits(one, sim, later, idle) == 3 * BLOCK


@pytest.mark.parametrize("level", [0, 1, 2])
def test_requests_that_are_kept_while_the_engine_sleeps(
    engines: Any, sim: Any, prompt: Any, idle: Any, level: int
) -> None:
    """From level 1 on the KV is gone when they go on: they are computed again, from what is cached on the host."""
    prompts = {"a": prompt(3 * BLOCK + 4), "b": prompt(6 * BLOCK)}
    one = engines("one", extra={"on_reset": "keep"})
    for name, tokens in prompts.items():
        one.add(name, tokens, 300)
    one.run(lambda: one.counters.get("saved_bytes", 0) >= 9 * 3 * sim.PAGE)
    one.core.sleep(level, "keep")
    before = one.computed
    for _ in range(3):
        one.step()
    assert one.computed == before
    one.core.wake_up()
    one.run()
    one.step()
    assert one.outputs == {name: sim.expected(tokens, 300) for name, tokens in prompts.items()}
    assert bool(one.received) == bool(level)


def test_saves_that_are_not_answered_end_with_a_sleep(
    engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    """The memory from which they would be copied is unmapped by the time of the answer."""
    tokens = prompt(9 * BLOCK + 1)
    one, two = engines("one", extra={"on_reset": "keep"}, max_num_batched_tokens=4 * BLOCK), engines("two")
    one.add("r", tokens, 9)
    one.step()
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        one.step()
        one.core.sleep(1)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    one.core.wake_up()
    join(one, prompt, idle)
    assert hits(two, sim, tokens, idle) <= 4 * BLOCK


def test_copies_end_before_the_memory_is_unmapped(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(6 * BLOCK + 1)
    one, two = engines("one", extra={"on_reset": "keep"}), engines("two")
    one.delay(0.1)
    one.add("r", tokens, 600)
    one.run(lambda: one.workers[0]._saves._stored)  # it has begun a save
    one.core.sleep(1)
    assert one.runners[0].unmapped == [False]
    idle()
    assert hits(two, sim, tokens, idle) == 6 * BLOCK


def test_the_memory_is_discarded_and_mapped_again(
    engines: Any, sim: Any, prompt: Any, idle: Any, lines: list[str]
) -> None:
    """Copies end before, and work afterwards."""
    tokens, later = prompt(6 * BLOCK + 1), prompt(3 * BLOCK + 1)
    one, two = engines("one", extra={"on_reset": "keep"}), engines("two")
    if not hasattr(one.core, "release_kv_cache_memory"):
        pytest.skip("from 0.32 on")
    one.delay(0.1)
    one.generate(tokens, name="r")
    assert one.workers[0]._saves._stored, "a save runs"
    one.core.pause_scheduler("abort")
    one.core.release_kv_cache_memory()
    assert one.runners[0].unmapped == [False]
    one.core.wake_up()
    join(one, prompt, idle)
    assert hits(one, sim, tokens, idle) == hits(two, sim, tokens, idle) == 6 * BLOCK
    one.generate(later, name="later")
    assert hits(two, sim, later, idle) == 3 * BLOCK
    assert not [line for line in lines if "copies" in line]


def test_a_worker_is_wrapped_only_if_it_does_not_call_the_connector(
    engines: Any, sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own call it from 0.33 on; those of other packages may not."""
    worker = pytest.importorskip("vllm.v1.worker.gpu_worker").Worker
    one = engines("one")
    names = [name for name in SLEEPS if hasattr(worker, name)]
    for name in names:
        monkeypatch.setattr(worker, name, getattr(worker, name))

    class Other(worker):  # type: ignore[misc, valid-type]
        def sleep(self, level: int = 1) -> None: ...

    for each in (worker, Other):
        before_sleep(each, one.workers[0].drain)
    for each in (worker, sim.SimulatedWorker):
        wrapped = {hasattr(getattr(each, name), "_kvcache_first") for name in names}
        assert wrapped == {not sim.HAS_SLEEP_HOOKS}
    assert hasattr(Other.sleep, "_kvcache_first")
    assert not sim.HAS_SLEEP_HOOKS or type(one.connector).supports_sleep_mode(one.runners[0].config.kv_transfer_config)
