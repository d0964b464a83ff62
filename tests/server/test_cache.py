"""What users rely on, one short scenario each: which blocks are evicted, which stay, and which are refused."""

from __future__ import annotations

import gc
import random
from itertools import count

import pytest
from insights import figures
from small_cache import KIB, MIB, Engine, audit, chain, hashes, make_cache, pass_time

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, GeometryMismatch, NotPermitted, UnknownHandle
from kvcache_proto.region import RegionRows
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
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.worth import FACTOR_ONE_OFF
from kvcache_server.core.index import Account, Grant, Group
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.pool import Runs
from kvcache_server.core.registry import OPERATORS
from kvcache_server.core.sessions import Session


def living(kind: type) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def test_a_stored_run_is_found_with_its_references_and_another_is_not():
    cache = make_cache()
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    reserved = engine.reserve(chain("a", 5))
    assert other.hits(chain("a", 5)) == 0
    assert engine.settle(reserved) == [Verdict.VISIBLE] * 5
    found = other.acquire(chain("a", 5) + chain("b", 2))
    assert (found.hits, found.slots) == (5, reserved.slots)
    assert other.hits(chain("b", 2)) == 0
    check_integrity(cache)


def test_a_second_writer_of_a_prefix_writes_only_the_rest():
    cache = make_cache()
    one, two = Engine(cache, "one"), Engine(cache, "two")
    first = one.reserve(["p", "q"])
    second = two.reserve(["p", "q", "r"])
    assert [Refusal(a) for a in second.answers] == [Refusal.IN_FLIGHT, Refusal.IN_FLIGHT, Refusal.GRANTED]
    assert two.settle(second) == [Verdict.HIDDEN]
    assert two.acquire(["p", "q", "r"]).pending == 3
    one.settle(first)
    assert two.hits(["p", "q", "r"]) == 3


def test_one_reservation_holds_the_runs_of_a_whole_step():
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.store(["p"])
    runs = [m.Run(hashes(["a", "b"])), m.Run(hashes(["q"]), hashes(["p"])[0]), m.Run(hashes(["x"]), hashes(["?"])[0])]
    runs += [m.Run(hashes(["a", "c"])), m.Run(hashes(["d"]), hashes(["c"])[0])]
    reserved = engine.ask(m.Reserve(1, b"", engine.namespace, runs))
    granted = Refusal.GRANTED
    expected = [granted, granted, granted, Refusal.NO_PARENT, Refusal.IN_FLIGHT, granted, granted]
    assert [Refusal(answer) for answer in reserved.answers] == expected
    assert engine.settle(reserved, at=(0, 2, 3)) == [Verdict.VISIBLE] * 3
    assert [engine.hits(run) for run in (["a", "b"], ["p", "q"], ["a", "c", "d"])] == [1, 2, 2]
    assert engine.settle(reserved, Outcome.FAILED, at=(1, 4)) == [Verdict.FAILED] * 2
    check_integrity(cache)


def test_descendants_of_a_failed_block_are_removed_with_it():
    cache = make_cache()
    one, two = Engine(cache, "one"), Engine(cache, "two")
    first = one.reserve(["p"])
    below = two.reserve(["q"], parent="p")
    late = two.reserve(["r"], parent="q")
    assert two.settle(below) == [Verdict.HIDDEN]
    assert one.settle(first, Outcome.FAILED) == [Verdict.FAILED]
    assert two.settle(late) == [Verdict.ORPHANED]
    assert figures(cache, 0.0)["pool"]["used_bytes"] == 0
    assert two.store(["p", "q", "r"]) == [Refusal.GRANTED] * 3
    check_integrity(cache)


def test_the_late_commit_of_a_stopped_writer_is_answered_superseded():
    cache = make_cache()
    slow, fast = Engine(cache, "slow"), Engine(cache, "fast")
    stuck = slow.reserve(["p", "q"])
    fast.now = 1.9
    assert fast.store(["p"]) == [Refusal.IN_FLIGHT]
    fast.now = 2.0
    assert fast.store(["p"]) == [Refusal.GRANTED]
    assert fast.hits(["p"]) == 1
    slow.now = 3.0
    assert slow.settle(stuck) == [Verdict.SUPERSEDED, Verdict.VISIBLE]
    assert fast.hits(["p", "q"]) == 2
    check_integrity(cache)


def test_the_pages_of_a_dead_writer_are_quarantined():
    cache = make_cache(31)
    victim, heir = Engine(cache, "victim"), Engine(cache, "heir")
    room = len(victim.reserve(chain("v", 100)).slots) // REF_BYTES
    cache.end_session(victim.session, 5.0)
    assert heir.store(["x"]) == [Refusal.NO_SPACE]
    cache.tick(14.9)
    assert heir.store(["x"]) == [Refusal.NO_SPACE]
    cache.tick(15.0)
    assert heir.store(chain("x", room)) == [Refusal.GRANTED] * room
    check_integrity(cache)


def test_a_leased_chain_is_not_evicted_until_it_is_released():
    cache = make_cache(31, pin_quota=1.0)
    reader, writer = Engine(cache, "reader"), Engine(cache, "writer")
    reader.store(["p", "q"])
    lease = reader.acquire(["p", "q"])
    for number in range(100):
        writer.store([f"n{number}"])
    view = RegionRows(memoryview(bytearray(cache.geometry.region_bytes)), cache.geometry)
    assert view is not None
    assert reader.hits(["p", "q"]) == 2
    reader.ask(m.Release(0, b"", [lease.lease, lease.lease]))
    assert cache.counters["releases_unknown"] == 1
    reader.ask(m.Clear(1, b""))
    assert reader.hits(["p", "q"]) == 0
    check_integrity(cache)


def test_a_parent_inherits_the_last_use_of_a_removed_child():
    cache = make_cache(31, pin_quota=1.0)
    engine = Engine(cache, "one")
    engine.store(["p", "q"])
    engine.store(["old"])
    lease = engine.acquire(["old"]).lease
    assert engine.hits(["p", "q"]) == 2  # later than the last use of "old"
    engine.store(chain("n", 31 - 3))
    engine.store(["x"])  # takes "q", the coldest leaf that is not leased
    engine.ask(m.Release(0, b"", [lease]))
    engine.store(["y"])  # "p" was last used with "q", after "old"
    assert (engine.hits(["p", "q"]), engine.hits(["old"])) == (1, 0)
    check_integrity(cache)


def test_a_system_prompt_in_daily_use_outlives_its_cold_children():
    cache = make_cache(31)
    engine = Engine(cache, "one")
    engine.store(["system"])
    for number in range(200):
        assert engine.hits(["system"]) == 1
        engine.store([f"question {number}"], parent="system")


def test_beyond_its_quota_an_engine_is_offered_fewer_hits_which_is_counted():
    cache = make_cache(64, pin_quota=0.25)
    engine = Engine(cache, "one", block_bytes=128 * KIB)
    engine.store(chain("a", 10))
    engine.reserve(chain("p", 2), parent="a9")
    cut = engine.acquire(chain("a", 10) + chain("p", 2))
    assert (cut.hits, cut.pending, cut.withheld) == (8, 0, 2)  # a quarter of 4 MiB
    again = engine.acquire(chain("a", 10))
    assert again.hits == 8  # shared blocks count once
    assert figures(cache, 0.0)["refusals"]["quota"] == 4
    engine.store(chain("b", 3))
    nothing = engine.acquire(chain("b", 3))
    assert (nothing.hits, nothing.withheld) == (0, 3)
    assert engine.hits(chain("b", 3)) == 3
    engine.ask(m.Release(1, b"", [cut.lease, again.lease]))
    some = engine.acquire(chain("b", 3))
    assert (some.hits, some.withheld) == (3, 0)


def test_beyond_its_quota_an_engine_saves_nothing_until_it_has_settled():
    cache = make_cache(64, write_quota=0.25)
    engine, other = Engine(cache, "one", block_bytes=128 * KIB), Engine(cache, "two", block_bytes=128 * KIB)
    reserved = engine.reserve(chain("a", 10))
    assert list(reserved.answers) == [Refusal.GRANTED] * 8 + [Refusal.QUOTA, Refusal.NO_PARENT]
    assert list(other.reserve(chain("b", 2)).answers) == [Refusal.GRANTED] * 2
    assert list(engine.reserve(["x"]).answers) == [Refusal.QUOTA]
    assert figures(cache, 0.0)["refusals"]["quota"] == 2
    engine.settle(reserved, Outcome.FAILED, at=(6,))
    engine.settle(reserved, at=(0, 1, 2))
    check_integrity(cache)
    again = engine.reserve(chain("x", 5))
    assert list(again.answers) == [Refusal.GRANTED] * 4 + [Refusal.QUOTA]
    engine.settle(reserved, at=(3, 4, 5, 7))
    engine.settle(again)
    assert cache.engines["one"].writing == 0
    check_integrity(cache)


def test_one_block_may_be_written_even_with_a_tiny_quota():
    cache = make_cache(write_quota=0.0)
    engine = Engine(cache, "one")
    assert list(engine.reserve(chain("a", 2)).answers) == [Refusal.GRANTED, Refusal.QUOTA]
    assert list(engine.reserve(chain("b", 1)).answers) == [Refusal.QUOTA]


def test_an_engine_at_its_ceiling_evicts_only_its_own_blocks():
    cache = make_cache(62)
    spec = NamespaceSpec("m", (GroupSpec(16, 64 * KIB),), hash_bytes=16)
    bounded, other = Engine(cache, "bounded"), Engine(cache, "other")
    bounded.ask(m.Attach(1, b"", spec, (0,), 4 * 64 * KIB))
    other.store(["theirs"])
    bounded.store(chain("a", 4))
    assert bounded.store(["b"]) == [Refusal.GRANTED]
    assert bounded.hits(chain("a", 4)) == 3
    assert other.hits(["theirs"]) == 1
    reserved = bounded.reserve(chain("c", 6))
    assert Refusal(reserved.answers[4]) == Refusal.QUOTA
    assert Refusal(reserved.answers[5]) == Refusal.NO_PARENT


def test_a_pool_full_of_small_blocks_makes_room_for_large_ones():
    cache = make_cache(2048, 16 * KIB, pin_quota=1.0)
    small = Engine(cache, "small", 64 * KIB, "small")
    for number in range(150):
        small.store(chain(f"{number}-", 16))
    # Among the oldest: what would go first lies around them.
    leased = [small.acquire(chain(f"{number}-", 16)) for number in range(40, 50)]
    assert [lease.hits for lease in leased] == [16] * 10
    large = Engine(cache, "large", 4 * MIB, "large")
    answers = [large.store([f"L{number}"]) for number in range(40)]
    assert answers == [[Refusal.GRANTED]] * 40
    assert any(len(runs_of(cache, large, name)) > 1 for name in visible(cache, large)), "all of them lie in one run"
    usage = {n["model"]: n["bytes"] for n in figures(cache, 0.0)["namespaces"]}
    assert usage["large"] >= cache.pool.capacity * 0.25
    assert usage["small"] >= cache.pool.capacity / 32, "its floor"
    rows = cache.rows
    for lease in leased:
        assert all(rows.is_current(ref) for ref in unpack_refs(lease.slots)), "a leased block moved"
    check_integrity(cache)  # no chain is stranded


def visible(cache: Cache, engine: Engine) -> list[bytes]:
    return list(cache.namespaces[engine.namespace].groups[0].visible)


def runs_of(cache: Cache, engine: Engine, name: bytes) -> Runs:
    return cache.pool.runs_of(cache.namespaces[engine.namespace].groups[0].visible[name])


def comb(cache: Cache) -> tuple[Engine, list[int]]:
    """Fill the pool with blocks of which every second one is leased, clear the rest, and return the leases."""
    small, names = Engine(cache, "small", model="small"), chain("s", cache.pool.blocks_of(64 * KIB))
    for name in names:
        small.store([name])
    leases = [small.acquire([name]).lease for name in names[1::2]]
    small.ask(m.Clear(1, b""))
    assert sorted(cache.pool.free.runs()) == [(page, 16) for page in range(0, cache.geometry.pages, 32)]
    return small, leases


def test_a_block_in_several_runs_is_stored_found_and_evicted_like_any_other():
    cache = make_cache(32, pin_quota=1.0)
    small, leases = comb(cache)
    size = 250 * KIB + 100
    large = Engine(cache, "large", size, "large")
    reserved = large.reserve(chain("L", 4))
    assert [Refusal(each) for each in reserved.answers] == [Refusal.GRANTED] * 4
    check_integrity(cache)
    content = [random.Random(number).randbytes(size) for number in range(4)]
    for ref, data in zip(unpack_refs(reserved.slots), content, strict=True):
        at = 0
        for view in cache.rows.views(ref, size, 0, size):
            view[:] = data[at : at + len(view)]
            at += len(view)
    assert large.settle(reserved) == [Verdict.VISIBLE] * 4
    found = large.acquire(chain("L", 4))
    assert (found.hits, found.slots) == (4, reserved.slots)
    assert [len(runs_of(cache, large, name)) for name in hashes(chain("L", 4))] == [4] * 4
    for ref, data in zip(unpack_refs(found.slots), content, strict=True):
        assert b"".join(cache.rows.views(ref, size, 0, size)) == data
        assert b"".join(cache.rows.views(ref, size, 60 * KIB, 100 * KIB)) == data[60 * KIB : 160 * KIB]
        assert cache.rows.is_current(ref)
    assert large.store(["x"]) == [Refusal.NO_SPACE], "all is leased"
    check_integrity(cache)
    large.ask(m.Release(1, b"", [found.lease]))
    assert large.store(["x"]) == [Refusal.GRANTED]
    assert large.hits(chain("L", 4)) == 3
    assert [cache.rows.is_current(ref) for ref in unpack_refs(found.slots)] == [True, True, True, False]
    check_integrity(cache)
    small.ask(m.Release(1, b"", leases))
    small.ask(m.Clear(1, b""))
    pass_time(cache, 0.0)
    assert cache.pool.free.runs() == [(0, cache.geometry.pages)], "runs that have not merged"
    assert not any(large.hits([name]) for name in chain("L", 4))
    check_integrity(cache)
    audit(cache)


def test_small_blocks_take_the_place_of_one_in_several_runs():
    cache = make_cache(32, pin_quota=1.0)
    comb(cache)
    large, other = Engine(cache, "large", 1 * MIB, "large"), Engine(cache, "other")
    large.store(["L"])
    assert len(runs_of(cache, large, *visible(cache, large))) == 16
    assert [other.store([name]) for name in chain("o", 16)] == [[Refusal.GRANTED]] * 16
    assert not large.hits(["L"])
    check_integrity(cache)
    audit(cache)


def test_a_large_block_is_refused_while_all_is_leased():
    cache = make_cache(62, pin_quota=1.0)
    small, large = Engine(cache, "small", 64 * KIB, "small"), Engine(cache, "large", MIB, "large")
    small.store(chain("a", 32))
    for name in chain("b", 30):
        small.store([name])
    leases = [small.acquire(chain("a", 32)).lease, *(small.acquire([name]).lease for name in chain("b", 30))]
    assert large.store(["L"]) == [Refusal.NO_SPACE]
    small.ask(m.Release(0, b"", leases[1::2]))
    assert large.store(["L"]) == [Refusal.NO_SPACE], "fifteen of the sixteen that it needs"
    check_integrity(cache)
    small.ask(m.Release(0, b"", leases[2:3]))
    assert large.store(["L"]) == [Refusal.GRANTED]
    assert small.hits(chain("a", 32)) == 32
    check_integrity(cache)


def test_a_large_block_that_is_worth_less_is_refused():
    cache = make_cache(64, namespace_floor=0.0, pin_quota=1.0)
    small, stream = Engine(cache, "small", 64 * KIB, "small"), Engine(cache, "stream", MIB, "large")
    small.store(chain("a", 48))
    stream.store(["L"])
    lease = stream.acquire(["L"]).lease
    (account,) = (each for each in cache.eviction.fair_share.accounts if each.engine == "stream")
    account.share.factor = FACTOR_ONE_OFF / 2
    assert stream.store(["M"]) == [Refusal.NO_SPACE]
    assert cache.eviction.declined == 1 and small.hits(chain("a", 48)) == 48
    stream.ask(m.Release(1, b"", [lease]))
    account.share.factor = 1.0
    cache.eviction.ranking.expire()
    assert stream.store(["M"]) == [Refusal.GRANTED]
    check_integrity(cache)


def test_blocks_of_many_engines_that_are_gone_make_room_for_blocks_of_two_sizes():
    """None of them has as much as one of these."""
    cache = make_cache(93)
    for number in range(96):
        engine = Engine(cache, f"gone{number}", model=f"m{number}")
        engine.store([f"{number}"])
        cache.end_session(engine.session, 0.0)
    suffix = GroupSpec(16, 128 * KIB, SUFFIX, 1)
    new = Engine(cache, "new", 32 * KIB, suffixes=(suffix,))
    prompts = [hashes([f"new{number}"]) for number in range(20)]
    runs = [m.Run(prompt, None, group) for prompt in prompts for group in (0, 1)]
    answers = new.ask(m.Reserve(1, b"", new.namespace, runs)).answers
    assert {Refusal(each) for each in answers} == {Refusal.GRANTED}, "suffix groups, too"
    check_integrity(cache)


def test_blocks_of_engines_at_their_floors_make_room_for_a_second_size():
    """As long as there is none of it: an engine without windows would have no hits at all."""
    cache = make_cache(60)
    live = [Engine(cache, f"live{number}", model=f"m{number}") for number in range(16)]
    for number, engine in enumerate(live):
        engine.store([f"{number}"])
    new = Engine(cache, "new", 256 * KIB, suffixes=(GroupSpec(16, 128 * KIB, SUFFIX, 1),))
    fill = [m.Run(hashes([f"full{number}"])) for number in range(11)]
    new.settle(new.ask(m.Reserve(1, b"", new.namespace, fill)))
    assert not cache.pool.free.pages
    runs = [m.Run(hashes(["full0"])), m.Run(hashes(["full0"]), None, 1)]
    answers = [Refusal(each) for each in new.ask(m.Reserve(1, b"", new.namespace, runs)).answers]
    assert answers == [Refusal.PRESENT, Refusal.GRANTED]
    check_integrity(cache)


def test_an_engine_that_streams_new_prompts_does_not_cost_another_its_hits():
    def hit_ratio(noise: bool) -> float:
        cache = make_cache(248)
        steady = Engine(cache, "steady")
        noisy = Engine(cache, "noisy") if noise else None
        found = asked = 0
        for turn in range(3000):
            prompt = chain(f"p{turn * 7919 % 55}-", 4)  # 220 blocks in turn: LRU hits all of them or none; 248 fit
            hits = steady.hits(prompt)
            steady.store(prompt)
            if turn > 500:
                found, asked = found + hits, asked + 4
            if noisy:
                noisy.store(chain(f"n{turn}-", 4))
        return found / asked

    alone = hit_ratio(noise=False)
    assert alone == 1.0
    assert hit_ratio(noise=True) >= 0.9 * alone


@pytest.mark.parametrize(
    ("request_of", "error", "says"),
    [
        (lambda e: m.Acquire(1, b"", 99, []), UnknownHandle, "namespace 99"),
        (lambda e: m.Acquire(1, b"", e.namespace, [b"short"]), BadArgument, "hash of 5 bytes"),
        (lambda e: m.Acquire(1, b"", e.namespace, [b"x" * 16] * 16_385), BadArgument, "16385 hashes"),
        (lambda e: m.Acquire(1, b"", e.namespace, [], group=1), BadArgument, "group 1"),
        (lambda e: m.Reserve(1, b"", e.namespace, [m.Run(hashes(["a", "a"]))]), BadArgument, "twice"),
        (lambda e: m.Reserve(1, b"", e.namespace, [m.Run([])]), BadArgument, "a run without a hash"),
        (lambda e: m.Settle(1, b"", b"other region....", 1, (0,), 0), UnknownHandle, "another region"),
        (lambda e: m.Settle(1, b"", b"r" * 16, 77, (0,), 0), UnknownHandle, "reservation 77"),
        (
            lambda e: m.Attach(1, b"", NamespaceSpec("m", (GroupSpec(16, 1),)), (0,)),
            GeometryMismatch,
            "registered with",
        ),
        (lambda e: m.Attach(1, b"", NamespaceSpec("x", (GroupSpec(16, 1),)), (1,)), BadArgument, "shards"),
        (lambda e: m.Attach(1, b"", NamespaceSpec("x", (GroupSpec(16, 1 << 30),)), (0,)), BadArgument, "does not fit"),
        (lambda e: m.Attach(1, b"", NamespaceSpec("x", (GroupSpec(16, 1),)), (0,), -1), BadArgument, "ceiling_bytes"),
    ],
)
def test_invalid_requests_are_refused_and_change_nothing(request_of, error, says):
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.store(["p"])
    before = figures(cache, 0.0)
    with pytest.raises(error, match=says):
        engine.ask(request_of(engine))
    assert figures(cache, 0.0) == before
    check_integrity(cache)


@pytest.mark.parametrize(
    ("shards", "outcome", "positions"),
    [((1,), 0, []), ((0,), 3, []), ((), 0, []), ((0,), 0, [2]), ((0,), 0, [-1]), ((0,), 0, [0, 0])],
)
def test_a_settle_out_of_bounds_settles_nothing(shards, outcome, positions):
    cache = make_cache()
    engine = Engine(cache, "one")
    reserved = engine.reserve(["a", "b"])
    with pytest.raises(BadArgument):
        engine.ask(m.Settle(1, b"", b"r" * 16, reserved.reservation, shards, outcome, positions))
    assert engine.settle(reserved) == [Verdict.VISIBLE] * 2


def test_limits_on_sessions_and_namespaces():
    cache = make_cache(max_sessions=2, max_namespaces=1)
    engine = Engine(cache, "one")
    cache.open_session("two", "", 0.0)
    with pytest.raises(NotPermitted, match="max_sessions"):
        cache.open_session("three", "", 0.0)
    with pytest.raises(NotPermitted, match="max_namespaces"):
        engine.ask(m.Attach(1, b"", NamespaceSpec("other", (GroupSpec(16, 1),)), (0,)))


def test_a_user_s_sessions_count_until_their_processes_end():
    cache = make_cache(max_sessions=8)
    ones = [cache.open_session(f"engine {number}", "", 0.0, user=1) for number in range(7)]
    with pytest.raises(NotPermitted, match="uid 1 has 7 sessions: max_user_sessions is 7"):
        cache.open_session("one more", "", 0.0, user=1)
    cache.disconnect_session(ones[0], 0.0)
    with pytest.raises(NotPermitted, match="max_user_sessions"):
        cache.open_session("one more", "", 0.0, user=1)
    cache.resume_session(ones[0], "", 0.0, user=2)  # of another user now: whoever has its token
    cache.open_session("one more", "", 0.0, user=1)
    for _ in range(OPERATORS):
        cache.open_session("status", "", 0.0, user=1, is_operator=True)
    with pytest.raises(NotPermitted, match="max_sessions is 8"):
        cache.open_session("status", "", 0.0, user=1, is_operator=True)
    for session in list(cache.sessions):
        cache.end_session(session, 0.0)
    assert not cache.sessions and not cache.registry.disconnected


class Reader(Engine):
    """One that reads a chain of 8 blocks, in a pool with room for 31."""

    def __init__(self) -> None:
        super().__init__(make_cache(31), "reader")
        self.other = Engine(self.cache, "other")
        self.store(chain("a", 8))
        reply = self.acquire(chain("a", 8))
        self.held = (reply.lease, reply.slots[-REF_BYTES:])

    def lose(self, now: float = 0.0) -> None:
        self.cache.disconnect_session(self.session, now)

    def resume(self, now: float = 0.0) -> None:
        self.cache.resume_session(self.session, "", now)
        self.ask(m.Attach(1, b"", self.cache.namespaces[self.namespace].spec, (0,)))

    def reclaim(self) -> list[int]:
        return self.ask(m.Reclaim(1, b"", 0, [self.held])).lost

    def survives(self, flood: str) -> bool:
        """Whether what it reads is still there, and no other block in its place, after others fill the pool."""
        for name in chain(flood, 40):
            self.other.store([name])
        check_integrity(self.cache)
        found = self.other.ask(m.Acquire(1, b"", self.namespace, hashes(chain("a", 8)), pin=False))
        return found.hits == 8 and found.slots[-REF_BYTES:] == self.held[1]


def test_who_loses_the_connection_may_go_on_reading():
    reader = Reader()
    reader.lose()
    assert reader.survives("x")
    assert figures(reader.cache, 0.0)["pool"]["leases"] == 1
    reader.resume()
    assert reader.survives("y")
    assert reader.reclaim() == []
    assert not reader.cache.registry.leaving
    assert reader.survives("z")
    reader.ask(m.Release(1, b"", [reader.held[0]]))
    assert not reader.survives("w")


def test_who_does_not_come_back_reads_no_more():
    reader = Reader()
    reader.lose(now=5.0)
    reader.cache.tick(14.9)
    assert reader.survives("x")
    reader.cache.tick(15.0)
    assert not reader.survives("y")


def test_who_has_come_back_has_time_to_restate():
    reader = Reader()
    reader.lose()
    reader.resume(now=9.9)
    reader.cache.tick(10.0)
    assert reader.survives("x")
    assert reader.reclaim() == []
    assert reader.survives("y")


def test_what_an_engine_s_other_sessions_have_left_pinned_counts():
    cache = make_cache(32, pin_quota=0.5)  # 16 blocks
    ones = [Engine(cache, "one") for _ in range(3)]
    lost = []
    for number, engine in enumerate(ones):
        names = chain("abc"[number], 8)
        engine.store(names)
        reply = engine.acquire(names, pin=False)
        cache.disconnect_session(engine.session, 0.0)
        cache.resume_session(engine.session, "", 0.0)
        engine.ask(m.Attach(1, b"", cache.namespaces[engine.namespace].spec, (0,)))
        cache.lookups.last += 1
        lost.append(engine.ask(m.Reclaim(1, b"", 0, [(cache.lookups.last, reply.slots[-REF_BYTES:])])).lost)
        cache.disconnect_session(engine.session, 0.0)
        check_integrity(cache)
    assert lost[:2] == [[], []] and lost[2], "more than the quota"


def test_who_has_ended_reads_no_more():
    reader = Reader()
    reader.lose()
    reader.cache.end_session(reader.session, 0.0)
    assert not reader.survives("x")


def test_who_loses_the_connection_twice_reads_as_long_as_who_loses_it_once():
    reader = Reader()
    reader.lose()
    reader.resume()
    reader.acquire(chain("a", 3))
    reader.lose(now=5.0)
    check_integrity(reader.cache)
    assert reader.survives("x")
    reader.resume()
    assert reader.reclaim() == []
    assert reader.survives("y")
    reader.lose(now=6.0)
    reader.cache.tick(10.0)
    assert reader.survives("z")
    reader.cache.tick(16.0)
    assert not reader.survives("w")


def test_engines_that_come_and_go_leave_only_their_blocks():
    cache = make_cache()
    for number in range(50):
        engine = Engine(cache, f"engine {number}")
        engine.store([f"block {number}"])
        engine.acquire([f"block {number}"])
        cache.end_session(engine.session, 0.0)
    assert len(cache.eviction.fair_share.accounts) == 50
    reader = Engine(cache, "reader")
    assert all(reader.hits([f"block {number}"]) for number in range(50))
    reader.ask(m.Clear(1, b""))
    cache.end_session(reader.session, 0.0)
    assert not cache.engines
    assert not cache.eviction.fair_share.accounts


def test_each_block_ends_in_one_count_and_present_is_what_is_left():
    cache = make_cache(31, supersede_after=2.0)
    engine, other = Engine(cache, "slow"), Engine(cache, "quick")
    engine.store(chain("kept", 3))
    slow = engine.reserve(chain("p", 4))  # two will be superseded, the others then have another parent
    other.now = 3.0
    other.store(chain("p", 2))
    engine.settle(slow)
    doomed = engine.reserve(chain("q", 4))
    engine.settle(doomed, at=(2,))
    assert engine.settle(doomed, Outcome.FAILED, at=(1,)) == [Verdict.FAILED]  # the third is whole and goes with it
    engine.settle(doomed, at=(0, 3))
    engine.store(chain("many", 40))
    engine.ask(m.Clear(1, b""))
    engine.store(chain("last", 5))
    check_integrity(cache)
    counts = {name.removeprefix("blocks_"): count for name, count in figures(cache, 0.0)["counters"].items()}
    assert (counts["superseded"], counts["failed"], counts["orphaned"], counts["unreachable"]) == (2, 1, 1, 1)
    assert counts["evicted"] > 0 and counts["cleared"] > 0
    assert counts["reserved"] == sum(counts[end] for end in ("committed", "failed", "superseded", "orphaned"))
    present = figures(cache, 0.0)["pool"]["blocks"]
    assert counts["committed"] == present + sum(counts[end] for end in ("evicted", "cleared", "unreachable"))


def test_a_block_is_not_superseded_by_one_below_itself():
    cache = make_cache()
    engine = Engine(cache, "one")
    stuck = engine.reserve(["a", "b", "c"])
    engine.now = 5.0
    assert [Refusal(answer) for answer in engine.reserve(["a"], parent="c").answers] == [Refusal.IN_FLIGHT]
    check_integrity(cache)
    assert engine.settle(stuck, Outcome.FAILED)[0] == Verdict.FAILED
    assert engine.store(["a", "b", "c"]) == [Refusal.GRANTED] * 3
    check_integrity(cache)


def test_clear_takes_chains_that_several_engines_have_stored():
    cache = make_cache()
    one, two = Engine(cache, "one"), Engine(cache, "two")
    one.store(["p"])
    two.store(["q"], parent="p")
    one.store(["r"], parent="q")
    assert one.ask(m.Clear(1, b"")).blocks == 3
    assert figures(cache, 0.0)["pool"]["used_bytes"] == 0
    check_integrity(cache)


def test_settling_twice_does_not_make_a_hidden_block_visible():
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.reserve(["p"])
    below = engine.reserve(["q", "r"], parent="p")
    assert engine.settle(below, at=(0,)) == [Verdict.HIDDEN]
    assert engine.settle(below, at=(0,)) == [Verdict.HIDDEN]


def test_a_namespace_at_its_ceiling_evicts_from_accounts_above_their_share():
    cache = make_cache(namespace_ceiling=0.5)
    reader, streamer = Engine(cache, "reader"), Engine(cache, "streamer")
    prompt = chain("p", 20)
    lost = 0
    for number in range(200):
        missing = 20 - reader.hits(prompt)
        if missing:
            lost += missing
            reader.store(prompt)
        streamer.store([f"s{number}"])
    assert lost <= 20 + 2, "once to fill it, and little until the shares are looked at anew"


def test_nothing_grows_with_blocks_that_come_and_go():
    # The daemon runs its collector on young objects only, so that what goes must go by itself.
    cache = make_cache(248)
    engine = Engine(cache, "one")
    spec = NamespaceSpec("m", (GroupSpec(16, 64 * KIB),), hash_bytes=16)
    engine.ask(m.Attach(1, b"", spec, (0,), 31 * 64 * KIB))
    gc.collect()
    before = living(Grant)
    gc.disable()
    try:
        for number in range(500):
            engine.store([f"s{number}"])
            engine.settle(engine.reserve(["t"], parent=f"s{number}"), Outcome.FAILED)
        assert living(Grant) == before
    finally:
        gc.enable()
    assert len(cache.pool.free.runs()) <= 2 and not cache.pool._scattered


def test_namespaces_that_nobody_can_attach_again_go_with_their_blocks():
    cache = make_cache(max_namespaces=3)
    engine = Engine(cache, "one")
    engine.store(["kept"])
    spec, named = cache.namespaces[engine.namespace].spec, engine.namespace
    for turn in range(1, 6):
        former = engine.namespace
        engine.namespace = engine.ask(m.Attach(1, b"", spec.with_unnamed_weights(), (0,))).namespace
        engine.store(["a", "b"])
        lease = engine.acquire(["a", "b"]).lease
        engine.ask(m.Detach(1, b"", former))
        pass_time(cache, turn)
        assert [*cache.namespaces] == [named, engine.namespace]
        assert engine.hits(["a", "b"]) == 2
        engine.ask(m.Release(1, b"", [lease]))
    cache.disconnect_session(engine.session, 6.0)
    pass_time(cache, 6.0)
    assert [*cache.namespaces] == [named, engine.namespace]  # its process lives, and may come back
    cache.end_session(engine.session, 7.0)
    pass_time(cache, 8.0)
    assert [*cache.namespaces] == [named]
    assert Engine(cache, "two").hits(["kept"]) == 1


def test_namespaces_that_come_and_go_leave_nothing():
    # A circle that leads through a block is found by no collector: it must be broken.
    cache = make_cache()
    engine = Engine(cache, "one")
    gc.collect()
    before = [living(kind) for kind in (Group, Account, Engine, Session)]
    gc.disable()
    try:
        for number in range(50):
            spec = NamespaceSpec(f"n{number}", (GroupSpec(16, 64 * KIB),), hash_bytes=16)
            there = engine.ask(m.Attach(1, b"", spec, (0,))).namespace
            engine.settle(engine.ask(m.Reserve(1, b"", there, [m.Run(hashes(["t"]))])), Outcome.FAILED)
            engine.ask(m.Detach(1, b"", there))
            with pytest.raises(BadArgument, match="does not fit"):
                engine.ask(m.Attach(1, b"", NamespaceSpec("huge", (GroupSpec(16, 1 << 30),)), (0,)))
        assert [living(kind) for kind in (Group, Account, Engine, Session)] == before
        assert [*cache.engines["one"].writers] == [engine.namespace]
    finally:
        gc.enable()


def test_an_engine_without_blocks_is_forgotten():
    cache = make_cache(31)
    engine = Engine(cache, "one")
    engine.store(["a", "b"])
    (account,) = cache.engines["one"].accounts.values()
    ref = engine.acquire(["a"], pin=False).slots
    assert engine.ask(m.Invalidate(1, b"", cache.geometry.region_id, ref, 0, Finding.CORRUPT)).blocks == 2
    cache.end_session(engine.session, 0.0)
    cache.end_session(Engine(cache, "three").session, 0.0)
    assert "one" not in cache.engines and not account.leaves


def test_small_blocks_evicted_for_large_ones_leave_no_leaves_behind():
    cache = make_cache(31, KIB)
    small, large = Engine(cache, "small", KIB, model="small"), Engine(cache, "large", 256 * KIB, model="large")
    for turn in range(16):
        runs = [m.Run([name]) for name in hashes(chain(f"{turn}.", cache.geometry.pages))]
        for at in range(0, len(runs), MAX_BLOCKS):
            small.settle(small.ask(m.Reserve(1, b"", small.namespace, runs[at : at + MAX_BLOCKS])))
        large.store(["x"])
        large.ask(m.Clear(1, b"", cache.namespaces[large.namespace].id))
        check_integrity(cache)
    assert cache.eviction.evictions["room"] > 12 * 256
    leaves = sum(len(each.leaves) for each in cache.eviction.fair_share.accounts)
    assert leaves <= figures(cache, 0.0)["pool"]["blocks"]


def test_an_engine_that_often_changes_its_weights_keeps_its_share():
    cache = make_cache(max_namespaces=8)
    engine = Engine(cache, "one")
    room = cache.pool.blocks_of(64 * KIB)
    for number in range(40):
        spec = NamespaceSpec(f"weights {number}", (GroupSpec(16, 64 * KIB),), hash_bytes=16)
        left, engine.namespace = engine.namespace, engine.ask(m.Attach(1, b"", spec, (0,))).namespace
        if number == 3:
            engine.reserve(["unsettled"])  # it goes on after its namespace was left
        assert engine.ask(m.Detach(0, b"", left)) is None
        for at in range(0, room + 8, 4):
            engine.store(chain(f"{number}-{at}-", 4))
        assert figures(cache, 0.0)["namespaces"][-1]["blocks"] >= room * 0.8
    assert len(cache.namespaces) < 8
    engine.ask(m.Detach(0, b"", left))
    assert cache.counters["detaches_unknown"] == 1
    cache.end_session(engine.session, 0.0)
    cache.tick(100.0)
    check_integrity(cache)


@pytest.mark.timeout(60)
def test_the_check_of_an_almost_empty_pool_of_many_pages_terminates():
    cache = make_cache(2048, KIB)
    Engine(cache, "one", block_bytes=512).store(["a"])
    assert cache.pool.free.pages > 100_000
    check_integrity(cache)


def test_an_internal_error_in_a_reserve_leaves_nothing_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.store(["a0"])
    make_room, calls = cache.eviction.make_room, count()
    monkeypatch.setattr(cache.eviction, "make_room", lambda *given: make_room(*given) if next(calls) < 2 else 1 / 0)
    for names in (chain("a", 8), ["a0", "b"]):
        with pytest.raises(ZeroDivisionError):
            engine.reserve(names)
    monkeypatch.undo()
    assert not cache.engines["one"].reservations and not cache.engines["one"].writing
    check_integrity(cache)
    assert engine.store(chain("a", 8)) == [Refusal.PRESENT, *[Refusal.GRANTED] * 7]
    assert engine.hits(chain("a", 8)) == 8


def test_a_lookup_of_too_many_hashes_is_refused_although_all_are_cached() -> None:
    cache = make_cache(20, 64)
    engine = Engine(cache, "one", 64)
    names = chain("a", MAX_HASHES + 1)
    engine.store(names)
    assert engine.hits(names[:-1]) == MAX_HASHES
    with pytest.raises(BadArgument, match=f"at most {MAX_HASHES}"):
        engine.hits(names)


def test_what_was_dropped_does_not_go_without_bound_for_one_reservation() -> None:
    cache = make_cache(20, 64)
    small, large = Engine(cache, "one", 64), Engine(cache, "two", 64 * 70, model="large")
    for name in "ab":
        small.store(chain(name, 10_000))
        small.ask(m.Drop(1, b"", small.namespace, hashes(chain(name, 10_000))))
    before = cache.eviction.evictions["dropped"]
    answers = large.reserve(chain("x", 256)).answers
    assert 0 < cache.eviction.evictions["dropped"] - before <= 512 + 70
    assert Refusal.NO_SPACE in answers, "the rest waits for the next one"


def test_a_block_is_not_evicted_for_its_own_child() -> None:
    """The first run evicts the last block of a chain; then the end of that chain would be the next one to go."""
    cache = make_cache(300)
    engine = Engine(cache, "one")
    engine.store(chain("a", 4))
    for at in range(296):
        engine.now = at + 1.0
        engine.store([f"b{at}"])
    engine.now = 1000.0
    runs = [m.Run(hashes(["x"])), m.Run(hashes(["y"]), hashes(["a2"])[0])]
    reserved = engine.ask(m.Reserve(1, b"", engine.namespace, runs))
    assert engine.settle(reserved) == [Verdict.VISIBLE] * 2
    assert engine.hits(["a0", "a1", "a2", "y"]) == 4
    check_integrity(cache)
