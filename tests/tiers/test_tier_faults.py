"""Whatever dies at whatever moment: no wrong byte, no request that fails, no slot that stays lost."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Daemon, StartDaemon
from redis_servers import Server
from tiered import ToyEngine, a_tier, all_is_free, hashes, patched, save_below, wait_for, wait_open

SECONDS = 8.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Server]:
    server = Server("redis", tmp_path / "redis").start()
    yield server
    server.stop()


def tier_pids(daemon: Daemon) -> list[int]:
    children = Path(f"/proc/{daemon.process.pid}/task").glob("*/children")
    return [int(each) for path in children for each in path.read_text().split()]


def work(engine: ToyEngine, draw: random.Random, until: float) -> int:
    """Save and load chains, more than the region holds; return how many blocks were hits. `load` compares all bytes."""
    hits = 0
    while time.monotonic() < until:
        names = hashes(draw.randrange(40), draw.randrange(1, 16))
        hits += engine.load(names)
        engine.save(names)
        hits += engine.load(names)
    return hits


@pytest.mark.parametrize("seed", range(2))
def test_tiers_that_are_killed_cost_no_slot_and_no_byte(
    start_daemon: StartDaemon, tmp_path: Path, store: Server, seed: int
) -> None:
    draw = random.Random(seed)
    urls = f"disk:{tmp_path}/tier?size=24MiB {store.url}/"
    daemon = start_daemon(size="32MiB", quarantine=0.5, env={"KVCACHE_TIER": urls})
    engine = ToyEngine(daemon.endpoint)
    try:
        wait_for(lambda: len(daemon.status()["daemon"]["tiers"]) == 2, "two tiers")
        end = time.monotonic() + SECONDS
        hits = 0
        while time.monotonic() < end:
            hits += work(engine, draw, time.monotonic() + draw.random() * 0.5)
            if pids := tier_pids(daemon):
                os.kill(draw.choice(pids), signal.SIGKILL)
        assert hits
        wait_for(lambda: all_is_free(daemon), "an idle cache")
        assert "checksums_wrong" not in str(daemon.status()["client_counts"])
    finally:
        engine.close()


def test_a_daemon_that_is_killed_while_blocks_are_brought(
    start_daemon: StartDaemon, tmp_path: Path, store: Server
) -> None:
    draw, urls = random.Random(7), f"disk:{tmp_path}/tier?size=64MiB {store.url}/"
    flags = {"size": "32MiB", "quarantine": 0.5, "grace": 1, "keep": "true", "env": {"KVCACHE_TIER": urls}}
    daemon = start_daemon(**flags)
    engine = ToyEngine(daemon.endpoint)
    try:
        wait_for(lambda: len(daemon.status()["daemon"]["tiers"]) == 2, "two tiers")
        for _ in range(4):
            work(engine, draw, time.monotonic() + 1 + draw.random())
            daemon.kill()
            daemon = start_daemon(**flags)
            wait_for(lambda: engine.namespace.attached, "the engine's return")
        wait_for(lambda daemon=daemon: len(daemon.status()["daemon"]["tiers"]) == 2, "two tiers")  # type: ignore[misc]
        work(engine, draw, time.monotonic() + 1)
        wait_for(lambda daemon=daemon: all_is_free(daemon), "an idle cache")  # type: ignore[misc]
    finally:
        engine.close()


def test_a_store_that_is_paused_flushed_and_killed(start_daemon: StartDaemon, store: Server) -> None:
    draw = random.Random(3)
    daemon = start_daemon(size="32MiB", tier=f"{store.url}/?timeout=0.3")
    engine = ToyEngine(daemon.endpoint)
    try:
        wait_for(lambda: len(daemon.status()["daemon"]["tiers"]) == 1, "a tier")
        assert work(engine, draw, time.monotonic() + 1)
        with store.paused():
            assert work(engine, draw, time.monotonic() + 2)
        client = store.client()
        client.flushall()
        client.close()
        assert work(engine, draw, time.monotonic() + 1)
        store.stop()
        assert work(engine, draw, time.monotonic() + 1)
        store.start()
        wait_for(lambda: daemon.status()["daemon"]["tiers"][0]["off"] == "", "the tier's return")
        assert work(engine, draw, time.monotonic() + 1)
        wait_for(lambda: all_is_free(daemon), "an idle cache")
    finally:
        engine.close()


@pytest.mark.parametrize("job", ["look", "bring", "write_out"])
def test_an_error_inside_a_tier(start_daemon: StartDaemon, tmp_path: Path, job: str) -> None:
    """The daemon hears of the job nevertheless, and asks again later."""
    fails = tmp_path / "fails"
    env = patched(
        tmp_path,
        f"""\
import os
from kvcache_tiers.moves import Moves

work = Moves.{job}


def failing(*args):
    if os.path.exists({str(fails)!r}):
        os.unlink({str(fails)!r})
        raise RuntimeError("a test")
    return work(*args)


Moves.{job} = failing
""",
    )
    daemon = start_daemon(tier=f"disk:{tmp_path}/tier?size=64MiB", env=env)
    engine, names = ToyEngine(daemon.endpoint), hashes(1, 20)
    try:
        wait_open(daemon)
        save_below(daemon, engine, names)
        fails.touch()
        if job == "write_out":
            engine.save(hashes(2, 20))
            engine.load(hashes(2, 20))
            wait_for(lambda: not fails.exists(), "an error")
            wait_for(lambda: all_is_free(daemon), "leases that end")
            engine.session.clear()
        engine.load_all(names)
        assert not fails.exists() and "a job has failed inside the tier" in daemon.log
        wait_for(lambda: all_is_free(daemon), "an idle cache")
    finally:
        engine.close()


def test_an_error_inside_the_daemon(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Whatever the reason, engines are served, and so is the tier once there is none."""
    fails = tmp_path / "fails"
    env = patched(
        tmp_path,
        f"""\
import os
from kvcache_server.tiering.tiering import Tiering

jobs = Tiering.jobs


def failing(*args):
    if os.path.exists({str(fails)!r}):
        raise RuntimeError("a test")
    return jobs(*args)


Tiering.jobs = failing
""",
    )
    daemon = start_daemon(tier=f"disk:{tmp_path}/tier?size=64MiB", env=env)
    engine, names = ToyEngine(daemon.endpoint), hashes(1, 20)
    try:
        wait_open(daemon)
        save_below(daemon, engine, names)
        fails.touch()
        wait_for(lambda: daemon.status()["daemon"]["errors"].get("internal", 0) > 0, "an error")
        assert engine.load(names) == 0
        assert engine.save(hashes(2, 20)) == engine.load(hashes(2, 20)) == 20
        fails.unlink()
        engine.load_all(names)
        assert daemon.status()["daemon"]["tier_processes"][0]["starts"] == 1
    finally:
        engine.close()


def test_a_tier_may_open_many_files(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with a_tier(tmp_path, f"disk:{tmp_path}/tier?size=64MiB", daemon.endpoint) as tier:
            wait_open(daemon)
            assert resource.prlimit(tier.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
