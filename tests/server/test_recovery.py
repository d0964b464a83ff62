"""After a kill between any two stores to the region, the next daemon restores the cache."""

from __future__ import annotations

import contextlib
import random

import msgspec
import pytest
from host import LIMITS, SMALL, Client, Host, Killed, Story, chain, digest, found, refs_of, spec_of
from insights import figures

from kvcache_proto import messages as m
from kvcache_proto.errors import ClientError, KVCacheError, NotPermitted, RegionError, UnknownHandle
from kvcache_proto.region import READY, ROW, RegionRows, row_of
from kvcache_proto.types import REF_BYTES, BlockRef, Outcome, Refusal, Verdict, unpack_refs
from kvcache_server.core import journal
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.journal import Manifest
from kvcache_server.core.limits import STEP

# Plain stories.


def test_blocks_are_restored_in_place_and_evicted_in_the_same_order() -> None:
    host = Host(blocks=28)
    engine = Client(host, "one", spec_of(256 << 10))  # room for seven
    for name in "abc":
        engine.store(chain(name, 2))
    engine.acquire(chain("a", 2), pin=False)
    before = found(host.cache)
    host.restart(gone=(engine.session,))
    assert found(host.cache) == before
    assert host.cache.counters["blocks_recovered"] == 6
    check_integrity(host.cache)
    engine = Client(host, "two", spec_of(256 << 10))
    engine.store(chain("d", 3))
    assert [engine.acquire(chain(name, 2), pin=False).hits for name in "abcd"] == [2, 0, 2, 2]
    check_integrity(host.cache)


def test_a_daemon_continues_with_the_last_tick_and_generation_and_the_same_free_pages() -> None:
    host = Host(blocks=120)
    engine = Client(host, "one", spec_of(512 << 10))
    for number in range(14):
        engine.store([f"c{number}"])
    for number in (3, 7, 12):
        engine.acquire([f"c{number}"])
    before = host.cache.pool
    after = host.restart(gone=(engine.session,)).pool
    assert (after.tick, after.generation) == (before.tick, before.generation)
    assert sorted(after.free.runs()) == sorted(before.free.runs())


@pytest.mark.parametrize("living", [True, False])
def test_blocks_in_several_runs_are_restored_with_all_their_pages(living: bool) -> None:
    host = Host(blocks=16)
    small, large = Client(host, "small", spec_of(64 << 10)), Client(host, "large", spec_of(160 << 10))
    small.store([f"s{number}" for number in range(16)])
    for number in range(1, 16, 2):
        small.ask(m.Drop(1, b"", small.namespace, [digest(f"s{number}")]))
    for number in range(16):
        if number % 2:
            small.acquire([f"s{number}"], pin=False)
    large.store(["x"])
    large.store(["y"])
    reserved = large.reserve(["z"])
    before = found(host.cache)
    group = host.cache.namespaces[2].groups[0]
    blocks = [*group.visible.values(), *(grant.block for grant in group.pending.values())]
    runs = {block.ref: host.cache.pool.runs_of(block) for block in blocks}
    assert len(runs) == 3
    host.restart(gone=() if living else (large.session,))
    check_integrity(host.cache)
    assert found(host.cache) == before
    pool = host.cache.pool
    assert {block.ref: pool.runs_of(block) for block in pool.blocks if block is not None and block.ref in runs} == runs
    if living:
        large.come_back(reserved.reservation)
        assert large.settle(reserved.reservation) == [Verdict.VISIBLE]
    else:
        host.now += LIMITS.quarantine
        host.tick()
    check_integrity(host.cache)


def test_what_a_parent_inherited_survives_a_restart() -> None:
    host = Host(blocks=28)
    engine = Client(host, "one", spec_of(256 << 10))
    engine.store(chain("p", 2))  # the prefix that children keep warm
    engine.store(chain("x", 3))
    engine.store(["q"], "p1")
    engine.store(["y"], "x2")
    engine.acquire([*chain("p", 2), "q"], pin=False)
    engine.acquire([*chain("x", 3), "y"], pin=False)
    engine.store(["z"])  # q goes, and p1 has its last use now
    assert engine.acquire([*chain("p", 2), "q"], pin=False).hits == 2
    host.restart()
    engine.come_back()
    host.tick()
    assert {block.hash: block.tick for block in host.cache.namespaces[1].groups[0].visible.values()}[digest("p1")] > 0
    check_integrity(host.cache)


def test_a_save_in_flight_is_settled_after_the_restart() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10, shards=2), (0, 1))
    reserved = engine.reserve(chain("a", 3))
    assert engine.settle(reserved.reservation, at=(0,)) == [Verdict.VISIBLE]
    assert engine.settle(reserved.reservation, at=(1,), shards=(0,)) == [Verdict.PARTIAL]
    host.restart()
    check_integrity(host.cache)
    engine.come_back(reserved.reservation)
    assert engine.settle(reserved.reservation, at=(0,)) == [Verdict.VISIBLE]  # its answer was lost, it asks again
    assert engine.settle(reserved.reservation, at=(2, 1)) == [Verdict.HIDDEN, Verdict.VISIBLE]
    assert engine.acquire(chain("a", 3)).slots == reserved.slots
    check_integrity(host.cache)


def test_reservations_whose_replies_were_lost_are_given_back() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    heard, unheard = engine.reserve(["a"]), engine.reserve(["b", "c"])
    host.restart()
    engine.come_back(heard.reservation)
    assert host.cache.counters["reservations_unheard"] == 1
    assert engine.settle(heard.reservation) == [Verdict.VISIBLE]
    with pytest.raises(UnknownHandle):
        engine.settle(unheard.reservation)
    # By way of the quarantine: that it was not told of them is for nobody else to say.
    assert (used(host), len(host.cache.pool.quarantine)) == (3, 2)
    check_integrity(host.cache)
    host.now += LIMITS.quarantine
    host.tick()
    assert used(host) == 1
    check_integrity(host.cache)


def test_only_a_resumed_session_restates_and_only_once() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    engine.store(chain("a", 3))
    ref = engine.acquire(chain("a", 3)).slots[-REF_BYTES:]
    writing = engine.reserve(["w"])
    for _ in range(2):
        with pytest.raises(NotPermitted, match="nothing to reclaim"):
            engine.ask(m.Reclaim(1, b"", 0, [(1, ref)]))
        assert engine.settle(writing.reservation) == [Verdict.VISIBLE]
        host.restart()
        lease = host.cache.lookups.last
        assert engine.come_back(writing.reservation, ((lease, ref),)) == []
        writing = engine.reserve([f"w{host.cache.epoch}"])
    check_integrity(host.cache)


def test_a_session_that_resumes_with_the_same_daemon_also_restates_once() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    engine.store(chain("a", 3))
    lease, heard = engine.acquire(chain("a", 3)), engine.reserve(["h"])
    unheard = engine.reserve(["u"])
    host.cache.disconnect_session(engine.session, 0.0)
    assert engine.come_back(heard.reservation, ((lease.lease, lease.slots[-REF_BYTES:]),)) == []
    assert host.cache.counters["leases_reclaimed"] == 1
    assert engine.settle(heard.reservation) == [Verdict.VISIBLE]
    with pytest.raises(UnknownHandle):
        engine.settle(unheard.reservation)
    assert len(host.cache.pool.quarantine) == 1
    with pytest.raises(NotPermitted):
        engine.ask(m.Reclaim(1, b"", 0))
    check_integrity(host.cache)


def test_restated_leases_are_within_max_leases_and_the_quota() -> None:
    limits = msgspec.structs.replace(LIMITS, max_leases=4, pin_quota=0.25)
    host = Host(blocks=62, limits=limits)
    engine = Client(host, "one", spec_of(64 << 10))
    for name in "abcdef":
        engine.store(chain(name, 3))
    group = host.cache.namespaces[1].groups[0]
    ends = {name: group.visible[digest(f"{name}2")].ref for name in "abcdef"}
    quota = int(0.25 * host.cache.pool.capacity) // group.allocated_bytes
    last = host.cache.lookups.last
    host.cache.disconnect_session(engine.session, 0.0)
    # The same chain over and over costs nothing; the fifth lease is one too many.
    assert engine.come_back(0, tuple((last - n, ends["a"]) for n in range(5000))) == [last - n for n in range(4, 5000)]
    assert host.cache.counters["leases_over_limits"] == 4996
    check_integrity(host.cache)
    host.cache.disconnect_session(engine.session, 0.0)
    host.cache.set_limits(msgspec.structs.replace(limits, max_leases=100))
    lost = engine.come_back(0, tuple((last - n, ends[name]) for n, name in enumerate("abcdef")))
    assert len(lost) == 6 - quota // 3
    held = {
        id(block) for lease in host.cache.sessions[engine.session].leases.values() for block in lease.block.ancestors()
    }
    assert len(held) <= quota
    check_integrity(host.cache)


def test_the_work_of_a_restate_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_server.core.lookups.MOST_RECLAIMED", 50)
    host = Host(blocks=93)
    engine = Client(host, "one", spec_of(64 << 10))
    engine.store(chain("a", 40))
    engine.store(chain("b", 40))
    refs = [host.cache.namespaces[1].groups[0].visible[digest(f"{name}39")].ref for name in "ab"]
    last = host.cache.lookups.last
    host.cache.disconnect_session(engine.session, 0.0)
    leases = [(last - n, refs[n % 2]) for n in range(6)]
    assert engine.come_back(0, tuple(leases)) == [number for number, ref in leases if ref == refs[1]]
    check_integrity(host.cache)


def test_leases_from_before_a_disconnect_are_taken_over_whatever_the_limits_are_now() -> None:
    host = Host(blocks=62)
    engine, other = Client(host, "one", spec_of(64 << 10)), Client(host, "other", spec_of(64 << 10))
    for name in "abc":
        engine.store(chain(name, 3))
    replies = [engine.acquire(chain(name, 3)) for name in "abc"]
    leases = tuple((each.lease, each.slots[-REF_BYTES:]) for each in replies)
    host.cache.disconnect_session(engine.session, 0.0)
    host.cache.set_limits(msgspec.structs.replace(LIMITS, max_leases=1, pin_quota=0.01))
    assert engine.come_back(0, leases[:2]) == []
    check_integrity(host.cache)
    assert host.cache.counters["leases_reclaimed"] == 2
    assert engine.acquire(chain("c", 3)).withheld == 3  # a new one is beyond the limits
    other.store([f"x{number}" for number in range(62)])
    other.acquire([f"x{number}" for number in range(62)], pin=False)
    for reply in replies[:2]:
        assert all(host.cache.rows.is_current(ref) for ref in unpack_refs(reply.slots)), "evicted although it is read"
    # What it has not named has ended with the reclaim; what another session holds it cannot name.
    assert not host.cache.registry.leaving and not host.cache.sweeper
    host.cache.disconnect_session(other.session, 0.0)
    assert other.come_back(0, leases[:1]) == [leases[0][0]]
    engine.ask(m.Release(1, b"", [number for number, _ in leases[:2]]))
    assert not host.cache.engines["one"].pins.bytes
    check_integrity(host.cache)


@pytest.mark.parametrize("stores", range(7))
def test_pages_being_granted_do_not_restore_its_former_block(stores: int) -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    engine.settle(engine.reserve(["half"]).reservation, Outcome.FAILED)
    host.fuse.left = stores
    with pytest.raises(Killed):
        engine.reserve(["b"])
    host.restart()
    assert not found(host.cache)
    check_integrity(host.cache)


def test_nothing_is_evicted_until_leases_are_restated_or_ten_seconds_have_passed() -> None:
    host = Host(blocks=28)
    reader, other = (Client(host, name, spec_of(256 << 10)) for name in ("reader", "other"))
    other.store(chain("a", 7))
    lease = reader.acquire(chain("a", 7))
    host.restart()
    other.come_back()
    assert engine_answers(other, ["b"]) == [Refusal.NO_SPACE]
    with pytest.raises(KVCacheError, match="try again"):
        other.ask(m.Clear(1, b""))
    refs = unpack_refs(lease.slots)
    stale = refs[0]._replace(generation=refs[0].generation + 1).pack()
    assert reader.come_back(0, ((lease.lease, refs[-1].pack()), (7, stale), (8, b"short"))) == [7, 8]
    host.tick()
    assert engine_answers(other, ["b"]) == [Refusal.NO_SPACE]  # the lease pins all seven
    reader.ask(m.Release(1, b"", [lease.lease]))
    assert engine_answers(other, ["b"]) == [Refusal.GRANTED]
    check_integrity(host.cache)


def used(host: Host) -> int:
    """Return how many blocks have pages."""
    return sum(block is not None for block in host.cache.pool.blocks)


def engine_answers(client: Client, paths: list[str]) -> list[Refusal]:
    return [Refusal(answer) for answer in client.reserve(paths).answers]


def test_after_the_grace_period_a_disconnected_session_keeps_only_its_slots_until_it_is_fenced_off() -> None:
    host = Host(blocks=28)
    away, other = (Client(host, name, spec_of(256 << 10)) for name in ("away", "other"))
    other.store(chain("a", 5))
    away.acquire(chain("a", 5))
    away.reserve(["w"])
    host.restart()
    other.come_back()
    host.now = 10.0
    host.tick()
    other.store(chain("b", 6))
    assert other.acquire(chain("b", 6), pin=False).hits == 6
    assert engine_answers(other, ["b0", "b1", "b2", "b3", "b4", "b5", "c"])[-1] == Refusal.NO_SPACE
    check_integrity(host.cache)
    with pytest.raises(ClientError, match="it is attached"):
        other.ask(m.Fence(1, b"", other.session))
    assert other.ask(m.Fence(1, b"", away.session)).reservations == 1
    host.now = 19.9
    host.tick()
    assert engine_answers(other, ["c"]) == [Refusal.GRANTED]
    assert figures(host.cache, host.now)["pool"]["blocks_quarantined"] == 1
    host.now = 20.0
    host.tick()
    assert figures(host.cache, host.now)["pool"]["blocks_quarantined"] == 0
    check_integrity(host.cache)


def test_a_quarantine_starts_again_with_the_daemon() -> None:
    host = Host(blocks=28)
    dead = Client(host, "dead", spec_of(256 << 10))
    dead.reserve(["w"])
    host.end(dead.session)
    host.living.pop(dead.session)
    for life in range(2):
        host.now += 9.0
        host.restart()
        host.tick()
        assert figures(host.cache, host.now)["pool"]["blocks_quarantined"] == 1, life
        check_integrity(host.cache)
    host.now += 10.0
    host.tick()
    assert used(host) == 0


def test_a_dead_rank_dooms_its_blocks_and_the_other_rank_settles_first() -> None:
    host = Host()
    spec = spec_of(64 << 10, shards=2)
    scheduler, zero, one = Client(host, "e", spec, ()), Client(host, "e", spec, (0,)), Client(host, "e", spec, (1,))
    reserved = scheduler.reserve(["a", "b"])
    zero.settle(reserved.reservation, at=(0,))
    host.restart(gone=(one.session,))
    check_integrity(host.cache)
    scheduler.come_back(reserved.reservation)
    zero.come_back()
    assert zero.settle(reserved.reservation, at=(1,)) == [Verdict.FAILED]
    assert scheduler.acquire(["a"]).hits == 0  # a rank is missing, and the block is doomed, too
    stats = figures(host.cache, host.now)["pool"]
    assert (stats["blocks_quarantined"], stats["blocks"], stats["blocks_writing"]) == (2, 0, 0)
    check_integrity(host.cache)


def test_blocks_below_a_failed_one_are_not_found_if_the_daemon_ends_before_they_are_gone() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(4096))
    top = engine.reserve(["top"])
    engine.store(chain("a", 3 * STEP), "top")
    writing = engine.reserve(chain("w", 3), "a2").reservation
    assert engine.settle(top.reservation, Outcome.FAILED) == [Verdict.FAILED]
    assert host.cache.reservations.orphaned
    host.restart()
    check_integrity(host.cache)
    assert not found(host.cache)
    engine.come_back(writing)
    assert engine.settle(writing) == [Verdict.FAILED] * 3
    pool = figures(host.cache, host.now)["pool"]
    assert (pool["used_bytes"], pool["quarantined_bytes"]) == (0, 3 * 4096)
    check_integrity(host.cache)


def sweep(host: Host, slices: int = 1 << 30) -> None:
    while host.cache.sweeper and slices:
        host.cache.sweeper.go_on()
        host.deliver()
        slices -= 1


@pytest.mark.parametrize("slices", [0, 1, 4, 9, 12, 100])
def test_after_a_kill_in_the_midst_of_a_clear_none_of_its_blocks_is_found_and_all_stored_since(
    monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    monkeypatch.setattr("kvcache_server.core.invalidation.STEP", 1)
    host = Host()
    engine, other = Client(host, "one", spec_of(64 << 10)), Client(host, "two", spec_of(64 << 10, model="n"))
    for name in "ab":
        engine.store(chain(name, 5))
    engine.acquire(chain("b", 3))
    other.store(chain("o", 3))
    before = set(found(host.cache).values())
    first, below = engine.reserve(chain("w", 2)).reservation, engine.reserve(["u"], "a4").reservation
    host.cache.clear(host.cache.namespaces[engine.namespace].id, "an operator", 0.0)
    host.deliver()
    engine.store(chain("c", 4))
    sweep(host, slices)
    engine.store([*chain("a", 2), "n"])
    kept = found(host.cache)
    assert len(kept) == 10
    cache = host.restart()
    check_integrity(cache)
    assert found(cache) == kept
    assert len(before & set(found(cache).values())) == 3, "those of the other namespace"
    engine.come_back()
    other.come_back()
    assert engine.settle(first) == [Verdict.VISIBLE] * 2
    assert engine.settle(below) == [Verdict.FAILED]
    assert engine.acquire(chain("w", 2), pin=False).hits == 2
    assert [engine.acquire(chain(name, 5), pin=False).hits for name in "abc"] == [2, 0, 4]
    check_integrity(cache)


@pytest.mark.parametrize("stores", range(16))
def test_after_a_kill_at_any_store_of_a_clear_the_next_daemon_finds_what_it_had_not_hidden(
    monkeypatch: pytest.MonkeyPatch, stores: int
) -> None:
    monkeypatch.setattr("kvcache_server.core.invalidation.STEP", 2)
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    for name in "abc":
        engine.store(chain(name, 4))
    before, told = found(host.cache), False
    host.fuse.left = stores
    with contextlib.suppress(Killed):
        engine.ask(m.Clear(1, b""))
        told = True
        sweep(host)
    cache = host.restart()
    check_integrity(cache)
    assert found(cache).items() <= (before if not told else {}).items()
    engine.come_back()
    engine.store(chain("a", 4))
    assert engine.acquire(chain("a", 4), pin=False).hits == 4
    check_integrity(cache)


def test_what_was_written_during_a_clear_survives_the_next_daemons() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    engine.store(chain("a", 5))
    writing = engine.reserve(chain("w", 3)).reservation
    engine.ask(m.Clear(1, b""))
    engine.settle(writing, at=(0,))
    sweep(host)
    engine.settle(writing, at=(1, 2))
    for _ in range(2):
        host.restart()
        engine.come_back()
        assert engine.acquire(chain("w", 3), pin=False).hits == 3
        assert engine.acquire(chain("a", 5), pin=False).hits == 0
        check_integrity(host.cache)


def test_what_was_written_during_a_clear_that_a_kill_has_ended_survives_the_next_daemons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcache_server.core.invalidation.STEP", 1)
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    engine.store(chain("a", 5))
    writing = engine.reserve(chain("w", 3)).reservation
    engine.ask(m.Clear(1, b""))
    assert host.cache.sweeper
    host.restart()
    engine.come_back(writing)
    assert engine.settle(writing) == [Verdict.VISIBLE] * 3
    assert engine.acquire(chain("w", 3), pin=False).hits == 3
    host.restart()
    assert len(found(host.cache)) == 3


@pytest.mark.parametrize("slices", [0, 1, 3, 6])
def test_after_a_kill_in_the_midst_of_a_distrust_nothing_below_is_found(
    monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    for module in ("index", "invalidation"):
        monkeypatch.setattr(f"kvcache_server.core.{module}.STEP", 1)
    monkeypatch.setattr("kvcache_server.core.index._DESCENTS", 1)
    host = Host()
    engine, other = Client(host, "one", spec_of(64 << 10)), Client(host, "two", spec_of(64 << 10))
    reserved = engine.reserve(chain("a", 6))
    engine.settle(reserved.reservation)
    engine.store(["b"], "a0")
    engine.ask(m.Invalidate(1, b"", host.geometry.region_id, reserved.slots[REF_BYTES : 2 * REF_BYTES], 0, 0))
    sweep(host, slices)
    assert host.cache.sweeper
    other.store(chain("a", 3))
    assert other.acquire(chain("a", 6), pin=False).hits == 3
    cache = host.restart()
    check_integrity(cache)
    engine.come_back()
    other.come_back()
    assert other.acquire(chain("a", 6), pin=False).hits == 3
    assert other.acquire(["a0", "b"], pin=False).hits == 2
    other.store(chain("a", 6))
    assert other.acquire(chain("a", 6), pin=False).hits == 6
    check_integrity(cache)


def test_the_state_file_has_the_number_of_writers_before_they_reserve() -> None:
    """A row has it, and the next daemon must not give it to others."""
    host = Host()
    spec = spec_of(64 << 10, shards=2)
    scheduler, zero, one = Client(host, "e", spec, ()), Client(host, "e", spec, (0,)), Client(host, "e", spec, (1,))
    written = bytes(host.file)
    assert [*journal.read(written).writers.values()] == [(zero.session, one.session)]
    assert scheduler.reserve(["a"]).reservation
    assert bytes(host.file) == written


def test_only_disconnected_sessions_can_be_resumed() -> None:
    host = Host()
    engine = Client(host, "one", spec_of(64 << 10))
    host.restart()
    with pytest.raises(UnknownHandle):
        host.cache.resume_session(engine.session + 1, "", 0.0)
    engine.come_back()
    with pytest.raises(UnknownHandle):
        host.cache.resume_session(engine.session, "", 0.0)
    assert Client(host, "two", spec_of(64 << 10)).session > engine.session


def test_numbers_and_generations_are_never_reused() -> None:
    host = Host(blocks=28)
    seen: set[tuple[str, int]] = set()
    for _ in range(3):
        engine = Client(host, "one", spec_of(256 << 10))
        for name in "ab":
            reserved = engine.reserve(chain(name, 4))
            generations = {("generation", ref.generation) for ref in unpack_refs(reserved.slots)}
            new = {("reservation", reserved.reservation), ("session", engine.session), *generations}
            if reserved.reservation:
                assert not (new - {("session", engine.session)}) & seen
                seen |= new
                engine.settle(reserved.reservation)
        lease = engine.acquire(chain("a", 1)).lease
        assert ("lease", lease) not in seen or not lease
        seen.add(("lease", lease))
        host.restart(gone=(engine.session,))


# Killed anywhere.


def still_there(host: Host, ref: bytes) -> bool:
    """Whether the region itself says that the slot holds the READY block of this reference."""
    rows = RegionRows(memoryview(host.buffer), host.geometry)
    where = BlockRef.unpack(ref)
    if not rows.is_current(where):
        return False
    row = rows.read_row(row_of(rows.page_of(where.offset)))
    return row is not None and row.state == READY


@pytest.mark.parametrize("seed", range(300))
def test_after_a_kill_at_any_store_the_next_daemon_finds_all_ready_blocks(seed: int) -> None:
    draw = random.Random(seed)
    host = Host()
    story = Story(host, seed)
    for _ in range(4):
        kill_at = draw.randrange(300)
        host.fuse.left = kill_at
        before, leased = found(host.cache), refs_of(story.leases)
        try:
            for _ in range(100):
                before, leased = found(host.cache), refs_of(story.leases)
                story.step()
        except Killed:
            pass
        host.fuse.left = -1
        ready = {name: ref for name, ref in before.items() if still_there(host, ref)}
        assert leased <= set(before.values())
        living = [client.session for client in story.every() if client.session in host.living]
        gone = tuple(session for session in living if draw.random() < 0.25)
        if draw.random() < 0.5:  # killed again, inside the rebuild
            with contextlib.suppress(Killed):
                host.restart(gone, fuse=draw.randrange(12))
            gone = ()
        cache = host.restart(gone)
        check_integrity(cache)
        after = found(cache)
        assert ready.items() <= after.items(), "a READY block was not found"
        story.leases = [each for each in story.leases if each[0].session in host.living]
        story.come_back()
        host.now += 0.25
        cache.tick(host.now)
        check_integrity(cache)


def test_a_torn_or_foreign_manifest_is_detected() -> None:
    host = Host()
    Client(host, "one", SMALL)
    whole = bytes(host.file)
    for cut in range(len(whole) - 30, len(whole)):
        assert journal.read(whole[:cut]).region == host.geometry.region_id
    with pytest.raises(RegionError, match="not a state file"):
        journal.read(b"something else")
    at, spoilt = len(journal.MAGIC), 0
    while (end := at + journal._HEAD.size + journal._HEAD.unpack_from(whole, at)[0]) < len(whole):
        for each in range(at + 4, end):  # without the length: a record that seems to be longer may be cut off
            torn = bytearray(whole)
            torn[each] ^= 0x55
            with pytest.raises(RegionError, match=r"torn|version"):
                journal.read(bytes(torn))
            spoilt += 1
        at = end
    assert spoilt > 100


def test_a_rewritten_manifest_is_equal() -> None:
    host = Host()
    story = Story(host, 3)
    for _ in range(60):
        story.step()
    book = journal.read(bytes(host.file))
    again = Manifest(b"")
    for record in book.records():
        again.apply(record)
    assert again == book
    assert ROW == 128


def test_a_row_forged_in_another_engine_s_name_does_not_harm_that_engine() -> None:
    host = Host()
    attacker, victim = Client(host, "attacker", SMALL), Client(host, "victim", SMALL)
    victim.reserve(["v"])
    mine = attacker.reserve(["a", "b"])
    rows = host.cache.rows
    at = host.cache.pool.row(host.cache.namespaces[1].groups[0].pending[digest("b")].block)
    row = rows.read_row(at)
    assert row is not None
    body = row.body._replace(engine=host.cache.engines["victim"].number)
    rows.open_row(at, row.generation, row.tick, row.parent, body, 25)
    cache = host.restart()
    check_integrity(cache)
    written = cache.engines["victim"].writing
    attacker.come_back()
    attacker.settle(mine.reservation)
    check_integrity(cache)
    assert cache.engines["victim"].writing == written
    assert cache.engines["attacker"].writing == 0
