"""Engines that zero blocks: those with states, and from vLLM 0.27 on those with KV of several precisions.

Model Runner V2 zeroes what a step gives to others, and moves states, before it calls any hook of a connector.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import threading
from typing import Any

import pytest

BLOCK = 32
MODELS = ("Granite 4", "windows and states", "states alone", "two precisions")
ZEROED = ("Granite 4", "windows and states", "two precisions")  # vLLM zeroes only blocks of attention


@pytest.fixture
def model(sim: Any) -> Any:
    """`model(name)` returns the options of an engine with a model like that one."""
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    memory = {"blocks": 96}
    states = memory | {"mamba_cache_mode": "align"}
    return lambda name: {
        "Granite 4": lambda: states | {"specs": sim.full(1) | sim.states(2, 1, "align")},
        "windows and states": lambda: states
        | {"specs": sim.full(1) | sim.windows(1, 2 * BLOCK, 1) | sim.states(1, 2, "align")},
        "states alone": lambda: states | {"specs": sim.states(3, 0, "align")},
        "two precisions": lambda: memory
        | {  # blocks of the windows have twice as many tokens, and are as large
            "specs": sim.full(1) | sim.windows(2, 2 * BLOCK, 1, dtype=sim.torch.bfloat16),
            "extra": {"block_size": 2 * BLOCK},
        },
    }[name]()


@pytest.fixture
def pair(engines: Any, model: Any) -> Any:
    """`pair(name, **options)` makes two engines with that model, the first one with these options."""
    return lambda name, **options: (engines("one", **model(name) | options), engines("two", **model(name)))


def little(blocks: int) -> dict[str, Any]:
    """Return options of an engine that has just enough memory for one prompt of `reallocate`."""
    return {"num_gpu_blocks_override": blocks, "max_model_len": 440, "max_num_seqs": 1}


def reallocate(sim: Any, prompt: Any, idle: Any, one: Any, two: Any, blocks: int) -> None:
    """Give away that many blocks of `one` while they are saved; `two` loads what was saved, and checks every byte.

    Each prompt takes nearly all blocks of the one before it, whose saves have just begun.
    """
    one.delay(0.05)  # a step must be over before, also on a busy host
    prompts: list[list[int]] = []
    while one.fenced < blocks:
        assert len(prompts) < 400
        first, prompts = len(prompts), [*prompts, *(prompt(13 * BLOCK + 1 + at % 20) for at in range(10))]
        for at, tokens in enumerate(prompts[first:], first):
            one.add(f"r{at}", tokens, 1 + at % 2)
        while one.step():
            one.answered()  # else a busy host has no saves that run when their blocks are given away
    one.step()
    idle()
    for at, tokens in enumerate(prompts):
        assert one.outputs[f"r{at}"] == sim.expected(tokens, 1 + at % 2)
        assert two.generate(tokens, 2) == sim.expected(tokens, 2)
    assert len(two.received) > len(prompts) // 2
    assert not {"saves_failed", "saves_given_away"} & one.counters.keys()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("name", "memory", "blocks"),
    [("Granite 4", 20, 1000), ("windows and states", 34, 200), ("states alone", 5, 100), ("two precisions", 40, 200)],
)
def test_blocks_are_given_to_others_while_they_are_saved(
    pair: Any, sim: Any, prompt: Any, idle: Any, name: str, memory: int, blocks: int, is_async: bool
) -> None:
    """No save is lost, and no byte is wrong."""
    one, two = pair(name, **little(memory), async_scheduling=is_async)
    reallocate(sim, prompt, idle, one, two, blocks)
    assert bool(one.runners[0].zeroed) == (name in ZEROED)


def test_mla_with_an_indexer(sim: Any, engines: Any, prompt: Any, idle: Any) -> None:
    """As DeepSeek V3.2: one group, whose layers have latent vectors of 16 bits and an indexer's bytes."""
    if not sim.HAS_PRECISIONS:
        pytest.skip("this version zeroes no blocks of such a model")
    one, two = engines("one", specs=sim.sparse_latent(2), **little(16)), engines("two", specs=sim.sparse_latent(2))
    reallocate(sim, prompt, idle, one, two, 200)


@pytest.mark.parametrize(("name", "memory"), [("Granite 4", 20), ("two precisions", 40)])
def test_two_ranks(engines: Any, model: Any, sim: Any, prompt: Any, idle: Any, name: str, memory: int) -> None:
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    one, two = engines("one", **model(name), **little(memory), **ranks), engines("two", **model(name), **ranks)
    reallocate(sim, prompt, idle, one, two, 100)


def test_beside_another_connector(engines: Any, model: Any, daemon: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """A rank's connector is vLLM's MultiConnector: the one that is ours is among others."""
    other = {
        "kv_connector": "KVCacheServerConnector",
        "kv_connector_module_path": "kvcache_client.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": f"{daemon.endpoint}.nobody"},
    }
    one, two = (engines(name, **model("Granite 4"), beside=[other]) for name in ("one", "two"))
    tokens = prompt(9 * BLOCK + 5)
    for engine in (one, two):
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        idle()
    assert two.received == ["r0"]


@pytest.mark.parametrize("name", MODELS)
def test_an_executor_that_bypasses_the_worker(
    pair: Any, sim: Any, prompt: Any, idle: Any, monkeypatch: Any, name: str
) -> None:
    """Then the rank hears of a step too late: what it saves may have been overwritten, and it takes no part."""
    monkeypatch.setattr(sim.SimulatedExecutor, "bypasses", True)
    one, two = pair(name)
    for engine in (one, two):
        for at in range(4):
            tokens = prompt(13 * BLOCK + at)
            assert engine.generate(tokens, 1 + at % 3) == sim.expected(tokens, 1 + at % 3)
        assert "saved_bytes" not in engine.counters
        idle()
    assert not two.received
    for engine in (one, two):
        assert "bypasses Worker.execute_model" in engine.connector._scheduler._membership.declined[0]


@pytest.mark.parametrize("zeroes_loads", [False, True])
@pytest.mark.parametrize("name", ZEROED)
def test_no_block_is_zeroed_after_its_load_began(
    pair: Any, sim: Any, prompt: Any, idle: Any, monkeypatch: Any, name: str, zeroes_loads: bool
) -> None:
    """Also where vLLM zeroes what is about to be loaded, as it does before 0.27, and later for groups not loaded."""
    one, two = pair(name)
    if zeroes_loads:
        connector = type(two.connector)
        monkeypatch.setattr(connector, "get_loaded_kv_cache_group_ids", lambda self, request: (), raising=False)
    shared = prompt(5 * BLOCK)
    prompts = {f"r{at}": prompt(5 * BLOCK + 19 * at + 1, shared if at % 2 else ()) for at in range(8)}
    one.generate_all(prompts, 3)
    idle()
    for _ in range(3):
        two.outputs.clear()
        before = two.runners[0].zeroed
        two.generate_all(prompts, 30)
        assert two.outputs == {name: sim.expected(tokens, 30) for name, tokens in prompts.items()}
        assert two.runners[0].zeroed > before
        idle()
        assert two.reset()
    assert two.received


@pytest.mark.parametrize("name", ["Granite 4", "two precisions"])
def test_a_load_that_has_failed_ends_with_its_last_copy(
    engines: Any, model: Any, sim: Any, prompt: Any, idle: Any, spoil: Any, name: str
) -> None:
    """vLLM then zeroes the blocks, or gives them away: what is still copied would be written into them."""
    extra = model(name).get("extra", {}) | {"verify": "all"}
    one, two = (engines(each, **model(name) | {"extra": extra}) for each in ("one", "two"))
    tokens = prompt(9 * BLOCK + 5)
    one.generate(tokens)
    idle()
    spoil(one, tokens, block=3, name="model.layers.0.attn")
    until, started = threading.Event(), itertools.count()
    for device in two.runners[0].devices:
        device._loader._copy = after_the_first(device._loader._copy, started, until)
    two.add("r", tokens, 3)
    two.run(lambda: two.counters.get("blocks_corrupt"))
    for _ in range(3):
        two.step()
    assert not two.received
    until.set()
    two.run()
    two.step()
    assert two.outputs["r"] == sim.expected(tokens, 3)
    assert two.received == ["r"] and two.counters["loads_failed"] == 1


def after_the_first(copy_now: Any, started: Any, until: threading.Event) -> Any:
    def wait(job: Any) -> None:
        assert next(started) == 0 or until.wait(30)
        copy_now(job)

    return wait


@pytest.mark.parametrize("name", ["gpu_worker.Worker", "cpu_worker.CPUWorker", "worker_base.WorkerWrapperBase"])
def test_vllm_s_own_workers_are_told_of_a_step(name: str) -> None:
    """As an executor calls them: by name, with the step as the only argument."""
    module, _, attribute = name.partition(".")
    worker = getattr(importlib.import_module(f"vllm.v1.worker.{module}"), attribute)
    assert list(inspect.signature(worker.execute_model).parameters) == ["self", "scheduler_output"]
