"""What the session makes of a daemon that stops, dies, comes back or was never there, and of forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache_client.session.channel
from kvcache_client import GroupSpec, Lease, NamespaceSpec, Outcome, Region, Session, Unavailable, Verdict
from kvcache_proto.errors import RegionError, UnknownHandle
from kvcache_proto.types import MAX_BLOCKS
from kvcache_server.admin_client import AdminClient

Hashes = Callable[[int], list[bytes]]
Until = Callable[[Callable[[], Any], str], Any]
Connect = Callable[..., Session]


class Stopped:
    """The daemon is stopped inside the `with`."""

    def __init__(self, daemon: Any) -> None:
        self._process = daemon.process

    def __enter__(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGCONT)


def held(session: Session | AdminClient) -> list[tuple[int, int]]:
    if isinstance(session, AdminClient):
        return [(each.leases, each.reservations) for each in session.status().sessions]
    return [(each["leases"], each["reservations"]) for each in session.stats()["sessions"]]


# A daemon that is stopped.


def test_commits_that_could_not_even_be_sent_in_time_are_sent_later(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    session = connect(deadline=0.2)
    ns = session.attach(spec, shards=(0,))
    reservations = [ns.reserve(hashes(1)) for _ in range(8)]
    together = threading.Barrier(len(reservations))

    def commit(reservation: Any) -> None:
        together.wait()
        assert reservation.commit() == []

    with Stopped(daemon):  # one of them waits for its answer, the others for their turn
        threads = [threading.Thread(target=commit, args=(each,)) for each in reservations]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    until(lambda: daemon.status()["pool"]["blocks"] == len(reservations), "the commits")


def test_a_stopped_daemon_costs_one_deadline_and_leaves_nothing_pinned(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    session = connect(deadline=0.3)
    ns, run, other = session.attach(spec, shards=(0,)), hashes(4), hashes(3)
    assert ns.reserve(run).commit() == [Verdict.VISIBLE] * 4
    until(lambda: session.up, "a closed breaker")
    with Stopped(daemon):
        missed = ns.acquire(run)
        assert (missed.failed, missed.hits, missed.slots, missed.id) == (True, 0, [], 0)
        missed.release()
        assert not session.up
        assert session.counters["breaker_opened"] == 1
        assert "breaker_open" not in session.counters
        assert ns.acquire(run).failed
        refused = ns.reserve(other)
        assert (refused.failed, refused.refused) == (True, dict.fromkeys(range(3), "unavailable"))
        later = ns.reserve_later(other).poll()
        assert later is not None
        assert later.failed
        assert session.counters["breaker_open"] == 2, "nobody was asked"
    until(lambda: session.up, "the end of the breaker")
    until(lambda: session.counters.get("late_lookups") == 1, "the late answer")
    until(lambda: held(session) == [(0, 0)], "the release of the late lease")
    with ns.acquire(run) as lease:
        assert lease.hits == 4


def test_a_late_reservation_is_given_back(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    session = connect(deadline=0.3)
    ns, run = session.attach(spec, shards=(0,)), hashes(4)
    until(lambda: session.up, "a closed breaker")
    with Stopped(daemon):
        assert ns.reserve(run).failed
    until(lambda: session.counters.get("late_reserves") == 1, "the late answer")
    until(lambda: held(session) == [(0, 0)], "the end of the late reservation")
    assert ns.reserve(run).granted == [0, 1, 2, 3]


def test_a_ticket_opens_the_breaker_too_and_is_answered_in_the_end(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    session = connect(deadline=0.3)
    ns, run = session.attach(spec, shards=(0,)), hashes(2)
    with Stopped(daemon):
        kept, given_up = ns.reserve_later(run), ns.reserve_later(hashes(2))
        until(lambda: not session.up, "an open breaker")
        assert kept.poll() is None
        assert given_up.wait(0.01).failed
    assert until(kept.poll, "the answer").granted == [0, 1]
    until(lambda: held(session) == [(0, 1)], "the end of the reservation that was given up")


def test_a_commit_is_not_lost_on_a_daemon_that_is_stopped(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    session = connect(deadline=0.3)
    ns, run = session.attach(spec, shards=(0,)), hashes(4)
    first, second = ns.reserve(run[:2]), ns.reserve(run[2:], parent=run[1])
    until(lambda: session.up, "a closed breaker")
    with Stopped(daemon):
        assert first.commit() == [], "no answer in time"
        assert second.commit() == [], "the breaker is open; it is sent all the same"
    until(lambda: session.counters.get("verdict_visible") == 4, "the late verdicts")
    assert until(lambda: ns.acquire(run).hits, "a closed breaker") == 4


def test_settles_that_the_socket_cannot_take_are_sent_later(start_daemon: Any, hashes: Hashes, until: Until) -> None:
    count = 16_000  # several times what ZeroMQ and the kernel take for a stopped peer
    daemon = start_daemon(size="256MiB", page_size="4KiB")
    with Session.connect(daemon.endpoint, engine="e1", deadline=10.0) as session:
        ns = session.attach(NamespaceSpec(model="small", groups=[GroupSpec(16, 64)]), shards=(0,))
        run = hashes(count)
        parts = [(run[at : at + MAX_BLOCKS], run[at - 1] if at else None) for at in range(0, count, MAX_BLOCKS)]
        reservations = [ns.reserve(part, above) for part, above in parts]
        with Stopped(daemon):
            for reservation in reservations:
                for position in range(len(reservation.granted)):
                    ns.settle(reservation.id, Outcome.COMMITTED, positions=(position,))
            assert session.counters["socket_full"] > 0
        # Asked by another one: a question of the session's waits behind all that it has sent.
        with AdminClient(daemon.endpoint, timeout=30.0) as other:
            until(lambda: held(other) == [(0, 0)], "the end of the reservation")
        until(lambda: session.up, "a closed breaker")
        assert ns.acquire(run).hits == count


def test_a_session_that_cannot_say_what_it_must_says_it_at_another_door(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvcache_client.session.channel, "MAX_OUTBOX", 100)
    session = connect(connect_timeout=2.0)
    ns = session.attach(spec, shards=(0,))
    reservation = ns.reserve(hashes(1))
    with Stopped(daemon):
        for _ in range(20_000):
            ns.settle(reservation.id, Outcome.FAILED)
        until(lambda: session.counters.get("links_lost") == 1, "the end of the link")
    until(lambda: session.up, "another link")
    assert session.counters["sessions_resumed"] == 1
    with pytest.raises(UnknownHandle, match="settled"):  # it failed, as was said 20,000 times
        reservation.commit()
    assert ns.reserve(hashes(1)).commit() == [Verdict.VISIBLE]


def test_close_does_not_wait_for_ever_for_a_stopped_daemon(daemon: Any, connect: Connect) -> None:
    session = connect(connect_timeout=0.5)
    with Stopped(daemon):
        session.close()
    assert not session.up


def test_many_threads_share_one_missed_deadline(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    session = connect(deadline=0.3)
    ns, run = session.attach(spec, shards=(0,)), hashes(2)
    until(lambda: session.up, "a closed breaker")
    failed: list[bool] = []
    with Stopped(daemon):
        threads = [threading.Thread(target=lambda: failed.append(ns.acquire(run).failed)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == [True] * 8
    assert session.counters["breaker_opened"] == 1


_SLOW = """
import sys, time
if "kvcache_server" in sys.orig_argv:
    from kvcache_server.core.cache import Cache
    def late(self, *what, answer=Cache.answer):
        time.sleep(0.2 if type(what[1]).__name__ in {kinds} else 0)
        return answer(self, *what)
    Cache.answer = late
"""


@pytest.mark.parametrize("kinds", [{"Acquire"}, {"Acquire", "Ping"}])
def test_a_daemon_that_is_always_late_costs_a_deadline_now_and_then(
    start_daemon: Any, short_folder: Path, spec: NamespaceSpec, hashes: Hashes, kinds: set[str]
) -> None:
    (short_folder / "sitecustomize.py").write_text(_SLOW.format(kinds=kinds))
    daemon = start_daemon(env={"PYTHONPATH": str(short_folder)})
    with Session.open(daemon.endpoint, engine="e1", deadline=0.1) as session:
        ns, run = session.attach(spec, shards=(0,)), hashes(1)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            ns.acquire(run)
            time.sleep(0.005)
        assert 1 <= session.counters["lookups_unanswered"] - session.counters.get("breaker_open", 0) <= 5


def test_an_attach_that_is_answered_late_holds(daemon: Any, spec: NamespaceSpec, hashes: Hashes, until: Until) -> None:
    with Session.open(daemon.endpoint, engine="e1", deadline=10.0, connect_timeout=0.2) as session:
        with Stopped(daemon):
            ns = session.attach(spec, shards=(0,))
            assert not ns.attached
        until(lambda: ns.attached, "the late answer")
        assert ns.reserve(hashes(1)).commit() == [Verdict.VISIBLE]


def test_a_stopped_daemon_does_not_hold_connect_up(daemon: Any) -> None:
    with Stopped(daemon), pytest.raises(Unavailable, match="in time"):
        Session.connect(daemon.endpoint, engine="e1", connect_timeout=0.2)


# A daemon that dies, and another one at its place.


def test_after_a_restart_the_session_comes_back_by_itself(
    start_daemon: Any, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    first = start_daemon()
    regions: list[Region] = []
    with Session.connect(first.endpoint, engine="e1", deadline=10.0) as session:
        session.on_region(regions.append)
        ns, run = session.attach(spec, shards=(0,)), hashes(4)
        ns.reserve(run).commit()
        lease, reservation, ticket = ns.acquire(run), ns.reserve(hashes(2)), ns.reserve_later(hashes(2))
        old = session.region
        view = session.view(lease.slots[0])
        first.kill()
        until(lambda: not session.up, "the end of the session")
        assert ns.acquire(run).failed
        assert ns.reserve(hashes(1)).refused == {0: "unavailable"}
        with pytest.raises(Unavailable, match=r"closed the connection|no daemon"):  # it may have tried again
            session.stats()
        with pytest.raises(Unavailable):
            session.attach(spec, shards=(0,))
        assert len(view) == 4096, "what is mapped stays mapped"
        assert session.view(lease.slots[0]) == view
        assert ticket.wait(10.0) is not None

        start_daemon()
        until(lambda: session.up, "another session")
        assert regions == [old, session.region]
        assert session.region is not None
        assert old is not None
        assert session.region.id != old.id
        lease.release()
        assert reservation.commit() == []
        reservation.abort()
        ns.settle(reservation.id, Outcome.COMMITTED, region_id=reservation.region_id)
        with pytest.raises(RegionError, match="another region"):
            session.view(lease.slots[0])
        assert session.counters["stale_releases"] == 1
        assert session.counters["stale_settles"] == 1
        assert session.counters["settles_of_another_region"] == 1
        assert held(session) == [(0, 0)]
        assert ns.acquire(run).hits == 0
        assert ns.reserve(run).commit() == [Verdict.VISIBLE] * 4
        assert ns.acquire(run).hits == 4


def test_a_call_does_not_wait_for_a_daemon_that_has_died(
    start_daemon: Any, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    daemon = start_daemon()
    with Session.connect(daemon.endpoint, engine="test", deadline=3600.0) as session:
        ns = session.attach(spec, shards=(0,))
        leases: list[Lease] = []
        owed = []

        def call() -> None:
            leases.append(ns.acquire(hashes(4)))

        with Stopped(daemon):
            owed.append(ns.reserve_later(hashes(4)))  # so that the supervisor looks after the channel, too
            caller = threading.Thread(target=call, daemon=True)
            caller.start()
            until(
                lambda: session.daemon.connection is not None and session.daemon.connection.channel._lock.locked(),
                "the call on its way",
            )
            session._supervisor._waker.wake()
            time.sleep(0.2)  # it may go there, and wait for its turn
            daemon.kill()
        caller.join(30)
        assert [lease.failed for lease in leases] == [True]
        assert "breaker_opened" not in session.counters


def test_a_daemon_that_stops_well_is_noticed_too(start_daemon: Any, spec: NamespaceSpec, until: Until) -> None:
    daemon = start_daemon()
    with Session.connect(daemon.endpoint, engine="e1") as session:
        ns = session.attach(spec, shards=(0,))
        assert daemon.stop() == 0
        until(lambda: not session.up, "the end of the session")
        assert ns.acquire([bytes(32)]).failed
        assert not ns.attached


def test_open_waits_for_nobody_and_attaches_when_a_daemon_comes(
    start_daemon: Any, short_folder: Path, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    endpoint = f"ipc://{short_folder}/kv.sock"
    with Session.open(endpoint, engine="e1") as session:
        seen: list[tuple[Region, bool]] = []
        session.on_region(lambda region: seen.append((region, ns.attached)))
        ns = session.attach(spec, shards=(0,))
        other = session.attach(NamespaceSpec(model="llama", groups=[GroupSpec(16, 8192)]), shards=(0,))
        run = hashes(2)
        assert (session.up, session.region, ns.attached) == (False, None, False)
        assert ns.acquire(run).failed
        assert ns.reserve(run).refused == {0: "unavailable", 1: "unavailable"}
        with pytest.raises(Unavailable, match="no daemon at"):
            session.ping()
        start_daemon(endpoint=endpoint)
        until(lambda: session.up, "a session")
        assert seen == [(session.region, False)], "the region comes before any namespace is attached"
        assert ns.attached
        assert ns.reserve(run).commit() == [Verdict.VISIBLE] * 2
        assert not other.attached, "its geometry disagrees with the first one's"
        assert session.counters["attaches_refused"] == 1
        assert other.acquire(run).failed


def test_open_says_once_that_nobody_is_there(
    short_folder: Path, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    with Session.open(f"ipc://{short_folder}/kv.sock", engine="e1") as session:
        until(lambda: session.counters["connects_failed"] >= 3, "three attempts")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "kvcache-server serve" in caplog.text


# Forks.

FORK = """
import json, os, signal, sys, time
from kvcache_client import *

session = Session.connect(sys.argv[1], engine="parent", deadline=10.0)
ns = session.attach(NamespaceSpec(model="llama", groups=[GroupSpec(16, 4096)]), shards=(0,))
reservation = ns.reserve([bytes(32)])
lease = ns.acquire([bytes(32)])
ready, told = os.pipe()
child = os.fork()
if child == 0:
    said = {"pid": os.getpid()}
    for name, use in {
        "ping": session.ping, "acquire": lambda: ns.acquire([bytes(32)]), "reserve": lambda: ns.reserve([bytes(32)]),
        "later": lambda: ns.reserve_later([bytes(32)]), "commit": reservation.commit,
        "settle": lambda: ns.settle(1, Outcome.COMMITTED), "view": lambda: session.view(reservation.slots[0]),
        "stats": session.stats, "attach": lambda: session.attach(ns.spec),
    }.items():
        try: said[name] = repr(use())
        except ClientError as error: said[name] = str(error)
    lease.release()
    reservation.abort()
    session.close()
    said["sockets"] = sum("socket:" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                          if os.path.lexists(f"/proc/self/fd/{fd}"))
    with Session.connect(sys.argv[1], engine="child", deadline=10.0) as own:
        said["own"] = own.attach(ns.spec, shards=(0,)).reserve([b"c" * 32]).commit()
    print(json.dumps(said), flush=True)
    os.write(told, b"x")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
assert reservation.commit() == [Verdict.VISIBLE], "the child has taken nothing away"
print(len(session.stats()["sessions"]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def forked(daemon: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """What the child of a killed parent said, and how many sessions the parent saw; the child lives on meanwhile."""
    # -W ignore: from 3.12 on a fork beside threads warns, and that is the very case.
    command = [sys.executable, "-W", "ignore", "-c", FORK, daemon.endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        said = json.loads(parent.stdout.readline())
        sessions = int(parent.stdout.readline())
        assert parent.wait(30) == -signal.SIGKILL
        try:
            yield said, sessions
        finally:
            os.kill(said["pid"], signal.SIGKILL)


def test_a_child_that_outlives_its_parent_does_not_keep_the_session(
    daemon: Any, forked: tuple[dict[str, Any], int]
) -> None:
    said, sessions = forked
    assert sessions == 1, "the parent's own"
    daemon.wait_status(lambda status: status["sessions"] == [], "the end of the parent's session")
    os.kill(said["pid"], 0)
    for use in ("ping", "acquire", "reserve", "later", "commit", "settle", "view", "stats", "attach"):
        assert "a forked child connects a session of its own" in said[use]
    assert said["sockets"] == 0
    assert said["own"] == [Verdict.VISIBLE]
