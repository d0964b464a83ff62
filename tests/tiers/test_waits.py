"""Requests wait for what a tier has: the daemon says "later" as long as it may come, and the engine bounds the wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import Daemon, StartDaemon
from hybrid import MODELS, ConnectHybrid
from tiered import (
    SPEC,
    Connect,
    ToyEngine,
    a_tier,
    hashes,
    leave_below,
    patched,
    save_below,
    wait_for,
    wait_open,
    wait_tier,
    why,
)

from kvcache_client import Session
from kvcache_client.scheduler.scheduler import Scheduler
from kvcache_client.scheduler.views import IDLE, EngineFacts, RequestView
from kvcache_client.session.namespace import Namespace
from kvcache_client.settings import ConnectorSettings

SLOW = 0.3  # seconds
OPENS_LATE = """
import time, kvcache_tiers.disk as disk
make = disk.DiskTier.__init__
def late(*arguments, **options):
    time.sleep(1.0)
    make(*arguments, **options)
disk.DiskTier.__init__ = late
"""


def slow(method: str, least: int = 0) -> str:
    """Return code that lets a disk take long to read blocks of at least so many bytes, or to say what it has."""
    return f"""
import time, kvcache_tiers.disk as disk
{method} = disk.DiskTier.{method}
def slow_{method}(self, keys, *buffers):
    if not buffers or buffers[0][0].nbytes >= {least}:
        time.sleep({SLOW})
    return {method}(self, keys, *buffers)
disk.DiskTier.{method} = slow_{method}
"""


SLOW_DISK = slow("contains") + slow("get")


def look_up_until(namespace: Namespace, names: list[bytes], hits: int) -> int:
    """Look up until there are so many hits, as long as it is said that more may come; return the hits then."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with namespace.acquire(names) as lease:
            assert not lease.failed
            if lease.hits == hits or not lease.eta:
                return lease.hits
            time.sleep(max(lease.eta, 0.002))
    raise AssertionError(f"not {hits} hits after 30 s")


@pytest.mark.parametrize("least", [0, 40960], ids=["all slow", "full blocks slow"])
@pytest.mark.parametrize("model", MODELS)
def test_windows_that_come_are_waited_for(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path, model: str, least: int
) -> None:
    engine = connect_hybrid(daemon, model)
    prompts = [hashes(number, 24) for number in range(3)]
    end = 24 - MODELS[model][0].needs_next_block
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through", env=patched(tmp_path, slow("get", least))):
        wait_open(daemon)
        wait_tier(daemon, "blocks_written", sum(engine.save(names, end) for names in prompts))
        engine.session.clear()
        assert [look_up_until(engine.namespace, names, end) for names in prompts] == [end] * 3


@pytest.mark.parametrize("model", ["both", "windows alone"])
def test_a_tier_that_answers_late_is_waited_for(
    daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path, model: str
) -> None:
    engine, names = connect_hybrid(daemon, model), hashes(1, 24)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through", env=patched(tmp_path, slow("contains"))):
        wait_open(daemon)
        wait_tier(daemon, "blocks_written", engine.save(names))
        engine.session.clear()
        assert look_up_until(engine.namespace, names, 24) == 24


def test_blocks_of_full_attention_are_waited_for(daemon: Daemon, engine: ToyEngine, url: str, tmp_path: Path) -> None:
    names = hashes(1, 24)
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through", env=patched(tmp_path, SLOW_DISK)):
        wait_open(daemon)
        leave_below(daemon, engine, names)
        assert look_up_until(engine.namespace, names, 24) == 24


def test_why_says_that_windows_come(daemon: Daemon, connect_hybrid: ConnectHybrid, url: str, tmp_path: Path) -> None:
    engine, names = connect_hybrid(daemon, "both"), hashes(1, 24)
    said = set()
    with a_tier(tmp_path, url, daemon.endpoint, "--writes", "through", env=patched(tmp_path, slow("get", 40960))):
        wait_open(daemon)
        wait_tier(daemon, "blocks_written", engine.save(names))
        engine.session.clear()

        def all_came() -> bool:
            hits = engine.load(names, "r")
            said.update(each["cause"] for each in why(daemon, "r")[0] if hits < 24)
            return hits == 24

        wait_for(all_came, "24 hits")
    assert said <= {"asked", "coming"}


def test_the_first_requests_after_a_start_wait_for_the_tier(
    start_daemon: StartDaemon, connect: Connect, url: str, tmp_path: Path
) -> None:
    daemon = start_daemon(tier=url)
    engine = connect(daemon)
    wait_open(daemon)
    prompts = [hashes(number, 10) for number in range(20)]
    for names in prompts:
        assert engine.save(names) == engine.load(names) == 10
    wait_tier(daemon, "blocks_written", 200)
    engine.close()
    assert daemon.stop() == 0
    daemon = start_daemon(tier=url, fresh=True, env=patched(tmp_path, OPENS_LATE))
    again = ToyEngine(daemon.endpoint)
    assert [look_up_until(again.namespace, names, 10) for names in prompts] == [10] * 20
    again.close()


def test_a_tier_that_cannot_be_opened_is_not_waited_for(
    start_daemon: StartDaemon, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    daemon = start_daemon(tier=f"disk:{tmp_path}/file/tier?size=64MiB")
    engine = connect(daemon)
    names = hashes(1, 10)
    assert look_up_until(engine.namespace, names, 10) == 0


def scheduler_of(daemon: Daemon, gate: str = "off") -> Scheduler:
    session = Session.connect(daemon.endpoint, engine="toy", deadline=5.0)
    return Scheduler(session, SPEC, ConnectorSettings(gate=gate, canary_every=0), EngineFacts(16))


@pytest.mark.parametrize("gate", ["off", "auto"])
def test_an_engine_waits_for_a_slow_tier(
    daemon: Daemon, engine: ToyEngine, url: str, tmp_path: Path, gate: str
) -> None:
    """It has computed nothing so far: what computing would take is unknown."""
    names = hashes(1, 24)
    with a_tier(tmp_path, url, daemon.endpoint, env=patched(tmp_path, SLOW_DISK)):
        wait_open(daemon)
        save_below(daemon, engine, names)
        scheduler, request = scheduler_of(daemon, gate), RequestView("r", 24 * 16 + 1, 24 * 16 + 1, names)
        until = time.monotonic() + 30
        while (answer := scheduler.matched_tokens(request, 0)) == (None, False):
            assert time.monotonic() < until
            time.sleep(0.005)
        assert answer == (24 * 16, True)
        scheduler.close()


def test_blocks_come_while_their_request_waits_in_the_queue(
    daemon: Daemon, engine: ToyEngine, url: str, tmp_path: Path
) -> None:
    """The engine is busy, and has not looked the request up yet. Nothing is pinned until it does."""
    names = hashes(1, 24)
    with a_tier(tmp_path, url, daemon.endpoint, env=patched(tmp_path, SLOW_DISK)):
        wait_open(daemon)
        save_below(daemon, engine, names)
        scheduler, request = scheduler_of(daemon), RequestView("r", 24 * 16 + 1, 24 * 16 + 1, names)
        lookups = daemon.status()["namespaces"][0]["lookups"]
        scheduler.queued(request)
        for _ in range(3):
            scheduler.plan(IDLE)
        wait_tier(daemon, "blocks_brought", 24)
        status = daemon.status()
        assert status["namespaces"][0]["lookups"] == lookups, "it is not looked up yet"
        assert status["pool"]["pinned_bytes"] == 0
        assert scheduler.matched_tokens(request, 0) == (24 * 16, True), "there is nothing to wait for"
        scheduler.close()
