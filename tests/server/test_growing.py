"""The daemon serves while the region's memory is still being made: only what is there is used."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from host import Host, geometry_of
from small_cache import Engine, audit, chain

from kvcache_proto.errors import RegionError
from kvcache_proto.types import Refusal
from kvcache_server.core import journal
from kvcache_server.core.cache import Cache
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits
from kvcache_server.core.recovery.snapshot import Snapshot
from kvcache_server.storage import region_file
from kvcache_server.storage.region_file import create_region

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
    cache.grow(10 * PAGES)
    assert engine.store(chain("a", 6)) == [Refusal.PRESENT] * 4 + [Refusal.GRANTED] * 2
    cache.grow(7 * PAGES)  # late news change nothing
    survey = cache.pool.survey()
    assert (survey.used, survey.free) == (6 * 65536, cache.pool.capacity - 6 * 65536)
    cache.grow(cache.geometry.pages)
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
    again.grow(again.geometry.pages)
    check_integrity(again)
    assert set(other.store(chain("c", 20))) == {Refusal.GRANTED}


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 32 MiB, where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("rival", [0, 20 * MIB], ids=["enough", "too little"])
def test_what_becomes_of_memory_that_is_made_later(
    small_mount: Path, monkeypatch: pytest.MonkeyPatch, rival: int
) -> None:
    monkeypatch.setattr(region_file, "FIRST", 4 * MIB)
    monkeypatch.setattr(region_file, "CHUNK", 1 * MIB)
    region = create_region(str(small_mount), 24 * MIB, socket_path=str(small_mount / "kv.sock"), lock="never")
    ended, made, errors = threading.Event(), [], []
    try:
        total = region.geometry.region_bytes
        assert region.present == 4 * MIB < total
        assert 0 < region.ready_pages < region.geometry.pages
        (small_mount / "rival").write_bytes(bytes(rival))
        region.fill(
            "never",
            "never",
            lambda done, of: made.append((done, of)),
            ended.set,
            lambda error: (errors.append(error), ended.set()),
        )
        assert ended.wait(SECONDS)
        assert made == sorted(made) and all(of == total for _, of in made)
        if rival:
            assert isinstance(errors[0], RegionError) and "memory ran out" in str(errors[0])
            assert 4 * MIB < region.present < total
        else:
            assert not errors and region.present == total and region.ready_pages == region.geometry.pages
            assert os.fstat(region.fd).st_blocks * 512 >= total
    finally:
        region.close()


def test_a_region_that_is_closed_early_stops_making_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_file, "FIRST", 4 * MIB)
    monkeypatch.setattr(region_file, "CHUNK", 1 * MIB)
    monkeypatch.setattr(region_file, "MAX_THREADS", 1)
    region = create_region("/dev/shm", 256 * MIB, socket_path=str(tmp_path / "kv.sock"), lock="never")
    begun, go_on, called = threading.Event(), threading.Event(), []

    def progress(made: int, total: int) -> None:
        begun.set()
        assert go_on.wait(SECONDS)

    region.fill("never", "never", progress, lambda: called.append("done"), called.append)
    assert begun.wait(SECONDS)
    region.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "fill-region":
            thread.join(SECONDS)
    assert not called
    assert region.present < region.geometry.region_bytes
