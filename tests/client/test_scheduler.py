"""Scheduler and rank sides together, on a real daemon and real tensors; the engine around them is acted out."""

from __future__ import annotations

import secrets
import signal
import time
from typing import Any

import pytest
from steps import BLOCK, BLOCKS, PATIENCE, SPEC, Request, Rig, idle

from kvcache_client import Session
from kvcache_client.step_plan import NOTHING


def test_what_one_engine_computed_another_one_loads(rigs: Any, daemon: Any) -> None:
    one, two = rigs("one"), rigs("two")
    request = Request("r", 5 * BLOCK)
    assert one.scheduler.matched_tokens(request, 0) == (0, False)
    one.run(request, [3, 1, 4, 15, 9])
    idle(daemon, 5)
    again = Request("s", 5 * BLOCK + 1, request.block_hashes)
    assert two.scheduler.matched_tokens(again, 0) == (5 * BLOCK, True)
    assert two.scheduler.matched_tokens(again, 2 * BLOCK) == (3 * BLOCK, True)
    two.admit(again, [20, 21, 22, 23, 24, 25], 2 * BLOCK, 3 * BLOCK)
    before = [two.block(number) for number in range(BLOCKS)]
    two.step()
    assert two.await_loads() == {"s"}
    loaded = {22: one.block(4), 23: one.block(15), 24: one.block(9)}
    assert [two.block(n) for n in range(BLOCKS)] == [loaded.get(n, before[n]) for n in range(BLOCKS)]
    idle(daemon, 5)


def test_a_whole_prompt_is_loaded_but_not_its_last_block_alone(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    assert rig.scheduler.matched_tokens(Request("s", 4 * BLOCK, request.block_hashes), 0) == (4 * BLOCK, True)
    assert rig.scheduler.matched_tokens(Request("t", 4 * BLOCK, request.block_hashes), 3 * BLOCK) == (0, False)
    assert rig.scheduler.matched_tokens(Request("u", 4 * BLOCK, request.block_hashes), 7) == (0, False)


def test_blocks_leave_as_they_fill(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 3 * BLOCK)
    rig.admit(request, [5, 6, 7, 8])
    assert rig.step({request: BLOCK + 3}).saves == []
    rig.session.ping()
    assert [job.blocks for job in rig.step({request: BLOCK - 4}).saves] == [[5]]  # one token short of the second
    assert rig.step({request: 1}).saves == []
    rig.session.ping()
    assert [job.blocks for job in rig.step({request: BLOCK}).saves] == [[6]]
    request.block_hashes.append(secrets.token_bytes(32))  # generated
    request.num_tokens += BLOCK
    rig.step({request: BLOCK})
    rig.scheduler.finished(request)
    rig.step()
    idle(daemon, 4)


def test_prompts_only(rigs: Any, daemon: Any) -> None:
    rig = rigs("one", save="prompt")
    request = Request("r", 2 * BLOCK + 3)
    request.block_hashes.append(secrets.token_bytes(32))
    rig.admit(request, [5, 6, 7, 8])
    rig.step({request: 3 * BLOCK})
    rig.scheduler.finished(request)
    rig.step()
    idle(daemon, 2)


@pytest.mark.parametrize("what", ["given", "written", "allocated"])
def test_a_block_given_away_is_read_first(rigs: Any, daemon: Any, what: str) -> None:
    """The step that gives a block to somebody else is the one that saves it: before, not after.

    A block may also be zeroed for a request that has been preempted in the same schedule: then nobody gets it. Or
    another connector loads into it for a request that is not computed yet.
    """
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.admit(request, [0, 1, 2, 3])
    rig.step({request: 4 * BLOCK})
    rig.session.ping()  # the answer has come
    before = rig.block(2)
    if what == "allocated":
        rig.admit(Request("loaded by another connector", 2 * BLOCK), [2, 9])
        plan = rig.step()
    else:
        plan = rig.step(**{what: [2, 9]})
    assert plan.given == [2]
    for tensor in rig.tensors:
        tensor[2] = 0  # the stranger writes
    rig.step(given=[2])
    idle(daemon, 4)
    again = Request("s", 4 * BLOCK + 1, request.block_hashes)
    assert rig.scheduler.matched_tokens(again, 0) == (4 * BLOCK, True)
    rig.admit(again, [10, 11, 12, 13, 14], 0, 4 * BLOCK)
    rig.step()
    rig.await_loads()
    assert rig.block(12) == before


def test_a_block_given_away_unanswered_is_dropped(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.admit(request, [0, 1, 2, 3])
    daemon.process.send_signal(signal.SIGSTOP)
    rig.step({request: 4 * BLOCK})
    assert rig.step(given=[2]) is NOTHING
    daemon.process.send_signal(signal.SIGCONT)
    rig.session.ping()
    (job,) = rig.step(given=[30]).saves
    assert job.blocks == [0, 1]
    assert rig.scheduler.counters["saves_dropped"] == 2
    idle(daemon, 2)


def test_a_lease_that_no_load_takes_is_given_back(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    waiting = Request("s", 5 * BLOCK, request.block_hashes)
    for _ in range(5):  # it stands in the queue, and is asked for in each schedule
        assert rig.scheduler.matched_tokens(waiting, 0) == (4 * BLOCK, True)
        rig.step()
    assert daemon.status()["pool"]["pinned_bytes"] > 0
    for _ in range(3):
        rig.step()
    idle(daemon, 4)
    assert rig.scheduler.matched_tokens(waiting, 0) == (4 * BLOCK, True)
    rig.admit(waiting, [10, 11, 12, 13, 14])  # the engine would rather compute
    idle(daemon, 4)


def test_a_load_may_be_smaller_than_the_hit(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    again = Request("s", 5 * BLOCK, request.block_hashes)
    assert rig.scheduler.matched_tokens(again, 0) == (4 * BLOCK, True)
    rig.admit(again, [10, 11, 12, 13], 0, 2 * BLOCK)
    (job,) = rig.step().loads
    assert job.blocks == [10, 11]
    rig.await_loads()
    assert [rig.block(10), rig.block(11)] == [rig.block(0), rig.block(1)]
    rig.admit(again, [10, 11, 12, 13, 14], 2 * BLOCK)  # the second call, after the load
    idle(daemon, 4)


def test_an_aborted_request_keeps_its_lease_until_the_load_has_ended(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    again = Request("s", 5 * BLOCK, request.block_hashes)
    rig.scheduler.matched_tokens(again, 0)
    rig.admit(again, [10, 11, 12, 13, 14], 0, 4 * BLOCK)
    rig.scheduler.finished(again)
    assert daemon.status()["pool"]["pinned_bytes"] > 0
    rig.step()
    assert rig.await_loads() == {"s"}
    idle(daemon, 4)


def test_a_load_without_a_lease_fails_once(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    again = Request("s", 5 * BLOCK, request.block_hashes)
    rig.scheduler.matched_tokens(again, 0)
    for _ in range(3):
        rig.step()  # the lease is given back, and the engine comes with the load after all
    rig.admit(again, [10, 11, 12, 13, 14], 0, 4 * BLOCK)
    rig.step()
    until = time.monotonic() + PATIENCE
    while not (received := rig.worker.received()) and time.monotonic() < until:
        time.sleep(0.001)
    errors = rig.worker.take_errors()
    assert (received, errors) == ({"s"}, {10, 11, 12, 13})
    rig.scheduler.ended(["s"], errors)
    assert rig.scheduler.matched_tokens(again, 0) == (0, False)
    assert rig.scheduler.counters["loads_failed"] == 1


def test_pending_blocks_are_waited_for_once(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    hashes = [secrets.token_bytes(32) for _ in range(3)]
    with Session.connect(daemon.endpoint, engine="other", deadline=5.0) as other:
        namespace = other.attach(SPEC, shards=(0,))
        reservation = namespace.reserve(hashes)
        request = Request("r", 4 * BLOCK, hashes)
        assert rig.scheduler.matched_tokens(request, 0) == (None, False)
        reservation.commit()
        assert rig.scheduler.matched_tokens(request, 0) == (3 * BLOCK, True)

        more = [*hashes, secrets.token_bytes(32)]
        slow = namespace.reserve(more[3:], parent=hashes[-1])
        request = Request("s", 5 * BLOCK, more)
        until = time.monotonic() + PATIENCE
        while (answer := rig.scheduler.matched_tokens(request, 0)) == (None, False):
            assert time.monotonic() < until, "it waits for ever"
            rig.step()
        assert answer == (3 * BLOCK, True)  # what is there
        assert rig.scheduler.matched_tokens(request, 0) == (3 * BLOCK, True)
        slow.abort()
    for _ in range(3):
        rig.step()
    idle(daemon)


def followers(rig: Any, daemon: Any, prefix: int, *extra: int) -> list[Request]:
    """Return requests of one prefix of cached blocks, with so many cached blocks of their own and one token each."""
    shared = Request("prefix", prefix * BLOCK)
    rig.run(shared, list(range(prefix)))
    cached = prefix
    made = []
    for number, own in enumerate(extra):
        whole = Request(f"whole {number}", (prefix + own) * BLOCK)
        whole.block_hashes[:prefix] = shared.block_hashes
        if own:
            rig.run(whole, list(range(prefix + own)))
        cached += own
        made.append(Request(f"{number}", whole.num_tokens + 1, whole.block_hashes))
    idle(daemon, cached)
    return made


def test_of_requests_with_one_prefix_one_loads_and_the_others_wait_for_it(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    first, second, third = followers(rig, daemon, 4, 0, 0, 0)
    assert rig.scheduler.matched_tokens(first, 0) == (4 * BLOCK, True)
    rig.admit(first, [10, 11, 12, 13, 14], 0, 4 * BLOCK)
    assert rig.scheduler.matched_tokens(second, 0) == (None, False)
    rig.step()
    daemon.wait_status(lambda s: s["pool"]["leases"] == 1, "one lease: who waits gives back what it looked up")
    assert rig.scheduler.matched_tokens(second, 0) == (None, False)
    assert rig.scheduler.matched_tokens(third, 0) == (None, False)
    assert rig.scheduler.counters["lookups_waited_for_load"] == 2, "one lookup each"
    rig.await_loads()
    # In the schedule after the end the engine caches what came: before it asks for these, or after.
    assert rig.scheduler.matched_tokens(second, 0) == (None, False)
    assert rig.scheduler.matched_tokens(third, 4 * BLOCK) == (0, False)
    rig.step({first: 1})
    assert rig.scheduler.matched_tokens(second, 4 * BLOCK) == (0, False)
    idle(daemon, 4)
    assert rig.scheduler.counters["needed_blocks"] == 4


def test_what_a_load_does_not_bring_is_not_waited_for(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    first, second, third = followers(rig, daemon, 2, 0, 3, 2)
    rig.scheduler.matched_tokens(first, 0)
    rig.admit(first, [20, 21, 22], 0, 2 * BLOCK)
    assert rig.scheduler.matched_tokens(second, 0) == (5 * BLOCK, True), "most of it is its own"
    assert rig.scheduler.matched_tokens(third, 0) == (None, False), "half of it comes"
    assert rig.scheduler.matched_tokens(third, 2 * BLOCK) == (2 * BLOCK, True), "and the rest it loads itself"


def test_a_load_that_fails_or_brings_nothing_is_waited_for_no_longer(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    first, second, third = followers(rig, daemon, 3, 0, 0, 0)
    rig.scheduler.matched_tokens(first, 0)
    rig.admit(first, [10, 11, 12, 13], 0, 3 * BLOCK)
    assert rig.scheduler.matched_tokens(second, 0) == (None, False)
    rig.step()
    rig.scheduler.finished(first)  # aborted: its blocks are freed when the load has ended, not cached
    rig.await_loads()
    assert rig.scheduler.matched_tokens(second, 0) == (None, False)
    rig.step()
    assert rig.scheduler.matched_tokens(second, 0) == (3 * BLOCK, True)
    rig.admit(second, [14, 15, 16, 17], 0, 3 * BLOCK)
    assert rig.scheduler.matched_tokens(third, 0) == (None, False)
    rig.scheduler.ended(["1"], {15})
    assert rig.scheduler.matched_tokens(third, 0) == (3 * BLOCK, True), "it failed: each has its own"
    fourth = Request("fourth", third.num_tokens, third.block_hashes)
    rig.admit(third, [20, 21, 22, 23], 0, 3 * BLOCK)
    assert rig.scheduler.matched_tokens(fourth, 0) == (3 * BLOCK, True), "as long as loads fail"
    rig.step()
    while len(rig.scheduler._loads):
        rig.await_loads()


def test_a_load_that_does_not_end_is_not_waited_for_long(
    rigs: Any, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_client.scheduler.loads.PATIENCE", 0.05)
    rig = rigs("one")
    first, second = followers(rig, daemon, 3, 0, 0)
    rig.scheduler.matched_tokens(first, 0)
    rig.admit(first, [10, 11, 12, 13], 0, 3 * BLOCK)  # and no step that has it loaded
    until = time.monotonic() + PATIENCE
    while (answer := rig.scheduler.matched_tokens(second, 0)) == (None, False):
        assert time.monotonic() < until, "it waits for ever"
        time.sleep(0.001)
    assert answer == (3 * BLOCK, True)


def test_what_running_loads_leave_no_quota_for_is_waited_for(
    start_daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvcache_client.scheduler.lookups.QUOTA_WAIT", PATIENCE
    )  # a busy machine may take long for the load
    daemon = start_daemon(pin_quota=6.5 * SPEC.groups[0].block_bytes / (64 << 20))
    rig = Rig(daemon.endpoint, "one")
    try:
        chains = [Request(name, 5 * BLOCK) for name in "ab"]
        for number, request in enumerate(chains):
            rig.run(request, list(range(5 * number, 5 * number + 5)))
        idle(daemon, 10)
        first, second = (Request(f"{r.request_id} again", 5 * BLOCK + 1, r.block_hashes) for r in chains)
        assert rig.scheduler.matched_tokens(first, 0) == (5 * BLOCK, True)
        rig.admit(first, list(range(10, 16)), 0, 5 * BLOCK)
        rig.step()
        for _ in range(3):
            assert rig.scheduler.matched_tokens(second, 0) == (None, False)
            rig.step()
        assert rig.scheduler.counters["lookups_waited_for_quota"] == 1
        rig.await_loads()
        assert rig.scheduler.matched_tokens(second, 0) == (5 * BLOCK, True)
    finally:
        rig.close()


def test_a_prompt_beyond_the_quota_does_not_wait_for_ever_beside_others(start_daemon: Any) -> None:
    daemon = start_daemon(pin_quota=6.5 * SPEC.groups[0].block_bytes / (64 << 20))
    rig = Rig(daemon.endpoint, "one")
    try:
        small, large = Request("small", BLOCK), Request("large", 8 * BLOCK)
        rig.run(small, [0])
        rig.run(large, list(range(1, 9)))
        idle(daemon, 9)
        first, second = (Request(f"{r.request_id} again", r.num_tokens + 1, r.block_hashes) for r in (small, large))
        assert rig.scheduler.matched_tokens(first, 0) == (BLOCK, True)
        rig.admit(first, [9, 10], 0, BLOCK)
        rig.step()  # and nobody tells of its end
        until = time.monotonic() + PATIENCE
        while (answer := rig.scheduler.matched_tokens(second, 0)) == (None, False):
            assert time.monotonic() < until, "it waits for ever"
            rig.step()
        assert answer == (5 * BLOCK, True)  # what is left of the quota
        rig.await_loads()
    finally:
        rig.close()


def test_beyond_its_quota_an_engine_that_loads_nothing_takes_what_it_gets(start_daemon: Any) -> None:
    daemon = start_daemon(pin_quota=2.5 * SPEC.groups[0].block_bytes / (64 << 20))
    rig = Rig(daemon.endpoint, "one")
    try:
        request = Request("r", 5 * BLOCK)
        rig.run(request, [0, 1, 2, 3, 4])
        idle(daemon, 5)
        again = Request("s", 5 * BLOCK + 1, request.block_hashes)
        assert rig.scheduler.matched_tokens(again, 0) == (2 * BLOCK, True)
    finally:
        rig.close()


@pytest.mark.parametrize(
    "facts",
    [
        {"lora_request": "adapter"},
        {"resumable": True},
        {"prompt_embeds": "tensor", "prompt_is_token_ids": [True, False]},
    ],
)
def test_hashes_that_do_not_name_content_are_left_alone(rigs: Any, daemon: Any, facts: dict[str, Any]) -> None:
    rig = rigs("one")
    plain = Request("r", 4 * BLOCK, cache_salt="a salt is content", lora_request=None, mm_features=[])
    rig.run(plain, [0, 1, 2, 3])
    idle(daemon, 4)
    odd = Request("s", 4 * BLOCK + 1, plain.block_hashes, **facts)
    assert rig.scheduler.matched_tokens(odd, 0) == (0, False)
    assert sum(count for name, count in rig.scheduler.counters.items() if name.startswith("lookups_declined")) == 1
    other = Request("t", 4 * BLOCK, **facts)
    rig.run(other, [4, 5, 6, 7])
    assert rig.scheduler.matched_tokens(Request("u", 5 * BLOCK, plain.block_hashes), 0) == (4 * BLOCK, True)
    assert daemon.status()["pool"]["blocks"] == 4


def test_skip_reading_is_obeyed(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    again = Request("s", 5 * BLOCK, request.block_hashes, skip_reading_prefix_cache=True)
    assert rig.scheduler.matched_tokens(again, 0) == (0, False)


def test_a_reset_moves_this_engine_alone(rigs: Any, daemon: Any) -> None:
    one, two = rigs("one"), rigs("two")
    request = Request("r", 4 * BLOCK)
    one.run(request, [0, 1, 2, 3])
    running = Request("s", 6 * BLOCK)
    one.admit(running, [4, 5, 6, 7, 8, 9])
    one.step({running: 2 * BLOCK})
    one.step()  # the ranks are told to save what is full
    assert one.scheduler.reset()
    one.session.ping()  # it has joined
    one.step({running: 2 * BLOCK})
    one.step({running: 2 * BLOCK})
    one.scheduler.finished(running)  # it began with the old weights: what it computed since stays here
    one.step()
    idle(daemon, 6)

    assert one.scheduler.matched_tokens(Request("t", 5 * BLOCK, request.block_hashes), 0) == (0, False)
    assert two.scheduler.matched_tokens(Request("u", 5 * BLOCK, request.block_hashes), 0) == (4 * BLOCK, True)
    one.run(Request("v", 4 * BLOCK, request.block_hashes), [10, 11, 12, 13])
    daemon.wait_status(lambda s: s["pool"]["blocks"] == 10, "the blocks of the new weights")
    (_, moved) = daemon.status()["namespaces"]
    assert moved["blocks"] == 4
    assert moved["identity"]["weights"]


def test_a_request_of_old_weights_is_saved_again_once_computed_from_the_start(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    running = Request("s", 3 * BLOCK)
    rig.scheduler.matched_tokens(running, 0)
    rig.admit(running, [4, 5, 6])
    rig.step({running: BLOCK})
    rig.step()  # the rank is told to save it
    rig.scheduler.reset()
    rig.session.ping()  # it has joined
    running.num_computed_tokens = 0  # preempted
    assert rig.scheduler.matched_tokens(running, 0) == (0, False)
    rig.admit(running, [7, 8, 9])
    rig.step({running: 3 * BLOCK})
    rig.scheduler.finished(running)
    # The rank joins beside its steps; until it has, reservations are asked for again, once a step.
    daemon.wait_status(lambda s: rig.step() and [n["blocks"] for n in s["namespaces"]] == [1, 3], "old and new blocks")


def test_a_reset_does_not_wait_for_a_stopped_daemon(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    rig.session.daemon.connect_timeout = 0.2  # what each request that is waited for would take
    rig.run(Request("r", 4 * BLOCK), [0, 1, 2, 3])
    idle(daemon, 4)
    daemon.process.send_signal(signal.SIGSTOP)
    assert rig.scheduler.reset()
    assert "requests_unanswered" not in rig.session.counters
    running = Request("s", 3 * BLOCK)
    rig.admit(running, [4, 5, 6])
    rig.step({running: BLOCK})  # the new namespace is not joined yet, and nothing is asked of it
    daemon.process.send_signal(signal.SIGCONT)
    rig.session.ping()
    rig.step({running: 2 * BLOCK})
    daemon.wait_status(lambda s: rig.step() and [n["blocks"] for n in s["namespaces"]] == [4, 3], "old and new blocks")
    assert "reserves_down" not in rig.session.counters


def test_what_was_asked_for_before_a_reset_is_not_read_after_it(rigs: Any, daemon: Any) -> None:
    """Sleep resets the cache first and discards the device's memory then: an answer that comes later is too late."""
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.admit(request, [0, 1, 2, 3])
    rig.step({request: 4 * BLOCK})  # asks for room
    rig.session.ping()  # the answer has come, and no step has picked it up
    assert rig.scheduler.reset()
    for tensor in rig.tensors:
        tensor[:] = 0  # as after sleep
    assert rig.step(given=[30]).saves == []
    assert rig.scheduler.counters["saves_dropped"] == 4
    idle(daemon, 0)


def test_a_stopped_daemon_costs_one_deadline_and_no_answer(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    rig.session.daemon.deadline = 0.02
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    again = Request("s", 5 * BLOCK, request.block_hashes)
    daemon.process.send_signal(signal.SIGSTOP)
    assert rig.scheduler.matched_tokens(again, 0) == (0, False)
    for _ in range(100):
        rig.step()
        assert rig.scheduler.matched_tokens(again, 0) == (0, False)
    assert rig.session.counters["lookups_unanswered"] == 1
    daemon.process.send_signal(signal.SIGCONT)
    until = time.monotonic() + PATIENCE
    while rig.scheduler.matched_tokens(again, 0) != (4 * BLOCK, True):
        assert time.monotonic() < until, "the daemon is back and nobody asks"
        rig.step()
        time.sleep(0.01)


def test_an_engine_that_falls_asleep_beside_a_stopped_daemon_leaves_nothing_in_the_writing(
    rigs: Any, daemon: Any
) -> None:
    rig = rigs("one")
    rig.session.daemon.deadline = 0.05
    request = Request("r", 4 * BLOCK)
    rig.admit(request, [0, 1, 2, 3])
    daemon.process.send_signal(signal.SIGSTOP)
    rig.step({request: 4 * BLOCK})  # asks for room, and is not answered
    rig.scheduler.finished(request)
    until = time.monotonic() + PATIENCE
    while rig.session.up:
        assert time.monotonic() < until, "the breaker stays closed"
        time.sleep(0.001)
    rig.step()  # the last one
    daemon.process.send_signal(signal.SIGCONT)
    while not rig.session.counters.get("late_reserves"):
        assert time.monotonic() < until, "no late answer"
        time.sleep(0.001)
    idle(daemon, 0)


def test_the_lookups_of_one_schedule_share_one_deadline(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    rig.session.daemon.deadline = 1e-6  # what one lookup takes is more than all may take
    rig.session.daemon.breaker.failed = lambda now: False  # as if each answer came just in time
    requests = [Request(f"r{number}", 5 * BLOCK) for number in range(20)]
    for request in requests:
        assert rig.scheduler.matched_tokens(request, 0) == (0, False)
    assert rig.scheduler.counters["lookups_over_budget"] == 19
    rig.step()
    rig.session.daemon.deadline = 10.0
    rig.scheduler.matched_tokens(requests[1], 0)
    assert rig.scheduler.counters["lookups_over_budget"] == 19


def test_a_lease_that_was_given_back_is_not_offered_again(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK + 1)
    rig.run(request, [0, 1, 2, 3, 4])
    idle(daemon, 4)
    longer = Request("s", 7 * BLOCK + 1, request.block_hashes)
    assert rig.scheduler.matched_tokens(longer, 5 * BLOCK) == (0, False)  # the device has more than the daemon
    assert rig.scheduler.matched_tokens(longer, 0) == (4 * BLOCK, True)  # and then less, in the next schedule
    rig.admit(longer, [10, 11, 12, 13, 14, 15, 16, 17], 0, 4 * BLOCK)
    rig.step()
    assert rig.await_loads() == {"s"}
    assert "loads_failed" not in rig.scheduler.counters


def test_a_shutdown_leaves_nothing_in_the_writing(rigs: Any, daemon: Any) -> None:
    rig = Rig(daemon.endpoint, "short-lived")
    request = Request("r", 8 * BLOCK)
    rig.admit(request, list(range(8)))
    rig.step({request: 4 * BLOCK})
    rig.session.ping()
    rig.step({request: 4 * BLOCK})  # half is being copied, half is asked for
    rig.close()
    daemon.wait_status(lambda s: not s["sessions"] and not s["pool"]["blocks_writing"], "the end")
    status = daemon.status()["pool"]
    assert (status["blocks"], status["blocks_quarantined"]) == (4, 0)


def test_loads_that_a_thread_must_carry_wait_until_they_beat_computing(
    rigs: Any, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rigs("one")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    device, region = rig.worker._device, rig.worker._session.region
    monkeypatch.setattr(device, "registered", lambda: (False, 0))  # nothing of the region is page-locked yet
    rig.scheduler.reported(rig.worker.take_report())
    again, third = (Request(name, 4 * BLOCK + 1, request.block_hashes) for name in ("s", "t"))
    assert rig.scheduler.matched_tokens(again, 0) == (0, False)
    assert rig.scheduler.counters["lookups_declined_slow"] == 1
    assert rig.worker.take_report().carried == {}  # told once
    monkeypatch.setattr(device, "registered", lambda: (True, region.bytes))
    rig.scheduler.reported(rig.worker.take_report())
    assert rig.scheduler.matched_tokens(third, 0) == (4 * BLOCK, True)
