"""A pool that is made smaller while it is used."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import msgspec
import pytest
from host import LIMITS, Host, Killed
from insights import figures
from small_cache import KIB, MIB, Engine, chain, make_cache

from kvcache_proto import messages as m
from kvcache_proto.errors import ClientError
from kvcache_proto.region import RegionRows
from kvcache_proto.types import Refusal
from kvcache_server.core.integrity import check_integrity


def shrink(cache) -> list[int]:
    given_up = []
    while (extent := cache.shrink(0.0)) is not None:
        given_up.append(extent)
        check_integrity(cache)
    return given_up


def lines_of_slices(steps: Any) -> list[int]:
    """Return how many lines of Python each slice took."""
    counts = []

    def note(frame: FrameType, event: str, argument: object) -> Any:
        counts[-1] += event == "line"
        return note

    while True:
        counts.append(0)
        sys.settrace(note)
        try:
            next(steps)
        except StopIteration:
            return counts
        finally:
            sys.settrace(None)


def test_uncut_extents_are_retired_first_and_then_the_coldest():
    cache = make_cache(extents=5)
    engine = Engine(cache, "one", block_bytes=512 * KIB)
    for name in "abc":  # an extent each
        engine.store(chain(name, 3))
    assert engine.hits(chain("a", 3)) == 3
    assert cache.resize(5 * MIB) == 4 * MIB
    assert shrink(cache) == [4, 3, 1]
    assert [engine.hits(chain(name, 3)) for name in "abc"] == [3, 0, 3]
    assert figures(cache, 0.0)["pool"]["bytes"] == 4 * MIB
    assert figures(cache, 0.0)["pool"]["given_back_bytes"] == 6 * MIB
    assert figures(cache, 0.0)["evictions"] == {"resize": 3}


def test_extents_being_read_or_written_are_not_retired():
    cache = make_cache(extents=3)
    engine = Engine(cache, "one", block_bytes=512 * KIB)
    engine.store(chain("a", 3))
    lease = engine.acquire(chain("a", 2)).lease
    reserved = engine.reserve(chain("b", 3))
    engine.store(chain("c", 3))
    cache.resize(2 * MIB)
    assert shrink(cache) == [2]
    assert (engine.hits(chain("a", 3)), engine.hits(chain("c", 3))) == (3, 0)
    engine.settle(reserved)
    assert shrink(cache) == [1]
    engine.ask(m.Release(1, b"", [lease]))
    assert shrink(cache) == []
    assert engine.hits(chain("a", 3)) == 3
    assert engine.store(chain("d", 4)) == [Refusal.GRANTED] * 3 + [Refusal.NO_SPACE]


def test_a_resize_evicts_the_end_of_a_chain():
    cache = make_cache(extents=40)
    engine = Engine(cache, "one", block_bytes=512 * KIB)
    engine.store(chain("a", 120))
    cache.resize(20 * 2 * MIB)
    shrink(cache)
    assert engine.hits(chain("a", 120)) == 60


def test_quotas_follow_the_pool_s_size():
    cache = make_cache(extents=4, write_quota=0.5)
    engine = Engine(cache, "one", block_bytes=512 * KIB)
    assert [Refusal(answer) for answer in engine.reserve(chain("a", 9)).answers].count(Refusal.GRANTED) == 8
    cache = make_cache(extents=4, write_quota=0.5)
    engine = Engine(cache, "one", block_bytes=512 * KIB)
    cache.resize(4 * MIB)
    shrink(cache)
    assert [Refusal(answer) for answer in engine.reserve(chain("a", 9)).answers].count(Refusal.GRANTED) == 4


def test_clients_see_which_extents_are_retired():
    cache = make_cache(extents=4)
    cache.resize(2 * MIB)
    shrink(cache)
    rows = RegionRows(cache.rows.buffer, cache.geometry)
    assert [rows.is_retired(extent) for extent in range(4)] == [False, True, True, True]


@pytest.mark.parametrize("size", [0, 2 * MIB - 1, 8 * MIB + 2 * MIB, -1])
def test_a_pool_cannot_grow_or_vanish(size: int):
    cache = make_cache(extents=4)
    with pytest.raises(ClientError, match="to enlarge the pool, restart"):
        cache.resize(size)
    assert shrink(cache) == []
    cache.resize(4 * MIB)
    shrink(cache)
    with pytest.raises(ClientError):
        cache.resize(6 * MIB)


def test_empty_extents_are_retired_before_any_block_is_evicted():
    cache = make_cache(extents=30)
    mine, others = Engine(cache, "one", 512 * KIB), Engine(cache, "two", 512 * KIB, model="other")
    for number in range(30):  # an extent each, and those that will be empty are neither the first nor the last
        (others if 10 <= number < 20 else mine).store(chain(f"{number}-", 3))
    assert cache.clear(cache.namespaces[others.namespace].id, "operator", 0.0) == 30
    cache.resize(20 * 2 * MIB)
    assert len(shrink(cache)) == 10
    assert sum(mine.hits(chain(f"{number}-", 3)) for number in range(30)) == 60


class Small(Host):
    """A pool of 8 extents, with two chains in it, that is made smaller."""

    def __init__(self) -> None:
        super().__init__(extents=8, limits=msgspec.structs.replace(LIMITS, write_quota=0.5, pin_quota=0.25))
        self.engine = Engine(self.cache, "one", block_bytes=512 * KIB)
        for name in "ab":
            self.engine.store(chain(name, 6))
        self.deliver()

    def shrink(self) -> None:
        self.cache.resize(4 * 2 * MIB)
        self.deliver()
        while self.cache.shrink(0.0) is not None:
            self.deliver()


def test_a_killed_daemon_s_resize_continues_without_losing_further_blocks():
    whole = Small()
    whole.fuse.left = 1 << 30
    whole.shrink()
    stores = (1 << 30) - whole.fuse.left
    assert stores > 10
    for fuse in range(stores):
        host = Small()
        host.fuse.left = fuse
        with pytest.raises(Killed):
            host.shrink()
        host.fuse.left = -1
        cache = host.restart()
        check_integrity(cache)
        if fuse:  # before the first note, nobody has been told
            assert cache.resizing.wanted == 8 * MIB
        given_up = cache.pool.retired
        while cache.shrink(0.0) is not None:
            check_integrity(cache)
        if fuse:
            assert cache.pool.capacity == 8 * MIB
            assert given_up <= cache.pool.retired
            assert (
                cache.eviction.fair_share._capacity == 8 * MIB
                and cache.lookups._quota == 2 * MIB
                and cache.reservations._quota == 4 * MIB
            )
            assert sum(cache.rows.is_retired(extent) for extent in range(8)) == 4
        assert sum(len(each.visible) for each in cache.namespaces[1].groups) == 12


def test_clients_cannot_retire_an_extent():
    host = Small()
    for extent in range(8):
        host.cache.rows._words.view[(4096 + 64 * extent) // 8 + 4] = 1
    cache = host.restart()
    assert cache.pool.capacity == 16 * MIB
    assert not any(cache.rows.is_retired(extent) for extent in range(8))
    check_integrity(cache)


@pytest.mark.parametrize("wide", [False, True], ids=["a chain", "children of one block"])
def test_no_slice_of_a_resize_grows_with_the_blocks_of_an_extent(monkeypatch: pytest.MonkeyPatch, wide: bool):
    cache = make_cache(extents=2)
    engine = Engine(cache, "one", block_bytes=64)
    names = chain("a", 15_000)  # 10,922 in an extent
    engine.store(names[:1])
    for at in range(1, len(names), 1 if wide else 1000):
        engine.store(names[at : at + (1 if wide else 1000)], names[0 if wide else at - 1])
    for bound in ("core.index.LOOK", "core.eviction.policy.LOOK", "core.eviction.policy._LOOK_BLOCKS"):
        monkeypatch.setattr(f"kvcache_server.{bound}", 64)
    monkeypatch.setattr("kvcache_server.core.eviction.policy.STEP", 1)
    cache.resize(2 * MIB)
    assert max(lines_of_slices(cache.shrinking(0.0))) < 2000
    assert cache.pool.capacity == 2 * MIB
    check_integrity(cache)


def test_examining_an_extent_is_bounded_for_any_number_of_children(monkeypatch: pytest.MonkeyPatch):
    cache = make_cache(extents=17)
    engine = Engine(cache, "one", block_bytes=32 * KIB)
    engine.store(["parent"])
    for name in chain("child", 1000):
        engine.store([name], "parent")
    for bound in ("core.index.LOOK", "core.eviction.policy.LOOK", "core.eviction.policy._LOOK_BLOCKS"):
        monkeypatch.setattr(f"kvcache_server.{bound}", 64)
    monkeypatch.setattr("kvcache_server.core.eviction.policy.STEP", 1)
    cache.resize(15 * 2 * MIB)
    assert cache.shrink(0.0) == 16  # nobody has cut it
    assert max(lines_of_slices(cache.shrinking(0.0))) < 2000
    assert cache.pool.capacity == 15 * 2 * MIB
