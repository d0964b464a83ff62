"""The region file: created, refused, pre-faulted and removed, on a real tmpfs."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import remove_regions

from kvcache_proto.errors import ConfigError, EndpointTaken, RegionError
from kvcache_proto.region import RegionRows
from kvcache_server.storage import region_file
from kvcache_server.storage.region_file import Region, available_memory, create_region, filesystem
from kvcache_server.storage.region_names import RegionFolder

SHM = "/dev/shm"
MIB = 1 << 20
SECONDS = 60.0


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    """An endpoint of its own for each test, and with it a region file; nothing may be left of that."""
    path = str(tmp_path / "kv.sock")
    yield path
    assert remove_regions(SHM, path) == 0


def resident(region: Region) -> int:
    """Bytes that the file takes on its mount."""
    return os.fstat(region.fd).st_blocks * 512


def test_a_region_is_complete_and_private(socket_path: str) -> None:
    done: list[tuple[int, int]] = []
    region = create_region(SHM, 64 * MIB, socket_path=socket_path, progress=lambda *step: done.append(step))
    try:
        found = os.stat(region.path)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert 62 * MIB < region.geometry.region_bytes <= 64 * MIB + 2 * MIB
        assert found.st_size == len(region.buffer) == region.geometry.region_bytes
        assert resident(region) >= region.geometry.region_bytes
        assert done[0] == (0, region.geometry.region_bytes)
        assert done[-1] == (region.geometry.region_bytes,) * 2
        assert sorted(done) == done
        RegionRows(region.buffer, region.geometry).format()
        RegionRows(region.buffer, region.geometry).check_header()
    finally:
        region.close()
    region.close()


def test_a_passed_descriptor_gives_access_to_the_bytes_but_not_to_the_lock(socket_path: str) -> None:
    region = create_region(SHM, 8 * MIB, socket_path=socket_path, lock="never")
    handed_over = os.dup(region.fd)
    name = os.path.basename(region.path).removesuffix(".region")
    try:
        region.buffer[4096:4100] = b"here"
        assert os.pread(handed_over, 4, 4096) == b"here"
        fcntl.flock(handed_over, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with RegionFolder(SHM, socket_path) as regions:
            assert regions.found() == [name]
            with pytest.raises(EndpointTaken, match="running daemon"):
                regions.claim(name)
            region.close(keep=True)
            regions.claim(name).remove()
    finally:
        region.close()
        os.close(handed_over)


def test_region_names_are_unpredictable(socket_path: str) -> None:
    regions = [create_region(SHM, 8 * MIB, socket_path=socket_path, lock="never") for _ in range(2)]
    assert len({region.path for region in regions}) == 2
    for region in regions:
        region.close()


def test_an_interrupted_start_leaves_nothing(socket_path: str) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_region(SHM, 128 * MIB, socket_path=socket_path, progress=stop)


def test_a_region_larger_than_memory_is_refused(socket_path: str) -> None:
    with pytest.raises(RegionError, match=r"needs \d+\.\d TiB; .* (room for|leaves) .*: choose a smaller size"):
        create_region(SHM, 8 << 40, socket_path=socket_path)


def test_a_region_smaller_than_a_huge_page_is_refused(socket_path: str) -> None:
    with pytest.raises(ConfigError, match="size: 1048576 bytes: at least 2162688"):
        create_region(SHM, MIB, socket_path=socket_path)
    with pytest.raises(ConfigError, match="choose pages of"):
        create_region(SHM, 1 << 40, page_size=4096, socket_path=socket_path)


@pytest.mark.parametrize("directory", ["/nowhere/at/all", "/proc/version"])
def test_a_missing_folder_is_refused(socket_path: str, directory: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        create_region(directory, 8 * MIB, socket_path=socket_path)


def test_a_region_on_a_disk_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if filesystem(str(tmp_path)) in ("tmpfs", "ramfs"):
        pytest.skip("the folder for tests is in memory here")
    region = create_region(str(tmp_path), 8 * MIB, socket_path=str(tmp_path / "kv.sock"), lock="never")
    try:
        assert "not in memory" in caplog.text
    finally:
        region.close()
    assert not list(tmp_path.iterdir())


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


def test_a_region_on_its_own_mount(small_mount: Path) -> None:
    socket_path = str(small_mount / "kv.sock")
    assert filesystem(str(small_mount)) == "tmpfs"
    with pytest.raises(RegionError, match=r"has room for 32\.0 MiB: choose a smaller size, or enlarge it"):
        create_region(str(small_mount), 64 * MIB, socket_path=socket_path)
    create_region(str(small_mount), 24 * MIB, socket_path=socket_path).close()
    assert not list(small_mount.iterdir())


def test_a_mount_that_fills_up_raises_an_error_and_no_signal(small_mount: Path) -> None:
    def rival(done: int, total: int) -> None:
        if not done:
            (small_mount / "rival").write_bytes(bytes(20 * MIB))

    with pytest.raises(RegionError, match="memory ran out"):
        create_region(str(small_mount), 24 * MIB, socket_path=str(small_mount / "kv.sock"), progress=rival)
    assert [path.name for path in small_mount.iterdir()] == ["rival"]


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


def test_a_region_that_is_closed_early_stops_making_memory(socket_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_file, "FIRST", 4 * MIB)
    monkeypatch.setattr(region_file, "CHUNK", 1 * MIB)
    monkeypatch.setattr(region_file, "MAX_THREADS", 1)
    region = create_region(SHM, 256 * MIB, socket_path=socket_path, lock="never")
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


def test_available_memory_is_at_most_the_host_s() -> None:
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
