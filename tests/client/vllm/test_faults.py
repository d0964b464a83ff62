"""The daemon dies, and comes back, while the engine's requests load and save; or a side of the connector fails."""

from __future__ import annotations

from typing import Any

import pytest

BLOCK = 32


@pytest.fixture
def world(engines: Any, start_daemon: Any) -> Any:
    """A daemon of this test's own, and two engines."""
    daemon = start_daemon(keep="true")
    return daemon, *(engines(name, endpoint=daemon.endpoint) for name in ("one", "two"))


def settled(daemon: Any) -> None:
    daemon.wait_status(lambda s: not s["pool"]["blocks_writing"] and not s["pool"]["leases"], "an idle cache")


def finds(engine: Any, sim: Any, tokens: list[int], loaded: int) -> bool:
    """Return whether an engine that forgets its own cache loads so many tokens of a prompt."""
    assert engine.reset()
    name = f"r{len(engine.outputs)}"
    assert engine.generate(tokens, 2, name) == sim.expected(tokens, 2)
    return engine.prefills[name] == (len(tokens) - loaded, 0, loaded)


@pytest.mark.parametrize("after", ["nobody", "the same region", "another region"])
def test_the_daemon_dies_while_a_request_loads(
    world: Any, start_daemon: Any, sim: Any, prompt: Any, until: Any, after: str
) -> None:
    """What is mapped stays mapped: the load ends well. Where another region is mapped meanwhile, it may not have."""
    daemon, one, two = world
    tokens = prompt(6 * BLOCK + 1)
    one.generate(tokens)
    settled(daemon)
    with two.held_copies():
        two.add("r", tokens, 4)
        two.step()
        daemon.kill()
        if after != "nobody":
            daemon = start_daemon(keep="true", endpoint=daemon.endpoint, fresh=after == "another region")
            until(lambda: two.connector.own_side.session.up and two.workers[0]._session.up, "the next daemon")
    two.run()
    assert two.received == ["r"]
    assert two.outputs["r"] == sim.expected(tokens, 4)
    assert not two.counters.get("loads_failed")
    if after == "nobody":
        assert finds(two, sim, tokens, 0)
        daemon = start_daemon(keep="true", endpoint=daemon.endpoint)
    until(lambda: one.workers[0]._session.up and one.connector.own_side.session.up, "the next daemon")
    until(lambda: finds(one, sim, tokens, 6 * BLOCK) or settled(daemon), "hits of the next daemon")
    settled(daemon)


@pytest.mark.parametrize("after", ["the same region", "another region"])
def test_the_daemon_dies_while_blocks_are_saved(
    world: Any, start_daemon: Any, sim: Any, prompt: Any, until: Any, after: str
) -> None:
    """A settlement that the daemon did not hear is sent to the next one, if that has the region."""
    daemon, one, two = world
    tokens = prompt(6 * BLOCK + 1)
    with one.held_copies():
        one.generate(tokens)
        daemon.wait_status(lambda s: s["pool"]["blocks_writing"] == 6, "the reservation")
        daemon.kill()
    until(lambda: one.workers[0].counters.get("saved_bytes"), "the end of the copy")
    daemon = start_daemon(keep="true", endpoint=daemon.endpoint, fresh=after == "another region")
    for engine in (one, two):
        until(
            lambda engine=engine: engine.workers[0]._session.up and engine.connector.own_side.session.up,
            "the next daemon",
        )
    settled(daemon)
    assert finds(two, sim, tokens, 6 * BLOCK if after == "the same region" else 0)
    settled(daemon)
    assert finds(one, sim, tokens, 6 * BLOCK)


def test_the_daemon_dies_again_and_again_while_requests_run(
    world: Any, start_daemon: Any, sim: Any, prompt: Any, until: Any
) -> None:
    daemon, one, two = world
    prompts = {f"{at}": prompt(2 * BLOCK + 37 * at) for at in range(7)}
    for engine in (one, two):
        engine.delay(0.002)
        for name, tokens in prompts.items():
            engine.add(name, tokens, 60)
    for life in range(2):  # the second daemon has the region of the first, and the third another one
        for _ in range(9):
            one.step()
            two.step()
        daemon.kill()
        for _ in range(3):
            one.step()
            two.step()
        daemon = start_daemon(keep="true", endpoint=daemon.endpoint, fresh=life == 1)
        for engine in (one, two):
            until(lambda engine=engine: engine.connector.own_side.session.up, "the next daemon")
    for engine in (one, two):
        engine.run()
        assert engine.outputs == {name: sim.expected(tokens, 60) for name, tokens in prompts.items()}


@pytest.mark.parametrize("what", ["loads", "saves"])
def test_a_plan_is_carried_out_in_its_own_region_only(
    world: Any, start_daemon: Any, sim: Any, prompt: Any, until: Any, what: str
) -> None:
    """The next daemon comes, with another region, between the scheduler's plan and the rank."""
    daemon, one, two = world
    tokens = prompt(6 * BLOCK + 1)
    if what == "loads":
        one.generate(tokens)
        settled(daemon)
    executor = two.core.model_executor
    execute, met = executor.execute_model, []

    def late(step: Any, *arguments: Any, **named: Any) -> Any:
        if getattr(step.kv_connector_metadata.plan, what) and not met:
            met.append(step)
            region = two.workers[0]._session.region
            daemon.kill()
            start_daemon(keep="true", endpoint=daemon.endpoint, fresh=True)
            until(lambda: two.workers[0]._session.region is not region, "the next region")
        return execute(step, *arguments, **named)

    executor.execute_model = late
    two.add("r", tokens, 30)
    two.run()
    assert met and two.outputs["r"] == sim.expected(tokens, 30)
    assert two.counters[f"{what}_of_another_region"]


@pytest.mark.parametrize("side", ["scheduler", "rank"])
def test_what_is_being_saved_when_a_side_fails_does_not_count(
    engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any, side: str
) -> None:
    """The engine goes on, and nothing keeps it from writing to blocks that are still to be saved."""
    one, two = engines("one", blocks=6, max_model_len=5 * BLOCK), engines("two")
    tokens, others = prompt(4 * BLOCK + 1), prompt(4 * BLOCK + 1)
    hooks = {"scheduler": (one.connector._scheduler, "plan"), "rank": (one.workers[0], "begin")}

    def fail(*arguments: Any) -> None:
        raise RuntimeError("a fault of ours")

    with one.held_copies():
        one.generate(tokens)
        daemon.wait_status(lambda s: s["pool"]["blocks_writing"] == 4, "the reservation")
        setattr(*hooks[side], fail)
        assert one.generate(others) == sim.expected(others, 1)
    idle()
    assert two.generate(tokens) == sim.expected(tokens, 1)
    assert two.prefills["r0"] == (4 * BLOCK + 1, 0, 0)


@pytest.mark.parametrize("where", ["the plan of the load", "a rank", "the lookup of another"])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_only_what_was_to_be_loaded_is_reported_as_not_loaded(
    engines: Any, sim: Any, prompt: Any, idle: Any, where: str, overlaps: bool, policy: str
) -> None:
    """`b` shares its first blocks with `a`, which runs, and is to load the others when something fails."""
    short = prompt(4 * BLOCK)
    long, running = prompt(8 * BLOCK + 5, short), prompt(4 * BLOCK + 3, short)
    engines("other").generate(long)
    idle()
    one = engines("one", async_scheduling=overlaps, extra={"kv_load_failure_policy": policy})
    reported: set[int] = set()
    update, ours = one.scheduler.update_from_output, one.connector._scheduler

    def noted(step: Any, output: Any) -> Any:
        if done := output.kv_connector_output:
            reported.update(done.invalid_block_ids or ())
        return update(step, output)

    def fault(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("a fault of ours")

    one.scheduler.update_from_output = noted
    one.add("a", running, 60)
    one.run(lambda: len(one.outputs["a"]) >= 9)
    shared = {*one.scheduler.kv_cache_manager.get_block_ids("a")[0]}
    one.add("b", long, 20)
    if where == "a rank":
        one.workers[0].load = fault
    elif where == "the plan of the load":
        ours.plan = fault
    else:
        matched = ours.matched_tokens
        ours.matched_tokens = lambda request, computed: (fault if request.id == "c" else matched)(request, computed)
        one.add("c", prompt(2 * BLOCK), 20)
    one.run()
    one.step()
    assert reported and not reported & shared
    assert one.outputs["a"] == sim.expected(running, 60) and one.finished["a"] == "length"
    assert policy == "fail" or one.outputs["b"] == sim.expected(long, 20)
