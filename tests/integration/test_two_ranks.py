"""A namespace of two ranks: every order in which scheduler and ranks may settle, abort, die or stop."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Daemon, StartDaemon
from rank import spec

from kvcache_client import Session
from kvcache_proto.types import Outcome, Verdict

RANK = Path(__file__).with_name("rank.py")
SCHEDULER_ACTS = ("nothing", "abort", "kill", "stop")
RANK_ACTS = ("commit", "fail", "kill", "stop")


class Actor:
    """One process; `ask` sends a command and waits for the answer."""

    def __init__(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(10)
        self._stream = connection.makefile("rw")
        self._connection = connection
        self.pid = int(self._stream.readline())

    def ask(self, *command: object):
        print(json.dumps(command), file=self._stream, flush=True)
        return json.loads(self._stream.readline())

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._stream.close()
        self._connection.close()


@pytest.fixture
def nursery(short_folder: Path) -> Iterator[object]:
    path = str(short_folder / "ranks")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        listener.settimeout(10)
        process = subprocess.Popen([sys.executable, str(RANK), path], stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None

        def start() -> Actor:
            print(file=process.stdin, flush=True)
            return Actor(listener)

        yield start
        process.stdin.close()
        process.wait(10)


def cases() -> list[tuple[tuple[str, str, str], tuple[int, ...]]]:
    """(what the scheduler, rank 0 and rank 1 do; the order in which they do it)."""
    acts = itertools.product(SCHEDULER_ACTS, RANK_ACTS, RANK_ACTS)
    return [(act, order) for act in acts for order in itertools.permutations(range(3))]


class Expected:
    """What the design says of one slot with two shards, step by step."""

    def __init__(self) -> None:
        self.pending = {0, 1}
        self.failed = self.dead = False

    def do(self, actor: int, act: str) -> None:
        shard = actor - 1
        if act == "abort" and self.pending:
            self.failed, self.pending = True, set()
        elif shard in self.pending and act in ("commit", "fail", "kill"):
            self.pending.discard(shard)
            self.failed |= act != "commit"
            self.dead |= act == "kill"

    @property
    def visible(self) -> bool:
        return not self.pending and not self.failed


def act_out(actors: list[Actor], actor: int, act: str, reservation: int, expected: Expected) -> None:
    if act == "abort":
        actors[actor].ask("settle", reservation, Outcome.NEVER_STARTED, [0, 1])
    elif act in ("commit", "fail"):
        outcome = Outcome.COMMITTED if act == "commit" else Outcome.FAILED
        verdicts = actors[actor].ask("settle", reservation, outcome, [actor - 1])
        if len(expected.pending) == 1 and not expected.failed and act == "commit" and actor - 1 in expected.pending:
            assert verdicts == [Verdict.VISIBLE]
    elif act in ("kill", "stop"):
        actors[actor].signal(signal.SIGKILL if act == "kill" else signal.SIGSTOP)


def wait_ended(daemon: Daemon, engine: str, sessions: int) -> None:
    daemon.wait_status(lambda s: sum(x["engine"] == engine for x in s["sessions"]) == sessions, "the session's end")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [slice(0, None, 4), pytest.param(slice(0, None), marks=pytest.mark.long)], ids=str)
def test_every_order_of_commit_abort_kill_and_stop(start_daemon: StartDaemon, nursery, part: slice) -> None:
    daemon = start_daemon(quarantine=0.3, supersede_after=3600)
    reader = Session.connect(daemon.endpoint, engine="reader", deadline=5.0)
    lookups = reader.attach(spec(2), (0, 1))
    for number, (acts, order) in enumerate(cases()[part]):
        engine, block_hash = f"engine {number}", number.to_bytes(32, "big")
        actors = [nursery() for _ in range(3)]
        try:
            for actor, shards in zip(actors, ([], [0], [1]), strict=True):
                actor.ask("attach", daemon.endpoint, engine, shards, 2)
            reservation = actors[0].ask("reserve", block_hash.hex())
            assert reservation
            expected, alive = Expected(), 3
            for actor in order:
                act_out(actors, actor, acts[actor], reservation, expected)
                expected.do(actor, acts[actor])
                if acts[actor] == "kill":
                    alive -= 1
                    wait_ended(daemon, engine, alive)
                with lookups.acquire([block_hash]) as lease:
                    assert lease.hits == int(expected.visible), (acts, order, actor)
                    assert not lease.hits or bytes(reader.view(lease.slots[0], 1)) is not None
            pool = daemon.status()["pool"]
            assert pool["blocks_writing"] == int(bool(expected.pending) and not expected.failed), (acts, order)
        finally:
            for actor in actors:
                actor.close()
        wait_ended(daemon, engine, 0)
        if number % 16 == 0:
            daemon.check_integrity()
    # All writers are gone: what they left unsettled rests for the quarantine and is free then.
    status = daemon.wait_status(lambda s: s["pool"]["blocks_quarantined"] == 0, "the quarantine's end")
    assert status["pool"]["blocks_writing"] == 0
    counters = status["counters"]
    assert counters["blocks_reserved"] == counters["blocks_committed"] + counters["blocks_failed"]
    assert status["pool"]["used_bytes"] == status["pool"]["blocks"] * 2 * 4096
    reader.close()


def test_a_stopped_rank_keeps_its_slot_and_may_continue(start_daemon: StartDaemon, nursery) -> None:
    daemon = start_daemon(quarantine=0.3, supersede_after=0.2)
    block_hash = b"p" * 32
    engines = []
    for engine in ("stopped", "other"):
        actors = [nursery() for _ in range(3)]
        for actor, shards in zip(actors, ([], [0], [1]), strict=True):
            actor.ask("attach", daemon.endpoint, engine, shards, 2)
        engines.append(actors)
    stopped, other = engines
    first = stopped[0].ask("reserve", block_hash.hex())
    stopped[1].ask("settle", first, Outcome.COMMITTED, [0])
    stopped[2].signal(signal.SIGSTOP)
    second = 0
    while not second:  # until the first reservation is old enough
        second = other[0].ask("reserve", block_hash.hex())
    assert other[1].ask("settle", second, Outcome.COMMITTED, [0]) == [Verdict.PARTIAL]
    assert other[2].ask("settle", second, Outcome.COMMITTED, [1]) == [Verdict.VISIBLE]
    assert daemon.status()["pool"]["used_bytes"] == 2 * 2 * 4096, "the stopped rank may still write its slot"
    stopped[2].signal(signal.SIGCONT)
    assert stopped[2].ask("settle", first, Outcome.COMMITTED, [1]) == [Verdict.SUPERSEDED]
    assert daemon.status()["pool"]["used_bytes"] == 2 * 4096
    for actor in (*stopped, *other):
        actor.close()
