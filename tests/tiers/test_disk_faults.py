"""Disks that are full, broken, too small or not the tier's: engines go on, and so does the tier once it can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from conftest import Daemon, StartDaemon
from failing_disk import FailingDisk, a_small_disk, failing_disk, missing, remount
from tiered import ToyEngine, a_tier, all_is_free, hashes, patched, save_below, tier_of, wait_for, wait_open, wait_tier

from kvcache_tiers.backend import Failed
from kvcache_tiers.disk import DiskTier

MIB = 1 << 20
BLOCK = 128 << 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    with ExitStack() as stack:
        try:
            stack.enter_context(a_small_disk(tmp_path / "small", 8 * MIB))
        except OSError as error:
            pytest.skip(f"no tmpfs can be mounted: {error}")
        yield tmp_path / "small"


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[FailingDisk]:
    if (why := missing()) is not None:
        pytest.skip(why)
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(failing_disk(tmp_path / "fuse"))
        except OSError as error:
            pytest.skip(f"no FUSE: {error}")
        yield disk


def test_a_disk_smaller_than_its_tier(daemon: Daemon, engine: ToyEngine, small_disk: Path, tmp_path: Path) -> None:
    with a_tier(tmp_path, f"disk:{small_disk}/tier?size=1GiB", daemon.endpoint) as tier:
        wait_open(daemon)
        for chain in range(6):  # 12 MiB in all
            names = hashes(chain, 16)
            engine.save(names)
            assert engine.load(names) == 16
            wait_for(lambda: tier_of(daemon)["to_write_blocks"] == 0, "the last write")
        used = os.statvfs(small_disk)
        assert used.f_bfree * used.f_frsize < 4 * BLOCK + MIB // 8, "what fits is used"
        engine.session.clear()
        engine.load_all(hashes(5, 16))
        # Once there is room, there are more.
        remount(small_disk, 64 * MIB)
        chains = iter(range(6, 1000))

        def grown() -> bool:
            save_below(daemon, engine, hashes(next(chains), 16))
            return sum(each.stat().st_size for each in (small_disk / "tier").glob("*.data")) > 16 * MIB

        wait_for(grown, "a larger tier")
        assert "is off for" not in tier.log
        engine.load_all(hashes(next(chains) - 1, 16))
    wait_for(lambda: all_is_free(daemon), "free slots")


def test_reads_that_fail(daemon: Daemon, engine: ToyEngine, failing: FailingDisk, tmp_path: Path) -> None:
    names = hashes(1, 20)
    with a_tier(tmp_path, f"disk:{failing.folder}/tier?size=64MiB", daemon.endpoint):
        wait_open(daemon)
        save_below(daemon, engine, names)
        with failing.failing("read", "EIO"):
            assert engine.load(names) == 0
            wait_tier(daemon, "blocks_not_brought", 1)
            assert engine.load(names) == 0
            engine.save(names)
        wait_open(daemon)
        more = hashes(2, 20)
        save_below(daemon, engine, more)
        engine.load_all(more)
        wait_for(lambda: all_is_free(daemon), "free slots")


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("direct", ["on", "off"])
def test_writes_that_fail(
    daemon: Daemon, engine: ToyEngine, failing: FailingDisk, tmp_path: Path, error: str, direct: str
) -> None:
    names, more, last = hashes(1, 20), hashes(2, 20), hashes(3, 20)
    with a_tier(tmp_path, f"disk:{failing.folder}/tier?size=64MiB&direct={direct}", daemon.endpoint) as tier:
        wait_open(daemon)
        save_below(daemon, engine, names)
        with failing.failing("write", error):
            engine.save(more)
            assert engine.load(more) == 20
            wait_for(lambda: tier_of(daemon).get("blocks_not_written", 0) > 0, "a failure")
            engine.load_all(names)
        assert "is off for" not in tier.log, "the disk can be read"
        assert ("is not written to for" in tier.log) == (error == "EIO"), "a full disk is tried again at once"
        wait_open(daemon)
        save_below(daemon, engine, last)
        for each in (names, last):
            engine.load_all(each)
        engine.save(more)
        engine.load(more)
        wait_tier(daemon, "blocks_written", 60)
        wait_for(lambda: all_is_free(daemon), "free slots")


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_disk_that_is_broken_from_the_beginning(
    daemon: Daemon, engine: ToyEngine, failing: FailingDisk, tmp_path: Path, operation: str
) -> None:
    names = hashes(1, 20)
    with a_tier(tmp_path, f"disk:{failing.folder}/tier?size=64MiB", daemon.endpoint) as tier:
        wait_open(daemon)
        with failing.failing(operation, "EIO"):
            engine.save(names)
            assert engine.load(names) == 20
            wait_for(lambda: tier_of(daemon).get("blocks_not_written", 0) > 0 or not tier_of(daemon), "a failure")
        assert tier.process.poll() is None, "an error is no reason to die"
        wait_open(daemon)
        engine.load(names)
        wait_tier(daemon, "blocks_written", 20)


def test_a_tier_ends_though_its_disk_hangs(daemon: Daemon, engine: ToyEngine, tmp_path: Path) -> None:
    """The slots that it was writing to are free after the quarantine."""
    names, hang = hashes(1, 20), tmp_path / "hang"
    env = patched(
        tmp_path,
        f"""\
import os, time
from kvcache_tiers import disk, process

process.STOP_SECONDS = 0.5
move_all = disk._move_all


def hanging(*args):
    while os.path.exists({str(hang)!r}):
        time.sleep(0.05)
    move_all(*args)


disk._move_all = hanging
""",
    )
    with a_tier(tmp_path, f"disk:{tmp_path}/tier?size=64MiB", daemon.endpoint, env=env) as tier:
        wait_open(daemon)
        save_below(daemon, engine, names)
        hang.touch()
        assert engine.load(names) == 0
        wait_for(lambda: daemon.status()["pool"]["blocks_writing"] > 0, "a read")
        assert tier.stop() == 1
        wait_for(lambda: all_is_free(daemon), "free slots")


def test_a_tier_that_hangs_in_opening(daemon: Daemon, tmp_path: Path) -> None:
    env = patched(
        tmp_path,
        """
import time
import kvcache_tiers.disk
import kvcache_tiers.process
kvcache_tiers.process.OPENING = 0.5
kvcache_tiers.disk.DiskTier._find = lambda self: time.sleep(1000)
""",
    )
    with a_tier(tmp_path, f"disk:{tmp_path}/tier?size=64MiB", daemon.endpoint, env=env) as tier:
        assert tier.process.wait(20) == 1
        assert "could not be opened" in tier.log


def test_a_smaller_size_after_a_restart(daemon: Daemon, engine: ToyEngine, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    env = patched(tmp_path, "import kvcache_tiers.disk\nkvcache_tiers.disk.SEGMENT = 4 << 20\n")

    def held() -> int:
        return sum(each.stat().st_size for each in folder.glob("*.data"))

    for size, chain in ((64, 1), (16, 2), (48, 3)):
        with a_tier(tmp_path, f"disk:{folder}?size={size}MiB", daemon.endpoint, env=env):
            wait_open(daemon)
            assert held() <= size * MIB
            if chain > 1:
                engine.load_all(hashes(chain + 98, 16))
            for other in range(10 * chain, 10 * chain + 16):
                save_below(daemon, engine, hashes(other, 16))
            save_below(daemon, engine, hashes(chain + 99, 16))
            assert size * MIB / 2 < held() <= size * MIB
        wait_for(lambda: not tier_of(daemon), "the tier's end")


def test_a_folder_of_somebody_else(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Nothing in it is touched, though names are like a segment's."""
    folder = tmp_path / "backups"
    folder.mkdir()
    files = {"20240101.data": b"precious", "20240101.index": b"too", "README": b"mine"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    daemon = start_daemon(tier=f"disk:{folder}?size=64MiB")
    wait_for(lambda: "not started again" in daemon.log, "the verdict")
    assert "files called like a tier's" in daemon.log
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == files


def test_a_folder_with_other_files(daemon: Daemon, engine: ToyEngine, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    (folder / "lost+found").mkdir(parents=True)
    (folder / "notes.data").write_bytes(b"mine")
    with a_tier(tmp_path, f"disk:{folder}?size=64MiB", daemon.endpoint):
        wait_open(daemon)
        save_below(daemon, engine, hashes(1, 8))
        engine.load_all(hashes(1, 8))
    assert (folder / "notes.data").read_bytes() == b"mine"


def test_a_folder_that_can_be_opened_later(daemon: Daemon, engine: ToyEngine, tmp_path: Path) -> None:
    """What an attempt has begun is undone: the next one is not in its own way."""
    folder = tmp_path / "tier"
    (folder / "00000001.data").mkdir(parents=True)
    (folder / "lock").touch()
    with a_tier(tmp_path, f"disk:{folder}?size=64MiB", daemon.endpoint) as tier:
        wait_for(lambda: "00000001.data: Is a directory" in tier.log, "a failure")
        (folder / "00000001.data").rmdir()
        wait_open(daemon)
        save_below(daemon, engine, hashes(1, 8))


def test_a_read_only_folder(daemon: Daemon, engine: ToyEngine, small_disk: Path, tmp_path: Path) -> None:
    remount(small_disk, 8 * MIB, read_only=True)
    with a_tier(tmp_path, f"disk:{small_disk}/tier?size=4MiB", daemon.endpoint) as tier:
        wait_for(lambda: "Read-only file system" in tier.log, "a line about it")
        engine.save(hashes(1, 8))
        assert engine.load(hashes(1, 8)) == 8
        remount(small_disk, 8 * MIB)
        wait_open(daemon)
        wait_for(lambda: engine.load(hashes(1, 8)) == 8 and tier_of(daemon).get("blocks_written", 0) == 8, "writes")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_without_permission(short_folder: Path) -> None:
    """`short_folder` is in one that all may enter, as no folder of pytest is."""
    (short_folder / "tier").mkdir()
    os.seteuid(65534)
    try:
        for folder in (short_folder / "tier", short_folder / "new"):
            with pytest.raises(Failed, match="Permission denied"):
                DiskTier(folder, 64 * MIB)
    finally:
        os.seteuid(0)
    with closing(DiskTier(short_folder / "tier", 64 * MIB)):
        pass


def test_two_daemons_with_one_folder(start_daemon: StartDaemon, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    url = f"disk:{folder}?size=64MiB"
    one = start_daemon(endpoint=f"ipc://{tmp_path}/one.sock", tier=url)
    wait_open(one)
    other = start_daemon(endpoint=f"ipc://{tmp_path}/other.sock", tier=url)
    wait_for(lambda: "another process uses it" in other.log, "a line about it")
    engine = ToyEngine(one.endpoint)
    save_below(one, engine, hashes(1, 8))
    engine.load_all(hashes(1, 8))
    engine.close()
    assert one.stop() == 0
    wait_open(other)
    engine = ToyEngine(other.endpoint)
    engine.load_all(hashes(1, 8))
    engine.close()
