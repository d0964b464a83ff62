"""Folders that other users made or may change, and files there that no tier has written."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from conftest import Daemon, StartDaemon
from tiered import a_tier, wait_for, wait_open

from kvcache_proto.errors import ConfigError, NotPermitted
from kvcache_tiers.backend import MAX_HEADER, Failed
from kvcache_tiers.conformance import BackendSuite, Region
from kvcache_tiers.disk import DiskTier, open_tier
from kvcache_tiers.segments import _HEAD, MOST_BYTES, PAGE, Kind

SIZE = 64 << 20
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one value."""
    values = BackendSuite()
    values.buffers = Region()
    with closing(DiskTier(tmp_path / "tier", SIZE)) as tier:
        values.put(tier, 1)
    return tmp_path / "tier"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_that_others_may_write(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(NotPermitted, match="written by others"):
        DiskTier(folder, SIZE)


@needs_root
def test_a_folder_of_another_user(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(NotPermitted, match=f"uid {NOBODY}"):
        DiskTier(folder, SIZE)


@needs_root
def test_a_link_of_another_user_in_place_of_the_folder(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    with closing(DiskTier(link, SIZE)) as tier:  # a link of one's own is no danger
        assert len(tier) == 1
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(NotPermitted, match="link"):
        DiskTier(link, SIZE)


def a_link(path: Path) -> None:
    other = path.rename(path.with_name("other"))
    path.symlink_to(other)


def a_second_name(path: Path) -> None:
    path.with_name("other").hardlink_to(path)


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def a_file_of_nobody(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


BAD = [a_link, a_second_name, a_fifo, a_folder, open_to_others, pytest.param(a_file_of_nobody, marks=needs_root)]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("pattern", ["lock", "*.data", "*.index"])
def test_files_that_no_tier_has_made(folder: Path, make: Callable[[Path], None], pattern: str) -> None:
    (path,) = folder.glob(pattern)
    make(path)
    with pytest.raises(Failed if make is a_folder else NotPermitted, match=str(path)):
        DiskTier(folder, SIZE)


def test_a_link_named_like_the_next_segment(folder: Path, tmp_path: Path) -> None:
    """One that comes when the tier is open already."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    values = BackendSuite()
    values.buffers = Region()
    with closing(DiskTier(folder, SIZE)) as tier:
        for suffix in ("data", "index"):
            (folder / f"00000002.{suffix}").symlink_to(precious)
        assert values.put(tier, 2, size=3 * PAGE) == [True]
        assert values.stored(tier, 2, size=3 * PAGE) == [True]
    assert precious.read_bytes() == b"precious"


# Every field of a segment's description at each extreme, with files that are as long as it says.
EXTREMES = (0, 1, 255, 1 << 14, 1 << 20, (1 << 31) - 1, (1 << 32) - 1)


@pytest.mark.parametrize("field", [1, 2, 3, 4])
@pytest.mark.parametrize("value", EXTREMES)
def test_a_segment_whose_description_lies(folder: Path, field: int, value: int) -> None:
    (index,) = folder.glob("*.index")
    facts = list(_HEAD.unpack(index.read_bytes()[: _HEAD.size]))
    facts[field] = value
    head = _HEAD.pack(*facts)[:-4]
    with index.open("r+b") as file:
        file.write(head + struct.pack("<I", zlib.crc32(head)))
    _, key, header, data, records, _ = facts
    os.truncate(index, min(1 << 40, PAGE + records * (-(-(4 + key + header) // 8) * 8)))
    os.truncate(index.with_suffix(".data"), min(1 << 43, records * (-(-data // PAGE) * PAGE)))
    tracemalloc.start()
    try:
        with closing(DiskTier(folder, SIZE)) as tier:
            values = BackendSuite()
            values.buffers = Region()
            assert values.put(tier, 7) == [True]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_more_segments_than_the_tier_may_have(folder: Path) -> None:
    """Each would be right by itself, and its index takes 256 MiB of memory."""
    records = MOST_BYTES // Kind(255, MAX_HEADER, PAGE).room
    head = _HEAD.pack(b"kvcache segment 1", 255, MAX_HEADER, PAGE, records, 0)[:-4]
    for number in range(10, 30):
        index = folder / f"{number:08d}.index"
        index.write_bytes(head + struct.pack("<I", zlib.crc32(head)))
        index.with_suffix(".data").touch()
        os.truncate(index, PAGE + records * Kind(255, MAX_HEADER, PAGE).entry)
        os.truncate(index.with_suffix(".data"), records * PAGE)
    values = BackendSuite()
    values.buffers = Region()
    tracemalloc.start()
    try:
        with closing(DiskTier(folder, SIZE)) as tier:
            assert values.stored(tier, 1) == [True]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20 and len(list(folder.glob("*.data"))) == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_segment_with_the_last_number(folder: Path, whole: bool) -> None:
    """A file with a number after it would not be found again, and take room for ever."""
    for path in list(folder.glob("00000001.*"))[: 2 if whole else 1]:
        path.rename(path.with_stem("9" * 12))
    values = BackendSuite()
    values.buffers = Region()
    for again in (False, True):
        with closing(DiskTier(folder, SIZE)) as tier:
            assert values.stored(tier, 3, size=2 * PAGE) == [again]
            assert values.put(tier, 1) == values.put(tier, 3, size=2 * PAGE) == [True]
    assert len(list(folder.glob("*.data"))) == 2


def test_a_url_with_nul() -> None:
    with pytest.raises(ConfigError, match="NUL"):
        open_tier("disk:/tmp/a%00b?size=1GiB", memoryview(b""))


def test_the_tier_of_such_a_folder_ends_for_good(start_daemon: StartDaemon, folder: Path) -> None:
    folder.chmod(0o777)
    daemon = start_daemon(tier=f"disk:{folder}?size=64MiB")
    wait_for(lambda: "it has no permission" in daemon.log, "the verdict")
    assert "may be written by others" in daemon.log


def test_a_tier_has_an_oom_score_of_its_own(daemon: Daemon, url: str, tmp_path: Path) -> None:
    with a_tier(tmp_path, url, daemon.endpoint) as tier:
        wait_open(daemon)
        assert Path(f"/proc/{tier.process.pid}/oom_score_adj").read_text() == "500\n"
