"""The public API against a real daemon that is well."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import kvcache_client
from kvcache_client import GroupSpec, Lease, NamespaceSpec, Outcome, Refusal, Session, Slot, Verdict
from kvcache_client.session.channel import Channel
from kvcache_client.session.grants import PendingReservation
from kvcache_proto.errors import (
    BadArgument,
    ClientError,
    ConfigError,
    GeometryMismatch,
    RegionError,
)

Hashes = Callable[[int], list[bytes]]
Connect = Callable[..., Session]
Until = Callable[[Callable[[], Any], str], Any]

MINE = [Verdict.VISIBLE]


def test_the_example(daemon: Any, hashes: Hashes) -> None:
    session = Session.connect(daemon.endpoint, engine="e1", deadline=10.0)  # a busy machine misses that of an engine
    spec = NamespaceSpec(model="llama", groups=[GroupSpec(block_tokens=16, shard_bytes=65536)])
    ns = session.attach(spec, shards=(0,))
    run = hashes(4)
    reservation = ns.reserve(run, parent=None)
    for number, slot in enumerate(reservation.slots):
        session.view(slot, 0)[:] = bytes([number]) * 65536
    assert reservation.commit() == MINE * 4
    with ns.acquire(run) as lease:
        assert isinstance(lease, Lease)
        assert (lease.hits, lease.pending, lease.failed) == (4, 0, False)
        assert [bytes(session.view(slot, 0)) for slot in lease.slots] == [bytes([n]) * 65536 for n in range(4)]
        assert session.region is not None
        assert session.region.current(lease.packed).all()
        placed = session.region.place(lease.packed, 65536)
        assert placed is not None and placed.runs is None
        assert placed.offsets.tolist() == [slot.ref.offset for slot in lease.slots]
    session.close()


def test_a_hit_is_the_longest_prefix_and_pending_is_told(session: Session, spec: NamespaceSpec, hashes: Hashes) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(6)
    assert ns.reserve(run[:3]).commit() == MINE * 3
    held = ns.reserve(run[3:5], parent=run[2])
    with ns.acquire(run) as lease:
        assert (lease.hits, lease.pending, len(lease.slots)) == (3, 2, 3)
    assert held.commit() == MINE * 2
    with ns.acquire(run) as lease:
        assert (lease.hits, lease.pending) == (5, 0)
    assert ns.acquire(hashes(2)).hits == 0
    assert ns.acquire([]).hits == 0
    assert not ns.acquire([]).failed


def test_refusals_come_with_their_positions(session: Session, spec: NamespaceSpec, hashes: Hashes) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(4)
    ns.reserve(run[:2]).commit()
    reservation = ns.reserve(run)
    assert reservation.granted == [2, 3]
    assert reservation.refused == {0: "present", 1: "present"}
    assert reservation.answers == [Refusal.PRESENT, Refusal.PRESENT, Refusal.GRANTED, Refusal.GRANTED]
    assert len(reservation.slots) == 2
    orphan = ns.reserve(hashes(1), parent=hashes(1)[0])
    assert (orphan.id, orphan.refused, orphan.slots, orphan.commit()) == (0, {0: "no_parent"}, [], [])
    assert session.counters["refused_present"] == 2
    assert session.counters["refused_no_parent"] == 1
    reservation.abort()
    reservation.abort()
    again = ns.reserve(run)
    assert again.granted == [2, 3], "what was aborted can be reserved again at once"
    assert again.commit() == MINE * 2
    empty = ns.reserve([])
    assert (empty.failed, empty.refused, empty.commit()) == (False, {}, [])


def test_hints_retain_and_drop(
    daemon: Any, session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    ns, run, other = session.attach(spec, shards=(0,)), hashes(4), hashes(4)
    answers: list[tuple[int, str]] = []
    ns.reserve(run[:3]).commit()
    ns.reserve(other).commit()
    assert ns.retain(run, seconds=60, then=lambda blocks, why: answers.append((blocks, why)))
    until(lambda: answers, "an answer")
    assert answers == [(3, "")]
    assert ns.drop(other, after=1)
    shown = daemon.wait_status(lambda s: s["hints"]["dropped_blocks"], "the drop")["hints"]
    assert (shown["dropped_blocks"], shown["retentions"]) == (3, 1)
    for wrong in (
        lambda: ns.retain(run, seconds=0),
        lambda: ns.retain([*run] * 5000),
        lambda: ns.retain([b"short"]),
        lambda: ns.drop(run, after=-1),
    ):
        with pytest.raises(BadArgument):
            wrong()
    daemon.stop()
    until(lambda: not session.up, "the end")
    assert not ns.retain(run)
    assert not ns.drop(run)
    assert session.counters["hints_unsent"] == 2


def test_a_lease_is_released_once(session: Session, spec: NamespaceSpec, hashes: Hashes) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(2)
    ns.reserve(run).commit()
    lease = ns.acquire(run)
    assert [each["leases"] for each in session.stats()["sessions"]] == [1]
    lease.release()
    lease.release()
    with lease:
        pass
    stats = session.stats()
    assert [each["leases"] for each in stats["sessions"]] == [0]
    assert "releases_unknown" not in stats["counters"]


def test_without_a_pin_nothing_is_held(session: Session, spec: NamespaceSpec, hashes: Hashes) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(2)
    ns.reserve(run).commit()
    lease = ns.acquire(run, pin=False)
    assert (lease.id, lease.hits) == (0, 2)
    assert [each["leases"] for each in session.stats()["sessions"]] == [0]


def test_views_are_shards_and_have_bounds(session: Session, hashes: Hashes) -> None:
    sizes = (4096, 100, 8192)
    ns = session.attach(NamespaceSpec(model="m", groups=[GroupSpec(16, sizes)]), shards=(0, 1, 2))
    run = hashes(2)
    reservation = ns.reserve(run)
    first, second = reservation.slots
    for shard, size in enumerate(sizes):
        assert len(session.view(first, shard)) == size
        session.view(first, shard)[:] = bytes([shard + 1]) * size
        session.view(second, shard)[:] = bytes([shard + 11]) * size
    for shard, size in enumerate(sizes):
        assert bytes(session.view(first, shard)) == bytes([shard + 1]) * size
    for shard in (-1, 3):
        with pytest.raises(BadArgument, match="this block has 3"):
            session.view(first, shard)
    reservation.commit()
    with ns.acquire(run) as lease, pytest.raises(TypeError):
        session.view(lease.slots[0], 0)[:] = bytes(4096)
    moved = Slot(first.ref._replace(offset=first.ref.offset + 64), first.group, first.region, True)
    with pytest.raises(RegionError, match="no page begins"):
        session.view(moved, 0)


def test_a_rank_settles_what_its_scheduler_reserved(
    connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    two = NamespaceSpec(model="tp2", groups=[GroupSpec(16, (4096, 4096))])
    scheduler, run = connect().attach(two), hashes(3)
    with pytest.raises(BadArgument, match="attached"):
        scheduler.reserve(run)
    sessions = [connect(), connect()]
    ranks = [session.attach(two, shards=(shard,)) for shard, session in enumerate(sessions)]
    reservation = scheduler.reserve(run)
    verdicts: list[list[Verdict]] = []
    ranks[0].settle(
        reservation.id, Outcome.COMMITTED, region_id=reservation.region_id, then=lambda said: verdicts.append(said)
    )
    until(lambda: verdicts, "the first rank's verdict")
    assert scheduler.acquire(run).hits == 0, "visible means whole"
    ranks[1].settle(reservation.id, Outcome.COMMITTED, positions=(0, 1), then=lambda said: verdicts.append(said))
    ranks[1].settle(reservation.id, Outcome.FAILED, positions=(2,), then=lambda said: verdicts.append(said))
    until(lambda: len(verdicts) == 3, "the second rank's verdicts")
    assert verdicts == [[Verdict.PARTIAL] * 3, MINE * 2, [Verdict.FAILED]]
    assert scheduler.acquire(run).hits == 2
    assert sessions[1].counters == {"verdict_visible": 2, "verdict_failed": 1}
    with pytest.raises(BadArgument, match="no shards"):
        scheduler.settle(reservation.id, Outcome.COMMITTED)


def test_a_failing_callback_is_counted_and_harms_nobody(
    session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(1)

    def fail(verdicts: list[Verdict]) -> None:
        raise RuntimeError("mine")

    ns.settle(ns.reserve(run).id, Outcome.COMMITTED, then=fail)
    until(lambda: session.counters.get("handler_errors"), "the count")
    until(lambda: "mine" in caplog.text, "the line")
    assert ns.acquire(run).hits == 1


def test_a_refused_settle_is_counted(session: Session, spec: NamespaceSpec, until: Until) -> None:
    ns = session.attach(spec, shards=(0,))
    ns.settle(12345, Outcome.COMMITTED)
    until(lambda: session.counters.get("settles_refused"), "the count")
    ns.settle(12345, Outcome.COMMITTED, region_id=bytes(16))
    assert session.counters["settles_of_another_region"] == 1


def test_a_later_reservation_is_picked_up(session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(3)
    ticket = ns.reserve_later(run)
    reservation = until(ticket.poll, "the answer")
    assert reservation.granted == [0, 1, 2]
    assert reservation.commit() == MINE * 3
    assert ns.reserve_later(hashes(1), parent=run[-1]).wait(10.0).commit() == MINE
    assert ns.reserve_later([]).poll() is not None
    twice = hashes(1) * 2
    with pytest.raises(BadArgument, match="twice"):
        ns.reserve_later(twice).wait(10.0)


def test_a_cancelled_ticket_leaves_nothing_behind(
    session: Session, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(3)
    answered = ns.reserve_later(run)
    assert answered.wait(10.0).granted == [0, 1, 2]
    answered.cancel()
    for _ in range(20):
        ns.reserve_later(run).cancel()

    def nothing_reserved() -> bool:
        return [each["reservations"] for each in session.stats()["sessions"]] == [0]

    until(nothing_reserved, "the end of every reservation")
    assert ns.reserve(run).commit() == MINE * 3


def test_eight_threads_share_one_session(connect: Connect, spec: NamespaceSpec, hashes: Hashes) -> None:
    session = connect()
    ns = session.attach(spec, shards=(0,))
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(40):
                run = hashes(4)
                reservation = ns.reserve(run)
                for slot in reservation.slots:
                    session.view(slot)[:] = bytes([seed]) * 4096
                assert reservation.commit() == MINE * 4
                more = ns.reserve_later(hashes(2), parent=run[-1]).wait(10.0)
                ns.settle(more.id, Outcome.COMMITTED)
                with ns.acquire(run) as lease:
                    assert lease.hits == 4
                    assert {bytes(session.view(slot)) for slot in lease.slots} == {bytes([seed]) * 4096}
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    session.ping()
    assert session.counters == {"verdict_visible": 8 * 40 * 6}
    assert [(each["leases"], each["reservations"]) for each in session.stats()["sessions"]] == [(0, 0)]


def test_absurd_requests_are_refused_and_cost_nothing(session: Session, spec: NamespaceSpec, hashes: Hashes) -> None:
    ns = session.attach(spec, shards=(0,))
    million = [bytes(32)] * 1_000_000
    for ask in (ns.acquire, ns.reserve, ns.reserve_later):
        with pytest.raises(BadArgument, match="1000000 hashes in one message"):
            ask(million)
        with pytest.raises(BadArgument, match="hash of 31 bytes"):
            ask([bytes(31)])
        with pytest.raises(BadArgument, match="hashes are bytes"):
            ask(["x" * 32])  # type: ignore[list-item]
        with pytest.raises(BadArgument, match="group 1"):
            ask(hashes(1), group=1)
    for ask in (ns.acquire, ns.reserve):  # the sum is right, so that the daemon is the one who says no
        with pytest.raises(BadArgument, match="hash of 31 bytes"):
            ask([bytes(31), bytes(33)])
    with pytest.raises(BadArgument, match="shards"):
        session.attach(spec, shards=(1,))
    with pytest.raises(BadArgument):
        session.attach(NamespaceSpec(model="big", groups=[GroupSpec(16, 1 << 40)]), shards=(0,))
    with pytest.raises(BadArgument):
        session.attach(spec, shards=(0,), ceiling_bytes=-1)
    with pytest.raises(ClientError, match="no namespace"):
        session.clear("nobody")
    assert session.up
    assert ns.reserve(hashes(1)).commit() == MINE


def test_another_geometry_is_refused(session: Session, spec: NamespaceSpec) -> None:
    session.attach(spec, shards=(0,))
    with pytest.raises(GeometryMismatch, match="shards"):
        session.attach(NamespaceSpec(model="llama", groups=[GroupSpec(16, 8192)]), shards=(0,))


def test_clear_forgets_all_and_spares_who_reads_it(session: Session, spec: NamespaceSpec, hashes: Hashes) -> None:
    ns, run, other = session.attach(spec, shards=(0,)), hashes(3), hashes(2)
    ns.reserve(run).commit()
    ns.reserve(other).commit()
    lease = ns.acquire(other)
    assert session.clear(ns.id) == 5
    assert ns.acquire(run).hits == ns.acquire(other).hits == 0
    assert session.region is not None
    assert all(session.region.rows.is_current(slot.ref) for slot in lease.slots)
    lease.release()
    assert session.clear() == 0


def test_close_waits_until_what_was_sent_has_arrived(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes
) -> None:
    run = hashes(50)
    with Session.connect(daemon.endpoint, engine="e2", deadline=10.0) as writer:
        ns = writer.attach(spec, shards=(0,))
        reservation = ns.reserve(run)
        for position in range(50):
            ns.settle(reservation.id, Outcome.COMMITTED, positions=(position,))
    assert connect().attach(spec, shards=(0,)).acquire(run).hits == 50
    writer.close()
    assert not writer.up


@pytest.mark.parametrize("noticed", [False, True])
def test_close_waits_longer_than_a_step_may(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, noticed: bool
) -> None:
    run, writer = hashes(256), connect(engine="e2", connect_timeout=10.0)
    ns = writer.attach(spec, shards=(0,))
    reservation = ns.reserve(run)
    writer.daemon.deadline = 0.05 if noticed else 5.0
    daemon.process.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, daemon.process.send_signal, (signal.SIGCONT,)).start()
    assert not noticed or ns.acquire(run).failed
    for position in range(256):
        ns.settle(reservation.id, Outcome.COMMITTED, positions=(position,))
    writer.daemon.deadline = 0.05
    writer.close()
    assert connect().attach(spec, shards=(0,)).acquire(run).hits == 256


def test_on_region_is_told_of_the_present_one(session: Session) -> None:
    seen: list[Any] = []
    session.on_region(seen.append)
    assert seen == [session.region]


def test_the_end_of_a_process_without_close_is_quiet(daemon: Any) -> None:
    program = "import sys, kvcache_client as k; k.Session.connect(sys.argv[1], engine='e').ping(); print('done')"
    command = [sys.executable, "-W", "error", "-c", program, daemon.endpoint]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_importing_is_light_and_starts_nothing() -> None:
    program = (
        "import sys, threading, kvcache_client\n"
        "assert not {'torch', 'vllm', 'uvloop', 'click'} & set(sys.modules), sys.modules.keys()\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=30)


def test_all_names_are_there() -> None:
    assert all(hasattr(kvcache_client, name) for name in kvcache_client.__all__)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc://relative", "ipc://", "ipc:///" + "x" * 200])
def test_an_unusable_endpoint_is_named(endpoint: str) -> None:
    for make in (Session.connect, Session.open):
        with pytest.raises(ConfigError, match="endpoint"):
            make(endpoint, engine="e1")


def test_the_environment_names_the_endpoint(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_ENDPOINT", daemon.endpoint)
    with Session.connect(engine="e1") as session:
        assert session.endpoint == daemon.endpoint


def test_nothing_is_left_open_after_close(daemon: Any, spec: NamespaceSpec) -> None:
    def descriptors() -> set[str]:
        return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)}

    before, threads = descriptors(), threading.active_count()
    with Session.connect(daemon.endpoint, engine="e1") as session:
        session.attach(spec, shards=(0,))
    del session
    gc.collect()  # a session and its namespaces refer to each other
    assert descriptors() - before == set()
    assert threading.active_count() == threads


def _exists(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_a_namespace_that_is_left_is_forgotten_once_it_is_empty(
    session: Session, spec: NamespaceSpec, daemon: Any, hashes: Hashes
) -> None:
    ns, run = session.attach(spec, shards=(0,)), hashes(3)
    reservation = ns.reserve(run)
    session.detach(ns)
    session.detach(ns)  # it has left
    assert ns.acquire(run).failed
    assert reservation.commit() == MINE * 3  # what was begun goes on
    assert [n["blocks"] for n in daemon.status()["namespaces"]] == [3]
    again = session.attach(spec, shards=(0,))
    assert again.acquire(run).hits == 3
    session.detach(again)
    assert session.clear() == 3
    assert len(daemon.status()["namespaces"]) == 1, "leased"
    session.close()
    daemon.wait_status(lambda status: not status["namespaces"], "an empty cache")


def test_attaching_without_waiting(session: Session, spec: NamespaceSpec, until: Until) -> None:
    ns = session.attach(spec, shards=(0,), wait=False)
    for _ in range(200):  # the answer may be here before the call has returned
        until(lambda ns=ns: ns.attached, "the answer")
        session.detach(ns)
        ns = session.attach(spec, shards=(0,), wait=False)
    until(lambda: ns.attached, "the last answer")
    other = NamespaceSpec(spec.model, [GroupSpec(16, 64)], identity=spec.identity)
    refused = session.attach(other, shards=(0,), wait=False)
    until(lambda: session.counters.get("attaches_refused"), "the refusal")
    assert not refused.attached


def test_what_is_given_back_at_the_end_is_not_lost_with_the_session(
    daemon: Any, connect: Any, spec: NamespaceSpec, hashes: Any
) -> None:
    for number in range(200):  # it was lost once in a hundred times
        session = connect(engine=f"e{number}")
        session.attach(spec, shards=(0,)).reserve_later(hashes(2)).cancel()
        session.close()
    status = daemon.wait_status(lambda status: not status["sessions"], "the end of all")
    assert (status["pool"]["blocks_quarantined"], status["pool"]["blocks_writing"]) == (0, 0)


def test_a_session_that_ends_waits_for_its_thread(
    daemon: Any, connect: Any, spec: NamespaceSpec, hashes: Any, monkeypatch: Any
) -> None:
    """The thread has taken the answer to what was cancelled, and has not given it back yet. The daemon must answer
    something after that: until then, the socket's end would lose it."""
    call, answer = Channel.call, PendingReservation.answer
    taken, asked = threading.Event(), threading.Event()
    done: list[str] = []

    def noted_call(channel: Channel, *arguments: Any) -> Any:
        reply = call(channel, *arguments)
        done.append("answered")
        asked.set()
        return reply

    def late_answer(pending: PendingReservation, reply: Any) -> None:
        taken.set()
        assert asked.wait(10)
        time.sleep(0.2)  # as a thread that others do not let run
        answer(pending, reply)
        done.append("given back")

    session = connect()
    namespace = session.attach(spec, shards=(0,))
    monkeypatch.setattr(Channel, "call", noted_call)
    monkeypatch.setattr(PendingReservation, "answer", late_answer)
    os.kill(daemon.process.pid, signal.SIGSTOP)  # so that no call here takes the answer
    namespace.reserve_later(hashes(2)).cancel()
    os.kill(daemon.process.pid, signal.SIGCONT)
    assert taken.wait(10)
    session.close()
    assert done == ["answered", "given back", "answered"]
    status = daemon.wait_status(lambda status: not status["sessions"], "the end of the session")
    assert (status["pool"]["blocks_quarantined"], status["pool"]["blocks_writing"]) == (0, 0)
