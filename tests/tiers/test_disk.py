"""A folder as a tier."""

from __future__ import annotations

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
