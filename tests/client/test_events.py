"""What one engine tells of host memory: its own saves, what its lookups found, and what they found no more."""

from __future__ import annotations

import time
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvcache_client.scheduler import events as module
from kvcache_client.scheduler.events import EngineEvents, Removed, Stored
from kvcache_client.scheduler.groups import FullAttention, HybridGroups
from kvcache_client.scheduler.views import Group, RequestView, Table
from kvcache_client.step_plan import RankVerdicts
from kvcache_proto.types import FULL, SUFFIX, GroupSpec, Verdict
from kvcache_server.admin_client import AdminClient

REGION = b"r" * 16
VISIBLE, HIDDEN, PARTIAL, FAILED = Verdict.VISIBLE, Verdict.HIDDEN, Verdict.PARTIAL, Verdict.FAILED


def a_request(name: str, blocks: int) -> Any:
    """With blocks of four tokens."""
    hashes = [f"{name}{number}".encode().rjust(32, b".") for number in range(blocks)]
    return RequestView(name, 4 * blocks, 4 * blocks, hashes, list(range(4 * blocks)))


def made(blocks_per_slot: int = 1) -> EngineEvents:
    """For an engine that says a request's name, and where the tokens of its blocks are."""
    return EngineEvents(
        FullAttention(4, blocks_per_slot), lambda request, begin, end, group: (request.id, [*range(begin, end)])
    )


def with_windows(volatile: int = 0) -> EngineEvents:
    """For an engine with full attention, and windows of two blocks."""
    groups = [Group((Table(0, 4, 1),)), Group((Table(1, 4, 1),), window_blocks=2, kept=7)]
    specs = [GroupSpec(4, 8, FULL), GroupSpec(4, 8, SUFFIX, 2)]
    rules = HybridGroups(groups, specs, 4, volatile=volatile)
    return EngineEvents(rules, lambda request, begin, end, group: (request.id, [*range(begin, end)]))


def stored(request: Any, first: int, end: int, group: int = 0) -> Stored:
    """Return the event of a request's blocks."""
    parent = request.hashes[first - 1] if first else None
    tokens = [*range(4 * first, 4 * end)]
    return Stored(parent, request.hashes[first:end], tokens, request.id, tokens, group)


def ship(events: EngineEvents, request: Any, slots: range, reservation: int = 1, group: int = 0) -> None:
    for position, slot in enumerate(slots):
        events.shipped(REGION, reservation, position, request, slot, group)


def test_a_save_is_told_with_all_blocks_of_the_engine_and_their_tokens() -> None:
    events, request = made(2), a_request("a", 7)
    ship(events, request, range(1, 3))
    assert events.take() == []
    events.settled(RankVerdicts(REGION, 1, [0, 1], [VISIBLE, VISIBLE]))
    assert events.take() == [stored(request, 2, 6)]
    assert events.take() == []


def test_runs_that_do_not_follow_each_other_stay_apart() -> None:
    events, one, two = made(), a_request("a", 2), a_request("b", 1)
    events.looked_up(one, 2, 2)
    events.looked_up(two, 1, 1)
    assert events.take() == [stored(one, 0, 2), stored(two, 0, 1)]


def test_of_several_ranks_the_last_one_tells_and_what_fails_is_not_told() -> None:
    events, request = made(), a_request("a", 3)
    ship(events, request, range(3))
    events.settled(RankVerdicts(REGION, 1, [0, 1, 2], [PARTIAL, PARTIAL, FAILED]))
    assert events.take() == []
    events.settled(RankVerdicts(REGION, 1, [0, 1, 2], [VISIBLE, FAILED, FAILED]))
    assert events.take() == [stored(request, 0, 1)]
    events.settled(RankVerdicts(REGION, 1, [0, 1], [VISIBLE, VISIBLE]))  # told and done
    assert events.take() == []


def test_a_parent_whose_last_verdict_comes_late_is_told_first() -> None:
    """The rank that ends a block's save need not be the one that ended that of its parent."""
    events, request = made(), a_request("a", 3)
    ship(events, request, range(3))
    events.settled(RankVerdicts(REGION, 1, [0, 1, 2], [PARTIAL, VISIBLE, VISIBLE]))
    assert events.take() == []
    events.settled(RankVerdicts(REGION, 1, [0, 1, 2], [VISIBLE, PARTIAL, PARTIAL]))
    assert events.take() == [stored(request, 0, 3)]


def test_what_waits_for_its_parent_is_told_with_it() -> None:
    events, request = made(), a_request("a", 3)
    ship(events, request, range(3))
    events.settled(RankVerdicts(REGION, 1, [2, 1], [HIDDEN, HIDDEN]))
    assert events.take() == []
    events.settled(RankVerdicts(REGION, 1, [0], [VISIBLE]))
    assert events.take() == [stored(request, 0, 3)]


def test_a_lookup_tells_what_it_found_and_what_it_found_no_more() -> None:
    events, request = made(2), a_request("a", 9)
    names = request.hashes
    events.looked_up(request, 3, 4)  # another engine's
    events.looked_up(request, 3, 4)
    assert events.take() == [stored(request, 0, 6)]
    events.looked_up(request, 1, 4)
    assert events.take() == [Removed(names[2:6])]
    events.looked_up(request, 4, 4)
    assert events.take() == [stored(request, 2, 8)]


def test_after_a_reset_nothing_is_there_and_late_verdicts_are_of_the_past() -> None:
    events, request = made(), a_request("a", 4)
    events.looked_up(request, 2, 2)
    ship(events, request, range(2, 4))
    events.take()
    events.reset()
    events.settled(RankVerdicts(REGION, 1, [0, 1], [VISIBLE, VISIBLE]))
    assert events.take() == [Removed(request.hashes[:2])]


def test_no_more_is_claimed_than_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 3)
    events, request = made(), a_request("a", 5)
    events.looked_up(request, 5, 5)
    known: list[bytes] = []
    for event in events.take():
        if isinstance(event, Stored):
            known += event.hashes
        else:
            known = [name for name in known if name not in event.hashes]
    assert known == request.hashes[2:]
    monkeypatch.setattr(module, "SHIPPED", 3)
    ship(events, request, range(5), reservation=2)  # and never settled
    assert len(events._shipped) == 3


def test_a_real_rank_and_a_real_daemon(daemon: Any) -> None:
    steps = pytest.importorskip("steps", reason="needs torch, as ranks do", exc_type=ImportError)
    rig = steps.Rig(daemon.endpoint, "one", events=True)
    other = steps.Rig(daemon.endpoint, "two", events=True)
    events = rig.scheduler.events

    def told(count: int) -> list[Stored | Removed]:
        """What is told once `count` verdicts have come."""
        until, heard = time.monotonic() + steps.PATIENCE, 0
        while heard < count:
            assert time.monotonic() < until, "the verdicts did not come"
            for each in rig.worker.take_report().verdicts:
                heard += len(each.verdicts)
                events.settled(each)
            time.sleep(0.001)
        return list(events.take())

    try:
        request = steps.Request("r", 3 * steps.BLOCK + 1, all_token_ids=list(range(3 * steps.BLOCK + 1)))
        whole = Stored(None, request.block_hashes, list(range(3 * steps.BLOCK)), None, [])
        assert rig.scheduler.matched_tokens(request, 0) == (0, False)
        rig.run(request, [3, 1, 4, 5])
        assert told(3) == [whole]
        again = steps.Request("s", 3 * steps.BLOCK + 1, request.block_hashes, all_token_ids=request.all_token_ids)
        assert other.scheduler.matched_tokens(again, 0)[0]
        assert other.scheduler.events.take() == [whole]
        other.scheduler.finished(again)
        with AdminClient(daemon.endpoint) as admin:
            daemon.wait_status(lambda s: not s["pool"]["pinned_bytes"], "no lease")
            assert admin.clear() == 3
        third = steps.Request("t", 3 * steps.BLOCK + 1, request.block_hashes, all_token_ids=request.all_token_ids)
        assert rig.scheduler.matched_tokens(third, 0) == (0, False)
        assert events.take() == [Removed(request.block_hashes)]
    finally:
        rig.close()
        other.close()


def test_what_waits_in_vain_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING", 3)
    events, requests = made(), [a_request(name, 3) for name in "abcd"]
    for number, request in enumerate(requests):
        ship(events, request, range(1, 2), reservation=number)
        events.settled(RankVerdicts(REGION, number, [0], [HIDDEN]))
    for request in requests:
        events.looked_up(request, 1, 1)
    told = [event for event in events.take() if isinstance(event, Stored)]
    assert [event.hashes for event in told] == [r.hashes[: 1 + (r is not requests[0])] for r in requests]


def test_nothing_is_kept_of_a_request_but_what_is_told() -> None:
    class Request(SimpleNamespace):
        pass

    events, request = made(), Request(**msgspec.structs.asdict(a_request("a", 3)))
    ship(events, request, range(3))
    events.settled(RankVerdicts(REGION, 1, [2], [HIDDEN]))
    kept = weakref.ref(request)
    del request
    assert kept() is None


def test_a_long_chain_that_waited_for_its_root_is_told_as_one() -> None:
    events, request = made(), a_request("a", 3000)
    ship(events, request, range(1, 3000))
    events.settled(RankVerdicts(REGION, 1, list(range(2999)), [HIDDEN] * 2999))
    assert events.take() == []
    events.looked_up(request, 1, 1)  # somebody else has written the root
    assert events.take() == [stored(request, 0, 3000)]


def test_a_window_is_told_below_full_attention() -> None:
    """Whatever comes first, and whatever becomes of the windows of other blocks."""
    events, request = with_windows(), a_request("a", 4)
    ship(events, request, range(4))
    ship(events, request, range(1, 4), reservation=2, group=1)
    events.settled(RankVerdicts(REGION, 2, [0, 1, 2], [FAILED, VISIBLE, HIDDEN]))
    events.settled(RankVerdicts(REGION, 1, [2, 1], [VISIBLE, VISIBLE]))
    assert events.take() == []
    events.settled(RankVerdicts(REGION, 1, [0], [VISIBLE]))
    assert events.take() == [stored(request, 0, 3), stored(request, 2, 3, 1)]
    events.settled(RankVerdicts(REGION, 1, [3], [VISIBLE]))
    assert events.take() == [stored(request, 3, 4), stored(request, 3, 4, 1)]


def test_windows_are_removed_with_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 4)
    events, one, two = with_windows(), a_request("a", 4), a_request("b", 3)
    events.looked_up(one, 4, 4, [range(2, 4)])
    events.take()
    events.looked_up(two, 3, 3, [range(1, 3)])
    removed = [event for event in events.take() if isinstance(event, Removed)]
    assert removed == [Removed(one.hashes[2:3], 1), Removed(one.hashes[:3])]
    events.reset()
    left = [Removed(one.hashes[3:] + two.hashes[1:], 1), Removed(one.hashes[3:] + two.hashes)]
    assert events.take() == left


@pytest.mark.parametrize("volatile", [0, 1])
def test_only_a_window_whose_promise_is_broken_is_removed(volatile: int) -> None:
    events, request = with_windows(volatile), a_request("a", 12)
    events.looked_up(request, 8, 8 + volatile, [range(6, 8)])
    ship(events, request, range(8, 12))
    ship(events, request, range(9, 11), reservation=2, group=1)
    events.settled(RankVerdicts(REGION, 1, [0, 1, 2, 3], [VISIBLE] * 4))
    events.settled(RankVerdicts(REGION, 2, [0, 1], [VISIBLE] * 2))
    events.take()
    events.looked_up(request, 8, 10 + volatile, [range(6, 8)])  # no hit after block 8 or 9 was promised
    assert events.take() == []
    events.looked_up(request, 8, 11 + volatile, [range(6, 8)])
    assert events.take() == [Removed(request.hashes[10:11], 1)]
    events.looked_up(request, 0, 8 + volatile)
    assert events.take() == [Removed(request.hashes[7:8], 1)]
    events.looked_up(request, 8, 8 + volatile, [range(6, 8)])
    assert events.take() == [stored(request, 7, 8, 1)]


def test_a_hit_that_needs_the_next_block_is_promised_with_it() -> None:
    events, request = with_windows(volatile=1), a_request("a", 9)
    events.looked_up(request, 8, 8, [range(5, 8)])
    events.take()
    events.looked_up(request, 7, 9, [range(5, 7)])
    assert events.take() == []
    events.looked_up(request, 6, 8)
    assert events.take() == [Removed(request.hashes[6:7], 1)]
