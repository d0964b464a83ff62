"""Checksums in the daemon, and the invalidation of corrupt blocks."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from host import geometry_of

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, UnknownHandle
from kvcache_proto.types import REF_BYTES, Finding, GroupSpec, NamespaceSpec, Outcome, PoolGeometry, Refusal, Verdict
from kvcache_server.core.cache import Cache
from kvcache_server.core.checksums import PIECE, Checksums, sums_bytes
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits
from kvcache_server.storage.checksum_file import open_sums
from kvcache_server.storage.folder import Folder

PAGE, MIB = 4096, 1 << 20
SHARDS = (3 * PAGE, PAGE, 2 * PAGE)


def make_cache(blocks: int = 31, **limits: Any) -> Cache:
    geometry = geometry_of(blocks)
    cache = Cache(memoryview(bytearray(geometry.region_bytes)), geometry, Limits(**limits), seed=11)
    cache.keep_checksums(Checksums(memoryview(bytearray(sums_bytes(geometry))), {0}, lambda piece: False))
    return cache


class Engine:
    """A scheduler and a session a shard."""

    def __init__(self, cache: Cache, name: str, shards: tuple[int, ...] = SHARDS) -> None:
        self.cache, self.count = cache, len(shards)
        spec = NamespaceSpec("m", (GroupSpec(16, shards),), {"shards": str(shards)}, 16)
        self.scheduler = cache.open_session(name, "scheduler", 0.0)
        self.ranks = [cache.open_session(name, f"rank {number}", 0.0) for number in range(len(shards))]
        self.namespace = self.ask(m.Attach(1, b"", spec)).namespace
        for number in range(len(shards)):
            self.ask(m.Attach(1, b"", spec, (number,)), number)

    def ask(self, request: Any, rank: int | None = None) -> Any:
        session = self.scheduler if rank is None else self.ranks[rank]
        reply = self.cache.handle(session, request, 0.0)
        self.cache.sweeper.finish()
        return reply

    def reserve(self, names: list[bytes], parent: bytes | None = None) -> m.Reserved:
        return self.ask(m.Reserve(1, b"", self.namespace, [m.Run(names, parent)]))

    def settle(self, reserved: m.Reserved, rank: int, sums: bytes = b"", outcome: int = 0, **more: Any) -> list[int]:
        region, number = self.cache.geometry.region_id, reserved.reservation
        return list(self.ask(m.Settle(1, b"", region, number, (rank,), outcome, sums=sums, **more), rank).verdicts)

    def store(self, names: list[bytes], parent: bytes | None = None, sums: bool = True) -> m.Reserved:
        """Store a run; the sum of shard s of block b is 256 * b + s, b from 1 on."""
        reserved = self.reserve(names, parent)
        count = reserved.answers.count(0)
        for rank in range(self.count if count else 0):
            self.settle(reserved, rank, b"".join(sum_of(b + 1, rank) for b in range(count)) if sums else b"")
        return reserved

    def acquire(self, names: list[bytes], verify: bool = True, pin: bool = True) -> m.Acquired:
        return self.ask(m.Acquire(1, b"", self.namespace, names, 0, pin, verify))

    def hits(self, names: list[bytes]) -> int:
        return int(self.acquire(names, pin=False).hits)

    def invalidate(self, slots: bytes, shard: int = 0, finding: int = Finding.CORRUPT, **changes: Any) -> m.Invalidated:
        region = changes.get("region", self.cache.geometry.region_id)
        return self.ask(m.Invalidate(1, b"", region, slots, shard, finding), shard)


def sum_of(block: int, shard: int) -> bytes:
    return (256 * block + shard).to_bytes(8, "little")


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{number}".encode().ljust(16, b".") for number in range(length)]


def slot(slots: bytes, number: int) -> bytes:
    return slots[number * REF_BYTES : (number + 1) * REF_BYTES]


# Checksums.


def test_checksums_are_returned_only_on_request() -> None:
    cache = make_cache()
    one, two = Engine(cache, "one"), Engine(cache, "two")
    one.store(chain("a", 5))
    expected = b"".join(sum_of(block + 1, shard) for block in range(4) for shard in range(3))
    assert two.acquire(chain("a", 4)).sums == expected
    assert two.acquire(chain("a", 4), verify=False).sums == b""


def test_blocks_stored_without_checksums_do_not_inherit_those_of_the_pages() -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    first = engine.store(chain("a", 3))
    assert engine.ask(m.Clear(1, b"")).blocks == 3
    again = engine.store(chain("b", 3), sums=False)
    assert sorted(slot(first.slots, n)[:8] for n in range(3)) == sorted(slot(again.slots, n)[:8] for n in range(3))
    assert engine.acquire(chain("b", 3)).sums == bytes(3 * 3 * 8)


def test_one_writer_gives_checksums_of_some_positions_and_several_shards() -> None:
    cache = make_cache()
    session = cache.open_session("one", "", 0.0)
    spec = NamespaceSpec("m", (GroupSpec(16, SHARDS),), {}, 16)
    namespace = cache.handle(session, m.Attach(1, b"", spec, (0, 1, 2)), 0.0).namespace
    reserved = cache.handle(session, m.Reserve(1, b"", namespace, [m.Run(chain("a", 3))]), 0.0)
    region, number = cache.geometry.region_id, reserved.reservation
    given = b"".join(sum_of(block, shard) for block in (3, 1) for shard in (2, 0))
    cache.handle(session, m.Settle(1, b"", region, number, (2, 0), 0, [2, 0], given), 0.0)
    cache.handle(session, m.Settle(1, b"", region, number, (1,), 0, [2, 0]), 0.0)
    cache.handle(session, m.Settle(1, b"", region, number, (0, 1, 2), 0, [1]), 0.0)
    sums = cache.handle(session, m.Acquire(1, b"", namespace, chain("a", 3), verify=True), 0.0).sums
    none = bytes(8)
    expected = [sum_of(1, 0), none, sum_of(1, 2), none, none, none, sum_of(3, 0), none, sum_of(3, 2)]
    assert sums == b"".join(expected)


def test_a_shard_settled_twice_keeps_its_first_checksum() -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    reserved = engine.reserve(chain("a", 1))
    engine.settle(reserved, 0, sum_of(1, 0))
    engine.settle(reserved, 0, sum_of(9, 9))
    for rank in (1, 2):
        engine.settle(reserved, rank, sum_of(1, rank))
    assert engine.acquire(chain("a", 1)).sums == b"".join(sum_of(1, shard) for shard in range(3))


@pytest.mark.parametrize("size", [8, 23, 32])
def test_checksums_of_a_wrong_length_change_nothing(size: int) -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    reserved = engine.reserve(chain("a", 3))
    with pytest.raises(BadArgument, match="bytes of checksums"):
        engine.settle(reserved, 0, bytes(size))
    assert engine.settle(reserved, 0, bytes(24)) == [Verdict.PARTIAL] * 3


def test_shards_smaller_than_a_page_have_no_checksums() -> None:
    cache = make_cache()
    engine = Engine(cache, "one", (PAGE, PAGE - 64))
    engine.store(chain("a", 3))
    assert engine.acquire(chain("a", 3)).sums == b""


def test_checksums_outlive_the_daemon_but_not_the_region(tmp_path: Path) -> None:
    path, copy = tmp_path / "kv.sums", tmp_path / "copy.sums"
    geometry = geometry_of(31)

    def found(path: Path, geometry: PoolGeometry, life: int) -> bytes:
        ref = (5 * PAGE).to_bytes(8, "little") + bytes(8)
        return opened(path, geometry, life).read(ref, (64,))

    opened(path, geometry, 1).put(5 * PAGE + 64, sum_of(1, 1))
    assert found(path, geometry, 2) == sum_of(1, 1)
    shutil.copy(path, copy)
    assert found(path, msgspec.structs.replace(geometry, region_id=b"s" * 16), 3) == bytes(8)
    assert found(copy, geometry, 4) == bytes(8)  # the third daemon stored blocks and kept no sums


def test_checksums_are_allocated_as_needed_and_dropped_without_memory(tmp_path: Path) -> None:
    path, far = tmp_path / "kv.sums", 3 * 512 * MIB
    geometry = geometry_of(32 << 10, 16 << 10)
    taken = lambda: path.stat().st_blocks * 512  # noqa: E731
    sums = opened(path, geometry, 1)
    ref = lambda offset: offset.to_bytes(8, "little") + bytes(8)  # noqa: E731
    assert (taken(), sums.read(ref(far), (0,))) == (PAGE, bytes(8))
    sums.put(far, b"")
    assert taken() == PAGE
    sums.put(far, sum_of(1, 1))
    assert taken() == PAGE + PIECE
    again = opened(path, geometry, 2)
    assert (taken(), again.read(ref(far), (0,))) == (PAGE + PIECE, sum_of(1, 1))
    full = Checksums(memoryview(bytearray(sums_bytes(geometry))), {3}, lambda piece: False)
    for offset in (0, far):
        full.put(offset, sum_of(2, 2))
    assert full.read(ref(0) + ref(far), (0,)) == bytes(8) + sum_of(2, 2)


def opened(path: Path, geometry: PoolGeometry, life: int) -> Checksums:
    sums = open_sums(Folder(str(path.parent)), path.name, geometry, life)
    assert sums is not None
    return sums


# Invalidate.


def test_a_invalidated_block_is_removed_with_its_descendants_and_its_writer_is_named() -> None:
    cache = make_cache()
    one, two = Engine(cache, "one"), Engine(cache, "two")
    reserved = one.store(chain("a", 5))
    one.store(chain("b", 2), chain("a", 5)[2])
    one.store(chain("c", 2), chain("a", 5)[0])
    found = two.invalidate(slot(reserved.slots, 1), 2)
    assert (found.blocks, found.writers) == (6, [("one", one.ranks[2])])
    assert two.hits(chain("a", 5)) == 1
    assert two.hits([chain("a", 1)[0], *chain("c", 2)]) == 3
    assert cache.counters["blocks_corrupt"] == 1
    assert cache.counters["blocks_invalidated"] == 6
    check_integrity(cache)
    assert sum(block is not None for block in cache.pool.blocks) == 3
    two.store(chain("a", 5)[1:], chain("a", 1)[0])
    assert one.hits(chain("a", 5)) == 5


def test_a_writer_that_has_left_is_named_by_its_engine() -> None:
    cache = make_cache()
    one, two = Engine(cache, "one"), Engine(cache, "two")
    reserved = one.store(chain("a", 1))
    for session in (*one.ranks, one.scheduler):
        cache.end_session(session, 0.0)
    assert two.invalidate(reserved.slots).writers == [("one", one.scheduler)]


def test_a_leased_block_keeps_its_bytes_until_it_is_released() -> None:
    cache = make_cache(pin_quota=1.0)
    one, two = Engine(cache, "one"), Engine(cache, "two")
    room = cache.pool.capacity // (6 * PAGE)
    reserved = one.store(chain("a", 4))
    lease = two.acquire(chain("a", 4))
    one.invalidate(slot(reserved.slots, 1))
    assert two.hits(chain("a", 4)) == 1
    check_integrity(cache)
    one.store(chain("a", 4)[1:], chain("a", 1)[0])  # the same hashes, beside those in limbo
    assert two.hits(chain("a", 4)) == 4
    leased = {slot(lease.slots, number)[:8] for number in range(4)}
    for number in range(2 * room):  # they turn the region over
        given = one.store(chain(f"x{number}", 1))
        assert given.slots[:8] not in leased
        check_integrity(cache)
    assert two.invalidate(slot(lease.slots, 2), 1).writers[0][0] == "one"  # the next rank finds it, too
    assert cache.counters["blocks_corrupt"] == 1
    two.ask(m.Release(1, b"", [lease.lease]))
    check_integrity(cache)
    evicted = cache.eviction.evictions.total()
    cache.tick(0.0)
    again = {one.store(chain(f"y{number}", 1)).slots[:8] for number in range(3)}
    assert again <= leased  # they go first
    assert cache.eviction.evictions.total() == evicted  # and are no loss
    check_integrity(cache)


def test_blocks_being_written_below_it_are_orphaned() -> None:
    cache = make_cache()
    one, two = Engine(cache, "one"), Engine(cache, "two")
    reserved = one.store(chain("a", 3))
    below = two.reserve(chain("b", 2), chain("a", 3)[2])
    hidden = one.store(chain("c", 1), chain("b", 2)[1])
    assert hidden.answers == bytes([Refusal.GRANTED])
    one.invalidate(slot(reserved.slots, 0))
    check_integrity(cache)
    assert two.settle(below, 0) == [Verdict.ORPHANED] * 2
    for rank in (1, 2):
        two.settle(below, rank)
    assert two.hits(chain("a", 3)) == 0
    check_integrity(cache)
    assert not any(cache.pool.blocks)


def test_unknown_references_invalidate_nothing() -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    reserved = engine.store(chain("a", 2))
    stale = reserved.slots[:8] + (1).to_bytes(8, "little")
    inside = (int.from_bytes(reserved.slots[:8], "little") + 64).to_bytes(8, "little") + reserved.slots[8:16]
    beyond = b"\xff" * REF_BYTES
    found = engine.invalidate(stale + inside + beyond)
    assert (found.blocks, found.writers) == (0, [("", 0)] * 3)
    with pytest.raises(UnknownHandle, match="another region"):
        engine.invalidate(reserved.slots, region=b"s" * 16)
    with pytest.raises(BadArgument, match="bytes of references"):
        engine.invalidate(reserved.slots[:-1])
    with pytest.raises(BadArgument, match="finding 9"):
        engine.invalidate(reserved.slots, finding=9)
    stranger = Engine(cache, "two", (PAGE, PAGE))
    assert stranger.invalidate(reserved.slots).blocks == 0  # it has not attached the namespace
    assert engine.hits(chain("a", 2)) == 2


@pytest.mark.parametrize("seed", range(20))
def test_invariants_hold_whatever_is_invalidated(seed: int) -> None:
    draw = random.Random(seed)
    cache = make_cache(62, pin_quota=0.5, supersede_after=0.0)
    engines = [Engine(cache, "one"), Engine(cache, "two"), Engine(cache, "three", (PAGE, 7 * PAGE))]
    leases: list[tuple[Engine, m.Acquired]] = []
    open_: list[tuple[Engine, m.Reserved]] = []
    for _ in range(300):
        engine = draw.choice(engines)
        names = chain(f"c{draw.randrange(4)}", draw.randint(1, 30))
        act = draw.randrange(6)
        if act == 0:
            engine.store(names)
        elif act == 1:
            reserved = engine.reserve(names)
            if reserved.reservation:
                open_.append((engine, reserved))
        elif act == 2 and open_:
            writer, reserved = open_.pop(draw.randrange(len(open_)))
            for rank in range(writer.count):
                writer.settle(reserved, rank, outcome=draw.choice([0, 0, 0, Outcome.FAILED]))
        elif act == 3:
            found = engine.acquire(names)
            if found.lease:
                leases.append((engine, found))
        elif act == 4 and leases:
            reader, found = leases.pop(draw.randrange(len(leases)))
            reader.ask(m.Release(1, b"", [found.lease]))
        elif act == 5:
            found = engine.acquire(names, pin=False)
            if found.hits:
                at = draw.randrange(found.hits)
                assert engine.invalidate(slot(found.slots, at)).blocks >= found.hits - at
                assert engine.hits(names) == at
        check_integrity(cache)
    for reader, found in leases:
        reader.ask(m.Release(1, b"", [found.lease]))
    for writer, reserved in open_:
        for rank in range(writer.count):
            writer.settle(reserved, rank)
    check_integrity(cache)
    engines[0].ask(m.Clear(1, b""))
    cache.tick(0.0)
    cache.sweeper.finish()
    assert cache.counters["blocks_invalidated"] > 20
    assert not any(cache.pool.blocks)
    assert all(share.bytes == 0 for share in cache.eviction.fair_share.shares)
