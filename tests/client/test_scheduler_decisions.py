"""What the scheduler's side decides: an engine and a cache in memory, and time as the test wants it."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time

import pytest
from toy_engine import BLOCK, REGION, SPEC, Cache, Engine, Request, chain

from kvcache_client.scheduler import loads, lookups, queue, saves
from kvcache_client.scheduler.device_cache import DeviceCache
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.requests import PAUSE, RequestState
from kvcache_client.scheduler.views import EngineFacts, Hint, RequestView
from kvcache_client.session.counters import LoggedCounters
from kvcache_client.step_plan import NOTHING, LoadJob, Report
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import unpack_refs
from kvcache_server.core.eviction import due

ASK_AGAIN, NO_HIT = (None, False), (0, False)


def hit(blocks: int) -> tuple[int, bool]:
    return blocks * BLOCK, True


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_decisions_need_neither_torch_nor_vllm() -> None:
    code = "import sys, kvcache_client.scheduler.scheduler; sys.exit(bool({'torch', 'vllm'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Lookups and loads.


def test_a_request_that_is_preempted_while_its_load_arrives_may_load_again() -> None:
    released: list[str] = []

    class Lease:
        def __init__(self, name: str) -> None:
            self._name = name

        def release(self) -> None:
            released.append(self._name)

    running = loads.Loads(FullAttention(BLOCK, 1), LoggedCounters(logging.getLogger("test")), 1)
    job = LoadJob("r", REGION, bytes(16), [0], layered=True)
    running.begin([job], Lease("first"), [b"a"], BLOCK, ranks=1)  # type: ignore[arg-type]
    running.end("r", 0.0)  # it is reported when it begins
    running.begin([job], Lease("second"), [b"a"], BLOCK)  # type: ignore[arg-type]
    assert running.are_coming and not released
    assert running.arrived("r") == BLOCK
    assert released == ["first"] and not running.are_coming
    running.end("r", 1.0)
    assert released == ["first", "second"]


def test_the_longest_prefix_is_offered_loaded_and_its_lease_given_back(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 6)
    cache.store([*run[:3], *run[4:]])
    request = engine.request("r", run)
    assert engine.ask(request) == hit(3), "up to the first miss"
    engine.admit(request, 3 * BLOCK)
    (job,) = engine.step().loads
    slots = cache.attach(SPEC, (), 0).visible
    assert (job.request, job.region, job.blocks) == ("r", REGION, request.blocks[:3])
    assert [ref.offset for ref in unpack_refs(job.refs)] == [4096 * slots[each] for each in run[:3]]
    assert cache.leases, "pinned while it is read"
    engine.scheduler.ended(["r"], set())
    assert not cache.leases


def test_a_whole_prompt_is_loaded(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run)
    assert engine.ask(engine.request("r", run, extra=0)) == hit(4)
    assert engine.ask(engine.request("s", run, extra=1)) == hit(4)


def test_what_the_device_has_is_not_loaded(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run)
    request = engine.request("r", run)
    request.computed = 3 * BLOCK
    assert engine.ask(request) == hit(1)
    request.computed = 4 * BLOCK
    assert engine.ask(request) == NO_HIT
    assert not cache.leases


@pytest.mark.parametrize(
    ("facts", "computed", "cause"),
    [
        ({"uncacheable": "lora"}, 0, "lora"),
        ({"skips_cache": True}, 0, "by_request"),
        ({}, 5, "unaligned"),
    ],
)
def test_requests_that_are_not_looked_up(cache: Cache, facts: dict[str, object], computed: int, cause: str) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run)
    request = engine.request("r", run, **facts)
    request.computed = computed
    for _ in range(3):
        assert engine.ask(request) == NO_HIT
    engine.step()
    assert cache.lookups == []
    assert cache.notes == [("r", cause)], "noted once"
    assert engine.scheduler.counters == {f"lookups_declined_{cause}": 3}


def test_without_the_daemon_or_a_rank_nothing_is_asked(cache: Cache) -> None:
    engine, request = Engine(cache), None
    cache.store(run := chain("a", 4))
    request = engine.request("r", run)
    cache.up = False
    assert engine.ask(request) == NO_HIT
    cache.up = True
    engine.scheduler.reported(Report(declined={1: "its copies do not work"}))
    assert engine.ask(request) == NO_HIT
    engine.scheduler.reported(Report(declined={1: ""}))
    assert engine.ask(request) == hit(4)


def test_blocks_that_are_being_written_are_waited_for_once_and_not_for_long(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    space = cache.attach(SPEC, (), 0)
    cache.store(run[:2])
    space.writing.update({run[2]: 90, run[3]: 91})
    request = engine.request("r", run)
    assert engine.ask(request) == ASK_AGAIN
    assert not cache.leases, "a request that waits pins nothing"
    engine.now += lookups.PENDING_WAIT
    assert engine.ask(request) == hit(2), "what is there"
    other = engine.request("s", run)
    assert engine.ask(other) == ASK_AGAIN
    space.visible[run[2]] = space.writing.pop(run[2])
    space.visible[run[3]] = space.writing.pop(run[3])
    assert engine.ask(other) == hit(4)


def test_each_vain_wait_for_a_block_is_shorter_until_its_writer_moves(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    space = cache.attach(SPEC, (), 0)
    space.writing.update(zip(run, range(90, 94), strict=True))

    def waits(*names: str) -> float:
        """Return how long requests that come together wait."""
        requests, begin = [engine.request(name, run) for name in names], engine.now
        while ASK_AGAIN in [engine.ask(request) for request in requests]:
            engine.now += lookups.PENDING_WAIT / 64
        return round((engine.now - begin) / lookups.PENDING_WAIT * 64) / 64

    assert [waits("a"), waits("b", "c"), waits("d"), waits("e")] == [1, 0.5, 0.25, 0.125]
    space.visible[run[0]] = space.writing.pop(run[0])
    assert [waits("f"), waits("g")] == [1, 0.5], "for the next block"
    gone = space.writing.pop(run[1])
    assert waits("h") == 0
    space.writing[run[1]] = gone
    assert [waits("i"), waits("j")] == [1, 0.5], "for another writer of the same block"


def test_a_lookup_that_found_all_is_kept_and_one_that_did_not_is_repeated_when_it_is_old(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run[:2])
    request = engine.request("r", run)
    assert engine.ask(request) == hit(2)
    cache.store(run[2:])
    assert engine.ask(request) == hit(2)
    engine.now += lookups.MAX_AGE + 0.001
    assert engine.ask(request) == hit(4)
    engine.now += 10 * lookups.MAX_AGE
    assert engine.ask(request) == hit(4)
    assert cache.lookups == ["r", "r"], "by its name, the daemon knows that this is one request"


def test_all_lookups_of_a_schedule_have_one_deadline(cache: Cache) -> None:
    engine = Engine(cache)
    acquire = cache.attach(SPEC, (), 0).acquire

    def slow(*arguments: object, **facts: object) -> object:
        engine.now += 0.6 * cache.deadline
        return acquire(*arguments, **facts)  # type: ignore[arg-type]

    cache.attach(SPEC, (), 0).acquire = slow  # type: ignore[method-assign, assignment]
    for number in range(4):
        engine.ask(engine.request(f"r{number}", chain(f"{number}", 3)))
    assert len(cache.lookups) == 2
    assert engine.scheduler.counters["lookups_over_budget"] == 2
    engine.step()
    engine.ask(engine.request("later", chain("later", 3)))
    assert len(cache.lookups) == 3


def test_a_lease_that_no_load_takes_is_given_back(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run)
    request = engine.request("r", run)
    for _ in range(5):  # it is asked for in each schedule, and keeps what it has
        assert engine.ask(request) == hit(4)
        engine.step()
        assert len(cache.leases) == 1
    for _ in range(lookups.IDLE_SCHEDULES):
        engine.step()
    assert not cache.leases
    engine.admit(request, 4 * BLOCK)  # the engine comes with the load after all: one that fails
    (job,) = engine.step().loads
    assert (job.region, job.refs) == (b"", b"")


def test_requests_of_one_prefix_wait_for_the_first_one_to_load_it(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run)
    first, second, third = (engine.request(name, run) for name in "rst")
    assert engine.ask(first) == hit(4)
    engine.admit(first, 4 * BLOCK)
    assert engine.ask(second) == ASK_AGAIN
    engine.step()
    assert engine.ask(second) == ASK_AGAIN
    engine.now += loads.PATIENCE
    assert engine.ask(second) == hit(4), "but not for ever"
    assert engine.ask(third) == ASK_AGAIN
    engine.scheduler.ended(["r"], {first.blocks[1]})
    assert engine.ask(third) == hit(4), "that load failed"


def test_a_load_that_failed_is_not_tried_again_and_many_stop_all_loads_for_a_while(cache: Cache) -> None:
    engine, runs = Engine(cache), [chain(name, 2) for name in "abcd"]
    for number, run in enumerate(runs[: loads.FAILED_LOADS]):
        cache.store(run)
        request = engine.request(f"r{number}", run)
        assert engine.ask(request) == hit(2)
        engine.admit(request, 2 * BLOCK)
        engine.step()
        engine.scheduler.ended([request.id], {request.blocks[0]})
        request.computed = 0
        assert engine.ask(request) == NO_HIT
    cache.store(runs[-1])
    request = engine.request("sound", runs[-1])
    assert engine.ask(request) == NO_HIT
    engine.now += loads.PAUSE
    assert engine.ask(request) == hit(2)
    counters = engine.scheduler.counters
    assert (counters["loads_failed"], counters["lookups_declined_loads_fail"]) == (3, 1)


def test_what_running_loads_pin_is_waited_for_and_what_is_beyond_the_quota_is_left(cache: Cache) -> None:
    engine, one, two = Engine(cache), chain("a", 4), chain("b", 4)
    cache.store([*one, *two])
    first, second = engine.request("r", one), engine.request("s", two)
    assert engine.ask(first) == hit(4)
    engine.admit(first, 4 * BLOCK)
    engine.step()
    cache.quota = 1
    assert engine.ask(second) == ASK_AGAIN
    asked = len(cache.lookups)
    assert engine.ask(second) == ASK_AGAIN
    assert len(cache.lookups) == asked, "nothing has changed"
    engine.now += lookups.QUOTA_WAIT
    assert engine.ask(second) == hit(1)


def test_what_a_tier_brings_soon_is_waited_for_without_further_lookups(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run[:1])
    cache.asking = 0.005
    request = engine.request("r", run)
    assert engine.ask(request) == ASK_AGAIN
    assert not cache.leases
    engine.now += 0.005
    cache.below, cache.asking = dict.fromkeys(run[1:], 0.04), 0.0
    assert engine.ask(request) == ASK_AGAIN
    asked = len(cache.lookups)
    engine.now += 0.03
    assert engine.ask(request) == ASK_AGAIN
    assert len(cache.lookups) == asked, "they are not expected yet"
    engine.now += 0.011
    cache.below = {}
    cache.store(run)
    assert engine.ask(request) == hit(4)
    assert engine.scheduler.counters["lookups_waited_for_tier"] == 1


def test_what_tiers_do_not_have_is_not_waited_for(cache: Cache) -> None:
    engine, request = Engine(cache), Engine(cache).request("r", chain("a", 4))
    cache.asking = 0.005
    assert engine.ask(request) == ASK_AGAIN
    engine.now += 0.005
    cache.asking = 0.0
    assert engine.ask(request) == NO_HIT


def test_a_tier_that_keeps_nobody_s_word_is_not_waited_for_for_ever(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.below = dict.fromkeys(run, 0.01)
    request, began = engine.request("r", run), engine.now
    while engine.ask(request) == ASK_AGAIN:
        engine.now += 0.001
        assert engine.now < began + lookups.TIER_WAIT + 0.02
    assert len(cache.lookups) < lookups.TIER_WAIT / 0.01
    cache.asking, cache.below = 0.001, {}
    assert engine.ask(request) == NO_HIT, "once a request"


@pytest.mark.parametrize(("eta", "waits"), [(1.9, True), (2.1, False)])
def test_a_tier_is_waited_for_while_computing_takes_longer(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, eta: float, waits: bool
) -> None:
    engine, run = Engine(cache), chain("a", 4)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(engine.scheduler.gate, "patience", lambda begin, end: asked.append((begin, end)) or 2.0)
    cache.store(run[:1])
    cache.below = dict.fromkeys(run[1:3], eta)
    assert (engine.ask(engine.request("r", run)) == ASK_AGAIN) == waits
    assert asked == [(BLOCK, 3 * BLOCK)], "what the tier brings would be computed, and nothing else"


def test_requests_that_wait_in_the_queue_are_announced_in_order_while_the_daemon_has_room(cache: Cache) -> None:
    engine = Engine(cache)
    cache.room = 5
    requests = [engine.request(f"r{number}", chain(f"r{number}", 2)) for number in range(4)]
    others = [
        engine.request("huge", chain("huge", 6)),
        engine.request("short", [], extra=3),
        engine.request("odd", chain("odd", 2), uncacheable="streaming"),
        engine.request("alone", chain("alone", 2), skips_cache=True),
    ]
    for request in (requests[0], *others, *requests[1:]):
        engine.scheduler.queued(request.view)
    assert engine.ask(requests[0]) == NO_HIT, "it is scheduled at once"
    assert not cache.prefetched
    engine.step()
    assert cache.prefetched == [("huge", 6), ("r1", 2), ("r2", 2), ("r3", 2)]
    assert [*cache.due] == ["r1", "r2"]
    engine.step()
    engine.step()
    assert len(cache.prefetched) == 4, "each is announced once until there may be room"
    engine.finish(requests[1])  # aborted
    engine.step()
    assert cache.prefetched[4:] == [("r1", 0), ("r3", 2)], "what is aborted is taken back, what never fits is given up"
    assert engine.ask(requests[2]) == NO_HIT
    engine.scheduler.queued(engine.request("next", chain("next", 4)).view)
    for _ in range(3):
        engine.step()
    assert cache.prefetched[6:] == [("next", 4)]
    assert engine.ask(requests[3]) == NO_HIT
    engine.step()
    assert cache.prefetched[7:] == [("next", 4)]
    assert [*cache.due] == ["next"]
    assert engine.scheduler.counters["prefetches"] == 7


def test_requests_whose_hint_asks_for_it_are_announced_first(cache: Cache) -> None:
    engine = Engine(cache)
    cache.room = 3
    hints = {"a": None, "b": Hint(fetch=True), "aborted": Hint(fetch=True), "c": Hint(drop=True), "d": Hint(fetch=True)}
    requests = {name: engine.request(name, chain(name, 2), hint=hint) for name, hint in hints.items()}
    for request in requests.values():
        engine.scheduler.queued(request.view)
    engine.finish(requests["aborted"])
    engine.step()
    assert cache.prefetched == [("b", 2), ("d", 2), ("a", 2), ("c", 2)]
    engine.step()
    for first, following in (("b", "d"), ("d", "a"), ("a", "c")):
        cache.prefetched.clear()
        engine.finish(requests[first])
        engine.step()
        assert cache.prefetched == [(first, 0), (following, 2)]


def test_a_drafter_s_block_is_announced_too_and_not_too_many_requests_are(cache: Cache) -> None:
    group, counters = FullAttention(BLOCK, 1, volatile=1), LoggedCounters(logging.getLogger("test"))
    waiting = queue.Queue(group, counters)
    for number in range(queue.MOST_ANNOUNCED + 1):
        waiting.add(RequestView(f"r{number}", 3 * BLOCK, 3 * BLOCK, chain(f"r{number}", 3)))
    space = cache.attach(SPEC, (), 0)
    waiting.announce(space, 0.0)
    assert len(cache.prefetched) == queue.AT_FIRST
    for _ in range(queue.MOST_ANNOUNCED // queue.AT_FIRST):
        waiting.announce(space, 0.0)
    assert cache.prefetched == [(f"r{number}", 3) for number in range(queue.MOST_ANNOUNCED)], "2 can be loaded"
    waiting.leave("r7")
    waiting.announce(space, 0.0)
    assert cache.prefetched[queue.MOST_ANNOUNCED :] == [("r7", 0), (f"r{queue.MOST_ANNOUNCED}", 3)]


def test_a_preempted_request_is_announced_once_with_what_it_has_filled_and_comes_first(cache: Cache) -> None:
    engine = Engine(cache)
    run, other, waiting = (engine.request(name, chain(name, 2)) for name in ("run", "other", "waiting"))
    for request in (run, other):
        engine.ask(request)
        engine.admit(request)
    engine.step((run, run.tokens), (other, other.tokens))
    run.hashes += chain("answer", 2)
    engine.scheduler.queued(waiting.view)
    engine.step((other, 1), preempted=[run, engine.request("of no interest", [])])
    assert cache.prefetched == [("run", 4), ("waiting", 2)]
    engine.step((other, 1))
    assert engine.ask(run) == NO_HIT
    engine.admit(run)
    engine.step((run, 1))
    engine.now += queue.REPEATED_AFTER
    engine.step((run, 1))
    assert cache.prefetched[2:] == [("waiting", 2)], "the other one is scheduled"


def test_what_the_engine_has_of_its_own_is_not_announced_any_more(cache: Cache) -> None:
    engine = Engine(cache)
    request = engine.request("r", chain("r", 2))
    engine.scheduler.queued(request.view)
    engine.step()
    request.computed = 2 * BLOCK
    assert engine.ask(request) == NO_HIT
    engine.step()
    assert not cache.lookups
    assert cache.prefetched == [("r", 2), ("r", 0)]


def test_announcements_are_repeated_one_per_step_before_the_daemon_forgets_them(cache: Cache) -> None:
    engine = Engine(cache)
    for name in "abc":
        engine.scheduler.queued(engine.request(name, chain(name, 2)).view)
    engine.step()
    engine.now += queue.REPEATED_AFTER - 1
    engine.step()
    assert len(cache.prefetched) == 3
    engine.now += 1
    engine.scheduler.finished("b", 0)
    for _ in range(4):
        engine.step()
    assert cache.prefetched[3:] == [("b", 0), ("a", 2), ("c", 2)]
    assert queue.REPEATED_AFTER <= due.SECONDS / 2


def test_blocks_that_came_while_a_request_was_in_the_queue_are_explained(cache: Cache) -> None:
    engine = Engine(cache)
    late, cached = (engine.request(name, chain(name, 2)) for name in ("late", "cached"))
    cache.store(cached.hashes)
    for request in (late, cached):
        engine.scheduler.queued(request.view)
    engine.step()
    cache.store(late.hashes)  # a tier has brought them
    assert engine.ask(late) == engine.ask(cached) == hit(2)
    engine.step()
    assert cache.notes == [("late", "came")]


def test_nothing_is_announced_to_a_daemon_that_is_down(cache: Cache) -> None:
    engine = Engine(cache)
    cache.up = False
    engine.scheduler.queued(engine.request("r", chain("r", 2)).view)
    engine.step()
    assert not cache.prefetched
    cache.up = True
    engine.step()
    assert cache.prefetched == [("r", 2)]


def test_another_request_of_the_same_name_starts_from_nothing(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run)
    assert engine.ask(engine.request("r", run)) == hit(4)
    assert len(cache.leases) == 1
    assert engine.ask(engine.request("r", run[:2])) == hit(2)
    assert len(cache.leases) == 1, "that of the first one is given back"


# Saves.


def test_blocks_are_reserved_when_they_fill_and_copied_a_step_later(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 3)
    request = engine.request("r", run)
    engine.admit(request)
    assert engine.step((request, BLOCK + 3)).saves == []
    assert [(each.hashes, each.parent) for each in cache.asked[-1]] == [([run[0]], None)]
    cache.answer()
    (job,) = engine.step((request, BLOCK - 4)).saves  # one token short of the second
    assert (job.request, job.blocks, job.positions) == ("r", request.blocks[:1], [0])
    assert len(cache.asked) == 1
    engine.step((request, 1))
    assert [(each.hashes, each.parent) for each in cache.asked[-1]] == [([run[1]], run[0])]
    engine.finish(request)
    cache.answer()
    engine.step()
    assert cache.attach(SPEC, (), 0).visible.keys() == set(run[:2])


def test_one_question_for_all_requests_of_a_step(cache: Cache) -> None:
    engine = Engine(cache)
    requests = [engine.request(f"r{number}", chain(f"{number}", 2)) for number in range(5)]
    for request in requests:
        engine.admit(request)
    engine.step(*((request, 2 * BLOCK) for request in requests))
    (runs,) = cache.asked
    assert [run.hashes for run in runs] == [request.hashes for request in requests]


def test_what_the_cache_has_or_somebody_writes_is_not_saved_and_the_rest_is(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    cache.store(run[:1])
    cache.attach(SPEC, (), 0).writing[run[1]] = 99
    request = engine.request("r", run)
    engine.admit(request)
    engine.step((request, 4 * BLOCK))
    cache.answer()
    (job,) = engine.step((request, 1)).saves
    assert job.blocks == request.blocks[2:4]


def test_a_block_that_is_given_away_unanswered_is_lost_with_those_after_it(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    request = engine.request("r", run)
    engine.admit(request)
    engine.step((request, 4 * BLOCK))
    engine.finish(request)
    assert engine.step(given=[request.blocks[2]]).saves == []
    cache.answer()
    (job,) = engine.step(given=[1000]).saves
    assert job.blocks == request.blocks[:2]
    assert cache.writing == 0, "what was granted for the others is given back"
    engine.step()
    assert cache.notes == [("r", "given_away")]


def test_lazy_saves_leave_out_memory_that_another_connector_fills(cache: Cache) -> None:
    """vLLM says nothing of it before the request is computed, but its own prefix cache has the block no more."""
    request = Engine(cache).request("r", chain("a", 4))
    hashes = dict(zip(blocks := [1, 2, 3, 4], request.hashes, strict=True))
    counts = LoggedCounters(logging.getLogger())
    facts = EngineFacts(
        BLOCK, step_tokens=4 * BLOCK, evicted_next=lambda count: [4], hash_of=lambda block: hashes.get(block, b"")
    )
    lazy = DeviceCache(FullAttention(BLOCK, 1), facts, counts, time.monotonic, True, False)
    state = RequestState(request.view, tables=[blocks])
    lazy.hold(state, 0, 4)
    del hashes[2]
    lazy.given(range(100, 108))
    (due,) = lazy.due()
    assert (due.parent, due.blocks) == (request.hashes[1], [3, 4])
    hashes[2] = request.hashes[1]
    for _ in range(2):
        lazy.found(state, 2 * BLOCK)
    hashes[2] = hashes[1]
    assert [due.blocks for due in lazy.due()] == [[1]], "the other was found twice on the device, and is gone since"


def test_what_a_device_keeps_is_reported_until_it_is_gone(cache: Cache) -> None:
    request = Engine(cache).request("r", chain("a", 6))
    hashes = dict(enumerate(request.hashes))
    counts, free = LoggedCounters(logging.getLogger()), [*range(20, 30)]
    facts = EngineFacts(
        BLOCK,
        step_tokens=4 * BLOCK,
        evicted_next=lambda count: free[:count],
        hash_of=lambda block: hashes.get(block, b""),
    )
    device = DeviceCache(FullAttention(BLOCK, 1), facts, counts, time.monotonic, False, True)

    def use(blocks: int) -> None:
        state = RequestState(request.view, tables=[list(range(blocks))])
        state.progress.saved = blocks
        device.found(state, blocks * BLOCK)
        assert device.changes() == ([], []), "a request uses them"
        device.ending(state)

    use(5)
    assert device.changes() == ([request.hashes[4]], [])
    device.given([4])
    assert device.changes() == ([request.hashes[3]], [request.hashes[4]])
    free[:] = [3, 2, *range(20, 30)]
    device.given(range(100, 108))
    (due,) = device.due()
    assert (due.keys, due.leaving, due.parent) == (request.hashes[:4], 2, None)
    assert device.changes() == ([request.hashes[1]], [])
    assert device.due() == []
    device.given([3, 2])
    assert device.changes() == ([], []), "the daemon was told before"
    device.forget()
    assert device.changes() == ([], [request.hashes[1]])
    free[:] = range(20, 26)
    use(6)
    assert device.changes() == ([], []), "with so little free memory, they may be gone at once"


def test_a_block_that_is_given_away_answered_is_guarded(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 4)
    request = engine.request("r", run)
    engine.admit(request)
    engine.step((request, 4 * BLOCK))
    cache.answer()
    plan = engine.step(given=[request.blocks[2], 1000])
    assert (len(plan.saves), plan.given) == (1, [request.blocks[2]])
    assert engine.step(given=[request.blocks[2]]) is NOTHING, "it is somebody else's by now"


def test_a_full_pool_is_asked_again_after_a_pause_that_doubles(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    engine, run = Engine(cache), chain("a", 40)
    cache.full = True
    request = engine.request("r", run)
    engine.admit(request)
    asked = []
    for step in range(30):
        engine.step((request, BLOCK))
        if len(cache.asked) > len(asked):
            asked.append(step)
        cache.answer()
        engine.now += PAUSE / 2
    assert asked[0] == 0
    assert asked[1:] == [3, 8, 17], "after 1, 2 and 4 seconds, each found out half a second later"
    assert engine.scheduler.counters["saves_no_space"] == len(asked)
    assert not caplog.records, "where memory is short, that is nothing special"


def test_reservations_that_are_refused_as_a_whole_are_given_up_in_the_end(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 2)
    cache.refusal = BadArgument("shard 0 has no live session of this engine")
    engine.run(engine.request("r", run))
    first = len(cache.asked)
    while engine.scheduler._saves.waiting:
        engine.step()
        engine.now += 0.01
    assert engine.now < 1000.0 + 2 * saves.INSIST
    assert first < len(cache.asked) < 20, "less and less often"
    assert engine.scheduler.counters["saves_refused"] == 1


def test_an_idle_step_leaves_no_answer_that_nobody_takes(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 2)
    request = engine.request("r", run)
    engine.admit(request)
    engine.step((request, 2 * BLOCK))
    engine.finish(request)
    (ticket,) = cache.tickets
    engine.step()
    assert ticket.cancelled


def test_of_prompts_only_what_was_generated_is_not_saved(cache: Cache) -> None:
    engine = Engine(cache, save="prompt")
    request = engine.request("r", chain("a", 2), extra=3)
    engine.admit(request)
    request.hashes.append(b"generated".ljust(32))
    request.blocks.append(77)
    engine.step((request, 3 * BLOCK))
    assert [run.hashes for run in cache.asked[-1]] == [request.hashes[:2]]


# Resets and canaries.


def test_after_a_reset_a_request_is_saved_only_once_it_is_computed_from_its_start(cache: Cache) -> None:
    engine, run = Engine(cache), chain("a", 3)
    cache.store(run)
    request = engine.request("r", run)
    engine.admit(request)
    engine.step((request, BLOCK))
    assert engine.scheduler.reset()
    plan = engine.step((request, BLOCK))
    assert plan.namespace is not None and plan.namespace.identity["weights"]
    engine.step((request, BLOCK))
    assert len(cache.asked) == 1, "it began with the old weights"
    request.computed, request.scheduled = 0, False  # preempted
    assert engine.ask(request) == NO_HIT, "and nothing of the new ones is there"
    engine.run(request)
    (old, new) = cache.spaces.values()
    assert (old.spec, new.visible.keys()) == (SPEC, set(run))


def test_a_canary_is_computed_and_compared_with_what_the_cache_has(cache: Cache) -> None:
    engine, run = Engine(cache, canary_every=1), chain("a", 4)
    cache.store(run)
    request = engine.request("r", run)
    assert engine.ask(request) == NO_HIT
    assert not cache.leases
    engine.admit(request)
    assert engine.step((request, 4 * BLOCK - 1)).checks == []
    assert engine.step((request, 1)).checks == []
    (check,) = engine.step((request, 1)).checks
    assert sorted(check.blocks) == request.blocks[:4]


# All together.


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_nothing_is_left_behind(seed: int) -> None:
    """Leases end, and every slot that was granted is written or given back."""
    draw, cache = random.Random(seed), Cache()
    engine = Engine(cache, canary_every=draw.choice((0, 3)))
    prompts = [chain(name, draw.randint(1, 8)) for name in "abcdef"]
    waiting: list[Request] = []
    running: list[Request] = []
    loading: list[Request] = []
    for number in range(200):
        if len(waiting) < 3:
            waiting.append(engine.request(f"r{number}", list(draw.choice(prompts))))
        cache.below = dict.fromkeys(draw.choice(prompts), draw.choice((0.001, 0.1))) if draw.random() < 0.3 else {}
        cache.asking = draw.choice((0.0, 0.004))
        cache.quota, cache.full = draw.choice((2, 1000)), draw.random() < 0.1
        for request in list(waiting):
            tokens, _ = engine.ask(request)
            if tokens is not None and draw.random() < 0.6:
                waiting.remove(request)
                load = draw.choice((0, tokens, max(0, tokens - BLOCK)))
                engine.admit(request, load)
                (loading if load else running).append(request)
        scheduled = [(each, min(draw.randint(1, 40), each.tokens - each.computed)) for each in running]
        scheduled = [(each, count) for each, count in scheduled if count > 0]
        given = draw.choice(running).blocks[:1] if running and draw.random() < 0.1 else ()
        engine.step(*scheduled, given=given)
        for request in list(loading):
            if draw.random() < 0.5:
                loading.remove(request)
                engine.scheduler.ended([request.id], {request.blocks[0]} if draw.random() < 0.2 else set())
                running.append(request)
        for request in list(running):
            if request.computed >= request.tokens or draw.random() < 0.1:
                running.remove(request)
                engine.finish(request)
        if draw.random() < 0.7:
            cache.answer()
        if draw.random() < 0.02:
            engine.scheduler.reset()
        engine.now += draw.choice((0.001, 0.02, 0.5, 3.0))
    for request in loading:
        engine.scheduler.ended([request.id], set())
    for request in [*waiting, *running, *loading]:
        engine.finish(request)
    cache.answer()
    for _ in range(lookups.IDLE_SCHEDULES + 2):
        engine.step()
        cache.answer()
    engine.scheduler.close()
    assert not cache.leases
    assert cache.writing == 0


def test_requests_wait_a_second_for_ranks_to_join(cache: Cache) -> None:
    """The daemon has neither hits nor slots for an engine that does not have all its ranks."""
    hashes = chain("a", 4)
    cache.store(hashes)
    late, engine = Engine(cache, joining=(0, 1)), Engine(cache, joining=(0, 1))
    for one in (late, engine):
        assert one.ask(one.request("first", hashes)) == ASK_AGAIN
        one.scheduler.reported(Report(declined={0: ""}))
        assert one.ask(one.request("first", hashes)) == ASK_AGAIN
    late.now += 1.0
    request = late.request("second", chain("b", 3))
    assert late.ask(request) == NO_HIT
    late.run(request)
    assert not cache.lookups and not cache.asked
    assert late.scheduler.counters["lookups_declined_rank"] == 1
    engine.scheduler.reported(Report(declined={1: ""}))
    assert engine.ask(engine.request("second", hashes)) == hit(4)


def test_nobody_waits_for_a_rank_that_takes_no_part(cache: Cache) -> None:
    engine = Engine(cache, joining=(0, 1))
    engine.scheduler.reported(Report(declined={0: "", 1: "its copies do not work"}))
    assert engine.ask(engine.request("first", chain("a", 4))) == NO_HIT
