"""The daemon serves while the region's memory is still being made: only what is there is used."""

from __future__ import annotations

import pytest
from host import Host, geometry_of
from small_cache import Engine, audit, chain

from kvcache_proto.types import Refusal
from kvcache_server.core import journal
from kvcache_server.core.cache import Cache
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits
from kvcache_server.core.recovery.read_rows import Snapshot

MIB = 1 << 20
PAGES = 16  # of a block of 64 KiB
SECONDS = 60.0


def growing(blocks: int, ready: int) -> Cache:
    """Return a cache with room for so many blocks of 64 KiB, of which so many are in memory."""
    geometry = geometry_of(blocks)
    buffer = memoryview(bytearray(geometry.region_bytes))
    return Cache(buffer, geometry, Limits(write_quota=1.0), seed=11, ready_pages=ready * PAGES)


def test_only_pages_that_are_ready_are_used_and_nothing_is_evicted_for_others() -> None:
    cache = growing(31, 4)
    engine = Engine(cache, "one")
    assert engine.store(chain("a", 6)) == [Refusal.GRANTED] * 4 + [Refusal.NO_SPACE, Refusal.NO_PARENT]
    assert cache.rows.ready_pages == 4 * PAGES
    check_integrity(cache)
    audit(cache)
    cache.pool.grow(10 * PAGES)
    assert engine.store(chain("a", 6)) == [Refusal.PRESENT] * 4 + [Refusal.GRANTED] * 2
    cache.pool.grow(7 * PAGES)  # late news change nothing
    survey = cache.memory_figures()
    assert (survey.used_bytes, survey.free_bytes) == (6 * 65536, cache.capacity - 6 * 65536)
    cache.pool.grow(cache.geometry.pages)
    blocks = cache.pool.blocks_of(65536)
    assert set(engine.store(chain("b", blocks - 6))) == {Refusal.GRANTED}
    assert not cache.eviction.evictions
    assert engine.store(["c"]) == [Refusal.GRANTED]
    assert cache.eviction.evictions["room"] == 1
    check_integrity(cache)


@pytest.mark.parametrize("lying", [False, True], ids=["", "the header says less"])
def test_the_next_daemon_goes_on_where_the_last_one_was(lying: bool) -> None:
    host = Host(31)
    limits, buffer = Limits(write_quota=1.0), memoryview(host.buffer)
    cache = host.cache = Cache(buffer, host.geometry, limits, 11, ready_pages=8 * PAGES)
    engine = Engine(cache, "one")
    engine.store(chain("a", 6))
    host.deliver()
    if lying:
        cache.rows.ready_pages = 2 * PAGES
    manifest = journal.read(bytes(host.file))
    manifest.epoch += 1
    ready = cache.rows.ready_pages
    again = Cache(buffer, host.geometry, limits, epoch=2, ready_pages=ready)
    again.restore(Snapshot(again.rows, manifest, set()), 0.0)
    check_integrity(again)
    other = Engine(again, "two")
    assert other.hits(chain("a", 6)) == 6
    assert again.pool.is_growing is not lying  # where blocks lie, memory is
    more = other.store(chain("b", 4))
    assert more == ([Refusal.GRANTED] * 4 if lying else [Refusal.GRANTED] * 2 + [Refusal.NO_SPACE, Refusal.NO_PARENT])
    again.pool.grow(again.geometry.pages)
    check_integrity(again)
    assert set(other.store(chain("c", 20))) == {Refusal.GRANTED}
