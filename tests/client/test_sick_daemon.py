"""What a session makes of a daemon that answers nonsense, floods, reads nothing, or plays tricks at its door.

The same each time: lookups miss, after one deadline at most nobody is asked, nothing is raised or kept, and once the
daemon is well it is used again.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sick_daemon import DOOR, RUDE, WIRE

from kvcache_client import GroupSpec, NamespaceSpec, Outcome, Session, Verdict
from kvcache_client.session.breaker import Backoff, CircuitBreaker
from kvcache_proto.errors import KVCacheError

Hashes = Callable[[int], list[bytes]]
Until = Callable[[Callable[[], Any], str], Any]

CALLS = 300
WELL, SICK = 10.0, 0.3  # deadlines: one that a busy machine does not miss, and one that is soon over
LONGEST = 0.2


class Sick:
    """A sick_daemon.py before a real daemon; `set` says how sick it is."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.endpoint = f"ipc://{real.folder}/{secrets.token_hex(4)}.sock"
        command = [sys.executable, str(Path(__file__).with_name("sick_daemon.py")), real.endpoint, self.endpoint]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.set()

    def set(self, **how: str | bool) -> dict[str, Any]:
        """Spoil what `door=` and `wire=` say from now on; return what was seen so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(how), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def asked(self, tag: str) -> int:
        return self.set()["asked"].get(tag, 0)

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def real(start_module_daemon: Any) -> Any:
    return start_module_daemon(quarantine=0.2)


@pytest.fixture
def sick(real: Any) -> Iterator[Sick]:
    made = Sick(real)
    yield made
    made.close()
    real.wait_status(
        lambda s: not (s["sessions"] or s["pool"]["blocks_writing"] or s["pool"]["pinned_bytes"]), "an idle daemon"
    )


@pytest.fixture
def session(sick: Sick) -> Iterator[Session]:
    with Session.open(sick.endpoint, engine="e1", deadline=WELL) as made:
        made._backoff, made._breaker = Backoff(longest=LONGEST), CircuitBreaker(Backoff(longest=LONGEST))
        yield made


def nothing_held(daemon: Any) -> None:
    daemon.wait_status(
        lambda s: all((e["leases"], e["reservations"]) == (0, 0) for e in s["sessions"])
        and not s["pool"]["pinned_bytes"],
        "the end of all leases and reservations",
    )


def chances(session: Session) -> int:
    """How often the daemon was, or seemed, well enough to be asked."""
    return 1 + session.counters.get("breaker_closed", 0) + session.counters.get("links_lost", 0)


RESERVING = {"answers", "few answers", "all refused", "no reservation", "reserved far", "reserved nowhere"}
HARMLESS = {"", "thrice", "mutated", "verdicts"}


@pytest.mark.parametrize("how", sorted(WIRE.keys() - RESERVING - HARMLESS))
def test_lookups_miss_and_soon_nobody_is_asked(
    sick: Sick, session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until, how: str
) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(4)
    assert ns.reserve(run).commit() == [Verdict.VISIBLE] * 4
    before = sick.set(wire=how)["asked"].get("acquire", 0)
    session.daemon.deadline = SICK
    for _ in range(CALLS):
        with ns.acquire(run) as lease:
            assert (lease.failed, lease.hits, lease.slots, lease.id) == (True, 0, [], 0)
    if how != "deaf":
        assert 1 <= sick.asked("acquire") - before <= chances(session)
    waited = session.counters.get("lookups_unanswered", 0) - session.counters.get("breaker_open", 0)
    assert waited <= chances(session)
    sick.set(wire="")
    session.daemon.deadline = WELL
    until(lambda: session.up and ns.acquire(run, pin=False).hits == 4, "a hit, once it is well")
    nothing_held(sick.real)


@pytest.mark.parametrize("how", sorted(RESERVING))
def test_reservations_that_cannot_be_are_refused_and_given_back(
    sick: Sick, session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until, how: str
) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(4)
    sick.set(wire=how)
    reservation = ns.reserve(run)
    assert (reservation.failed, reservation.id, reservation.slots) == (True, 0, [])
    assert reservation.refused == dict.fromkeys(range(4), "unavailable")
    assert session.counters["odd_replies"] == session.counters["breaker_opened"] == 1
    later = until(ns.reserve_later(run).poll, "the answer to a ticket")
    assert later.failed
    sick.set(wire="")
    until(lambda: session.up, "a closed breaker")
    if how == "no reservation":
        return  # its number is not known, so that only the session's end gives it back
    nothing_held(sick.real)
    assert ns.reserve(run).commit() == [Verdict.VISIBLE] * 4


def test_verdicts_that_nobody_knows_are_none(
    sick: Sick, session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    ns = session.attach(spec, shards=(0,))
    reservation, other = ns.reserve(hashes(4)), ns.reserve(hashes(2))
    sick.set(wire="verdicts")
    assert reservation.commit() == []
    assert session.counters["odd_replies"] == 1
    ns.settle(other.id, Outcome.COMMITTED)
    until(lambda: session.counters["odd_replies"] == 2, "the other one's")
    assert "handler_errors" not in session.counters


def test_a_daemon_that_says_everything_thrice_is_heard_once(
    sick: Sick, session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    sick.set(wire="thrice")
    ns = session.attach(spec, shards=(0,))
    for _ in range(20):
        run = hashes(3)
        assert ns.reserve(run).commit() == [Verdict.VISIBLE] * 3
        with ns.acquire(run) as lease:
            assert lease.hits == 3
    assert session.counters["answers_unasked"] > 0
    assert "links_lost" not in session.counters


def test_an_attach_that_got_nonsense_is_asked_again(
    sick: Sick, session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    sick.set(wire="type")
    ns = session.attach(spec, shards=(0,))
    assert not ns.attached
    sick.set(wire="")
    until(lambda: ns.attached, "another attach")
    assert ns.reserve(hashes(2)).commit() == [Verdict.VISIBLE] * 2


def test_replies_with_one_wrong_field_do_no_harm(
    sick: Sick, session: Session, hashes: Hashes, until: Until, spec: NamespaceSpec
) -> None:
    """A quarter of all replies have one field changed at random: nothing but KVCacheErrors, no address outside."""
    ns = session.attach(spec, shards=(0,))
    sick.set(wire="mutated")
    session.daemon.deadline = session.daemon.connect_timeout = 0.5
    region = session.region
    assert region is not None
    for _ in range(12):
        until(lambda: session.up and ns.attached, "a session")
        run = hashes(3)
        try:
            reservation = ns.reserve(run)
            for slot in reservation.slots:
                assert region.geometry.data_offset <= slot.ref.offset <= region.bytes - 4096
            reservation.commit()
            with ns.acquire(run) as lease:
                assert 0 <= lease.hits == len(lease.slots) <= 3
                assert 0 <= lease.pending <= 3
                assert region.holds(lease.packed)
        except KVCacheError:
            continue
    assert "handler_errors" not in session.counters
    assert "keeper_errors" not in session.counters
    sick.set(wire="")
    session.daemon.deadline = session.daemon.connect_timeout = WELL
    run = hashes(2)
    until(lambda: session.up and ns.reserve(run).commit() == [Verdict.VISIBLE] * 2, "a commit, once it is well")


def test_posts_to_a_daemon_that_reads_nothing_do_not_grow_without_bound(
    sick: Sick, session: Session, hashes: Hashes, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_client.session.channel.MAX_OUTBOX", 500)
    ns = session.attach(NamespaceSpec(model="small", groups=[GroupSpec(16, 64)]), shards=(0,))
    run = hashes(50)
    reservation = ns.reserve(run)
    assert len(reservation.granted) == 50
    sick.set(wire="deaf")
    session.daemon.deadline = session.daemon.connect_timeout = SICK
    for _ in range(30_000):
        ns.settle(reservation.id, Outcome.FAILED, positions=(0,))
    until(lambda: session.counters.get("links_lost"), "the end of the link")
    sick.set(wire="")
    session.daemon.deadline = session.daemon.connect_timeout = WELL
    until(lambda: session.up and ns.reserve(hashes(1)).commit() == [Verdict.VISIBLE], "a commit, once it is well")


def test_answers_that_never_come_do_not_pile_up(
    sick: Sick, session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_client.session.channel.MAX_OWED", 100)
    ns = session.attach(spec, shards=(0,))
    reservation = ns.reserve(hashes(1))
    sick.set(wire="mute")
    session.daemon.deadline = session.daemon.connect_timeout = SICK
    for _ in range(200):
        ns.settle(reservation.id, Outcome.FAILED)
    until(lambda: session.counters.get("links_lost"), "the end of the link")
    sick.set(wire="")
    session.daemon.deadline = session.daemon.connect_timeout = WELL
    until(lambda: session.up and ns.reserve(hashes(1)).commit() == [Verdict.VISIBLE], "a commit, once it is well")


def test_a_step_that_joins_and_leaves_does_not_wait_for_a_supervisor_that_does(
    sick: Sick, session: Session, spec: NamespaceSpec, until: Until
) -> None:
    first = session.attach(spec, shards=(0,))
    before = sick.asked("attach")
    sick.set(wire="mute", hang_up=True)
    until(lambda: sick.asked("attach") > before, "an attach over the next link, which nobody answers")
    second = session.attach(NamespaceSpec(model="other", groups=spec.groups), shards=(0,), wait=False)
    session.detach(first)
    assert "connects_failed" not in session.counters, "the supervisor still waits"
    assert not second.attached
    sick.set(wire="")
    until(lambda: second.attached, "the answer")


# The door.


@pytest.mark.parametrize("how", sorted((DOOR.keys() | RUDE.keys()) - {"", "leave", "speak"}))
def test_a_door_with_tricks_costs_no_lookup_anything(
    sick: Sick, spec: NamespaceSpec, hashes: Hashes, until: Until, how: str
) -> None:
    sick.set(door=how)
    before = len(os.listdir("/proc/self/fd"))
    with Session.open(sick.endpoint, engine="e1", deadline=WELL, connect_timeout=SICK) as session:
        ns, run = session.attach(spec, shards=(0,)), hashes(3)
        counters = session.daemon.counters
        until(lambda: counters.snapshot()["connects_failed"] >= 3, "three attempts")
        assert (session.up, session.region, ns.attached) == (False, None, False)
        for _ in range(CALLS):
            assert ns.acquire(run).failed
        assert "keeper_errors" not in session.counters
        assert sick.asked("acquire") == 0
        sick.set(door="")
        session.daemon.connect_timeout = WELL
        until(lambda: session.up, "a session, once it is well")
        assert ns.reserve(run).commit() == [Verdict.VISIBLE] * 3
        assert ns.acquire(run).hits == 3
    # A session is in cycles, its thread is one of them, and the mapping has a descriptor of its own.
    mapped = weakref.ref(session.region)
    session = ns = None
    gc.collect()
    assert mapped() is None
    assert len(os.listdir("/proc/self/fd")) <= before, "no descriptor is kept"


@pytest.mark.parametrize("how", ["leave", "speak"])
def test_a_door_that_throws_out_whom_it_lets_in_is_knocked_at_less_and_less(
    sick: Sick, session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until, how: str
) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(3)
    sick.set(door=how)
    first = len(sick.set()["visits"])
    with Session.open(sick.endpoint, engine="e2", deadline=WELL) as thrown_out:
        until(lambda: len(sick.set()["visits"]) >= first + 6, "six visits")
        visits = sick.set()["visits"][first:]
        assert visits[5] - visits[4] > 0.7, "0.8 to 1.6 s: it doubles, though each knock was answered"
        seen = thrown_out.counters
        assert seen["links_lost"] + seen.get("connects_failed", 0) >= 5
        sick.set(door="")
        until(lambda: thrown_out.up, "a session, once it is well")
    assert ns.reserve(run).commit() == [Verdict.VISIBLE] * 3, "the other session has noticed nothing"
