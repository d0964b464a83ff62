"""A tier or the daemon dies at each point of its work: no wrong byte, no failed request, no slot that stays lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon, StartDaemon
from kill_points import KillPoint
from tiered import Connect, ToyEngine, all_is_free, hashes, save_below, tier_of, wait_for, wait_open

from kvcache_proto.errors import Unavailable

FLAGS = {"size": "16MiB", "quarantine": 0.5, "grace": 1, "keep": "true"}
READS = ("before a look", "after a look", "before a reservation", "after a reservation", "before a read")
READS += ("amid a read", "after a read", "before a settlement", "after a settlement")
WRITES = ("before a write", "amid a write", "before an entry", "after an entry", "after a write")
PROMOTION = ("before an answer: exists", "after an answer: exists", "before a report: exists", "after a report: exists")
PROMOTION += ("before an answer: fetches", "after an answer: fetches", "before an answer: Reserved")
PROMOTION += ("after an answer: Reserved", "before an answer: Settled", "after an answer: Settled")
PROMOTION += ("before a report: fetched", "after a report: fetched")
WRITE_OUT = (
    "before an answer: stores",
    "after an answer: stores",
    "before a report: stored",
    "after a report: stored",
)
# Before, amid and after each kind of work. The other points are long.
FEW = {
    *("after a look", "before a reservation", "amid a read", "before a settlement", "amid a write", "before an entry"),
    *("after an eviction", "after an answer: exists", "before a report: exists", "before an answer: Settled"),
    *("after a report: fetched", "after an answer: stores", "before a report: stored"),
}


def marked(*names: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in names]


def die(point: KillPoint, name: str, engine: ToyEngine, names: list[bytes], writes: bool) -> None:
    """Have blocks brought, or written, until a process has died."""
    engine.save(hashes(100, 120))  # there are other bytes in the slots that they get
    engine.session.clear()
    point.arm(name)
    if writes:
        engine.save(names)

    def passed() -> bool:
        engine.load(names, answered=False)
        return point.passed

    wait_for(passed, name)


def cleared(engine: ToyEngine) -> bool:
    try:
        engine.session.clear()
    except Unavailable:  # engines are reconnecting after a restart
        return False
    return True


def bring_again(daemon: Daemon, engine: ToyEngine, first: list[bytes], second: list[bytes]) -> None:
    """Check that both chains can be written, unless they are, and brought."""
    wait_open(daemon)
    for names in (first, second):
        engine.save(names)
        engine.load(names)
    wait_for(lambda: tier_of(daemon).get("to_write_blocks") == 0 and not engine.load([]), "the last write")
    wait_for(lambda: all_is_free(daemon), "free slots")
    wait_for(lambda: cleared(engine), "an empty region")
    before = tier_of(daemon)
    for names in (first, second):
        engine.load_all(names)
    most = before.get("blocks_brought", 0) + len(first) + len(second)
    wait_for(lambda: tier_of(daemon).get("blocks_brought", 0) >= most, "blocks that are brought")
    wait_for(lambda: all_is_free(daemon), "free slots")
    assert tier_of(daemon).get("blocks_not_brought", 0) == before.get("blocks_not_brought", 0), "a wrong value"


@pytest.mark.parametrize("name", marked(*READS, *WRITES))
def test_a_tier_that_dies(start_daemon: StartDaemon, connect: Connect, tmp_path: Path, name: str) -> None:
    point = KillPoint(tmp_path, "tier")
    daemon = start_daemon(tier=f"disk:{tmp_path}/tier?size=64MiB", env=point.environ, **FLAGS)
    engine = connect(daemon)
    first, second = hashes(1, 20), hashes(2, 20)
    wait_open(daemon)
    save_below(daemon, engine, first)
    die(point, name, engine, second if name in WRITES else first, name in WRITES)
    wait_for(lambda: daemon.status()["daemon"]["tier_processes"][0]["starts"] == 2, "the next process")
    if name in READS:
        engine.load_all(first)
    bring_again(daemon, engine, first, second)


@pytest.mark.parametrize("name", marked("before an eviction", "after an eviction", "amid a write", "before an entry"))
def test_a_tier_that_dies_when_its_folder_is_full(
    start_daemon: StartDaemon, connect: Connect, tmp_path: Path, name: str
) -> None:
    """What was to be replaced is there, or is not; it is never mistaken for what has replaced it."""
    point = KillPoint(tmp_path, "tier")
    daemon = start_daemon(tier=f"disk:{tmp_path}/tier?size=4MiB", env=point.environ, **FLAGS)
    engine = connect(daemon)
    wait_open(daemon)
    for chain in (1, 2):  # of 32 blocks in all, for which there is room
        save_below(daemon, engine, hashes(chain, 16))
    die(point, name, engine, hashes(3, 16), True)
    wait_for(lambda: daemon.status()["daemon"]["tier_processes"][0]["starts"] == 2, "the next process")
    wait_open(daemon)
    engine.session.clear()
    for chain in (1, 2, 3, 4):
        if chain == 4:
            save_below(daemon, engine, hashes(chain, 16))
        engine.load(hashes(chain, 16))
        wait_for(lambda: tier_of(daemon)["to_look_up"] == 0, "what is there")
        wait_for(lambda: tier_of(daemon)["to_bring_bytes"] == 0, "the last read")
        hits = engine.load(hashes(chain, 16))
        assert chain != 2 or hits == 16
    wait_for(lambda: all_is_free(daemon), "free slots")
    assert tier_of(daemon).get("blocks_not_brought", 0) == 0, "what is found is right"


@pytest.mark.parametrize("name", marked(*PROMOTION, *WRITE_OUT))
def test_a_daemon_that_dies(start_daemon: StartDaemon, connect: Connect, tmp_path: Path, name: str) -> None:
    point = KillPoint(tmp_path, "daemon")
    flags = {"tier": f"disk:{tmp_path}/tier?size=64MiB", "env": point.environ, **FLAGS}
    daemon = start_daemon(**flags)
    engine = connect(daemon)
    first, second = hashes(1, 20), hashes(2, 20)
    wait_open(daemon)
    save_below(daemon, engine, first)
    die(point, name, engine, second if name in WRITE_OUT else first, name in WRITE_OUT)
    daemon.process.wait(20)
    daemon = start_daemon(**flags)
    wait_for(lambda: engine.namespace.attached, "the engine's return")
    bring_again(daemon, engine, first, second)
