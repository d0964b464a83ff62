"""Long work is cut into slices: the state is sound after each, and requests in between are answered correctly."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import pytest
from insights import begin, figures, follow
from small_cache import KIB, MIB, Engine, chain, hashes, make_cache

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_request, encode
from kvcache_proto.errors import BadArgument, BadFrame, KVCacheError, UnknownHandle
from kvcache_proto.region import ROW, row_of
from kvcache_proto.types import (
    MAX_BLOCKS,
    MAX_HASHES,
    REF_BYTES,
    TAIL,
    Finding,
    GroupSpec,
    NamespaceSpec,
    Outcome,
    Refusal,
    Verdict,
    unpack_refs,
)
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import LRU
from kvcache_server.core.index import Block
from kvcache_server.core.integrity import audit, check_integrity
from kvcache_server.core.slices import LOOK, STEP, finish
from kvcache_server.insight.explanations import EXAMINED, MOST_BLOCKS, MOST_RUNS

CUT = (
    *("core.eviction.policy", "core.index", "core.integrity", "core.invalidation", "core.lookups", "core.pool"),
    *("core.reservations", "core.retention", "insight.explanations", "insight.stats"),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as finely as can be."""
    for module in CUT:
        for name in ("STEP", "LOOK"):
            monkeypatch.setattr(f"kvcache_server.{module}.{name}", 1, raising=False)


class Long:
    """A request under way: what is left of it, and what came of it."""

    def __init__(self, engine: Engine, request: m.Request) -> None:
        self.engine, self.request = engine, request
        self.slices = 0
        self.reply: Any = None
        self.error: KVCacheError | None = None
        self._left: Any = None
        self._step(lambda: begin(engine.cache, engine.session, request, engine.now))

    def _step(self, take: Any) -> None:
        follow(self.engine.cache)
        try:
            result = take()
        except StopIteration as done:
            result = done.value
        except KVCacheError as error:
            self.error, result = error, None
        self.slices += 1
        self._left = result if isinstance(result, Generator) else None
        self.reply = None if self._left is not None else result
        if not isinstance(self.request, m.Why):  # which changes nothing
            check_integrity(self.engine.cache)

    @property
    def under_way(self) -> bool:
        return self._left is not None

    def take_slice(self) -> None:
        left = self._left

        def take() -> Any:
            next(left)
            return left

        self._step(take)

    def finish(self) -> Any:
        while self.under_way:
            self.take_slice()
        if self.error is not None:
            raise self.error
        return self.reply


def do_chores(cache: Cache) -> int:
    done = 0
    while cache.chores:
        cache.chores.go_on()
        check_integrity(cache)
        done += 1
    return done


def reserving(engine: Engine, names: list[str], parent: str | None = None) -> Long:
    return Long(
        engine, m.Reserve(1, b"", engine.namespace, [m.Run(hashes(names), hashes([parent])[0] if parent else None)])
    )


def settling(
    engine: Engine, reserved: m.Reserved, outcome: Outcome = Outcome.COMMITTED, at: tuple[int, ...] = ()
) -> Long:
    region = engine.cache.geometry.region_id
    return Long(engine, m.Settle(1, b"", region, reserved.reservation, (0,), outcome, list(at)))


def answers(reserved: m.Reserved) -> list[Refusal]:
    return [Refusal(answer) for answer in reserved.answers]


def verdicts(settled: m.Settled) -> list[Verdict]:
    return [Verdict(verdict) for verdict in settled.verdicts]


# How much a slice is.


def test_what_engines_wait_for_in_each_step_is_one_step_of_the_daemon(tiny: None) -> None:
    """No other request comes in between, however long it is."""
    cache = make_cache(4, 64)
    engine = Engine(cache, "one", block_bytes=64)
    for at in range(0, 1024, MAX_BLOCKS):
        names = chain(f"{at}-", MAX_BLOCKS)
        reserved = reserving(engine, names)
        assert not reserved.under_way and answers(reserved.reply) == [Refusal.GRANTED] * MAX_BLOCKS
        settled = settling(engine, reserved.reply)
        assert not settled.under_way and verdicts(settled.reply) == [Verdict.VISIBLE] * MAX_BLOCKS
    long = Long(engine, m.Acquire(1, b"", engine.namespace, hashes([*names, *chain("n", MAX_HASHES - MAX_BLOCKS)])))
    assert not long.under_way and long.reply.hits == MAX_BLOCKS


def test_slices_are_bounded() -> None:
    cache = make_cache(248, KIB)
    engine = Engine(cache, "one", block_bytes=1 * KIB)
    engine.store(chain("a", 10 * STEP))
    cleared = Long(engine, m.Clear(1, b""))
    assert cleared.finish().blocks == 10 * STEP
    assert cleared.slices >= 10


@pytest.mark.parametrize("when", [3, 8, 20, 40, 300, 800])
def test_why_examines_a_long_miss_in_slices_while_the_cache_changes(when: int) -> None:
    cache = make_cache(page_bytes=KIB)
    engines = [Engine(cache, name, 64, name) for name in ("one", "two", "three")]
    names = [f"{number}" for number in range(MAX_HASHES)]
    for engine in engines[1:]:
        engine.store(names[:2000])
        engine.ask(m.Remark(1, b"", engine.namespace, [m.Note("q", "paused", 0, hashes(names))]))
    request = m.Acquire(1, b"", engines[0].namespace, hashes(names), request="r")
    engines[0].ask(request)
    why = Long(engines[0], m.Why(1, b"", "r"))
    while why.under_way:
        if why.slices == when:  # in the midst of it: what it relies on goes
            for engine in engines:
                cache.end_session(engine.session, 1000.0)
            cache.chores.go_on()
            finish(cache.clearing("", "an operator", 1000.0))
            cache.registry.prune()
        why.take_slice()
    (told,) = why.reply.answer["explained"]
    assert [run["last"] for run in told["runs"]][-1] == MAX_HASHES - 1
    assert why.slices > MOST_BLOCKS / EXAMINED


def test_a_why_with_very_many_causes_ends_with_unexamined_blocks() -> None:
    cache = make_cache()
    engine = Engine(cache, "one", 64)
    names = [f"{number}" for number in range(2000)]
    request = m.Acquire(1, b"", engine.namespace, hashes(names), request="r")
    for part in (names[::2], names[1::2]):
        cause = "paused" if part[0] == "0" else "weights"
        engine.ask(m.Remark(1, b"", engine.namespace, [m.Note("q", cause, 0, hashes(part))]))
    engine.ask(request)
    (told,) = engine.ask(m.Why(1, b"", "r")).answer["explained"]
    assert len(told["runs"]) == MOST_RUNS + 1
    assert told["runs"][-1] | {"cached_now": 0} == {
        "first": MOST_RUNS,
        "last": 1999,
        "cause": "unexamined",
        "cached_now": 0,
    }


def test_the_runs_and_blocks_of_one_request_are_bounded() -> None:
    cache = make_cache()
    engine = Engine(cache, "one", block_bytes=1 * KIB)
    names = hashes(chain("a", MAX_BLOCKS))
    orphans = engine.ask(m.Reserve(1, b"", engine.namespace, [m.Run([name], b"x" * 16) for name in names]))
    assert answers(orphans) == [Refusal.NO_PARENT] * MAX_BLOCKS
    with pytest.raises(BadFrame):
        decode_request(encode(m.Reserve(1, b"", 1, [m.Run(names[:1])] * (MAX_BLOCKS + 1))))
    with pytest.raises(BadFrame):
        decode_request(encode(m.Remark(1, b"", 1, [m.Note("r", "c")] * (m.MAX_NOTES + 1))))


def test_a_reserve_of_one_block_too_many_is_refused_and_changes_nothing() -> None:
    """Its runs count together."""
    cache = make_cache()
    engine = Engine(cache, "one", block_bytes=1 * KIB)
    engine.store(["p"])
    names = hashes(chain("a", MAX_BLOCKS + 1))
    runs = [m.Run(names[:100]), m.Run(names[100:200], hashes(["p"])[0]), m.Run(names[200:])]

    def state() -> Any:
        told = [*cache.effects.records, *cache.effects.changes]
        return bytes(cache.rows.buffer), figures(cache, 0.0), cache.reservations.last, told

    before = state()
    with pytest.raises(BadArgument, match=f"{MAX_BLOCKS + 1} blocks in one reservation: at most {MAX_BLOCKS}"):
        engine.ask(m.Reserve(1, b"", engine.namespace, runs))
    assert state() == before and not cache.engines["one"].reservations
    runs[2].hashes.pop()
    assert answers(engine.ask(m.Reserve(1, b"", engine.namespace, runs))) == [Refusal.GRANTED] * MAX_BLOCKS
    check_integrity(cache)


def test_a_commit_shows_many_blocks_in_slices() -> None:
    cache = make_cache(80, 512)
    engine = Engine(cache, "one", block_bytes=512)
    names = chain("a", 2 * LOOK)
    first = engine.reserve(names[:1])
    assert set(engine.store(names[1:], names[0])) == {Refusal.GRANTED}
    assert engine.hits(names) == 0
    assert engine.settle(first) == [Verdict.VISIBLE]
    check_integrity(cache)
    assert engine.hits(names) == 1 + LOOK
    assert engine.acquire(names, pin=False).pending == LOOK - 1
    new = engine.reserve(["new"], names[-1])  # below one that is about to be shown
    assert engine.settle(new) == [Verdict.HIDDEN]
    assert do_chores(cache) > 0
    assert not cache.reservations.showing
    assert engine.hits([*names, "new"]) == len(names) + 1


def test_what_is_about_to_be_shown_may_be_distrusted(tiny: None) -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    first = engine.reserve(["p"])
    for name in "abc":
        engine.store(chain(name, 3), "p")
    engine.settle(first)
    assert len(cache.reservations.showing) > 1, "one is shown at once, and the rest is not"
    long = Long(engine, m.Distrust(1, b"", cache.geometry.region_id, first.slots, 0, Finding.CORRUPT))
    while not cache.invalidation.waiting:
        long.take_slice()
    visible = cache.namespaces[1].groups[0].visible
    hidden = set(hashes(["a0", "b0", "c0"])) - visible.keys()
    assert len(hidden) == 2
    while long.under_way:
        cache.chores.go_on()
        check_integrity(cache)
        long.take_slice()
        assert not visible.keys() & hidden, "shown although what is above it is distrusted"
    do_chores(cache)
    assert not visible and not cache.reservations.showing
    assert figures(cache, 0.0)["pool"]["used_bytes"] == 0


def test_a_long_invalid_request_changes_nothing() -> None:
    cache = make_cache(80, 512)
    engine = Engine(cache, "one", block_bytes=512)
    names = chain("a", MAX_BLOCKS)
    with pytest.raises(BadArgument, match="twice"):
        engine.reserve([*names[:-1], names[5]])
    assert not cache.engines["one"].writing and not cache.namespaces[1].groups[0].pending
    reserved = engine.reserve(names)
    with pytest.raises(BadArgument, match="positions"):
        engine.settle(reserved, at=(*range(len(names)), 0))
    assert engine.settle(reserved) == [Verdict.VISIBLE] * len(names)


# Blocks that can never become visible, and what is below them.


def stage(engine: Engine, top: str, below: int, wide: bool) -> tuple[m.Reserved, list[m.Reserved]]:
    """Reserve a block, and so many below it: a chain, or each below the block itself. Commit every second part of them,
    which stays hidden. Return the block's reservation, and those of the rest."""
    first, names, rest = engine.reserve([top]), chain(f"{top}.", below), []
    for number, at in enumerate(range(0, below, MAX_BLOCKS)):
        part, above = names[at : at + MAX_BLOCKS], names[at - 1] if at else top
        runs = [m.Run([each], hashes([top])[0]) for each in hashes(part)]
        reserved = engine.ask(m.Reserve(1, b"", engine.namespace, runs)) if wide else engine.reserve(part, above)
        assert answers(reserved) == [Refusal.GRANTED] * len(part)
        if number % 2 == 0:
            assert set(engine.settle(reserved)) == {Verdict.HIDDEN}
        else:
            rest.append(reserved)
    return first, rest


@pytest.mark.parametrize("wide", [False, True], ids=["a chain", "children of one block"])
def test_what_is_below_a_failed_block_is_never_found_and_goes_in_slices(
    monkeypatch: pytest.MonkeyPatch, wide: bool
) -> None:
    monkeypatch.setattr("kvcache_server.core.index.LOOK", 1000)  # the way down takes slices, too
    cache, below = make_cache(8, 256), 6 * MAX_BLOCKS
    engine, other = Engine(cache, "one", block_bytes=256), Engine(cache, "two", block_bytes=256)
    first, rest = stage(engine, "a", below, wide)
    names = ["a", *chain("a.", below)]
    assert other.acquire(names, pin=False).pending > 0
    assert engine.settle(first, Outcome.FAILED) == [Verdict.FAILED]
    check_integrity(cache)
    found = other.acquire(names, pin=False)
    assert (found.hits, found.pending) == (0, 0)
    assert answers(other.reserve(["x"], "a")) == [Refusal.NO_PARENT]
    assert engine.settle(rest[0], at=(0,)) == [Verdict.HIDDEN]  # its turn comes
    assert do_chores(cache) >= below // STEP - 1
    assert not cache.reservations.orphaned and not cache.namespaces[1].groups[0].pending
    pool = figures(cache, 0.0)["pool"]
    assert pool["blocks_writing"] == 0 and pool["used_bytes"] > 0  # their writers may still write
    assert engine.settle(rest[0], Outcome.FAILED, tuple(range(1, MAX_BLOCKS))) == [Verdict.ORPHANED] * (MAX_BLOCKS - 1)
    for reserved in rest[1:]:
        assert engine.settle(reserved) == [Verdict.ORPHANED] * MAX_BLOCKS
    check_integrity(cache)
    assert figures(cache, 0.0)["pool"]["used_bytes"] == 0
    assert set(other.store(names)) == {Refusal.GRANTED}
    assert other.hits(names) == len(names)


def test_new_blocks_below_one_that_is_about_to_go_are_orphaned_too(tiny: None) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    reserved = engine.reserve(chain("a", 6))
    assert engine.settle(reserved, Outcome.FAILED, at=(0,)) == [Verdict.FAILED]
    assert cache.reservations.orphaned
    ready, writing = other.reserve(["x"], "a2"), other.reserve(["y"], "x")
    assert answers(ready) == answers(writing) == [Refusal.GRANTED]
    assert other.settle(ready) == [Verdict.HIDDEN]
    check_integrity(cache)
    do_chores(cache)
    assert cache.counters["blocks_unreachable"] == 1  # x
    assert other.settle(writing) == [Verdict.ORPHANED]
    assert engine.settle(reserved, at=tuple(range(1, 6))) == [Verdict.ORPHANED] * 5
    check_integrity(cache)
    assert figures(cache, 0.0)["pool"]["used_bytes"] == 0
    assert other.store([*chain("a", 3), "x", "y"]) == [Refusal.GRANTED] * 5


def test_a_block_below_one_that_is_gone_is_not_superseded(tiny: None) -> None:
    """The new one has another parent. What is below the old one may be superseded, and goes with it."""
    cache = make_cache(supersede_after=2.0)
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    reserved = engine.reserve(chain("a", 6))
    engine.settle(reserved, Outcome.FAILED, at=(0,))
    assert cache.reservations.orphaned
    other.now = 5.0
    again = other.reserve(chain("a", 3))
    assert answers(again) == [Refusal.GRANTED, Refusal.IN_FLIGHT, Refusal.GRANTED]
    check_integrity(cache)
    assert other.settle(again) == [Verdict.VISIBLE, Verdict.HIDDEN]
    assert engine.settle(reserved, at=(1, 2)) == [Verdict.HIDDEN, Verdict.SUPERSEDED]
    assert other.hits(chain("a", 3)) == 1
    do_chores(cache)
    assert other.hits(chain("a", 3)) == 1
    assert other.store(chain("a", 3)) == [Refusal.PRESENT, Refusal.GRANTED, Refusal.GRANTED]
    assert engine.settle(reserved, at=(3, 4, 5)) == [Verdict.ORPHANED] * 3
    assert other.hits(chain("a", 3)) == 3
    check_integrity(cache)


@pytest.mark.parametrize("slices", range(0, 16, 3))
def test_a_block_that_waits_to_go_may_fail_or_lose_its_writer(tiny: None, slices: int) -> None:
    cache = make_cache(quarantine=10.0)
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    reserved = engine.reserve(chain("a", 4))
    assert answers(other.reserve(chain("b", 4), "a3")) == [Refusal.GRANTED] * 4
    engine.settle(reserved, Outcome.FAILED, at=(0,))
    for _ in range(slices):
        cache.chores.go_on()
        check_integrity(cache)
    gone = slices >= 12  # seven slices down, then b3 to b0, a3, a2; the first one was taken at once
    assert engine.settle(reserved, Outcome.FAILED, at=(2,)) == [Verdict.ORPHANED if gone else Verdict.FAILED]
    check_integrity(cache)
    cache.end_session(other.session, 0.0)
    check_integrity(cache)
    do_chores(cache)
    assert not cache.reservations.orphaned
    assert figures(cache, 0.0)["pool"]["blocks_quarantined"] == 4
    assert engine.settle(reserved, at=(1, 3)) == [Verdict.ORPHANED] * 2
    cache.tick(10.0)
    do_chores(cache)
    assert figures(cache, 0.0)["pool"]["used_bytes"] == 0


# Statistics, while what they count goes.


@pytest.mark.parametrize("slices", range(15))
def test_blocks_may_go_while_those_that_leases_hold_are_counted(tiny: None, slices: int) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    engine.store(chain("a", 8))
    engine.acquire(chain("a", 8))
    held = figures(cache, 0.0)["pool"]["pinned_bytes"]
    long = Long(other, m.Stats(1, b""))
    for _ in range(slices):
        long.take_slice()
    cache.end_session(engine.session, 0.0)
    other.ask(m.Clear(1, b""))
    do_chores(cache)
    assert not cache.eviction.fair_share.used
    assert 0 <= long.finish().stats["pool"]["pinned_bytes"] <= held


# Making room.


def test_large_and_small_blocks_take_each_others_place() -> None:
    cache = make_cache(62)
    small, large = Engine(cache, "one", 256 * KIB), Engine(cache, "two", 1 * MIB, model="large")
    small.store(chain("a", 14))
    for turn in range(20):
        reserved = large.reserve(chain(f"x{turn}.", 2))
        small.store([f"b{turn}"])
        assert answers(reserved) == [Refusal.GRANTED] * 2
        large.settle(reserved)
        check_integrity(cache)
    assert cache.eviction.evictions["room"] > 40
    finish(audit(cache))


def test_the_parent_of_a_run_is_not_evicted_for_it() -> None:
    cache = make_cache(31)
    engine = Engine(cache, "one", 512 * KIB)
    engine.store(["p", "q", "r"])
    assert not engine.cache.pool.free.pages // cache.namespaces[1].groups[0].pages, "room for another one"
    assert answers(engine.reserve(["s"], parent="r")) == [Refusal.NO_SPACE]  # r is the only leaf
    assert engine.hits(["p", "q", "r"]) == 3
    assert answers(engine.reserve(["s"], parent="q")) == [Refusal.GRANTED]
    assert engine.hits(["p", "q", "r"]) == 2
    check_integrity(cache)


def test_what_is_leased_stays_while_room_is_made() -> None:
    cache = make_cache(64, pin_quota=1.0)
    small, large = Engine(cache, "one", 256 * KIB), Engine(cache, "two", 1 * MIB, model="large")
    small.store(chain("a", 16))
    assert small.acquire(chain("a", 12)).hits == 12
    assert large.store(chain("x", 4)) == [Refusal.GRANTED, Refusal.NO_SPACE, *[Refusal.NO_PARENT] * 2]
    assert small.hits(chain("a", 16)) == 12
    check_integrity(cache)


def test_what_is_coldest_goes_for_a_large_block() -> None:
    cache = make_cache(96, policy=LRU)
    engine, large = Engine(cache, "one", block_bytes=512 * KIB), Engine(cache, "two", 3 * MIB, model="large")
    for name in "abcd":
        engine.store(chain(name, 3))
    engine.hits(chain("a", 3))
    assert large.store(["x"]) == [Refusal.GRANTED]
    assert [engine.hits(chain(name, 3)) for name in "abcd"] == [3, 0, 0, 3]
    check_integrity(cache)


def test_of_a_chain_the_end_goes_for_large_blocks() -> None:
    cache = make_cache(960)
    engine, large = Engine(cache, "one", block_bytes=512 * KIB), Engine(cache, "two", 6 * MIB, model="large")
    engine.store(chain("a", 120))
    assert large.store(chain("x", 5)) == [Refusal.GRANTED] * 5
    assert engine.hits(chain("a", 120)) == 60
    check_integrity(cache)


def test_for_one_reservation_a_bounded_number_of_others_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its engine asks again, the rest goes."""
    monkeypatch.setattr("kvcache_server.core.eviction.policy._MOST_EVICTED", 100)
    cache = make_cache(4, 64)
    small, large = Engine(cache, "one", block_bytes=64), Engine(cache, "two", 64 * 250, model="large")
    names = chain("a", cache.geometry.pages)
    small.store(names)
    assert [large.store(["x"]) for _ in range(3)] == [[Refusal.NO_SPACE]] * 2 + [[Refusal.GRANTED]]
    assert cache.eviction.evictions["room"] == 250
    check_integrity(cache)
    middle = Engine(cache, "three", 64 * 60, model="middle")
    assert middle.store(["y", "z"]) == [Refusal.GRANTED, Refusal.NO_SPACE]  # all of its blocks together
    assert cache.eviction.evictions["room"] == 350
    assert middle.store(["y", "z"]) == [Refusal.PRESENT, Refusal.GRANTED]
    assert cache.eviction.evictions["room"] == 370
    check_integrity(cache)


def test_below_a_ceiling_a_bounded_number_goes_for_one_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_server.core.eviction.policy._MOST_EVICTED", 100)
    cache = make_cache(8, 64)
    engine = Engine(cache, "one", block_bytes=64)
    spec = NamespaceSpec("two sizes", (GroupSpec(16, 64), GroupSpec(16, 64 * 250)), hash_bytes=16)
    engine.namespace = engine.ask(m.Attach(1, b"", spec, (0,), 64 * 400)).namespace
    assert set(engine.store(chain("a", 400))) == {Refusal.GRANTED}
    large = m.Reserve(1, b"", engine.namespace, [m.Run(hashes(["x"]))], 1)
    assert [answers(engine.ask(large)) for _ in range(3)] == [[Refusal.QUOTA]] * 2 + [[Refusal.GRANTED]]
    assert cache.eviction.evictions == {"own_ceiling": 250}
    check_integrity(cache)


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of Python it takes."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return note

    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("wide", [False, True], ids=["a chain", "children of one block"])
def test_no_reserve_grows_with_the_blocks_in_the_pool(wide: bool) -> None:
    most = []
    for blocks in (4, 16):
        cache = make_cache(blocks, 64)
        engine, large = Engine(cache, "one", block_bytes=64), Engine(cache, "two", 20 * 64, model="large")
        names = chain("a", cache.geometry.pages)
        engine.store(names[:1])
        for at in range(1, len(names), 1 if wide else 1000):
            engine.store(names[at : at + (1 if wide else 1000)], names[0 if wide else at - 1])
        assert not cache.pool.free.pages
        replies: list[m.Reserved] = []
        most.append(lines_of(lambda: replies.append(large.reserve(chain("x", 24)))))  # noqa: B023 - it is called here
        assert answers(replies[0]) == [Refusal.GRANTED] * 24
        assert cache.eviction.evictions["room"] == 24 * 20
        check_integrity(cache)
    assert most[1] < 1.2 * most[0]


# Clear, distrust, ends and quarantines.


def test_a_clear_removes_existing_blocks_and_keeps_new_ones(tiny: None) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    for name in "abc":
        engine.store(chain(name, 5))
    leased = engine.acquire(chain("c", 2))
    long = Long(other, m.Clear(1, b""))
    for number in range(3):
        for _ in range(3):
            long.take_slice()
        other.store([f"new{number}"])
        engine.hits(chain("a", 5))  # a hit does not save it
        other.store(["below"], parent=f"new{number}")
    assert long.finish().blocks == 13
    assert [engine.hits(chain(name, 5)) for name in "abc"] == [0, 0, 2]
    assert [other.hits([f"new{number}"]) for number in range(3)] == [1, 1, 1]
    engine.ask(m.Release(1, b"", [leased.lease]))
    assert engine.ask(m.Clear(1, b"")).blocks == 6


def test_two_clears_at_once(tiny: None) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    for name in "abc":
        engine.store(chain(name, 5))
    clears = [Long(each, m.Clear(1, b"")) for each in (engine, other)]
    while any(clear.under_way for clear in clears):
        for clear in clears:
            if clear.under_way:
                clear.take_slice()
    assert sum(clear.reply.blocks for clear in clears) == 15
    assert figures(cache, 0.0)["pool"]["blocks"] == 0


def test_distrusted_blocks_are_hidden_from_the_first_slice_on(tiny: None) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    names = chain("a", 8)
    reserved = engine.reserve(names)
    engine.settle(reserved)
    lease = other.acquire(names[:6])
    writing = other.reserve(["below"], parent=names[7])
    long = Long(
        engine,
        m.Distrust(1, b"", cache.geometry.region_id, reserved.slots[REF_BYTES : 2 * REF_BYTES], 0, Finding.CORRUPT),
    )
    while not cache.invalidation.waiting:
        long.take_slice()
    assert other.hits(names) == 1
    assert other.reserve(["x"], parent=names[1]).reservation == 0
    assert long.finish().blocks == 7
    assert other.settle(writing) == [Verdict.ORPHANED]
    assert other.hits(names) == 1
    other.ask(m.Release(1, b"", [lease.lease]))
    check_integrity(cache)


def test_nothing_below_a_distrusted_block_is_found_through_a_new_one(tiny: None) -> None:
    """Another engine computes the block again while those below it are still being forgotten."""
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    names = chain("a", 8)
    reserved = engine.reserve(names)
    engine.settle(reserved)
    long = Long(engine, m.Distrust(1, b"", cache.geometry.region_id, reserved.slots[:REF_BYTES], 0, Finding.CORRUPT))
    while other.hits(names):
        long.take_slice()
    while long.under_way:
        other.store(names[:1])
        assert other.hits(names) <= 1
        long.take_slice()
    other.store(names[:1])
    assert other.hits(names) == 1


def test_what_is_retained_may_be_distrusted_until_a_tick_has_looked(tiny: None) -> None:
    """The state is sound in all that time."""
    cache = make_cache(retain_quota=0.5)
    engine = Engine(cache, "one")
    slots = b""
    for name in "abc":
        names = chain(name, 3)
        reserved = engine.reserve(names)
        engine.settle(reserved)
        engine.ask(m.Retain(1, b"", engine.namespace, hashes(names), 60.0))
        slots += reserved.slots
    long = Long(engine, m.Distrust(1, b"", cache.geometry.region_id, slots, 0, Finding.CORRUPT))
    while long.under_way:
        if long.slices % 5 == 0:
            cache.tick(0.0)
            do_chores(cache)
        long.take_slice()
    assert long.reply.blocks == 9
    cache.tick(0.0)
    check_integrity(cache)
    assert do_chores(cache) > 1
    assert not cache.retentions.doubted and not cache.retentions.retained_bytes


def test_the_end_of_a_writer_takes_slices_and_its_pages_stay_quarantined(tiny: None) -> None:
    cache = make_cache(quarantine=10.0)
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    engine.reserve(chain("a", 8))
    cache.end_session(engine.session, 0.0)
    assert cache.chores
    assert figures(cache, 0.0)["pool"]["blocks_quarantined"] < 8
    assert do_chores(cache) > 8
    assert figures(cache, 0.0)["pool"]["blocks_quarantined"] == 8
    assert "one" not in cache.engines
    cache.tick(10.0)
    assert 0 < figures(cache, 0.0)["pool"]["blocks_quarantined"] < 8
    cache.tick(10.0)
    do_chores(cache)
    assert figures(cache, 0.0)["pool"]["blocks_quarantined"] == 0
    assert other.store(chain("a", 8)) == [Refusal.GRANTED] * 8


# A look at what must always hold.


def block_of(cache: Cache, name: str) -> Block:
    return cache.namespaces[1].groups[0].visible[hashes([name])[0]]


def spoil_row(cache: Cache) -> None:
    cache.rows.set_state(cache.pool.row(block_of(cache, "a1")), 0)


def spoil_stray_row(cache: Cache) -> None:
    row = cache.pool.row(block_of(cache, "a1"))
    cache.rows.buffer[row_of(1) : row_of(2)] = cache.rows.buffer[row : row + ROW]


def spoil_busy(cache: Cache) -> None:
    cache.pool.busy += 1


def spoil_free(cache: Cache) -> None:
    cache.pool.free.add(cache.pool.page(block_of(cache, "a1")), 1)


def spoil_page(cache: Cache) -> None:
    pool = cache.pool
    pool.blocks[pool.page(block_of(cache, "a1"))] = block_of(cache, "a2")


def spoil_tree(cache: Cache) -> None:
    block = block_of(cache, "a3")
    assert block.parent is not None
    block.parent.child = None


def spoil_order(cache: Cache) -> None:
    block_of(cache, "a5").queued = 0


def spoil_parent(cache: Cache) -> None:
    cache.rows.set_parent(cache.pool.row(block_of(cache, "a2")), 77)


def spoil_account(cache: Cache) -> None:
    cache.eviction.fair_share.accounts[0].share.bytes += 1


def spoil_engine(cache: Cache) -> None:
    cache.engines["one"].writing += 1


def spoil_pending(cache: Cache) -> None:
    next(iter(cache.namespaces[1].groups[0].pending.values())).verdict = Verdict.FAILED


@pytest.mark.parametrize(
    "spoil",
    [
        *(spoil_row, spoil_stray_row, spoil_busy, spoil_free, spoil_page, spoil_tree, spoil_order, spoil_parent),
        *(spoil_account, spoil_engine, spoil_pending),
    ],
)
def test_an_audit_finds_what_is_broken(spoil: Any) -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.store(chain("a", 6))
    engine.acquire(chain("a", 3))
    engine.reserve(["w"])
    finish(audit(cache))
    check_integrity(cache)
    spoil(cache)
    with pytest.raises(AssertionError):
        finish(audit(cache))
    with pytest.raises(AssertionError):
        check_integrity(cache)


@pytest.mark.parametrize("slices", range(1, 12))
def test_an_audit_passes_over_pages_that_get_other_blocks_meanwhile(slices: int) -> None:
    cache = make_cache(31)
    engine, other = Engine(cache, "one"), Engine(cache, "two", 100 * KIB, "other")
    engine.store(chain("a", 3))
    auditing = audit(cache)
    for _ in range(slices):
        next(auditing, None)
    cache.clear("", "an operator", 0.0)
    assert other.reserve(["b"]).reservation  # on the same pages; it is written now
    finish(auditing)


def test_an_audit_runs_in_slices_while_the_cache_changes() -> None:
    cache = make_cache(248, KIB)
    engine = Engine(cache, "one", block_bytes=1 * KIB)
    engine.store(chain("a", 20 * STEP))
    looks = 0
    for _ in audit(cache):
        looks += 1
        engine.store([f"b{looks}"])
    assert looks > 20


# All of it at once.


TAILS = GroupSpec(16, 64 * KIB, TAIL, 2), GroupSpec(16, 250 * KIB, TAIL, 1)


class Story:
    """Engines of two block sizes, and some with tails, whose requests come in any order, some of them in the midst of
    others."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.cache = make_cache(93, 32 * KIB, supersede_after=1.0, quarantine=3.0)
        self.now = 0.0
        self.count = 0
        self.long: dict[str, Long] = {}
        self.open: dict[str, list[m.Reserved]] = {}
        self.leases: dict[str, list[int]] = {}
        self.refs: list[bytes] = []
        self.engines: dict[str, Engine] = {}
        self.audit, self.audits = audit(self.cache), 0
        self.scattered = self.orphaned = False
        self.comb = Engine(self.cache, "comb", 64 * KIB, "comb")  # between what it leases, no large block fits
        for at in range(93):
            self.comb.store([f"c{at}"])
            if at % 4 == 0:
                self.comb.acquire([f"c{at}"])
        self.comb.ask(m.Clear(1, b""))
        for name in ("one", "two", "three", "four", "window", "state"):
            self.start(name)

    def start(self, name: str) -> None:
        kind = {"four": "large", "window": "hybrid", "state": "hybrid"}.get(name, "m")
        size = 640 * KIB if kind == "large" else 128 * KIB
        self.engines[name] = Engine(self.cache, name, size, kind, TAILS if kind == "hybrid" else ())
        self.open[name], self.leases[name] = [], []

    def names(self) -> list[str]:
        path = "".join(self.draw.choice("ab") for _ in range(self.draw.randrange(1, 7)))
        return [path[:end] for end in range(1, len(path) + 1)]

    def request(self, name: str) -> m.Request:
        engine, names = self.engines[name], self.names()
        region = self.cache.geometry.region_id
        cut = self.draw.randrange(len(names))
        match self.draw.randrange(10):
            case 0 | 1 | 2 | 3:
                run = m.Run(hashes(names[cut:]), hashes(names[:cut])[-1] if cut else None)
                more = [m.Run(hashes(self.names()))] if self.draw.random() < 0.3 else []
                for group in (1, 2) if name in ("window", "state") else ():
                    more.append(m.Run(hashes(names)[-TAILS[group - 1].reach :], None, group))
                return m.Reserve(1, b"", engine.namespace, [run, *more])
            case 4 | 5 | 6 if self.open[name]:
                reserved = self.draw.choice(self.open[name])
                outcome = self.draw.choice([Outcome.COMMITTED] * 3 + [Outcome.FAILED, Outcome.NEVER_STARTED])
                count = reserved.answers.count(0)
                at = self.draw.sample(range(count), self.draw.randrange(count + 1))
                return m.Settle(1, b"", region, reserved.reservation, (0,), outcome, at)
            case 7 if self.refs:
                return m.Distrust(1, b"", region, b"".join(self.draw.sample(self.refs, 2 % len(self.refs))), 0, 0)
            case 8 if self.draw.random() < 0.3:
                return m.Clear(1, b"")
        return m.Acquire(1, b"", engine.namespace, hashes(names))

    def step(self) -> None:
        name = self.draw.choice(list(self.engines))
        self.now += self.draw.random() / 10
        engine = self.engines[name]
        engine.now = self.now
        if self.cache.chores and self.draw.random() < 0.4:
            self.cache.chores.go_on()
        elif self.draw.random() < 0.02:
            self.end(name)
        elif self.draw.random() < 0.5:
            self.look_at_a_part()
        elif self.draw.random() < 0.1:
            self.cache.tick(self.now)
        elif name in self.long:
            self.long[name].take_slice()
            self.look(name)
        elif self.leases[name] and self.draw.random() < 0.2:
            engine.ask(m.Release(1, b"", [self.leases[name].pop()]))
        else:
            self.long[name] = Long(engine, self.request(name))
            self.look(name)
        self.scattered |= bool(self.cache.pool._scattered)
        self.orphaned |= bool(self.cache.reservations.orphaned)
        check_integrity(self.cache)

    def look_at_a_part(self) -> None:
        try:
            for _ in range(16):
                next(self.audit)
        except StopIteration:
            self.audits += 1
            self.audit = audit(self.cache)

    def look(self, name: str) -> None:
        long = self.long[name]
        if long.under_way:
            assert not isinstance(long.request, (m.Reserve, m.Settle, m.Acquire)), "engines wait for these in each step"
            return
        del self.long[name]
        reply = long.reply
        self.count += long.slices > 1
        if isinstance(reply, m.Reserved) and reply.reservation:
            self.open[name].append(reply)
            self.refs = [ref.pack() for ref in unpack_refs(reply.slots)] + self.refs[:10]
        elif isinstance(reply, m.Acquired) and reply.lease:
            self.leases[name].append(reply.lease)

    def end(self, name: str) -> None:
        self.cache.end_session(self.engines[name].session, self.now)
        long = self.long.pop(name, None)
        while long is not None and long.under_way:  # as the daemon does: it goes on, and nobody hears of it
            long.take_slice()
        self.start(name)


@pytest.mark.parametrize("seed", range(20))
def test_concurrent_requests_leave_a_consistent_state_after_each_slice(tiny: None, seed: int) -> None:
    story = Story(seed)
    for _ in range(800):
        story.step()
    assert story.audits > 5 and story.scattered and story.orphaned
    for name in list(story.long):
        story.long.pop(name).finish()
    assert story.count > 10
    for name, engine in list(story.engines.items()):
        for reserved in story.open[name]:
            try:
                engine.settle(reserved, Outcome.FAILED)
            except UnknownHandle:
                continue  # settled
        story.cache.end_session(engine.session, story.now)
    story.cache.end_session(story.comb.session, story.now)
    do_chores(story.cache)
    story.cache.tick(story.now + 10.0)
    do_chores(story.cache)
    finish(story.cache.clearing("", "the end", story.now))
    assert figures(story.cache, 0.0)["pool"]["used_bytes"] == 0
    assert not story.cache.holds.blocks and not story.cache.invalidation.waiting
    assert not story.cache.reservations.showing and not story.cache.reservations.orphaned


# Restate.


def restating(engine: Engine, ends: list[str]) -> Long:
    """Let the engine's session leave and resume, and restate a lease on each of the chains that have these ends."""
    cache = engine.cache
    namespace = cache.namespaces[engine.namespace]
    last = cache.lookups.last
    leases = [(last - at, namespace.groups[0].visible[name].ref) for at, name in enumerate(hashes(ends))]
    cache.disconnect_session(engine.session, 0.0)
    cache.resume_session(engine.session, "", engine.now)
    engine.ask(m.Attach(1, b"", namespace.spec, (0,)))
    return Long(engine, m.Restate(1, b"", 0, leases))


def test_many_long_leases_are_restated_in_slices() -> None:
    cache = make_cache(16, 64)
    engine = Engine(cache, "one", block_bytes=64)
    names = chain("a", 2 * LOOK)
    engine.store(names)
    sibling = Engine(cache, "one", block_bytes=64)
    for _ in range(10 * STEP):
        sibling.acquire(["a0"])
    few = restating(engine, ["a0"])
    assert few.finish().lost == [cache.lookups.last]  # another session holds it
    assert few.slices >= 10  # what its engine holds already is looked at first
    cache.lookups.last += 4096
    many = restating(engine, ["a0"] * 4096)
    assert many.finish().lost == []
    assert many.slices >= 4096 // STEP
    long = restating(engine, [names[-1]])
    assert long.finish().lost == []
    assert long.slices >= 4  # up and down again


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("seed", range(5))
def test_leases_are_restated_while_others_evict_and_read(seed: int) -> None:
    draw = random.Random(seed)
    cache = make_cache(31)
    engine, sibling, other = (Engine(cache, name) for name in ("one", "one", "other"))
    engine.store(chain("a", 12))
    for name in "bc":
        engine.store(chain(name, 4), "a5")
    held = [sibling.acquire(chain("a", 6) + chain("b", length)).lease for length in (1, 4)]
    ends = draw.sample(["a11", "b3", "a5", "c3", "c1", "a11", "b3"], 7)
    cache.lookups.last += len(ends)
    last, stored = cache.lookups.last, 0
    long = restating(engine, ends)
    while long.under_way:
        if draw.random() < 0.5:
            other.store(chain(f"x{stored}-", 2))
            stored += 2
        elif held and draw.random() < 0.2:
            sibling.ask(m.Release(1, b"", [held.pop()]))
        long.take_slice()
    lost = long.finish().lost
    leases, group = cache.sessions[engine.session].leases, cache.namespaces[engine.namespace].groups[0]
    assert leases.keys() == {last - at for at in range(len(ends))} - set(lost)
    assert all(group.trusts(block) for lease in leases.values() for block in lease.block.ancestors())
    assert cache.eviction.evictions


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("slices", [1, 2, 5, 12])
def test_a_session_that_leaves_while_it_restates_holds_nothing(slices: int) -> None:
    cache = make_cache(31)
    engine, other = Engine(cache, "one"), Engine(cache, "other")
    engine.store(chain("a", 8))
    cache.lookups.last += 4
    long = restating(engine, ["a7", "a3", "a7", "a1"])
    while long.slices < slices:
        long.take_slice()
    cache.disconnect_session(engine.session, 0.0)
    with pytest.raises(UnknownHandle):
        long.finish()
    other.store(chain("b", 31))
    assert engine.cache.sessions.keys() == {other.session}
    assert other.hits(chain("b", 31)) == 31
