"""Host memory need not double what devices have: those copies make room first, and come back in time.

`python -m pytest tests/client/vllm/test_device_cache.py -k random` runs a few hundred steps of a random schedule. With
KVCACHE_STEPS=100000 it runs as many.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import peer_memory
import pytest
from test_little_memory import BLOCK, STUCK_SECONDS, queues, slow_or_failing

LENGTH = 8 * BLOCK  # of a prompt; the device has room for 8 of them, and the host for 21


@pytest.fixture
def daemon(start_daemon: Any, request: Any) -> Any:
    return start_daemon(size=getattr(request, "param", "2200KiB"))


def attentive(engines: Any, name: str, **extra: Any) -> Any:
    """Return an engine that gets each of the daemon's answers before its next step, as an engine does that computes."""
    options = {"blocks": 66, "max_model_len": LENGTH + 2 * BLOCK, "max_num_batched_tokens": 4 * BLOCK}
    engine = engines(name, extra={"gate": "off"} | extra, **options)
    runner, session = engine.runners[0], engine.connector.own_side.session
    forward = runner._forward

    def patient_forward(step: Any) -> Any:
        session.ping()
        return forward(step)

    runner._forward = patient_forward
    return engine


def test_a_device_and_the_host_hold_more_together(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """26 prompts, asked for in turn: more than the host has room for, fewer than the host and the device have."""
    one = attentive(engines, "one")
    prompts = [prompt(LENGTH + 3) for _ in range(26)]
    for tokens in prompts * 2:
        assert one.generate(tokens) == sim.expected(tokens, 1)
        idle()
    again = [one.prefills[f"r{number}"][0] for number in range(26, 52)]
    assert sum(again) < 13 * LENGTH, "tokens that it computed the second time; LRU would compute them all"
    assert one.counters["blocks_saved_again"]


@pytest.mark.parametrize("daemon", ["64MiB"], indirect=True)
def test_nothing_is_saved_twice_if_the_host_has_room(
    engines: Any, prompt: Any, idle: Any, stored: Any, daemon: Any
) -> None:
    one = attentive(engines, "one")
    prompts = [prompt(LENGTH + 3) for _ in range(26)]
    for tokens in prompts * 2:
        one.generate(tokens)
        idle()
    assert stored() == 26 * 8 and "blocks_saved_again" not in one.counters


def test_what_a_device_evicts_is_found_by_other_engines(
    engines: Any, sim: Any, prompt: Any, idle: Any, daemon: Any
) -> None:
    """The first prompt is asked for again and again, so it stays on the device of `one` only, until others come."""
    one = attentive(engines, "one")
    wanted = prompt(LENGTH + 3)
    for _ in range(24):
        one.generate(wanted)
        one.generate(prompt(LENGTH + 3))
        idle()
    for _ in range(16):
        one.generate(prompt(LENGTH + 3))
        idle()
    two = attentive(engines, "two")
    assert two.generate(wanted) == sim.expected(wanted, 1)
    assert two.prefills["r0"] == (3, 0, LENGTH)


@pytest.mark.parametrize("kind", ["eager", "compressed", "lazy", "peers"])
def test_random_schedules_on_little_host_memory(
    engines: Any, sim: Any, prompt: Any, request: Any, kind: str, monkeypatch: Any
) -> None:
    """Two engines share prompts of shared beginnings that neither devices nor host have room for. Requests are aborted
    and preempted, copies are slow or fail, caches are reset, some blocks cannot be compressed, or ranks that share
    loads are late."""
    options: dict[str, Any] = {}
    if kind == "compressed":
        monkeypatch.setenv("KVCACHE_COPY_COMPRESS_ON_CPU", "1")
        monkeypatch.setattr(sim, "NOISY", 500)
        options = {"specs": sim.full(6, dtype=sim.torch.bfloat16)}
    if kind == "peers":
        peer_memory.use(monkeypatch)
        options = {"specs": sim.latent(size=32), "heads": 8, "tensor_parallel_size": 2}
    count = int(os.environ.get("KVCACHE_STEPS", "400"))
    draw = random.Random(request.node.name)
    beginnings = [prompt(draw.choice((2, 4, 6)) * BLOCK) for _ in range(6)]
    prompts = [prompt(draw.randrange(6, 12) * BLOCK + draw.randrange(32), draw.choice(beginnings)) for _ in range(60)]
    both = [
        engines(
            name,
            blocks=blocks,
            max_model_len=20 * BLOCK,
            max_num_seqs=6,
            max_num_batched_tokens=4 * BLOCK,
            async_scheduling=draw.random() < 0.5,
            extra={"save_mode": "lazy" if kind == "lazy" else "eager", "peer_loads": "auto"},
            **options,
        )
        for name, blocks in (("one", 25), ("two", 60))
    ]
    for engine in both:
        for thread in engine._copiers(sim.ALL):
            copy = thread._copy
            thread._copy = lambda job, copy=copy: slow_or_failing(draw, copy, job)
        if kind == "peers":
            peer_memory.wait_met(engine)
    wanted: dict[str, tuple[list[int], int]] = {}
    live: list[tuple[Any, str]] = []
    taken, progress, since = 0, 0, time.monotonic()
    while taken < count or live:
        for engine in both:
            if taken < count and sum(each is engine for each, _ in live) < 8 and draw.random() < 0.3:
                name, tokens, answer = f"r{len(wanted)}", draw.choice(prompts), draw.choice((1, 3, 40))
                wanted[name] = tokens, answer
                engine.add(name, tokens, answer)
                live.append((engine, name))
            engine.step()
            if not any(each is engine for each, _ in live) and draw.random() < 0.3:
                assert engine.reset()
        if live and draw.random() < 0.02:
            engine, name = draw.choice(live)
            engine.abort(name)
        if kind == "peers" and draw.random() < 0.01:
            late = draw.choice(engine.workers).loads.peers
            if not late._events:
                late._put(lambda: time.sleep(0.3) or [])
        taken += 1
        for engine, name in [each for each in live if each[1] not in each[0].scheduler.requests]:
            live.remove((engine, name))
            tokens, answer = wanted[name]
            output = engine.outputs[name]
            assert output == sim.expected(tokens, answer)[: len(output)], f"{name} after {taken} steps"
        done = len(wanted) - len(live) + sum(len(each) for engine in both for each in engine.outputs.values())
        if done != progress:
            progress, since = done, time.monotonic()
        assert time.monotonic() - since < STUCK_SECONDS or not live, [queues(engine) for engine in both]
    loads = [len(engine.received) for engine in both]
    again = [engine.counters.get("blocks_saved_again", 0) for engine in both]
    print(f"vLLM {sim.VERSION}, {kind}: {taken} steps, {len(wanted)} requests, loads {loads}, saved again {again}")
    assert all(loads) and (any(again) or kind == "peers")  # vLLM makes steps too long for that with MLA on a CPU
