"""Fixtures of tests of tiers: a daemon, and toy engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Daemon, StartDaemon
from hybrid import MODELS, ConnectHybrid, HybridEngine
from tiered import Connect, ToyEngine


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(quarantine=0.5)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a disk tier."""
    return f"disk:{tmp_path}/tier?size=256MiB"


@pytest.fixture
def connect() -> Iterator[Connect]:
    engines: list[ToyEngine] = []

    def connect(daemon: Daemon) -> ToyEngine:
        engines.append(ToyEngine(daemon.endpoint))
        return engines[-1]

    yield connect
    for each in engines:
        each.close()


@pytest.fixture
def connect_hybrid() -> Iterator[ConnectHybrid]:
    engines: list[HybridEngine] = []

    def connect(daemon: Daemon, model: str) -> HybridEngine:
        engines.append(HybridEngine(daemon.endpoint, MODELS[model]))
        return engines[-1]

    yield connect
    for each in engines:
        each.session.close()


@pytest.fixture
def engine(daemon: Daemon, connect: Connect) -> ToyEngine:
    return connect(daemon)
