"""Hints of engines and pins of operators: what stays, what goes first, what is refused. On the real state machine."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from insights import answer, explained, figures, follow, insight
from small_cache import KIB, Engine, audit, chain, hashes, make_cache, pass_time

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, ClientError, NotPermitted
from kvcache_proto.types import MAX_HASHES, REF_BYTES, Finding
from kvcache_server.commands.describe import describe
from kvcache_server.commands.why import describe as explain
from kvcache_server.core import retention
from kvcache_server.core.cache import Cache
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.journal import Manifest, PinEnded, PinMade, pack, read
from kvcache_server.core.limits import OPERATOR
from kvcache_server.status import Status

BLOCKS = 128  # of 64 KiB, for which there is room here


def retain(engine: Engine, names: list[str], seconds: float = 60.0, request: str = "") -> m.Retained:
    return engine.ask(m.Retain(1, b"", engine.namespace, hashes(names), seconds, request=request))


def drop(engine: Engine, names: list[str], after: int = 0) -> int:
    return int(engine.ask(m.Drop(1, b"", engine.namespace, hashes(names), after)).blocks)


def flood(engine: Engine, blocks: int = 10 * BLOCKS, name: str = "flood") -> None:
    for number in range(blocks // 8):
        engine.store(chain(f"{name} {number} ", 8))


def tick(cache: Cache, now: float) -> None:
    pass_time(cache, now)
    follow(cache)


def hints(cache: Cache, now: float = 0.0) -> dict[str, Any]:
    return dict(figures(cache, now)["hints"])


@pytest.fixture
def cache() -> Any:
    made = make_cache(
        BLOCKS, retain_quota=0.2, policy="lru"
    )  # otherwise what was asked for again survives a flood by itself
    yield made
    check_integrity(made)
    audit(made)


# What is retained stays.


def test_what_is_to_be_retained_is_stored_whatever_it_is_worth() -> None:
    cache = make_cache(BLOCKS, retain_quota=0.2)
    engine = Engine(cache, "one")
    popular = [chain(f"popular {number} ", 4) for number in range(BLOCKS // 4)]
    for turn in range(600):
        engine.now += 0.05
        prompt = popular[turn % len(popular)] if turn % 3 else chain(f"once {turn} ", 2)
        engine.hits(prompt)
        engine.store(prompt)
    assert set(engine.store(chain("plain", 4))) != {0}, "it is worth less than what is asked for again and again"
    assert retain(engine, chain("wanted", 4)).blocks == 0
    assert engine.store(chain("wanted", 4)) == [0, 0, 0, 0]
    tick(cache, engine.now)
    assert hints(cache, engine.now)["retained_bytes"] == 4 * 64 * KIB
    check_integrity(cache)


def test_what_is_dropped_right_after_it_was_asked_for_goes_first() -> None:
    cache = make_cache(BLOCKS)
    engine = Engine(cache, "one")
    for name in ("older", "over", "newer"):
        engine.store(chain(name, 8))
    engine.store(chain("rest", BLOCKS - 24))
    engine.hits(chain("over", 8))
    assert drop(engine, chain("over", 8)) == 8
    assert engine.store(chain("new", 8)) == [0] * 8
    assert [engine.hits(chain(name, 8)) for name in ("older", "over", "newer")] == [8, 0, 8]
    assert cache.eviction.evictions == {"dropped": 8}


def test_a_retained_prompt_survives_a_flood_of_ten_times_the_pool(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("kept", 10))
    one.store(chain("plain", 10))
    assert retain(one, chain("kept", 10)).blocks == 10
    flood(one)
    assert (one.hits(chain("kept", 10)), one.hits(chain("plain", 10))) == (10, 0)


def test_blocks_are_retained_once_they_are_stored(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("kept", 4))
    assert retain(one, chain("kept", 10)).blocks == 4
    one.store(chain("kept", 10)[4:], chain("kept", 10)[3])
    tick(cache, 1.0)
    flood(one)
    assert one.hits(chain("kept", 10)) == 10
    assert hints(cache)["waiting"] == 0


def test_retention_ends_with_its_time(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("kept", 10))
    retain(one, chain("kept", 10), 60.0)
    one.now = 30.0
    retain(one, chain("kept", 10), 60.0)  # another request of the same prompt
    tick(cache, 89.0)
    flood(one)
    assert one.hits(chain("kept", 10)) == 10
    tick(cache, 91.0)
    flood(one, name="more")
    assert one.hits(chain("kept", 10)) == 0
    assert hints(cache)["ended"] == {"expired": 1}


def test_what_engines_that_have_ended_retain_stays_and_counts_until_its_time_is_over(cache: Cache) -> None:
    stays = Engine(cache, "stays")
    for number in range(3):
        engine = Engine(cache, f"engine {number}")
        engine.store(chain(f"prompt {number} ", 25))
        assert retain(engine, chain(f"prompt {number} ", 25), 60.0 + number).refused == ("quota" if number == 2 else "")
        cache.end_session(engine.session, 0.0)
        tick(cache, 1.0)
        check_integrity(cache)
    flood(stays)
    # 64 blocks are half of the pool.
    assert [stays.hits(chain(f"prompt {number} ", 25)) for number in range(3)] == [25, 25, 14]
    stays.store(chain("mine", 5))
    assert retain(stays, chain("mine", 5)).refused == "quota"
    assert {each["engine"] for each in hints(cache)["engines"]} == {f"engine {number}" for number in range(3)}
    stays.now = 60.5
    tick(cache, 60.5)
    assert retain(stays, chain("mine", 5)).refused == ""
    tick(cache, 63.0)
    tick(cache, 64.0)
    assert [*cache.retentions.engines] == ["stays"]


def test_a_lease_and_a_retention_of_one_block_do_not_end_each_other(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("kept", 6))
    retain(one, chain("kept", 6), 10.0)
    lease = one.acquire(chain("kept", 6)).lease
    tick(cache, 11.0)
    flood(one)
    assert one.hits(chain("kept", 6)) == 6
    retain(one, chain("kept", 6))
    one.ask(m.Release(1, b"", [lease]))
    flood(one, name="more")
    assert one.hits(chain("kept", 6)) == 6


# Quotas.


def test_an_engine_retains_no_more_than_its_quota(cache: Cache) -> None:
    one = Engine(cache, "one")
    for name in ("a", "b", "c"):
        one.store(chain(name, 10))
    assert retain(one, chain("a", 10)).blocks == 10
    assert retain(one, chain("b", 10)).blocks == 10
    answered = retain(one, chain("c", 10), request="cmpl-c")  # 25 blocks are a fifth of the pool
    assert (answered.blocks, answered.refused) == (5, "quota")
    told = hints(cache)
    assert told["refused"] == {"quota": 5}
    assert told["retained_bytes"] == 25 * 64 * KIB <= told["quota_bytes"]
    text = describe(msgspec.convert(figures(cache, 0.0), Status))
    assert "retained    prompts: 3, 1.6 MiB" in text
    assert "not retained: quota 5" in text
    why = explain(explained(answer(cache, one.session, m.Why(1, b"", "cmpl-c"), 0.0)))
    assert "engine one had used up its retain_quota (5 blocks)" in why
    assert "retained: 5 of 10 blocks, for 60 s from now on" in why


def test_a_shared_beginning_counts_once(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("system", 12))
    for number in range(6):
        one.store(chain(f"question {number} ", 2), chain("system", 12)[-1])
        assert retain(one, chain("system", 12) + chain(f"question {number} ", 2)).refused == ""
    tick(cache, 1.0)
    assert cache.retentions.engines["one"].pins.bytes >= 24 * 64 * KIB


def test_what_does_not_fit_displaces_nothing(cache: Cache) -> None:
    one, other = Engine(cache, "one"), Engine(cache, "other")
    for engine, name in ((one, "first"), (one, "second"), (one, "third"), (other, "theirs")):
        engine.store(chain(name, 12))
    assert [retain(one, chain(name, 12)).blocks for name in ("first", "second", "third")] == [12, 12, 1]
    assert retain(other, chain("theirs", 12)).blocks == 12
    assert {each.names[0]: each.held for each in cache.retentions.all()} == dict(
        zip(hashes(["first0", "second0", "third0", "theirs0"]), (12, 12, 1, 12), strict=True)
    )
    assert hints(cache)["refused"] == {"quota": 11}


def test_all_engines_together_retain_half_of_the_pool() -> None:
    cache = make_cache(BLOCKS, retain_quota=0.2)
    engines = [Engine(cache, f"engine {number}") for number in range(4)]
    for number, engine in enumerate(engines):
        engine.store(chain(f"prompt {number} ", 24))
    held = [retain(engine, chain(f"prompt {number} ", 24)).blocks for number, engine in enumerate(engines)]
    assert held == [24, 24, 16, 0]
    check_integrity(cache)


def test_lowering_the_quota_ends_the_oldest_retentions(cache: Cache) -> None:
    one = Engine(cache, "one")
    for name in ("a", "b", "c"):
        one.store(chain(name, 8))
        assert retain(one, chain(name, 8)).blocks == 8
    cache.set_limits(msgspec.structs.replace(cache.limits, retain_quota=0.1))
    tick(cache, 1.0)
    assert [each.names[0][:1] for each in cache.retentions.all()] == [b"c"]
    cache.set_limits(msgspec.structs.replace(cache.limits, retain_quota=0.0))
    tick(cache, 2.0)
    assert cache.retentions.all() == []
    assert retain(one, chain("a", 8)).refused == "quota"


def test_the_number_of_retentions_is_bounded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MOST_OF_ONE", 3)
    one = Engine(cache, "one")
    for number in range(3):
        assert retain(one, chain(f"prompt {number} ", 2)).refused == ""
    assert retain(one, chain("one too many", 2)).refused == "count"
    assert hints(cache)["refused"] == {"count": 2}


@pytest.mark.parametrize(
    ("seconds", "named"),
    [(0.0, "retain for 0.0 s"), (float("nan"), "retain for nan s"), (float("inf"), "retain for inf s")],
)
def test_values_out_of_bounds_are_named(cache: Cache, seconds: float, named: str) -> None:
    with pytest.raises(BadArgument, match=named):
        retain(Engine(cache, "one"), chain("a", 1), seconds)
    with pytest.raises(BadArgument, match="at most 16384"):
        retain(Engine(cache, "one"), chain("a", MAX_HASHES + 1))


# Nobody's floor suffers.


def test_engines_and_operators_that_keep_all_they_may_leave_the_others_their_floors() -> None:
    cache = make_cache(BLOCKS, retain_quota=0.25, operator_quota=0.25)
    for number in range(2):
        one = Engine(cache, f"engine {number}")
        one.store(chain(f"kept {number} ", 31))
        assert retain(one, chain(f"kept {number} ", 31)).blocks == 31
    one.store(chain("pinned", 31))
    assert pin(cache, one, chain("pinned", 31)).blocks == 31
    late = Engine(cache, "late", model="another")
    flood(late)
    names = chain("theirs", BLOCKS // 4)
    assert late.store(names) == [0] * len(names), "all that nobody keeps"
    assert late.hits(names) == len(names)
    assert len(names) * 64 * KIB > 10 * max(share.floor for share in cache.eviction.fair_share.shares)
    check_integrity(cache)


def test_an_engine_above_its_floor_gets_nothing_of_what_others_retain(cache: Cache) -> None:
    one, other = Engine(cache, "one"), Engine(cache, "other")
    one.store(chain("kept", 24))
    retain(one, chain("kept", 24))
    flood(other)
    assert one.hits(chain("kept", 24)) == 24
    assert hints(cache)["ended"] == {}


# Dropped blocks go first.


def test_a_dropped_prompt_goes_first() -> None:
    cache = make_cache(BLOCKS)
    one, other = Engine(cache, "one"), Engine(cache, "other")
    other.store(chain("old", 20))
    one.store(chain("over", 20))
    one.store(chain("rest", BLOCKS - 40))
    assert drop(one, chain("over", 20)) == 20
    one.store(chain("new", 20))
    assert (other.hits(chain("old", 20)), one.hits(chain("over", 20)), one.hits(chain("new", 20))) == (20, 0, 20)
    assert cache.eviction.evictions == {"dropped": 20}
    assert hints(cache)["dropped_blocks"] == 20
    check_integrity(cache)


def test_what_others_share_is_not_dropped() -> None:
    cache = make_cache(BLOCKS, retain_quota=0.2)
    one, other = Engine(cache, "one"), Engine(cache, "other")
    one.store(chain("system", 5))
    for name in ("a", "b"):
        one.store(chain(name, 5), chain("system", 5)[-1])
    assert drop(one, chain("system", 5) + chain("a", 5)) == 5
    assert drop(one, chain("system", 5)) == 0  # both go on from here
    assert drop(one, chain("system", 5) + chain("b", 5), after=8) == 2
    one.store(chain("leased", 5))
    other.acquire(chain("leased", 3))
    assert drop(one, chain("leased", 5)) == 2
    one.store(chain("kept", 5))
    retain(one, chain("kept", 4))
    assert drop(one, chain("kept", 5)) == 1
    assert drop(one, chain("unknown", 5)) == 0
    with pytest.raises(BadArgument, match="after -1"):
        drop(one, chain("a", 1), after=-1)
    check_integrity(cache)


def test_a_dropped_prompt_that_is_asked_for_again_stays() -> None:
    cache = make_cache(BLOCKS)
    one = Engine(cache, "one")
    one.store(chain("first", 10))
    one.store(chain("over", 10))
    one.store(chain("rest", BLOCKS - 20))
    assert drop(one, chain("over", 10)) == 10
    assert one.hits(chain("over", 6)) == 6
    one.store(chain("new", 14))
    # Four dropped blocks below the last one that was asked for, then ten of what is oldest.
    assert (one.hits(chain("over", 10)), one.hits(chain("first", 10))) == (6, 0)
    check_integrity(cache)


def test_a_drop_by_one_engine_does_not_take_another_below_its_floor() -> None:
    cache = make_cache(namespace_floor=0.3)  # 38 blocks
    one, other = Engine(cache, "one"), Engine(cache, "other", model="another")
    other.store(chain("theirs", 20))
    one.store(chain("mine", BLOCKS - 20))
    assert drop(other, chain("theirs", 20)) == 20
    one.store(chain("new", 30))
    assert other.hits(chain("theirs", 20)) == 20
    check_integrity(cache)


def test_nothing_is_left_of_engines_and_namespaces_that_are_gone() -> None:
    cache = make_cache(BLOCKS, retain_quota=0.5)
    for number in range(3):
        engine = Engine(cache, f"engine {number}", (64 + number) * KIB, f"model {number}")
        engine.store(chain("kept", 5))
        engine.store(chain("over", 5))
        retain(engine, chain("kept", 5), 10.0)
        retain(engine, chain("never stored", 5), 1000.0)
        drop(engine, chain("over", 5))
        cache.end_session(engine.session, 0.0)
    engine = Engine(cache, "nothing stored", model="nothing stored")
    retain(engine, chain("never stored", 5), 1000.0)
    cache.end_session(engine.session, 0.0)
    tick(cache, 1.0)
    assert hints(cache)["ended"] == {"namespace_gone": 1}
    cache.clear("", "an operator", 2.0)
    for second in range(3, 6):
        tick(cache, float(second))
    cache.registry.prune()
    tick(cache, 6.0)
    assert not cache.namespaces and not cache.engines
    left = cache.retentions
    assert not (left.all() or left.engines or left.waiting or cache.eviction._dropped)


# Pins.


def operator(cache: Cache) -> int:
    return cache.open_session(OPERATOR, "", 0.0, is_operator=True)


def pin(cache: Cache, engine: Engine, names: list[str], session: int | None = None, label: str = "") -> m.Pinned:
    space = cache.namespaces[engine.namespace].id
    session = operator(cache) if session is None else session
    return answer(cache, session, m.Pin(1, b"", space, hashes(names), 0, label), 0.0)


def test_an_operator_pins_a_prompt_and_ends_the_pin(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("system", 10))
    made = pin(cache, one, chain("system", 10), label="the system prompt")
    assert (made.pin, made.blocks) == (1, 10)
    flood(one)
    assert one.hits(chain("system", 10)) == 10
    (shown,) = hints(cache)["pins"]
    assert (shown["pin"], shown["label"], shown["blocks"], shown["wanted"]) == (1, "the system prompt", 10, 10)
    assert answer(cache, operator(cache), m.Unpin(1, b"", 1), 0.0).pins == 1
    flood(one, name="more")
    assert one.hits(chain("system", 10)) == 0
    with pytest.raises(ClientError, match="no pin 1"):
        answer(cache, operator(cache), m.Unpin(1, b"", 1), 0.0)


def test_a_pin_survives_a_clear_and_holds_what_is_stored_again(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("system", 10))
    pin(cache, one, chain("system", 10))
    cache.clear("", "an operator", 0.0)
    assert one.hits(chain("system", 10)) == 0
    tick(cache, 1.0)
    assert not cache.eviction.fair_share.used
    one.store(chain("system", 10))
    tick(cache, 2.0)
    flood(one)
    assert one.hits(chain("system", 10)) == 10


def test_only_operators_pin_and_within_their_quota(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("system", 10))
    with pytest.raises(NotPermitted, match="only root and the daemon's own user"):
        pin(cache, one, chain("system", 10), one.session)
    with pytest.raises(NotPermitted, match="only root and the daemon's own user"):
        answer(cache, one.session, m.Unpin(1, b"", 0), 0.0)
    assert pin(cache, one, chain("system", 10)).blocks == 10
    with pytest.raises(NotPermitted, match="operator_quota allows"):
        pin(cache, one, chain("too long", 23))
    assert pin(cache, one, chain("not cached yet", 20)).blocks == 0
    one.store(chain("not cached yet", 20))
    tick(cache, 1.0)
    flood(one)
    assert one.hits(chain("not cached yet", 20)) == 20
    assert answer(cache, operator(cache), m.Unpin(1, b"", 0), 0.0).pins == 2


def test_clear_ends_what_engines_retain(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("kept", 10))
    retain(one, chain("kept", 10))
    assert cache.clear("", "an operator", 0.0) == 10
    tick(cache, 0.0)
    assert hints(cache)["ended"] == {"cleared": 1}


def test_wrong_blocks_are_forgotten_although_they_are_kept_and_kept_again_once_they_are_stored(cache: Cache) -> None:
    one = Engine(cache, "one")
    one.store(chain("kept", 10))
    retain(one, chain("kept", 10))
    pin(cache, one, chain("kept", 10))
    slots = one.acquire(chain("kept", 10), pin=False).slots
    region = cache.geometry.region_id
    one.ask(m.Invalidate(1, b"", region, slots[4 * REF_BYTES : 5 * REF_BYTES], 0, Finding.CORRUPT))
    check_integrity(cache)
    tick(cache, 1.0)
    flood(one)
    assert one.hits(chain("kept", 10)) == 4
    one.store(chain("kept", 10)[4:], chain("kept", 10)[3])
    tick(cache, 2.0)
    flood(one, name="more")
    assert one.hits(chain("kept", 10)) == 10


def test_pins_are_in_the_state_file() -> None:
    manifest = Manifest(b"r" * 16)
    manifest.apply(PinMade(1, 1, 0, [b"a" * 16], "one"))
    manifest.apply(PinMade(2, 1, 0, [b"b" * 16], "two"))
    manifest.apply(PinEnded(1))
    again = read(b"KVCSTAT1" + b"".join(map(pack, manifest.records())))
    assert again.pins == {2: PinMade(2, 1, 0, [b"b" * 16], "two")}
    longest = PinMade(3, 1, 0, [bytes(32)] * MAX_HASHES, "x" * 256)
    manifest.apply(longest)
    assert read(b"KVCSTAT1" + b"".join(map(pack, manifest.records()))).pins[3] == longest


# Naming a prompt.


def chained(cache: Cache, **fields: Any) -> m.Chained:
    return answer(cache, operator(cache), m.Chain(1, b"", **fields), 0.0)


def test_a_prompt_is_found_by_its_request_and_by_its_last_block(cache: Cache) -> None:
    insight(cache)
    one, other = Engine(cache, "one"), Engine(cache, "other", model="another")
    one.store(chain("system", 4))
    one.ask(m.Acquire(1, b"", one.namespace, hashes(chain("system", 6)), pin=False, request="cmpl-7-abc"))
    found = chained(cache, request="cmpl-7")
    assert found.matches == ["cmpl-7-abc"]
    assert (found.hashes, found.cached, found.model) == (hashes(chain("system", 6)), 4, "m")
    for name in (hashes(["system3"])[0], hashes(["system3"])[0][-12:]):
        found = chained(cache, hash=name)
        assert (found.hashes, found.cached) == (hashes(chain("system", 4)), 4)
    other.store(chain("system", 4))
    assert len(chained(cache, hash=hashes(["system3"])[0]).matches) == 2
    space = cache.namespaces[other.namespace].id
    assert chained(cache, hash=hashes(["system3"])[0], namespace=space).namespace == space
    assert chained(cache, request="unknown").matches == []
    for fields in ({}, {"hash": b"short"}, {"hash": b"x" * 16, "request": "r"}):
        with pytest.raises(BadArgument, match="a request, or at least 8 bytes"):
            chained(cache, **fields)


# All of it, in any order.


class Machine(RuleBasedStateMachine):
    """Engines store, look up, lease, retain, drop and end; the operator pins. Nothing that is kept ever goes."""

    names = st.sampled_from(["a", "b", "c", "d", "e"])
    lengths = st.integers(1, 9)

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(31, retain_quota=0.3, operator_quota=0.2, pin_quota=0.3)
        self.engines = [Engine(self.cache, f"engine {number}") for number in range(3)]
        self.operator = operator(self.cache)
        self.now = 0.0
        self.lives = 3

    @rule(engine=st.integers(0, 2), name=names, length=lengths)
    def store(self, engine: int, name: str, length: int) -> None:
        self.store_and_check(engine, chain(name, length))

    @rule(engine=st.integers(0, 2), length=st.integers(1, 12))
    def store_new(self, engine: int, length: int) -> None:
        self.lives += 1
        self.store_and_check(engine, chain(f"new {self.lives} ", length))

    def store_and_check(self, engine: int, names: list[str]) -> None:
        """Nobody loses a block below its floor."""
        tick(self.cache, self.now)
        shares = {each: each.bytes for each in self.cache.eviction.fair_share.shares}
        self.engines[engine].store(names)
        below = [each for each, bytes_ in shares.items() if each.bytes < min(bytes_, each.floor - 64 * KIB)]
        assert not below, "an engine has lost a part of its floor"

    @rule(engine=st.integers(0, 2), name=names, length=lengths, lease=st.booleans())
    def look_up(self, engine: int, name: str, length: int, lease: bool) -> None:
        self.engines[engine].acquire(chain(name, length), lease)

    @rule(engine=st.integers(0, 2), name=names, length=lengths, pin=st.booleans())
    def announce_or_schedule(self, engine: int, name: str, length: int, pin: bool) -> None:
        """A request is called as its prompt is: it comes again."""
        each = self.engines[engine]
        each.ask(m.Acquire(1, b"", each.namespace, hashes(chain(name, length)), pin=pin, request=name))

    @rule(engine=st.integers(0, 2))
    def release(self, engine: int) -> None:
        session = self.engines[engine].session
        self.engines[engine].ask(m.Release(1, b"", list(self.cache.sessions[session].leases)))

    @rule(engine=st.integers(0, 2), name=names, length=lengths, seconds=st.integers(1, 30))
    def retain(self, engine: int, name: str, length: int, seconds: int) -> None:
        answered = retain(self.engines[engine], chain(name, length), seconds)
        assert answered.blocks <= length

    @rule(engine=st.integers(0, 2), name=names, length=lengths, after=st.integers(0, 4))
    def drop(self, engine: int, name: str, length: int, after: int) -> None:
        drop(self.engines[engine], chain(name, length), after)

    @rule(name=names, length=lengths)
    def pin(self, name: str, length: int) -> None:
        with contextlib.suppress(NotPermitted):  # beyond its quota
            pin(self.cache, self.engines[0], chain(name, length), self.operator)

    @rule()
    def unpin(self) -> None:
        answer(self.cache, self.operator, m.Unpin(1, b"", 0), self.now)

    @rule(engine=st.integers(0, 2), name=names, at=st.integers(0, 8))
    def invalidate(self, engine: int, name: str, at: int) -> None:
        found = self.engines[engine].acquire(chain(name, at + 1), pin=False)
        region = self.cache.geometry.region_id
        self.engines[engine].ask(m.Invalidate(1, b"", region, found.slots[-REF_BYTES:], 0, Finding.CORRUPT))

    @rule()
    def clear(self) -> None:
        self.cache.clear("", "operator", self.now)

    @rule(engine=st.integers(0, 2))
    def restart(self, engine: int) -> None:
        self.cache.end_session(self.engines[engine].session, self.now)
        self.lives += 1
        self.engines[engine] = Engine(self.cache, f"engine {self.lives}")

    @rule(seconds=st.sampled_from([0.25, 5.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for engine in self.engines:
            engine.now = self.now
        tick(self.cache, self.now)

    @invariant()
    def holds(self) -> None:
        check_integrity(self.cache)
        retentions, slot = self.cache.retentions, 64 * KIB
        for owner in retentions.engines.values():
            names = {n for each in owner.retentions.values() for n in each.names[: each.held]}
            assert len(names) * slot <= retentions.quota
        assert retentions.retained_bytes <= retention.TOGETHER * self.cache.pool.capacity + 1
        for each in retentions.all():
            if each.sound:
                assert len(each.group.prefix(each.names[: each.held])) == each.held, "what is kept is cached"


Machine.TestCase.settings = settings(stateful_step_count=50, deadline=None)
TestAnyOrder = Machine.TestCase
