"""A folder as a tier."""

from __future__ import annotations

import os
import resource
from contextlib import closing
from pathlib import Path

import pytest

from kvcache_tiers import disk
from kvcache_tiers.backend import Failed
from kvcache_tiers.conformance import BackendSuite, Open
from kvcache_tiers.disk import DiskTier

SIZE = 64 << 20


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def open_tier(tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setattr(disk, "SEGMENT", 1 << 20)
    return lambda: DiskTier(tmp_path / "tier", SIZE, direct)


class TestDisk(BackendSuite):
    def test_nobody_else_can_read_its_files(self, tier: DiskTier, tmp_path: Path) -> None:
        self.put(tier, 1)
        files = list((tmp_path / "tier").iterdir())
        assert len(files) == 3 and not any(path.stat().st_mode & 0o077 for path in files)

    def test_one_process_has_a_folder(self, tier: DiskTier, open_tier: Open) -> None:
        with pytest.raises(Failed, match="tier"):
            open_tier()

    def test_a_full_folder_keeps_what_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "SEGMENT", 16 * self.size)
        with closing(DiskTier(tmp_path / "small", 64 * self.size)) as tier:
            for number in range(200):
                assert self.put(tier, number) == [True]
                assert self.stored(tier, 0) == [True]
            assert len(tier) <= 64
            assert self.stored(tier, 199, 1) == [True, False]

    def test_another_kind_of_values_takes_room_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "SEGMENT", 16 * self.size)
        with closing(DiskTier(tmp_path / "small", 64 * self.size)) as tier:
            self.put(tier, *range(64))
            for number in range(100, 300):
                assert self.put(tier, number, size=2 * self.size) == [True]
            assert sum(self.stored(tier, *range(100, 300), size=2 * self.size)) == 32
            held = sum(each.stat().st_size for each in (tmp_path / "small").glob("*.data"))
            assert held <= 64 * self.size

    def test_files_that_are_not_whole(self, open_tier: Open, tmp_path: Path) -> None:
        """Of a killed host, for example: what they had is not there, and they are removed."""
        with closing(open_tier()) as tier:
            self.put(tier, *range(5), size=4096)
            self.put(tier, *range(5, 10), size=8192)
            self.put(tier, *range(10, 15), size=12288)
        first, second, _ = sorted((tmp_path / "tier").glob("*.index"))
        with first.open("r+b") as file:
            file.write(b"x")
        second.with_suffix(".data").unlink()
        (tmp_path / "tier" / "99999999.index").write_bytes(b"")
        (tmp_path / "tier" / "88888888.data").write_bytes(b"no index")
        with closing(open_tier()) as tier:
            assert len(tier) == 5 and tier.counts["segments_lost"] == 4
            assert all(self.stored(tier, *range(10, 15), size=12288))
        assert len([*(tmp_path / "tier").iterdir()]) == 3

    def test_an_entry_that_was_torn(self, open_tier: Open, tmp_path: Path) -> None:
        with closing(open_tier()) as tier:
            self.put(tier, 1, 2)
        (index,) = (tmp_path / "tier").glob("*.index")
        with index.open("r+b") as file:
            file.seek(4096 + 10)
            file.write(b"?")
        with closing(open_tier()) as tier:
            assert sum(self.stored(tier, 1, 2)) == 1
            assert self.put(tier, 1, 2) == [True, True]

    def test_too_few_descriptors(self, open_tier: Open) -> None:
        """Segments that cannot be opened now are not removed."""
        with closing(open_tier()) as tier:
            for number in range(6):
                self.put(tier, number, size=(number + 1) * 4096)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
        try:
            with pytest.raises(Failed, match="Too many open files"):
                open_tier()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with closing(open_tier()) as tier:
            assert len(tier) == 6 and not tier.counts["segments_lost"]
            assert all(self.stored(tier, number, size=(number + 1) * 4096) == [True] for number in range(6))

    def test_a_record_that_cannot_be_written_is_not_used_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(disk, "SEGMENTS", 1)
        with closing(DiskTier(tmp_path / "small", 16 * self.size)) as tier:
            assert all(self.put(tier, *range(15)))
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (15 * self.size, hard))  # the last record is beyond it
            try:
                with pytest.raises(Failed, match="File too large"):
                    self.put(tier, 15)
                assert self.put(tier, 16) == [True]
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert self.stored(tier, 16) == [True]
