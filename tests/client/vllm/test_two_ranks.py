"""Two ranks of one engine, with the same layers or with some each: each has its own part of every block, and only both
together make it whole."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

BLOCK = 32
SECOND = slice(1, 2)


@pytest.fixture(params=[{"tensor_parallel_size": 2}, {"stages": (2, 1)}], ids=["tensor parallel", "pipeline parallel"])
def pairs(engines: Any, request: pytest.FixtureRequest) -> Any:
    return lambda name, **options: engines(name, **request.param, **options)


def test_ranks_load_what_ranks_have_saved(pairs: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(5 * BLOCK + 7)
    one, two = pairs("one"), pairs("two")
    for engine, loaded in ((one, 0), (two, 5 * BLOCK)):
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()
    assert [runner.received for runner in two.runners] == [["r0"], ["r0"]]


def test_a_load_ends_with_the_slowest_rank(pairs: Any, daemon: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(5 * BLOCK + 7)
    one, two = pairs("one"), pairs("two")
    one.generate(tokens)
    idle()
    with two.held_copies(SECOND):
        request = two.add("r", tokens, 3)
        two.run(lambda: two.received)
        for _ in range(5):
            two.step()
        assert request.status.name == "WAITING_FOR_REMOTE_KVS" and not two.computed
        assert daemon.status()["pool"]["leases"] == 1
    two.run()
    assert two.outputs["r"] == sim.expected(tokens, 3)
    assert [runner.received for runner in two.runners] == [["r"], ["r"]]


def test_a_block_is_found_once_every_rank_has_saved_it(
    pairs: Any, daemon: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    tokens = prompt(5 * BLOCK + 7)
    one, two = pairs("one"), pairs("two")
    with one.held_copies(SECOND):
        one.generate(tokens)
        daemon.wait_status(lambda s: s["pool"]["blocks_writing"] == 5, "the reservation")
        assert two.generate(tokens, name="early") == sim.expected(tokens, 1)
        assert two.prefills["early"] == (len(tokens), 0, 0)
    idle()
    assert two.reset()
    assert two.generate(tokens, name="late") == sim.expected(tokens, 1)
    assert two.prefills["late"] == (7, 0, 5 * BLOCK)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_load_of_one_rank_fails(pairs: Any, sim: Any, prompt: Any, idle: Any, spoil: Any, policy: str) -> None:
    tokens = prompt(6 * BLOCK + 1)
    extra = {"verify": "all", "kv_load_failure_policy": policy}
    one, two = pairs("one", extra=extra), pairs("two", extra=extra)
    one.generate(tokens)
    idle()
    spoil(one, tokens, block=3, rank=1)
    two.add("r", tokens, 5)
    two.run()
    assert [runner.received for runner in two.runners] == [["r"], ["r"]]
    assert two.counters["loads_failed"] == 1
    if policy == "fail":
        assert two.finished == {"r": "error"} and not two.outputs["r"]
    else:
        assert two.outputs["r"] == sim.expected(tokens, 5)
        assert two.computed == 3 * BLOCK + 1 + 4, "what both ranks have loaded is kept"


def test_the_session_of_one_rank_dies(pairs: Any, daemon: Any, sim: Any, prompt: Any, idle: Any, until: Any) -> None:
    """A load that runs needs no session of the rank. Saves and hits come again with its next session."""
    tokens = prompt(6 * BLOCK + 1)
    one, two = pairs("one"), pairs("two")
    one.generate(tokens)
    idle()
    session = two.workers[1]._session
    with two.held_copies():
        request = two.add("r", tokens, 2)
        two.run(lambda: request.status.name == "WAITING_FOR_REMOTE_KVS")
        with socket.socket(fileno=os.dup(session.daemon.connection.handshake.descriptor)) as door:
            door.shutdown(socket.SHUT_RDWR)
        until(lambda: session.counters.get("links_lost"), "the end of the session")
    two.run()
    assert two.outputs["r"] == sim.expected(tokens, 2)
    assert two.prefills["r"] == (1, 0, 6 * BLOCK)
    until(lambda: session.up, "the next session")

    def found() -> bool:
        assert two.reset()
        name, other = f"r{len(two.outputs)}", prompt(3 * BLOCK + 1)
        assert two.generate(other) == sim.expected(other, 1)
        idle()
        assert one.generate(other, name=name) == sim.expected(other, 1)
        return one.prefills[name] == (1, 0, 3 * BLOCK)

    until(found, "a block that the engine has saved again")


def test_data_parallel_ranks_share_blocks(engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Each is an engine of its own, with sessions of its own."""
    tokens = prompt(5 * BLOCK + 7)
    ranks = [engines("one", data_parallel_rank=rank, tensor_parallel_size=2) for rank in range(2)]
    for engine, loaded in zip(ranks, (0, 5 * BLOCK), strict=True):
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()
    sessions = [session["engine"] for session in daemon.status()["sessions"]]
    assert len(sessions) == 6 and sorted(map(sessions.count, set(sessions))) == [3, 3]
    others = [prompt(3 * BLOCK) for _ in ranks]
    for engine, own in zip(ranks, others, strict=True):
        engine.add("own", own)
        engine.add("same", tokens)
    while sum(engine.step() for engine in ranks):
        pass
    for engine, own in zip(ranks, others, strict=True):
        assert (engine.outputs["own"], engine.outputs["same"]) == (sim.expected(own, 1), sim.expected(tokens, 1))
