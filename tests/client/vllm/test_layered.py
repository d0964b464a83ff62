"""Loads that run while the rest of their request is computed: each layer waits for its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache_client.scheduler.cost_model import Overlap
from kvcache_client.step_plan import StepPlan
from kvcache_client.worker import layered
from kvcache_proto.types import REF_BYTES

BLOCK = 32
HIT = 10 * BLOCK
CONTEXTS = {
    "heads": 2,
    "tensor_parallel_size": 4,
    "decode_context_parallel_size": 2,
    "extra": {"overlap": "auto", "block_size": 2 * BLOCK},
}


@pytest.fixture(autouse=True)
def _always(monkeypatch: Any) -> None:
    """Whatever the times of this toy are, overlapping wins; its blocks are large enough, and not all copies begin at
    once."""
    monkeypatch.setattr(layered, "LEAST", 1)
    monkeypatch.setattr(layered, "AHEAD", 1)
    monkeypatch.setattr(Overlap, "wins", lambda self, *_: sum(self._ready.values()) >= self.ranks)


@pytest.fixture
def loaded(engines: Any, prompt: Any, idle: Any) -> Callable[..., tuple[Any, list[int]]]:
    """`loaded(**options)` returns an engine that knows its layers, whose copies take long, and a prompt that begins
    with what another one has saved."""

    def make(**options: Any) -> tuple[Any, list[int]]:
        options.setdefault("extra", {"overlap": "auto"})
        one, two = engines("one", **options), engines("two", **options)
        tokens = prompt(HIT + 2 * BLOCK + 3)
        one.generate(tokens[: HIT + 1])
        idle()
        two.generate(prompt(2 * BLOCK + 1))
        idle()
        two.delay(0.02)
        return two, tokens

    return make


def loads_when_computing(engine: Any, rank: int = 0) -> list[int]:
    """Note how many blocks are being loaded when each step begins to compute."""
    runner = engine.runners[rank]
    forward, found = runner._forward, []

    def note(step: Any) -> Any:
        found.append(len(runner.jobs.blocks("load")))
        return forward(step)

    runner._forward = note
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True}, {"tensor_parallel_size": 2}, {"stages": (2, 2)}, {"specs": "latent"}, CONTEXTS],
    ids=["alone", "asynchronous scheduling", "ranks", "stages", "MLA", "contexts"],
)
def test_a_request_is_computed_while_it_loads(loaded: Any, sim: Any, idle: Any, options: dict[str, Any]) -> None:
    if "specs" in options:
        options = {"specs": sim.latent()}
    if "stages" in options:
        options = options | {"specs": sim.full(4)}
    engine, tokens = loaded(**options)
    loads = loads_when_computing(engine)
    assert engine.generate(tokens, name="r") == sim.expected(tokens, 1)
    assert not engine.connector._scheduler._loads.are_coming, "it has heard of the end with the step that needs it"
    assert engine.prefills["r"] == (len(tokens) - HIT, 0, HIT)
    assert loads[0] > 0, "it computes before its load has ended"
    assert engine.counters["loads_layered"] == len(engine.runners)
    assert engine.counters["loaded_bytes"] > 0
    assert engine.received == ["r"]
    idle()


def test_copies_begin_while_the_layers_before_them_are_computed(loaded: Any, sim: Any) -> None:
    """And only the first ones before there is anything to compute."""
    engine, tokens = loaded()
    device, connector, happened = engine.workers[0]._device, engine.runners[0].connector, []

    def note(where: Any, method: str, what: Callable[..., Any]) -> None:
        inner = getattr(where, method)

        def outer(*arguments: Any) -> Any:
            happened.append((method, what(*arguments)))
            return inner(*arguments)

        setattr(where, method, outer)

    note(device, "load", lambda job: None if job.later else job.section)
    note(device, "start", lambda job: job.section)
    note(device, "hold", lambda job: job.section)
    note(connector, "wait_for_layer_load", lambda name: name)
    assert engine.generate(tokens) == sim.expected(tokens, 1)
    for where, method in ((device, "load"), (device, "start"), (device, "hold"), (connector, "wait_for_layer_load")):
        delattr(where, method)  # a connector that lives on lets no other work in this process
    layers = list(engine.runners[0].layers)
    expected = [("load", 1), *[("load", None)] * (len(layers) - 1), ("wait_for_layer_load", layers[0]), ("hold", 1)]
    for section, layer in enumerate(layers[1:], start=2):
        expected += [("start", section), ("wait_for_layer_load", layer), ("hold", section)]
    assert len(layers) > 2 and happened[: len(expected)] == expected


def test_it_may_begin_in_a_step_that_computes_another_prompt(loaded: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Model Runner V2 starts loads once the step has been submitted: nothing of the step reads what they fill."""
    engine, tokens = loaded()
    other = prompt(2 * BLOCK + 1)
    engine.add("r", tokens, 1)
    engine.add("other", other, 1)
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 1) and engine.outputs["other"] == sim.expected(other, 1)
    assert engine.counters["loads_layered"] == 1
    assert "loads_unannounced" not in engine.counters
    assert engine.prefills["r"][2] == HIT
    idle()


def test_a_step_that_computes_nothing_does_not_wait_for_it(loaded: Any, sim: Any) -> None:
    """The request can be scheduled at once: the load is reported when it begins."""
    engine, tokens = loaded()
    engine.add("r", tokens, 1)
    engine.run(lambda: engine.received)
    assert engine.runners[0].jobs.blocks("load")
    rank, waited = engine.workers[0], []
    rank._device.linger = waited.append
    rank.received(idle=True)
    del rank._device.linger
    assert not waited
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 1)


def test_with_heads_as_shards(loaded: Any, sim: Any) -> None:
    engine, tokens = loaded(
        heads=4, tensor_parallel_size=2, extra={"share_tp": True, "overlap": "auto"}, layout="LBHNC"
    )
    engine.add("r", tokens, 2)
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 2)
    assert engine.counters["loads_layered"] == 2


def test_it_can_be_turned_off(loaded: Any, sim: Any) -> None:
    engine, tokens = loaded(extra={"overlap": "off"})
    engine.add("r", tokens, 2)
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 2)
    assert "loads_layered" not in engine.counters


def test_beside_others_a_request_loads_first(loaded: Any, sim: Any, prompt: Any) -> None:
    engine, tokens = loaded()
    engine.add("other", prompt(5), 50)
    engine.step()
    engine.add("r", tokens, 2)
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 2)
    assert "loads_layered" not in engine.counters


@pytest.mark.parametrize("generates", [False, True])
def test_a_request_is_aborted_while_it_loads(loaded: Any, daemon: Any, sim: Any, prompt: Any, generates: bool) -> None:
    """Its blocks, all that the device has, are given to others before the load has filled them.

    Layers are only announced after their new KV was written, and a short prompt's need not be.
    """
    engine, tokens = loaded(blocks=14, max_model_len=13 * BLOCK)
    engine.delay(0.3)
    engine.add("r", tokens, 1)
    engine.run(lambda: engine.received)
    assert engine.runners[0].jobs.blocks("load")
    assert daemon.status()["pool"]["leases"] == 1, "what is being read is not evicted"
    engine.abort("r")
    other, count = (prompt(5), 5 * BLOCK) if generates else (prompt(12 * BLOCK), 3)
    engine.add("other", other, count)
    engine.run()
    assert engine.outputs["other"] == sim.expected(other, count)


def test_the_lease_of_an_aborted_request_ends(loaded: Any, daemon: Any, unleased: Any) -> None:
    """The engine is idle: no step waits for the layers that have not been asked for yet."""
    engine, tokens = loaded()
    engine.add("r", tokens, 1)
    engine.run(lambda: engine.received)
    assert daemon.status()["pool"]["leases"] == 1
    engine.abort("r")
    engine.run()
    unleased()


def test_a_step_that_computes_nothing_gives_away_what_is_being_loaded(loaded: Any, sim: Any) -> None:
    """To a request whose own load fails, for example. The next step computes it in these blocks, and its plan does not
    name them again."""
    engine, tokens = loaded()
    engine.add("r", tokens, 1)
    engine.run(lambda: engine.received)
    loading, rank = engine.runners[0].jobs, engine.workers[0]
    blocks = loading.blocks("load")
    assert blocks
    rank.begin(StepPlan(rank._begun + 1, given=[10_000]), idle=True)
    assert loading.blocks("load"), "others are given away"
    rank.begin(StepPlan(rank._begun + 1, given=list(blocks)), idle=True)
    assert not loading.blocks("load"), "what is submitted from now on comes after the load"
    rank._begun -= 2
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 1)


def test_a_load_overlaps_after_one_that_was_aborted(loaded: Any, sim: Any) -> None:
    """Whose last copy ended in the step that gave it up."""
    engine, tokens = loaded()
    engine.add("r", tokens, 1)
    engine.run(lambda: engine.received)
    device = engine.workers[0]._device
    leave = device.leave_step

    def late() -> None:
        leave()
        engine.workers[0].loads.early.layered.start_all()
        assert device.drain(10)

    device.leave_step = late
    engine.abort("r")
    engine.run()
    del device.leave_step
    engine.reset()
    loads = loads_when_computing(engine)
    engine.add("again", tokens, 2)
    engine.run()
    assert engine.outputs["again"] == sim.expected(tokens, 2)
    assert loads[0] > 0 and engine.counters["loads_layered"] == 2


def test_a_step_that_announces_nothing_waits_for_the_load_that_begins_with_it(
    loaded: Any, sim: Any, prompt: Any, monkeypatch: Any
) -> None:
    """Steps that only generate are often captured as a whole in a graph."""
    engine, tokens = loaded()
    runner = engine.runners[0]
    announce, forward, sizes = runner._announce, runner._forward, []

    def note(step: Any) -> Any:
        sizes.append(step.total_num_scheduled_tokens)
        return forward(step)

    runner._forward = note
    runner._announce = lambda *arguments: announce(*arguments) if sizes[-1] > 16 else None
    arrival, came = engine.workers[0].loads.early._ended, []
    wait = arrival.wait_for
    monkeypatch.setattr(arrival, "wait_for", lambda *arguments: came.append(wait(*arguments)))
    short = prompt(5)
    engine.add("r", tokens, 2)
    engine.add("short", short, 2)
    engine.run()
    assert engine.outputs == engine.outputs | {"r": sim.expected(tokens, 2), "short": sim.expected(short, 2)}
    assert engine.counters["loads_layered"] == 1
    assert sizes[0] == 5 and came and all(came), "and not only until its patience ends"


def test_others_read_what_is_being_loaded(loaded: Any, sim: Any, prompt: Any) -> None:
    engine, tokens = loaded()
    engine.add("r", tokens, 2)
    other = prompt(HIT + 7, tokens[:HIT])
    engine.add("other", other, 2)
    engine.run()
    assert engine.outputs == engine.outputs | {"r": sim.expected(tokens, 2), "other": sim.expected(other, 2)}
    assert engine.counters["loads_layered"] == 1


def test_the_daemon_dies_while_a_request_loads(engines: Any, start_daemon: Any, sim: Any, prompt: Any) -> None:
    daemon = start_daemon()
    extra = {"overlap": "auto"}
    one, two = (engines(name, endpoint=daemon.endpoint, extra=extra) for name in ("one", "two"))
    tokens = prompt(HIT + BLOCK)
    one.generate(tokens[: HIT + 1])
    daemon.wait_status(lambda s: s["pool"]["blocks"] == HIT // BLOCK, "the blocks")
    two.generate(prompt(2 * BLOCK + 1))
    two.delay(0.05)
    two.add("r", tokens, 2)
    two.run(lambda: two.received)
    daemon.kill()
    two.run()
    assert two.outputs["r"] == sim.expected(tokens, 2)
    assert two.prefills["r"] == (BLOCK, 0, HIT)


def test_a_side_fails_while_a_request_loads(loaded: Any, sim: Any, monkeypatch: Any) -> None:
    """What the engine computes after that waits for all that is still being loaded."""
    engine, tokens = loaded()
    engine.add("r", tokens, 2)
    engine.run(lambda: engine.received)
    assert engine.runners[0].jobs.blocks("load")

    def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(engine.workers[0].loads.early, "layer", fail)
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 2)
    assert engine.workers[0] is None
    assert engine.runners[0].connector.rank_side.quiet.wait(10)
    engine.generate(tokens)  # its first step reports that the load is over


def test_an_engine_that_does_not_announce_its_layers(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one, two = engines("one"), engines("two", extra={"overlap": "auto"})
    two.runners[0]._announce = lambda *_: None
    tokens = prompt(HIT + BLOCK)
    one.generate(tokens[: HIT + 1])
    idle()
    two.generate(prompt(2 * BLOCK + 1))
    two.delay(0.02)
    assert two.generate(tokens, 2) == sim.expected(tokens, 2)
    assert "loads_layered" not in two.counters


def test_a_step_that_announces_nothing_fails_the_load(loaded: Any, sim: Any) -> None:
    """No engine should do that. What it has computed is thrown away, and the rank takes no part any more."""
    engine, tokens = loaded()
    runner = engine.runners[0]
    compute, workers = runner._forward, engine.workers

    def late(step: Any) -> Any:
        workers[0].loads.early.layered.start_all()
        assert workers[0]._device.drain(10)  # the simulated model must not see what was not there
        return compute(step)

    runner._forward, runner._announce = late, lambda *_: None
    engine.add("r", tokens, 2)
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 2)
    assert engine.counters["loads_unannounced"] == 1
    assert engine.prefills["r"][0] == len(tokens) or runner.computed > len(tokens)
    assert engine.connector._scheduler._membership.declined


def test_slots_that_were_given_away_are_loaded_like_others(loaded: Any, sim: Any, monkeypatch: Any) -> None:
    """A load is not reported early unless its slots are still those that were leased."""
    engine, tokens = loaded()
    region = engine.workers[0]._session.region
    monkeypatch.setattr(type(region), "current", lambda self, refs: sim.np.zeros(len(refs) // REF_BYTES, bool))
    engine.add("r", tokens, 2)
    engine.run()
    assert engine.outputs["r"] == sim.expected(tokens, 2)
    assert engine.prefills["r"] == (len(tokens), 0, 0)
    assert "loads_layered" not in engine.counters and engine.counters["loads_failed"] == 1
