"""What vLLM makes of a hit that it is offered: it may have to ask again, and may take less of it, or nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_client.engines.vllm.compat import stops_before_loading_requests
from kvcache_client.scheduler import lookups

BLOCK = 32


@pytest.fixture
def patient(monkeypatch: Any) -> None:
    """A request waits for blocks that are being written for as long as the test wants."""
    monkeypatch.setattr(lookups, "PENDING_WAIT", 1000.0)


def writing(engine: Any, daemon: Any, tokens: list[int]) -> None:
    """Have an engine whose copies are held compute a prompt."""
    engine.generate(tokens)
    daemon.wait_status(lambda s: s["pool"]["blocks_writing"] == len(tokens) // BLOCK, "the reservation")


# (None, False): to be asked again.


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("end", ["come", "aborted", "lost"])
def test_a_request_waits_for_blocks_that_are_being_written(
    engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any, end: str
) -> None:
    tokens = prompt(5 * BLOCK + 3)
    one, two = engines("one"), engines("two")
    with one.held_copies(fail=end == "lost"):
        writing(one, daemon, tokens)
        request = two.add("r", tokens, 2)
        for _ in range(5):
            two.step()
        assert request.status.name == "WAITING" and not two.computed
        if end == "aborted":
            two.abort("r")
            two.run()
            assert two.finished == {} and not two.computed
    idle()
    if end == "aborted":
        two.add("r", tokens, 2)
    two.run()
    assert two.outputs["r"] == sim.expected(tokens, 2)
    assert two.prefills["r"] == ((len(tokens), 0, 0) if end == "lost" else (3, 0, 5 * BLOCK))


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_a_consumer_waits_for_its_producer(
    engines: Any, daemon: Any, stored: Any, sim: Any, prompt: Any, idle: Any, monkeypatch: Any, role: str
) -> None:
    """An engine that computes prompts hands them to one that only loads; one that saves, too, waits less long."""
    monkeypatch.setattr(lookups, "PENDING_WAIT", 0.0)
    monkeypatch.setattr(lookups, "PRODUCER_WAIT", 1000.0)
    tokens = prompt(5 * BLOCK + 3)
    one = engines("one", transfer={"kv_role": "kv_producer"})
    two = engines("two", transfer={"kv_role": role})
    with one.held_copies():
        writing(one, daemon, tokens)
        two.add("r", tokens, 2)
        for _ in range(3):
            two.step()
        assert bool(two.computed) is (role == "kv_both")
    idle()
    two.run()
    assert two.outputs["r"] == sim.expected(tokens, 2)
    assert two.prefills["r"] == ((3, 0, 5 * BLOCK) if role == "kv_consumer" else (len(tokens), 0, 0))
    before = stored()
    two.generate(prompt(5 * BLOCK), name="own")
    one.generate(tokens, name="again")
    idle()
    assert stored() == before + (0 if role == "kv_consumer" else 5), "a consumer saves nothing"
    one.reset()
    one.generate(tokens, name="computed")
    assert one.prefills["computed"] == (len(tokens), 0, 0), "a producer loads nothing"


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_a_writer_that_stands_still_is_waited_for_less_each_time(
    engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any, role: str
) -> None:
    tokens = prompt(5 * BLOCK + 3)
    one, two = engines("one"), engines("two", transfer={"kv_role": role}, extra={"gate": "off", "on_reset": "keep"})
    clock, took = SimpleNamespace(now=0.0), []
    two.connector._scheduler._clock = lambda: clock.now
    with one.held_copies():
        writing(one, daemon, tokens)
        for at in range(8):
            two.add(f"{at}", tokens, 1)
            begin = clock.now
            while not two.outputs.get(f"{at}"):
                two.step()
                clock.now += 0.005
            took.append(clock.now - begin)
            two.run()
            assert two.reset()
    assert took == sorted(took, reverse=True) and took[-1] < took[0] / 4
    idle()
    assert two.generate(tokens, name="last") == sim.expected(tokens, 1)
    assert two.prefills["last"] == (3, 0, 5 * BLOCK), "the writer has moved"


@pytest.mark.usefixtures("patient")
def test_the_daemon_dies_while_a_request_waits(engines: Any, start_daemon: Any, sim: Any, prompt: Any) -> None:
    daemon = start_daemon()
    tokens = prompt(5 * BLOCK + 3)
    one, two = (engines(name, endpoint=daemon.endpoint) for name in ("one", "two"))
    with one.held_copies():
        writing(one, daemon, tokens)
        two.add("r", tokens, 2)
        for _ in range(3):
            two.step()
        assert not two.computed
        daemon.kill()
        two.run()
    assert two.outputs["r"] == sim.expected(tokens, 2)
    assert two.prefills["r"] == (len(tokens), 0, 0)


@pytest.mark.parametrize("end", ["well", "aborted", "failed"])
def test_requests_of_one_prefix_wait_for_one_load(
    engines: Any, sim: Any, prompt: Any, idle: Any, spoil: Any, end: str
) -> None:
    shared = prompt(6 * BLOCK)
    prompts = {name: prompt(6 * BLOCK + 5, shared) for name in "abc"}
    extra = {"verify": "all"}
    one, two = engines("one", extra=extra), engines("two", extra=extra)
    one.generate(shared)
    idle()
    if end == "failed":
        spoil(one, shared, block=4)
    with two.held_copies():
        for name, tokens in prompts.items():
            two.add(name, tokens, 2)
        for _ in range(3):
            two.step()
        assert two.counters["lookups_waited_for_load"] == 2 and not two.computed
        if end == "aborted":
            two.abort("a")
            del prompts["a"]
    two.run()
    assert {name: two.outputs[name] for name in prompts} == {n: sim.expected(t, 2) for n, t in prompts.items()}
    if end == "well":
        assert two.prefills == {"a": (5, 0, 6 * BLOCK), "b": (5, 6 * BLOCK, 0), "c": (5, 6 * BLOCK, 0)}
        assert two.counters["loaded_bytes"] == 6 * 3 * sim.PAGE


# Less than was offered.


@pytest.mark.parametrize("blocks", range(6))
def test_vllm_takes_fewer_tokens_than_it_is_offered(
    engines: Any, unleased: Any, sim: Any, prompt: Any, idle: Any, take: Any, blocks: int
) -> None:
    """As where another connector's hit is preferred, or a limit cuts it."""
    tokens = prompt(5 * BLOCK + 3)
    one, two = engines("one"), engines("two")
    one.generate(tokens)
    idle()
    offers = take(two, blocks * BLOCK)
    two.add("r", tokens, 2)
    two.step()
    assert offers == [(5 * BLOCK, True)]
    if not blocks:
        unleased()
    two.run()
    assert two.outputs["r"] == sim.expected(tokens, 2)
    assert two.prefills["r"] == (len(tokens) - blocks * BLOCK, 0, blocks * BLOCK)
    idle()


def test_a_hit_within_a_block_is_left_to_vllm(engines: Any, prompt: Any, idle: Any) -> None:
    """Where vLLM itself has a part of a block, the connector offers nothing."""
    tokens = prompt(5 * BLOCK + 3)
    one, two = engines("one"), engines("two")
    one.generate(tokens)
    idle()
    request = two.add("r", tokens, 2)
    assert [two.connector.get_num_new_matched_tokens(request, has)[0] for has in (0, 7, BLOCK)] == [160, 0, 128]


@pytest.mark.parametrize("end", ["room", "abort"])
def test_there_is_no_room_for_what_is_offered(
    engines: Any, daemon: Any, unleased: Any, sim: Any, prompt: Any, idle: Any, end: str
) -> None:
    """vLLM asks in every step, and allocates nothing."""
    tokens, other = prompt(12 * BLOCK + 3), prompt(9 * BLOCK)
    one, two = engines("one"), engines("two", blocks=16, max_model_len=480)
    one.generate(tokens)
    idle()
    two.add("first", other, 2 * BLOCK)
    two.step()
    request = two.add("r", tokens, 2)
    for _ in range(10):
        two.step()
        assert daemon.status()["pool"]["leases"] == 1, "the offer stands"
    assert request.status.name == "WAITING"
    if end == "abort":
        two.abort("r")
        two.step()
        unleased()
    two.run()
    assert two.outputs["first"] == sim.expected(other, 2 * BLOCK)
    assert two.outputs["r"] == ([] if end == "abort" else sim.expected(tokens, 2))
    assert two.received == ([] if end == "abort" else ["r"])


def test_an_offer_that_vllm_does_not_come_back_to_ends(
    engines: Any, daemon: Any, unleased: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    """A more important request comes before the one that was offered a hit, and finds no room either."""
    tokens, other = prompt(12 * BLOCK + 3), prompt(9 * BLOCK)
    urgent = prompt(13 * BLOCK)
    one = engines("one")
    two = engines("two", blocks=16, max_model_len=480, scheduling_policy="priority")
    one.generate(tokens)
    idle()
    two.add("first", other, 2 * BLOCK, priority=0)
    two.step()
    two.add("offered", tokens, 2, priority=9)
    two.step()
    assert daemon.status()["pool"]["leases"] == 1
    two.add("urgent", urgent, 2, priority=1)
    for _ in range(4):
        two.step()
    unleased()
    assert two.counters["leases_given_back"] == 1
    two.run()
    assert two.outputs["offered"] == sim.expected(tokens, 2)
    assert two.outputs["urgent"] == sim.expected(urgent, 2)
    if stops_before_loading_requests():  # then nothing urgent may have to wait for the blocks of a load
        assert not two.received and two.counters["loads_without_room"]
    else:
        assert two.received == ["offered"]
