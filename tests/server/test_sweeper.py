"""What takes long is finished by the sweeper, a slice at a time: it takes effect at once, the state is sound after each
slice, and requests in between are answered correctly. Answers that take long are cut likewise."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator
from itertools import pairwise
from types import FrameType
from typing import Any

import msgspec
import pytest
import small_cache
from insights import begin, explained, figures, finish, follow
from small_cache import KIB, MIB, audit, chain, hashes, make_cache

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_request, encode
from kvcache_proto.errors import BadArgument, BadFrame, NotPermitted, UnknownHandle
from kvcache_proto.region import ROW, row_of
from kvcache_proto.types import (
    MAX_BLOCKS,
    MAX_HASHES,
    REF_BYTES,
    SUFFIX,
    Finding,
    GroupSpec,
    NamespaceSpec,
    Outcome,
    Refusal,
    Verdict,
    unpack_refs,
)
from kvcache_server.core import integrity
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import LRU
from kvcache_server.core.index import Block, Group
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import LOOK, STEP
from kvcache_server.insight.miss_causes import EXAMINED, MOST_BLOCKS, MOST_RUNS
from kvcache_server.miss_report import Run

CUT = (
    *("core.eviction.policy", "core.index", "core.integrity", "core.invalidation", "core.registry"),
    *("core.reservations", "core.retention", "insight.chains", "insight.miss_causes", "insight.stats"),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as finely as can be."""
    for module in CUT:
        for name in ("STEP", "LOOK"):
            monkeypatch.setattr(f"kvcache_server.{module}.{name}", 1, raising=False)
    monkeypatch.setattr("kvcache_server.core.index._DESCENTS", 1)


class Engine(small_cache.Engine):
    """One that leaves to the test what is left to the sweeper."""

    def ask(self, request: m.Request) -> Any:
        reply = begin(self.cache, self.session, request, self.now)
        if isinstance(reply, Generator):
            reply = finish(reply)
        follow(self.cache)
        return reply

    def invalidate(self, slots: bytes) -> m.Invalidated:
        return self.ask(m.Invalidate(1, b"", self.cache.geometry.region_id, slots, 0, Finding.CORRUPT))


class Long:
    """A question for insight, the answer to which is under way."""

    def __init__(self, engine: small_cache.Engine, request: m.Request) -> None:
        follow(engine.cache)
        self._left = begin(engine.cache, engine.session, request, engine.now)
        self._cache, self.slices, self.reply = engine.cache, 1, None
        if not isinstance(self._left, Generator):
            self._left, self.reply = None, self._left

    @property
    def under_way(self) -> bool:
        return self._left is not None

    def take_slice(self) -> None:
        follow(self._cache)
        self.slices += 1
        try:
            next(self._left)
        except StopIteration as done:
            self._left, self.reply = None, done.value

    def finish(self) -> Any:
        while self.under_way:
            self.take_slice()
        return self.reply


def sweep(cache: Cache, most: int = 1 << 30) -> int:
    """Let the sweeper do so many slices, or all; return how many it did."""
    done = 0
    while cache.sweeper and done < most:
        cache.sweeper.go_on()
        check_integrity(cache)
        done += 1
    return done


def answers(reserved: m.Reserved) -> list[Refusal]:
    return [Refusal(answer) for answer in reserved.answers]


# How much a slice is.


def test_what_engines_wait_for_in_each_step_leaves_nothing_to_the_sweeper(tiny: None) -> None:
    """However long it is."""
    cache = make_cache(4, 64)
    engine = Engine(cache, "one", block_bytes=64)
    for at in range(0, 1024, MAX_BLOCKS):
        names = chain(f"{at}-", MAX_BLOCKS)
        reserved = engine.reserve(names)
        assert answers(reserved) == [Refusal.GRANTED] * MAX_BLOCKS
        assert engine.settle(reserved) == [Verdict.VISIBLE] * MAX_BLOCKS
        assert not cache.sweeper
    assert engine.hits([*names, *chain("n", MAX_HASHES - MAX_BLOCKS)]) == MAX_BLOCKS
    assert not cache.sweeper


def test_slices_are_bounded() -> None:
    cache = make_cache(248, KIB)
    engine = Engine(cache, "one", block_bytes=1 * KIB)
    engine.store(chain("a", 10 * STEP))
    left = [cache.eviction.fair_share.used]
    assert engine.ask(m.Clear(1, b"")).blocks == 10 * STEP
    left.append(cache.eviction.fair_share.used)
    while cache.sweeper:
        assert sweep(cache, 1) == 1
        left.append(cache.eviction.fair_share.used)
    assert max(before - after for before, after in pairwise(left)) == STEP * KIB
    assert left[-1] == 0


@pytest.mark.parametrize("when", [3, 8, 20, 40, 300, 800])
def test_why_examines_a_long_miss_in_slices_while_the_cache_changes(when: int) -> None:
    cache = make_cache(page_bytes=KIB)
    engines = [small_cache.Engine(cache, name, 64, name) for name in ("one", "two", "three")]
    names = [f"{number}" for number in range(MAX_HASHES)]
    for engine in engines[1:]:
        engine.store(names[:2000])
        engine.ask(m.ReportMisses(1, b"", engine.namespace, [m.MissNote("q", "paused", 0, hashes(names))]))
    request = m.Acquire(1, b"", engines[0].namespace, hashes(names), request="r")
    engines[0].ask(request)
    why = Long(engines[0], m.Why(1, b"", "r"))
    while why.under_way:
        if why.slices == when:  # in the midst of it: what it relies on goes
            for engine in engines:
                cache.end_session(engine.session, 1000.0)
            cache.sweeper.go_on()
            cache.clear("", "an operator", 1000.0)
            cache.sweeper.finish()
            cache.registry.prune()
        why.take_slice()
    (told,) = explained(why.reply).explained
    assert [run.last for run in told.runs][-1] == MAX_HASHES - 1
    assert why.slices > MOST_BLOCKS / EXAMINED


def test_a_why_with_very_many_causes_ends_with_unexamined_blocks() -> None:
    cache = make_cache()
    engine = small_cache.Engine(cache, "one", 64)
    names = [f"{number}" for number in range(2000)]
    request = m.Acquire(1, b"", engine.namespace, hashes(names), request="r")
    for part in (names[::2], names[1::2]):
        cause = "paused" if part[0] == "0" else "weights"
        engine.ask(m.ReportMisses(1, b"", engine.namespace, [m.MissNote("q", cause, 0, hashes(part))]))
    engine.ask(request)
    (told,) = explained(engine.ask(m.Why(1, b"", "r"))).explained
    assert len(told.runs) == MOST_RUNS + 1
    assert told.runs[-1] == Run(MOST_RUNS, 1999, "unexamined", cached_now=0)


def test_the_runs_and_blocks_of_one_request_are_bounded() -> None:
    cache = make_cache()
    engine = Engine(cache, "one", block_bytes=1 * KIB)
    names = hashes(chain("a", MAX_BLOCKS))
    orphans = engine.ask(m.Reserve(1, b"", engine.namespace, [m.Run([name], b"x" * 16) for name in names]))
    assert answers(orphans) == [Refusal.NO_PARENT] * MAX_BLOCKS
    with pytest.raises(BadFrame):
        decode_request(encode(m.Reserve(1, b"", 1, [m.Run(names[:1])] * (MAX_BLOCKS + 1))))
    with pytest.raises(BadFrame):
        decode_request(encode(m.ReportMisses(1, b"", 1, [m.MissNote("r", "c")] * (m.MAX_NOTES + 1))))


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
    cache = make_cache(120, 512)
    engine = Engine(cache, "one", block_bytes=512)
    names = chain("a", 3 * LOOK)
    first = engine.reserve(names[:1])
    assert set(engine.store(names[1:], names[0])) == {Refusal.GRANTED}
    assert engine.hits(names) == 0
    assert engine.settle(first) == [Verdict.VISIBLE]
    check_integrity(cache)
    shown = engine.hits(names)
    assert 1 + LOOK <= shown < len(names)
    assert engine.acquire(names, pin=False).pending == len(names) - shown
    new = engine.reserve(["new"], names[-1])  # below one that is about to be shown
    assert engine.settle(new) == [Verdict.HIDDEN]
    sweep(cache)
    assert not cache.reservations.showing
    assert engine.hits([*names, "new"]) == len(names) + 1


@pytest.mark.parametrize("what", ["invalidate", "clear"])
def test_what_is_about_to_be_shown_may_go(tiny: None, what: str) -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    first = engine.reserve(["p"])
    for name in "abc":
        engine.store(chain(name, 3), "p")
    engine.settle(first)
    assert len(cache.reservations.showing) > 1, "some are shown at once, and the rest is not"
    if what == "invalidate":
        assert engine.invalidate(first.slots).writers == [("one", engine.session)]
    else:
        engine.ask(m.Clear(1, b""))
    visible = cache.namespaces[1].groups[0].visible
    hidden = set(hashes(["p", "a0", "b0", "c0"])) - visible.keys()
    assert len(hidden) >= 2
    while True:
        check_integrity(cache)
        assert not visible.keys() & hidden, "shown although what is above it is not found"
        assert not any(engine.hits(["p", *chain(name, 3)]) for name in "abc")
        if not sweep(cache, 1):
            break
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
def test_what_is_below_a_failed_block_is_never_found_and_goes_in_slices(wide: bool) -> None:
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
    assert sweep(cache) >= below // STEP - 1
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
    sweep(cache)
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
    sweep(cache)
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
        cache.sweeper.go_on()
        check_integrity(cache)
    gone = slices >= 12  # seven slices down, then b3 to b0, a3, a2; the first one was taken at once
    assert engine.settle(reserved, Outcome.FAILED, at=(2,)) == [Verdict.ORPHANED if gone else Verdict.FAILED]
    check_integrity(cache)
    cache.end_session(other.session, 0.0)
    check_integrity(cache)
    sweep(cache)
    assert not cache.reservations.orphaned
    assert figures(cache, 0.0)["pool"]["blocks_quarantined"] == 4
    assert engine.settle(reserved, at=(1, 3)) == [Verdict.ORPHANED] * 2
    cache.tick(10.0)
    sweep(cache)
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
    sweep(cache)
    assert not cache.eviction.fair_share.used
    assert 0 <= msgspec.msgpack.decode(long.finish().stats)["pool"]["pinned_bytes"] <= held


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
    audit(cache)


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


# Clear, invalidate, ends and quarantines.


def test_a_clear_hides_all_blocks_at_once_and_keeps_new_ones(tiny: None) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    for name in "abc":
        engine.store(chain(name, 5))
    writing = engine.reserve(["w0", "w1"])  # the first ones of their chain
    below = engine.reserve(["below"], "b4")
    assert other.ask(m.Clear(1, b"")).blocks == 15
    assert cache.sweeper
    assert [engine.hits(chain(name, 5)) for name in "abc"] == [0, 0, 0]
    assert answers(other.reserve(["x"], "a4")) == [Refusal.NO_PARENT]
    slices = 0
    while sweep(cache, 3):
        other.store([f"new{slices}"])
        other.store(["below"], parent=f"new{slices}")  # in another place than before
        other.store(chain("a", 2))
        assert [engine.hits(chain(name, 5)) for name in "abc"] == [2, 0, 0]
        assert all(other.hits([f"new{number}"]) == 1 for number in range(slices + 1))
        slices += 1
    assert slices > 4
    assert engine.settle(below) == [Verdict.ORPHANED]
    assert engine.settle(writing) == [Verdict.VISIBLE] * 2
    assert engine.hits(["w0", "w1"]) == 2
    assert cache.counters["blocks_cleared"] == 15
    check_integrity(cache)


def test_a_clear_hides_what_is_in_use_at_once_and_frees_it_after_that(tiny: None) -> None:
    """Leased, retained and pinned: what was read under a lease is there until that ends."""
    cache = make_cache(retain_quota=0.5, operator_quota=0.5)
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    for name in "lrpo":
        engine.store(chain(name, 4))
    lease = engine.acquire(chain("l", 4))
    assert engine.ask(m.Retain(1, b"", engine.namespace, hashes(chain("r", 4)), 60.0)).blocks == 4
    operator = cache.open_session("operator", "", 0.0, is_operator=True)
    space = cache.namespaces[engine.namespace].id
    pin = begin(cache, operator, m.Pin(1, b"", space, hashes(chain("p", 4))), 0.0)
    assert pin.blocks == 4
    assert other.ask(m.Clear(1, b"")).blocks == 16
    refs = unpack_refs(lease.slots)
    for turn in range(100):
        assert [other.hits(chain(name, 4)) for name in "lrpo"] == [0, 0, 0, 0]
        assert all(cache.rows.is_current(ref) for ref in refs), "lost while it is read"
        if turn % 7 == 0:
            cache.tick(0.0)
        sweep(cache, 1)
    sweep(cache)
    check_integrity(cache)
    assert cache.eviction.fair_share.used == 4 * 64 * KIB, "more than what is leased"
    assert not cache.retentions.doubted and not cache.retentions.retained_bytes
    engine.store(chain("l", 4))  # anew, beside those that are read
    assert all(cache.rows.is_current(ref) for ref in refs)
    assert {slot.pack() for slot in refs}.isdisjoint(
        slot.pack() for slot in unpack_refs(other.acquire(chain("l", 4), pin=False).slots)
    )
    engine.store(chain("p", 4))
    cache.tick(0.0)
    sweep(cache)
    assert cache.retentions.operator.retentions[hashes(["p3"])[0] + cache.namespaces[1].groups[0].tag].held == 4
    engine.ask(m.Release(1, b"", [lease.lease]))
    cache.tick(0.0)
    sweep(cache)
    assert cache.eviction.fair_share.used == 8 * 64 * KIB, "only what was stored since"
    assert other.hits(chain("l", 4)) == other.hits(chain("p", 4)) == 4
    assert not cache.invalidation.kept


def test_the_state_is_found_sound_in_the_midst_of_a_clear(tiny: None) -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.store(chain("a", 5))
    engine.ask(m.Clear(1, b""))
    assert cache.invalidation.cleared
    check_integrity(cache)


def test_a_clear_in_the_midst_of_another_one_s_sweep(tiny: None) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    for name in "abc":
        engine.store(chain(name, 5))
    assert engine.ask(m.Clear(1, b"")).blocks == 15
    assert other.ask(m.Clear(1, b"")).blocks == 0
    sweep(cache, 5)
    engine.store(chain("a", 5))
    assert other.ask(m.Clear(1, b"")).blocks == 5
    assert engine.hits(chain("a", 5)) == 0
    engine.store(chain("b", 2))
    assert sweep(cache) >= 14
    assert engine.hits(chain("b", 5)) == 2
    assert figures(cache, 0.0)["pool"]["blocks"] == 2


def test_invalidated_blocks_and_those_below_are_not_found_from_then_on(tiny: None) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    names = chain("a", 8)
    reserved = engine.reserve(names)
    engine.settle(reserved)
    lease = other.acquire(names[:6])
    writing = other.reserve(["below"], parent=names[7])
    assert 1 <= engine.invalidate(reserved.slots[REF_BYTES : 2 * REF_BYTES]).blocks < 7
    assert other.reserve(["x"], parent=names[1]).reservation == 0
    slices = 0
    while True:
        assert other.hits(names) == 1
        if not sweep(cache, 1):
            break
        slices += 1
    assert slices > 7 and cache.counters["blocks_invalidated"] == 7
    assert other.settle(writing) == [Verdict.ORPHANED]
    refs = unpack_refs(lease.slots)
    assert all(cache.rows.is_current(ref) for ref in refs)
    assert cache.eviction.fair_share.used == 6 * 64 * KIB
    other.ask(m.Release(1, b"", [lease.lease]))
    cache.tick(0.0)
    sweep(cache)
    assert cache.eviction.fair_share.used == 64 * KIB
    assert not any(cache.rows.is_current(ref) for ref in refs[1:])


@pytest.mark.parametrize("stored", [1, 3, 8])
@pytest.mark.parametrize("slices", [0, 3, 9, 13])
def test_nothing_below_a_invalidated_block_is_found_through_a_new_one(tiny: None, stored: int, slices: int) -> None:
    """Another engine computes the block again, and some of those below it, before the sweeper has come to them."""
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    names = chain("a", 8)
    reserved = engine.reserve(names)
    engine.settle(reserved)
    old = {ref.pack() for ref in unpack_refs(reserved.slots)}
    engine.invalidate(reserved.slots[:REF_BYTES])
    sweep(cache, slices)
    assert cache.sweeper
    assert set(other.store(names[:stored])) == {Refusal.GRANTED}, "taken for present"
    while True:
        check_integrity(cache)
        found = other.acquire(names, pin=False)
        assert found.hits == stored
        assert old.isdisjoint(ref.pack() for ref in unpack_refs(found.slots))
        if not sweep(cache, 1):
            break
    other.store(names)
    assert other.hits(names) == 8


@pytest.mark.parametrize("slices", [0, 2, 5, 8])
@pytest.mark.parametrize("names", ["abcd", "abc"])
def test_no_suffix_of_a_invalidated_block_is_found_through_a_new_one(tiny: None, slices: int, names: str) -> None:
    """The full group has the block again; the suffix groups hang on the one that was invalidated."""
    cache = make_cache()
    engine = Hybrid(cache, "one")
    engine.store_all("abcd", "abc")
    before = engine.look("abcd")
    assert before.hits == 4
    old = {ref.pack() for ref in unpack_refs(before.slots)}
    engine.invalidate(before.slots[:REF_BYTES])
    assert engine.look("abcd").hits == engine.look("abc").hits == 0
    sweep(cache, slices)
    assert cache.sweeper
    full = engine.ask(m.Reserve(1, b"", engine.namespace, [m.Run(engine.names(names))]))
    assert answers(full) == [Refusal.GRANTED] * len(names), "taken for present"
    engine.settle(full)
    check_integrity(cache)
    assert engine.look("abcd").hits == engine.look("abc").hits == 0, "with the suffix groups of the old blocks"
    engine.store_all(names)
    while True:
        check_integrity(cache)
        found = engine.look(names)
        assert found.hits == len(names)
        assert old.isdisjoint(ref.pack() for ref in unpack_refs(found.slots))
        if not sweep(cache, 1):
            break


def test_a_namespace_may_be_forgotten_before_the_sweeper_comes_to_its_invalidated_blocks(tiny: None) -> None:
    cache = make_cache(31)
    engine, other = Engine(cache, "one"), Engine(cache, "two", model="other")
    reserved = engine.reserve(["a"])
    engine.settle(reserved)
    other.store(chain("x", 5))
    other.ask(m.Clear(1, b"", cache.namespaces[other.namespace].id))
    assert cache.sweeper
    engine.invalidate(reserved.slots)  # its turn comes
    other.store(chain("y", 40))  # takes its room
    engine.ask(m.Detach(1, b"", engine.namespace))
    assert cache.namespaces.keys() == {other.namespace}
    sweep(cache)
    assert not cache.invalidation.under_way


def test_no_suffix_of_a_invalidated_block_is_retained(tiny: None) -> None:
    cache = make_cache(retain_quota=0.5)
    engine = Hybrid(cache, "one")
    engine.store_all("abcd")
    engine.invalidate(engine.look("abcd").slots[:REF_BYTES])
    full = engine.ask(m.Reserve(1, b"", engine.namespace, [m.Run(engine.names("abcd"))]))
    engine.settle(full)
    assert engine.look("abcd").hits == 0
    assert engine.ask(m.Retain(1, b"", engine.namespace, engine.names("abcd"), 60.0)).blocks == 0


def test_a_namespace_of_suffixes_alone_finds_its_other_blocks_while_one_is_swept(tiny: None) -> None:
    """Their blocks do not hang on each other."""
    cache = make_cache()
    engine = Engine(cache, "one")
    spec = NamespaceSpec("suffixes", (GroupSpec(16, 64 * KIB, SUFFIX, 2),), hash_bytes=16)
    engine.namespace = engine.ask(m.Attach(1, b"", spec, (0,))).namespace
    for name in "ab":
        assert engine.store(chain(name, 2)) == [Refusal.GRANTED] * 2
    slots = engine.acquire(chain("a", 2), pin=False).slots
    other = Engine(cache, "two", model="m")
    other.store(chain("x", 5))
    other.ask(m.Clear(1, b"", cache.namespaces[other.namespace].id))
    assert cache.sweeper
    engine.invalidate(slots[:REF_BYTES])  # its turn comes
    assert [engine.hits(chain(name, 2)) for name in "ab"] == [0, 2]
    sweep(cache)
    assert [engine.hits(chain(name, 2)) for name in "ab"] == [0, 2]


@pytest.mark.parametrize("every", [2, 5, 100])
def test_what_is_retained_may_be_invalidated_until_a_tick_has_looked(tiny: None, every: int) -> None:
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
    engine.invalidate(slots)
    check_integrity(cache)
    assert not any(engine.hits(chain(name, 3)) for name in "abc")
    for slices in range(100):
        sweep(cache, 1)
        if slices % every == 0:
            cache.tick(0.0)
            check_integrity(cache)
    sweep(cache)
    assert cache.counters["blocks_invalidated"] == 9
    cache.tick(0.0)
    check_integrity(cache)
    sweep(cache)
    assert not cache.retentions.doubted and not cache.retentions.retained_bytes
    cache.tick(0.0)
    sweep(cache)
    assert cache.eviction.fair_share.used == 0


def test_the_end_of_a_writer_takes_slices_and_its_pages_stay_quarantined(tiny: None) -> None:
    cache = make_cache(quarantine=10.0)
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    for number in range(4):
        engine.reserve(chain(f"{number}-", 2))
    cache.end_session(engine.session, 0.0)
    check_integrity(cache)
    assert cache.sweeper
    assert figures(cache, 0.0)["pool"]["blocks_quarantined"] < 8
    assert sweep(cache) >= 4
    assert figures(cache, 0.0)["pool"]["blocks_quarantined"] == 8
    assert "one" not in cache.engines
    cache.tick(10.0)
    assert 0 < figures(cache, 0.0)["pool"]["blocks_quarantined"] < 8
    cache.tick(10.0)
    sweep(cache)
    assert figures(cache, 0.0)["pool"]["blocks_quarantined"] == 0
    assert other.store(chain("a", 8)) == [Refusal.GRANTED] * 8


def test_the_leases_of_a_session_that_has_ended_go_in_slices(tiny: None) -> None:
    cache = make_cache(31)
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    engine.store(chain("a", 6))
    for _ in range(40):
        engine.acquire(chain("a", 6))
    cache.end_session(engine.session, 0.0)
    check_integrity(cache)
    assert figures(cache, 0.0)["pool"]["leases"] > 0
    assert sweep(cache) >= 9
    assert figures(cache, 0.0)["pool"]["leases"] == 0
    assert set(other.store(chain("b", 31))) == {Refusal.GRANTED}


def test_what_is_short_does_not_wait_for_what_is_long(tiny: None) -> None:
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    for name in "abcdefgh":
        engine.store(chain(name, 6))
    other.ask(m.Clear(1, b""))
    writing = other.reserve(["w0", "w1"])
    assert answers(writing) == [Refusal.GRANTED] * 2
    cache.end_session(other.session, 0.0)
    sweep(cache, 6)
    assert cache.sweeper, "blocks of the clear are left"
    assert len(cache.pool.quarantine) == 2


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
    audit(cache)
    check_integrity(cache)
    spoil(cache)
    with pytest.raises(AssertionError):
        audit(cache)
    with pytest.raises(AssertionError):
        check_integrity(cache)


@pytest.mark.parametrize("slices", range(1, 12))
def test_an_audit_passes_over_pages_that_get_other_blocks_meanwhile(slices: int) -> None:
    cache = make_cache(31)
    engine, other = Engine(cache, "one"), Engine(cache, "two", 100 * KIB, "other")
    engine.store(chain("a", 3))
    auditing = integrity.audit(cache)
    for _ in range(slices):
        next(auditing, None)
    cache.clear("", "an operator", 0.0)
    cache.sweeper.finish()
    assert other.reserve(["b"]).reservation  # on the same pages; it is written now
    finish(auditing)


def test_an_audit_runs_in_slices_while_the_cache_changes() -> None:
    cache = make_cache(248, KIB)
    engine = Engine(cache, "one", block_bytes=1 * KIB)
    engine.store(chain("a", 20 * STEP))
    looks = 0
    for looks, _ in enumerate(integrity.audit(cache), 1):
        engine.store([f"b{looks}"])
    assert looks > 20


# All of it at once.


SUFFIXES = GroupSpec(16, 64 * KIB, SUFFIX, 2), GroupSpec(16, 250 * KIB, SUFFIX, 1)


class Hybrid(Engine):
    """One with suffix groups. A prompt is a word: each letter is a block."""

    def __init__(self, cache: Cache, name: str) -> None:
        super().__init__(cache, name, model="hybrid", suffixes=SUFFIXES)

    @staticmethod
    def names(path: str) -> list[bytes]:
        return hashes([path[:end] for end in range(1, len(path) + 1)])

    def store_all(self, *paths: str) -> None:
        """Store prompts, with what suffix groups need after each."""
        for path in paths:
            names = self.names(path)
            suffixes = [
                m.Run(names[-suffix.window_blocks :], None, number) for number, suffix in enumerate(SUFFIXES, 1)
            ]
            reserved = self.ask(m.Reserve(1, b"", self.namespace, [m.Run(names), *suffixes]))
            if reserved.reservation:
                assert set(self.settle(reserved)) == {Verdict.VISIBLE}

    def look(self, path: str) -> m.Acquired:
        return self.ask(m.Acquire(1, b"", self.namespace, self.names(path), pin=False))


GRACE = 10.0
WORDS = "aaaaaa", "aaabab", "abbbbb", "bababa"


class Story:
    """Engines of two block sizes, and some with suffix groups, and an operator, whose requests come in any order, and
    whose connections fail, while the sweeper is behind.

    `invalid` are the references to all blocks that no lookup may find any more: those that were there at a clear, and
    those that were invalidated or below one that was. What hangs on them is as invalid as they are.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.cache = make_cache(
            140, 32 * KIB, supersede_after=1.0, quarantine=3.0, retain_quota=0.2, operator_quota=0.2, grace=GRACE
        )
        self.now = 0.0
        self.between = self.found = self.reclaimed = 0
        self.open: dict[str, list[m.Reserved]] = {}
        self.leases: dict[str, dict[int, bytes]] = {}
        self.away: dict[str, float] = {}  # since when
        self.back: dict[str, set[int]] = {}  # those that have not reclaimed yet, and their leases since
        self.refs: list[bytes] = []
        self.hot: list[str] = []
        self.invalid: set[bytes] = set()
        self.engines: dict[str, Engine] = {}
        self.specs: dict[str, NamespaceSpec] = {}
        self.audit, self.audits = integrity.audit(self.cache), 0
        self.scattered = self.orphaned = self.severed = False
        self.comb = Engine(self.cache, "comb", 64 * KIB, "comb")  # between what it leases, no large block fits
        for at in range(140):
            self.comb.store([f"c{at}"])
            if at % 6 == 0:
                self.comb.acquire([f"c{at}"])
        self.operator = self.cache.open_session("operator", "", 0.0, is_operator=True)
        self.clear(self.comb)
        for name in ("one", "two", "three", "four", "window", "state"):
            self.start(name)

    def start(self, name: str) -> None:
        kind = {"four": "large", "window": "hybrid", "state": "hybrid"}.get(name, "m")
        size = 640 * KIB if kind == "large" else 128 * KIB
        self.engines[name] = Engine(self.cache, name, size, kind, SUFFIXES if kind == "hybrid" else ())
        self.specs[name] = self.cache.namespaces[self.engines[name].namespace].spec
        self.open[name], self.leases[name] = [], {}
        self.away.pop(name, None)
        self.back.pop(name, None)

    def names(self) -> list[str]:
        """Return a chain; after a invalidate often one through what was invalidated."""
        path = self.draw.choice(WORDS)
        if self.hot and self.draw.random() < 0.6:
            path = self.hot.pop()
        return [path[:end] for end in range(1, self.draw.randrange(1, len(path) + 1) + 1)]

    # What a lookup may find.

    def tainted(self, block: Block) -> bool:
        return any(each.ref in self.invalid for each in block.ancestors())

    def prefix(self, engine: Engine, names: list[bytes]) -> int:
        """Return how many blocks of a chain of the full group are cached, by the tree alone."""
        at = self.cache.namespaces[engine.namespace].groups[0].root
        for count, name in enumerate(names):
            below = [each for each in at.children() if each.visible and each.hash == name]
            valid = [each for each in below if not each.account.group.is_suffix and not self.tainted(each)]
            assert len(valid) < 2, "stored twice"
            if not valid:
                return count
            at = valid[0]
        return len(names)

    def clear(self, engine: Engine) -> None:
        there = [block for block in self.cache.pool.blocks if block is not None and block.visible]
        count = sum(not self.tainted(block) for block in there)
        self.invalid.update(block.ref for block in there)
        severed = sum(group.severed for namespace in self.cache.namespaces.values() for group in namespace.groups)
        cleared = engine.ask(m.Clear(1, b"")).blocks
        assert cleared == count or (severed and cleared > count)

    def invalidate(self, engine: Engine, refs: list[bytes]) -> None:
        for ref in refs:
            for block in self.cache.pool.blocks:
                if block is None or block.ref != ref or not block.visible:
                    continue
                group = block.account.group
                if self.cache.sessions[engine.session].attached.keys() == {group.namespace}:
                    assert block.is_found or self.tainted(block), "hidden for no reason"
                    self.invalid.update(each.ref for each in block.subtree())
                    self.hot = [block.subtree()[-1].hash.decode().rstrip(".")] * 12
        engine.invalidate(b"".join(refs))

    # Steps.

    def step(self) -> None:
        draw, cache = self.draw, self.cache
        name = draw.choice(list(self.engines))
        self.now += draw.random() / 10
        engine = self.engines[name]
        engine.now = self.now
        behind = bool(cache.sweeper)
        if behind and draw.random() < 0.3:
            cache.sweeper.go_on()
        elif draw.random() < 0.008:
            self.end(name)
        elif draw.random() < 0.2:
            self.look_at_a_part()
        elif draw.random() < 0.1:
            cache.tick(self.now)
        elif name in self.away:
            if draw.random() < 0.3 or self.now > self.away[name] + 0.9 * GRACE:
                self.resume(name)
        elif draw.random() < 0.04:
            self.disconnect(name)
        elif name in self.back and draw.random() < 0.7:
            self.reclaim(name)
        elif draw.random() < 0.04:
            self.operate(engine)
        elif self.leases[name] and name not in self.back and draw.random() < 0.4:
            lease = draw.choice(list(self.leases[name]))
            del self.leases[name][lease]
            engine.ask(m.Release(1, b"", [lease]))
        else:
            self.between += behind
            self.request(name)
        self.scattered |= bool(cache.pool._scattered)
        self.orphaned |= bool(cache.reservations.orphaned)
        self.severed |= any(group.severed for namespace in cache.namespaces.values() for group in namespace.groups)
        self.check()

    def check(self) -> None:
        check_integrity(self.cache)
        for name, leases in self.leases.items():
            if name not in self.away or self.now < self.away[name] + GRACE:
                for slots in leases.values():
                    assert all(map(self.cache.rows.is_current, unpack_refs(slots))), "lost while it is read"

    def look_at_a_part(self) -> None:
        for _ in range(16):
            if next(self.audit, self) is self:
                self.audits += 1
                self.audit = integrity.audit(self.cache)
                return

    def request(self, name: str) -> None:
        engine, names = self.engines[name], self.names()
        match self.draw.randrange(13) if len(self.open[name]) < 3 else 4:
            case 0 | 1:
                self.reserve(name, names, self.draw.choice([0, self.draw.randrange(len(names))]))
            case 2 | 11 | 12:
                self.store(name, names)
            case 4 | 5 if self.open[name]:
                self.settle(name)
            case 6 | 7 if self.draw.random() < 0.35:
                there = [each for each in self.cache.pool.blocks if each is not None and each.visible]
                mine = [each.ref for each in there if each.account.group.namespace == engine.namespace]
                refs = mine if self.draw.random() < 0.8 else self.refs
                self.invalidate(engine, self.draw.sample(refs, min(2, len(refs))))
            case 8 if self.draw.random() < 0.12:
                self.clear(engine)
            case 9:
                group = self.draw.randrange(3) if self.draw.random() < 0.1 and len(self.groups(engine)) > 1 else 0
                seconds = self.draw.random() * 10
                engine.ask(m.Retain(1, b"", engine.namespace, hashes(names), seconds, group))
            case 10 if self.draw.random() < 0.3:
                engine.ask(m.Drop(1, b"", engine.namespace, hashes(names), self.draw.randrange(3)))
            case _:
                self.acquire(name, hashes(names))

    def groups(self, engine: Engine) -> list[Any]:
        return self.cache.namespaces[engine.namespace].groups

    def reserve(self, name: str, names: list[str], cut: int) -> None:
        engine = self.engines[name]
        runs = [m.Run(hashes(names[cut:]), hashes(names[:cut])[-1] if cut else None)]
        if self.draw.random() < 0.3:
            runs.append(m.Run(hashes(self.names())))
        for number in range(1, len(self.groups(engine))):
            runs.append(m.Run(hashes(names)[-SUFFIXES[number - 1].window_blocks :], None, number))
        cached = self.prefix(engine, hashes(names))
        reply = engine.ask(m.Reserve(1, b"", engine.namespace, runs))
        if not cut:
            first = reply.answers[: len(names)]
            assert len(first) - len(first.lstrip(bytes([Refusal.PRESENT]))) == cached, "taken for present"
        if reply.reservation:
            self.open[name].append(reply)
            self.refs = [ref.pack() for ref in unpack_refs(reply.slots)] + self.refs[:10]

    def store(self, name: str, names: list[str]) -> None:
        before = len(self.open[name])
        self.reserve(name, names, 0)
        for reserved in self.open[name][before:]:
            self.engines[name].settle(reserved)

    def settle(self, name: str) -> None:
        reserved = self.draw.choice(self.open[name])
        outcome = self.draw.choice([Outcome.COMMITTED] * 3 + [Outcome.FAILED, Outcome.NEVER_STARTED])
        count = reserved.answers.count(0)
        at = self.draw.sample(range(count), self.draw.choice([0, self.draw.randrange(count + 1)]))
        try:
            self.engines[name].settle(reserved, outcome, at)
        except UnknownHandle:  # it is settled
            self.open[name].remove(reserved)

    def acquire(self, name: str, names: list[bytes]) -> None:
        engine, pin = self.engines[name], self.draw.random() < 0.4
        reply = engine.ask(m.Acquire(1, b"", engine.namespace, names, pin=pin))
        self.found += reply.hits
        for ref in unpack_refs(reply.slots):
            block = self.cache.pool.find(ref.pack())
            assert block is not None and not self.tainted(block), "found although it is invalid"
        cached = self.prefix(engine, names)
        assert reply.hits <= cached
        if len(self.groups(engine)) == 1:
            assert reply.hits + reply.withheld == cached, "not found although it is there"
        if reply.lease:
            self.leases[name][reply.lease] = reply.slots[(reply.hits - 1) * REF_BYTES :]
            if name in self.back:
                self.back[name].add(reply.lease)

    # Who comes and goes.

    def end(self, name: str) -> None:
        self.cache.end_session(self.engines[name].session, self.now)
        self.start(name)

    def disconnect(self, name: str) -> None:
        self.cache.disconnect_session(self.engines[name].session, self.now)
        self.away[name] = self.now
        for lease in self.back.pop(name, ()):  # it has been away before, and has not said what it holds
            self.leases[name].pop(lease, None)

    def resume(self, name: str) -> None:
        engine = self.engines[name]
        self.cache.resume_session(engine.session, "", self.now)
        engine.namespace = engine.ask(m.Attach(1, b"", self.specs[name], (0,))).namespace
        self.away.pop(name)
        self.back[name] = set()

    def reclaim(self, name: str) -> None:
        engine, leases = self.engines[name], self.leases[name]
        heard = max((each.reservation for each in self.open[name]), default=0)
        heard -= self.draw.random() < 0.2
        self.open[name] = [each for each in self.open[name] if each.reservation <= heard]
        since = self.back.pop(name)
        held = [(lease, slots) for lease, slots in leases.items() if lease not in since]
        reply = engine.ask(m.Reclaim(1, b"", heard, [*held, (0, b"")]))
        assert reply.lost == [0], "it was not away for long"
        self.reclaimed += len(held)

    def operate(self, engine: Engine) -> None:
        space = self.cache.namespaces[engine.namespace].id
        try:
            if self.draw.random() < 0.8:
                begin(self.cache, self.operator, m.Pin(1, b"", space, hashes(self.names())), self.now)
            else:
                begin(self.cache, self.operator, m.Unpin(1, b"", 0), self.now)
        except NotPermitted:
            pass  # beyond the quota


@pytest.mark.parametrize("seed", range(20))
def test_concurrent_requests_leave_a_consistent_state_after_each_slice(tiny: None, seed: int) -> None:
    story = Story(seed)
    for _ in range(1000):
        story.step()
    cache = story.cache
    assert story.audits > 5 and story.scattered and story.orphaned and story.severed
    assert story.between > 10 and story.found
    for _ in range(2):
        sweep(cache)
        cache.tick(story.now)
    sweep(cache)
    assert not cache.retentions.doubted and not any(group.severed for group in all_groups(cache))
    for each in cache.retentions.all():
        assert each.sound and not any(map(story.tainted, each.lease.blocks if each.lease is not None else ()))
    for name, engine in list(story.engines.items()):
        for reserved in story.open[name] if name not in story.away else ():
            try:
                engine.settle(reserved, Outcome.FAILED)
            except UnknownHandle:
                continue  # settled
        cache.end_session(engine.session, story.now)
    cache.end_session(story.comb.session, story.now)
    begin(cache, story.operator, m.Unpin(1, b"", 0), story.now)
    sweep(cache)
    cache.tick(story.now + 20.0)
    sweep(cache)
    cache.clear("", "the end", story.now + 20.0)
    assert not any(group.visible for group in all_groups(cache))
    sweep(cache)
    cache.tick(story.now + 20.0)
    sweep(cache)
    assert figures(cache, 0.0)["pool"]["used_bytes"] == 0
    assert not cache.invalidation.kept and not cache.invalidation.cleared and not cache.invalidation.under_way
    assert not cache.reservations.showing and not cache.reservations.orphaned and not cache.registry.ended


def all_groups(cache: Cache) -> list[Group]:
    return [group for namespace in cache.namespaces.values() for group in namespace.groups]


# What one message may take.


def many(engine: Engine, count: int, below: int) -> tuple[m.Reserved, list[str]]:
    """Store as many first blocks, each with a chain below it; return the reservation of the first ones, unsettled."""
    names = chain("top", count)
    tops = engine.ask(m.Reserve(1, b"", engine.namespace, [m.Run([each]) for each in hashes(names)]))
    for name in names:
        engine.store(chain(f"{name}-", below), name)
    return tops, names


def test_one_distrust_of_many_blocks_removes_a_bounded_number_at_once() -> None:
    cache = make_cache(64, 256)
    engine = Engine(cache, "one", block_bytes=256)
    tops, names = many(engine, MAX_BLOCKS, 20)
    engine.settle(tops)
    cache.handle(
        engine.session, m.Invalidate(1, b"", cache.geometry.region_id, tops.slots, 0, Finding.CORRUPT), engine.now
    )
    assert cache.counters["blocks_invalidated"] < MAX_BLOCKS * 21 // 2
    assert not any(engine.acquire([name, f"{name}-0"], pin=False).hits for name in names[:8]), "none is found at once"
    sweep(cache)
    assert cache.counters["blocks_invalidated"] == MAX_BLOCKS * 21
    assert not cache.eviction.fair_share.used


def test_one_settlement_of_many_failed_blocks_removes_a_bounded_number_at_once() -> None:
    cache = make_cache(64, 256)
    engine = Engine(cache, "one", block_bytes=256)
    tops, _ = many(engine, MAX_BLOCKS, 20)
    region = cache.geometry.region_id
    cache.handle(engine.session, m.Settle(1, b"", region, tops.reservation, (0,), Outcome.FAILED), engine.now)
    assert cache.counters["blocks_unreachable"] < MAX_BLOCKS * 20 // 2
    sweep(cache)
    assert cache.counters["blocks_unreachable"] == MAX_BLOCKS * 20
    assert not cache.eviction.fair_share.used


def test_a_restate_examines_a_bounded_number_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_server.core.lookups.MOST_NAMED", 10)
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.store(["a"])
    ref = cache.namespaces[1].groups[0].visible[hashes(["a"])[0]].ref
    cache.lookups.last += 20
    last, spec = cache.lookups.last, cache.namespaces[1].spec
    cache.disconnect_session(engine.session, 0.0)
    cache.resume_session(engine.session, "", 0.0)
    engine.ask(m.Attach(1, b"", spec, (0,)))
    lost = engine.ask(m.Reclaim(1, b"", 0, [(last - at, ref) for at in range(8)])).lost
    assert lost == [last - at for at in range(5, 8)]  # each takes two
    assert cache.counters["leases_over_limits"] == 3
    check_integrity(cache)
