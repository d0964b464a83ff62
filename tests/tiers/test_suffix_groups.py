"""Windows and states below the region: a tier brings all that an engine needs to continue, or nothing of it counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Daemon, StartDaemon
from hybrid import MODELS, ConnectHybrid
from tiered import a_tier, hashes, patched, tier_of, wait_for, wait_open, wait_tier, wait_why


def usable(model: str, names: list[bytes]) -> int:
    return len(names) - MODELS[model][0].needs_next_block


@pytest.mark.parametrize("policy", ["second", "through"])
@pytest.mark.parametrize("model", MODELS)
def test_an_engine_continues_where_a_tier_has_what_that_takes(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path, model: str, policy: str
) -> None:
    engine, names = connect_hybrid(daemon, model), hashes(1, 24)
    end = usable(model, names)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", policy):
        wait_open(daemon)
        stored = engine.save(names, end)
        assert engine.load(names) == end
        wait_tier(daemon, "blocks_written", stored)
        engine.session.clear()
        assert engine.load(names) == 0
        engine.load_all(names, end)
        assert tier_of(daemon)["blocks_brought"] == stored
        assert engine.load([*names, *hashes(2, 3)]) == end, "a longer prompt continues there, too"


def test_each_block_of_a_suffix_may_come_in_a_part_of_its_own(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path
) -> None:
    engine, names = connect_hybrid(daemon, "both"), hashes(1, 24)
    small = patched(tmp_path, "import kvcache_tiers.disk as disk\ndisk.DiskTier.batch_bytes = 4096\n")
    with a_tier(tmp_path, url, daemon.endpoint, env=small):
        wait_open(daemon)
        stored = engine.save(names)
        assert engine.load(names) == 24
        wait_tier(daemon, "blocks_written", stored)
        engine.session.clear()
        engine.load_all(names, 24)
        assert not tier_of(daemon).get("blocks_not_brought")


def test_an_engine_with_a_drafter_continues_a_block_earlier(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path
) -> None:
    engine, names = connect_hybrid(daemon, "followed"), hashes(1, 24)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through"):
        wait_open(daemon)
        stored = engine.save(names, 23) + engine.save(names, 24)
        wait_tier(daemon, "blocks_written", stored)
        engine.session.clear()
        engine.load_all(names, 23)


@pytest.mark.parametrize("model", ["both", "followed"])
def test_prompts_outlive_the_region(
    start_daemon: StartDaemon, connect_hybrid: ConnectHybrid, url: str, model: str
) -> None:
    daemon = start_daemon(tier=url)
    engine = connect_hybrid(daemon, model)
    wait_open(daemon)
    system = hashes(0, 12)
    prompts = [[*system, *hashes(number, 8)] for number in (1, 2)]
    end = usable(model, prompts[0])
    stored = 0
    for names in prompts:
        stored += engine.save(names, end)
        assert engine.load(names) == end
    wait_tier(daemon, "blocks_written", stored)
    assert daemon.stop() == 0
    daemon = start_daemon(tier=url, fresh=True)
    wait_open(daemon)
    engine = connect_hybrid(daemon, model)
    for names in prompts:
        engine.load_all(names, end)
    assert daemon.status()["pool"]["blocks"] == stored


def test_what_is_cached_already_is_not_brought_again(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path
) -> None:
    """The full blocks are still there, but the window and the state at their end are gone."""
    engine, names = connect_hybrid(daemon, "both"), hashes(1, 24)
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_open(daemon)
        stored = engine.save(names)
        assert engine.load(names) == 24
        wait_tier(daemon, "blocks_written", stored)
        engine.session.clear()
        assert engine.save(names, 12) == 24 + 4
        assert engine.load(names) == 12
        engine.load_all(names, 24)
        assert tier_of(daemon)["blocks_brought"] == 4


def test_an_earlier_place_to_continue_is_better_than_none(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path
) -> None:
    engine, names, others = connect_hybrid(daemon, "both"), hashes(1, 24), hashes(2, 4)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through"):
        wait_open(daemon)
        stored = engine.save(names, 10)  # the blocks after these have no state
        wait_tier(daemon, "blocks_written", stored)
        engine.session.clear()
        assert engine.load([*names[:20], *others]) == 0
        engine.load_all([*names[:20], *others], 10)
        assert tier_of(daemon)["blocks_brought"] == 10 + 4, "nothing of use after them"


def test_what_only_has_full_blocks_is_not_brought(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path
) -> None:
    engine, names = connect_hybrid(daemon, "both"), hashes(1, 24)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through"):
        wait_open(daemon)
        stored = engine.save(names)
        wait_tier(daemon, "blocks_written", stored)
        engine.session.clear()
        assert engine.load(names[:20]) == 0
        wait_tier(daemon, "looks", 3)
        wait_for(lambda: not tier_of(daemon)["to_look_up"], "answers")
        for _ in range(3):
            assert engine.load(names[:20]) == 0
        assert tier_of(daemon)["looks"] == 3, "it is not asked again at once"
        assert not tier_of(daemon).get("blocks_brought")
        engine.load_all(names, 24)


def test_why_says_what_was_known_of_tiers(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path
) -> None:
    engine, names = connect_hybrid(daemon, "both"), hashes(1, 24)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through"):
        wait_open(daemon)
        assert engine.load(names, "first") == 0
        said = wait_why(daemon, "first", "asked")
        assert "\n  tier disk, blocks 0-23: it was being asked for them, and has not answered\n" in said
        wait_for(lambda: not tier_of(daemon)["to_look_up"], "answers")
        assert engine.load(names, "second") == 0
        assert "\n  tier disk, blocks 0-23: it does not have them\n" in wait_why(daemon, "second", "absent")
