"""Several real clients at one real daemon: mixed sizes in a full pool, and clients that are killed or stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.types import Verdict

CLIENT = Path(__file__).with_name("client.py")
SPEC = NamespaceSpec(model="victim", groups=[GroupSpec(16, (4096, 4096))])
BLOCK = 8192


def run_of(chain: int, count: int) -> list[bytes]:
    """The hashes that client.py gives to a chain."""
    return [((chain + 1).to_bytes(8, "little") + n.to_bytes(8, "little")).ljust(32, b"\0") for n in range(count)]


@pytest.fixture
def client() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`client(daemon, engine, what...)` starts client.py; whatever it leaves is killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(daemon: Any, engine: str, *what: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(CLIENT), daemon.endpoint, engine, *map(str, what)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def honest(daemon: Any) -> Session:
    return Session.connect(daemon.endpoint, engine="honest", deadline=20.0)


# What each state leaves behind: (visible blocks, blocks of the victim in quarantine).
STATES = {"attached": (8, 0), "lease": (8, 0), "reserved": (8, 8), "half": (10, 6), "settled": (16, 0)}


@pytest.mark.parametrize("state", STATES)
def test_a_client_killed_in_any_state_leaves_nothing(
    start_daemon: Any, client: Callable[..., subprocess.Popen[str]], state: str
) -> None:
    daemon = start_daemon(quarantine=2)
    visible, quarantined = STATES[state]
    with honest(daemon) as session:
        namespace = session.attach(SPEC, shards=(0, 1))
        assert set(namespace.reserve(run_of(0, 8)).commit()) == {Verdict.VISIBLE}
        victim = client(daemon, "victim", "reach", state)
        assert victim.stdout is not None
        assert victim.stdout.readline().strip() == state
        before = daemon.status()
        assert before["pool"]["pinned_bytes"] == (8 * BLOCK if state == "lease" else 0)
        victim.kill()
        status = daemon.wait_status(lambda status: len(status["sessions"]) == 1, "the end of the session")
        pool = status["pool"]
        assert (pool["pinned_bytes"], pool["blocks_writing"], pool["blocks"]) == (0, 0, visible)
        assert pool["blocks_quarantined"] == quarantined
        daemon.check_integrity()
        pool = daemon.wait_status(lambda s: not s["pool"]["blocks_quarantined"], "the end of the quarantine")["pool"]
        assert pool["used_bytes"] == visible * BLOCK
        # Nothing half-written is found, and what was lost can be written again.
        whole = visible - 8
        with namespace.acquire(run_of(1, 8)) as lease:
            assert (lease.hits, lease.pending) == (whole, 0)
        again = namespace.reserve(run_of(1, 8)[whole:], run_of(1, 8)[whole - 1] if whole else None)
        assert set(again.commit()) <= {Verdict.VISIBLE}
        assert namespace.acquire(run_of(1, 8), pin=False).hits == 8


@pytest.mark.parametrize("state", ["lease", "half"])
def test_a_client_killed_under_load_leaves_nothing(
    start_daemon: Any, client: Callable[..., subprocess.Popen[str]], state: str
) -> None:
    daemon = start_daemon(quarantine=0.1)
    with honest(daemon) as session:
        namespace = session.attach(SPEC, shards=(0, 1))
        namespace.reserve(run_of(0, 8)).commit()
        busy = [client(daemon, f"busy {n}", "traffic", 65536, 2, n) for n in range(2)]
        for _ in range(4):
            victim = client(daemon, "victim", "reach", state)
            assert victim.stdout is not None
            victim.stdout.readline()
            victim.kill()
        for process in busy:
            counts = json.loads(process.communicate(timeout=60)[0])
            assert counts["wrong"] == 0
        status = daemon.wait_status(
            lambda s: len(s["sessions"]) == 1 and not s["pool"]["blocks_quarantined"], "the end of the victims"
        )
        assert status["pool"]["pinned_bytes"] == status["pool"]["blocks_writing"] == 0


def test_a_stopped_client_keeps_its_lease_and_does_not_disturb_others(
    daemon: Any, client: Callable[..., subprocess.Popen[str]]
) -> None:
    with honest(daemon) as session:
        namespace = session.attach(SPEC, shards=(0, 1))
        namespace.reserve(run_of(0, 8)).commit()
        victim = client(daemon, "victim", "reach", "lease")
        assert victim.stdout is not None
        victim.stdout.readline()
        victim.send_signal(signal.SIGSTOP)
        filler = 3  # more than the whole region
        for chain in range(filler, filler + 100):
            reservation = namespace.reserve(run_of(chain, 100))
            if reservation.id:
                reservation.commit()
        status = daemon.status()
        assert status["counters"]["blocks_evicted"] > 0
        assert status["pool"]["pinned_bytes"] == 8 * BLOCK
        assert namespace.acquire(run_of(0, 8), pin=False).hits == 8
        victim.kill()
        daemon.wait_status(lambda s: s["pool"]["pinned_bytes"] == 0, "the end of the lease")


def test_mixed_sizes_in_a_full_pool(start_daemon: Any, client: Callable[..., subprocess.Popen[str]]) -> None:
    daemon = start_daemon(size="32MiB", supersede_after=0.05)
    sizes = (4096, 65536, 65536, 1 << 20)
    processes = [client(daemon, f"engine {n}", "traffic", size, 4, n) for n, size in enumerate(sizes)]
    results = [json.loads(process.communicate(timeout=100)[0]) for process in processes]
    assert [result["wrong"] for result in results] == [0] * len(sizes)
    assert all(result["stored"] and result["hit"] for result in results), results
    status = daemon.wait_status(lambda status: not status["sessions"])
    assert status["counters"]["blocks_evicted"] > 0
    assert status["pool"]["blocks_writing"] == status["pool"]["pinned_bytes"] == 0
    assert status["daemon"]["errors"] == {}


def test_bad_frames_beside_honest_traffic(daemon: Any, client: Callable[..., subprocess.Popen[str]]) -> None:
    process = client(daemon, "engine", "traffic", 65536, 3, 1)
    draw = random.Random(7)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(daemon.endpoint)
        sent = 0
        while process.poll() is None:
            parts = [os.urandom(draw.choice((0, 1, 16, 300, 70_000))) for _ in range(draw.choice((1, 1, 1, 2, 9)))]
            socket.send_multipart(parts)
            sent += 1
            if socket.poll(1):
                socket.recv()
    counts = json.loads(process.communicate()[0])
    assert counts["wrong"] == 0
    assert counts["stored"] > 0
    errors = daemon.status()["daemon"]["errors"]
    assert set(errors) == {"bad_frame"}
    assert 0 < errors["bad_frame"] <= sent
