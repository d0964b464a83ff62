"""Somebody removes the files of a disk tier that runs, as cleaners of /tmp do: it says so, and begins again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Daemon, StartDaemon
from tiered import Connect, ToyEngine, hashes, patched, save_below, tier_of, wait_for, wait_open, wait_tier, why

FIRST, SECOND, THIRD = hashes(1, 8), hashes(2, 8), hashes(3, 8)
Start = Callable[[], tuple[Daemon, ToyEngine]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "tier"


@pytest.fixture
def start(start_daemon: StartDaemon, connect: Connect, tmp_path: Path, folder: Path) -> Start:
    """Start a daemon whose tier looks after its files all the time, and which has FIRST below."""
    env = patched(tmp_path, "import kvcache_tiers.process\nkvcache_tiers.process.CHECK_EVERY = 0.05\n")

    def start() -> tuple[Daemon, ToyEngine]:
        daemon = start_daemon(tier=f"disk:{folder}?size=64MiB", env=env)
        engine = connect(daemon)
        wait_open(daemon)
        save_below(daemon, engine, FIRST)
        return daemon, engine

    return start


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def emptied(folder: Path) -> None:
    for each in folder.iterdir():
        each.unlink()


def without_segments(folder: Path) -> None:
    for each in folder.glob("0*"):
        each.unlink()


def without_an_index(folder: Path) -> None:
    next(folder.glob("*.index")).unlink()


def without_data(folder: Path) -> None:
    next(folder.glob("*.data")).rename(folder.with_name("data"))


def without_a_lock(folder: Path) -> None:
    (folder / "lock").unlink()


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def restored(folder: Path) -> None:
    """From a copy."""
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)


def unlinked_files(daemon: Daemon, folder: Path) -> list[str]:
    """Return what processes of the daemon have open in the folder, or had there, and that is there no more."""
    found = []
    for pid in [path.name for path in Path("/proc").glob("[0-9]*")]:
        try:
            open_files = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:  # it has ended
            continue
        found += [each for each in open_files if each.startswith(str(folder.parent)) and each.endswith("(deleted)")]
    return found


@pytest.mark.parametrize(
    ("harm", "kept"),
    [
        (removed, False),
        (without_segments, False),
        (without_a_lock, True),
        pytest.param(emptied, False, marks=pytest.mark.long),
        pytest.param(without_an_index, False, marks=pytest.mark.long),
        pytest.param(without_data, False, marks=pytest.mark.long),
        pytest.param(moved, False, marks=pytest.mark.long),
        pytest.param(restored, True, marks=pytest.mark.long),
    ],
)
def test_it_begins_again(start: Start, folder: Path, harm: Callable[[Path], None], kept: bool) -> None:
    daemon, engine = start()
    engine.save(SECOND)
    assert engine.load(SECOND) == 8
    wait_tier(daemon, "blocks_written", 16)
    harm(folder)
    wait_for(lambda: daemon.log.count("tier disk is open") == 2, "another beginning")
    assert f"tier disk is off for 0.5 s: {folder}: its files were removed" in daemon.log
    wait_open(daemon)
    # What is cached above is stored again, unless it is there.
    assert engine.load(SECOND) == 8
    wait_for(lambda: tier_of(daemon)["to_write_blocks"] == 0, "the last write")
    save_below(daemon, engine, THIRD)
    for names in (SECOND, THIRD, *([FIRST] if kept else [])):
        engine.load_all(names)
    assert kept or engine.load(FIRST) == 0
    assert not unlinked_files(daemon, folder)
    assert (folder / "lock").exists() and len(list(folder.glob("*.data"))) == len(list(folder.glob("*.index"))) > 0
    assert daemon.status()["daemon"]["tier_processes"] == [{"name": "disk", "starts": 1, "ended": ""}]


def test_a_folder_that_cannot_be_made_again(start: Start, folder: Path) -> None:
    daemon, engine = start()
    shutil.rmtree(folder.parent)
    folder.parent.write_text("in the way")
    said = f"{folder}: its files were removed, and it cannot be opened again: Not a directory"
    wait_for(lambda: tier_of(daemon).get("off") == said, "a tier that is off")
    assert engine.load(FIRST, request="r") == 0
    ((facts,), text) = why(daemon, "r")
    assert facts["cause"] == "off" and said in text
    assert engine.save(FIRST) == engine.load(FIRST) == 8, "the engine goes on"
    folder.parent.unlink()
    wait_open(daemon)
    save_below(daemon, engine, SECOND)
    engine.load_all(SECOND)


def test_a_tier_that_drops_segments_itself(start_daemon: StartDaemon, connect: Connect, tmp_path: Path) -> None:
    """That is no loss."""
    code = "import kvcache_tiers.process, kvcache_tiers.disk\n"
    code += "kvcache_tiers.process.CHECK_EVERY = 0\nkvcache_tiers.disk.SEGMENT = 1 << 20\n"
    daemon = start_daemon(tier=f"disk:{tmp_path}/tier?size=4MiB", env=patched(tmp_path, code))
    engine = connect(daemon)
    wait_open(daemon)
    for chain in range(10):
        save_below(daemon, engine, hashes(chain, 16))
    assert tier_of(daemon)["blocks_written"] == 160 and "removed" not in daemon.log
