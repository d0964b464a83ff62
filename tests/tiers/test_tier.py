"""A tier's process beside a real daemon and a toy engine that compares every byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon, StartDaemon
from tiered import ToyEngine, a_tier, hashes, wait_for


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    return start_daemon()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk:{tmp_path}/tier?size=256MiB"


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[ToyEngine]:
    engine = ToyEngine(daemon.endpoint)
    yield engine
    engine.close()


def tier_of(daemon: Daemon) -> dict[str, Any]:
    found = daemon.status()["daemon"]["tiers"]
    return dict(found[0]) if found else {}


def wait_tier(daemon: Daemon, name: str, least: int) -> None:
    wait_for(lambda: tier_of(daemon).get(name, 0) >= least, f"{name} of {least}")


def test_blocks_come_back_from_a_tier(daemon: Daemon, engine: ToyEngine, url: str, tmp_path: Path) -> None:
    names = hashes(1, 40)
    with a_tier(tmp_path, url, daemon.endpoint):
        wait_for(lambda: bool(tier_of(daemon)), "a tier")
        assert engine.save(names) == 40
        assert engine.load(names) == 40
        wait_tier(daemon, "blocks_written", 40)
        engine.session.clear()
        assert engine.load(names) == 0
        engine.load_all(names)
        wait_tier(daemon, "blocks_brought", 40)
        assert tier_of(daemon)["blocks_found"] == 40
    wait_for(lambda: not tier_of(daemon), "the tier's end")
