"""Lookups and reservations in a namespace with suffix groups: what a session makes of the daemon's answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_client import GroupSpec, NamespaceSpec
from kvcache_client.session.namespace import Namespace
from kvcache_proto.messages import Acquired, Release, Reserve, Reserved, Run, Settle
from kvcache_proto.types import SUFFIX, BlockRef, Refusal, Resume, unpack_refs

WINDOW = GroupSpec(16, 8192, SUFFIX, 3)
STATE = GroupSpec(16, 512, SUFFIX, 1)
CHUNKS = GroupSpec(16, 1024, SUFFIX, 4, 4)
FULL = GroupSpec(16, 4096)
BYTES = 1 << 20


def refs(*numbers: int, size: int = 64) -> bytes:
    return b"".join(BlockRef(size * number, number).pack() for number in numbers)


def names(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(1, count + 1)]


class Daemon:
    """Answers with what a test says, and keeps what it was sent."""

    up = True

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.reply: Any = None
        self.odd: list[str] = []
        channel = SimpleNamespace(closed=False, give_up=self.odd.append)
        region = SimpleNamespace(id=b"r" * 16, holds=self._holds)
        self.connection = SimpleNamespace(channel=channel, region=region, leases={}, owed=[])

    @staticmethod
    def _holds(packed: bytes) -> bool:
        return all(ref.offset < BYTES for ref in unpack_refs(packed))

    def call(self, connection: Any, request: Any, late: Any) -> Any:
        self.sent.append(request)
        return self.reply

    def post(self, connection: Any, request: Any, *more: Any) -> bool:
        self.sent.append(request)
        for answered in more[1:]:
            answered(self.reply)
        return True

    def check_process(self) -> None: ...

    def count(self, name: str, count: int = 1) -> None: ...

    def pump(self) -> None: ...

    def misbehaved(self, why: str) -> None:
        self.odd.append(why)


class Settlements:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def settle(self, connection: Any, reservation: int, outcome: Any, positions: Any, shards: Any) -> None:
        self._daemon.sent.append(Settle(0, b"", b"", reservation, tuple(shards), int(outcome), list(positions)))


def joined(*groups: GroupSpec) -> tuple[Daemon, Namespace]:
    daemon = Daemon()
    namespace = Namespace(daemon, Settlements(daemon), NamespaceSpec("m", groups), (0,), 0)  # type: ignore[arg-type]
    namespace._number = daemon.connection.channel, 1  # type: ignore[assignment]
    return daemon, namespace


@pytest.mark.parametrize(
    ("groups", "hits", "start", "counts"),
    [
        ((FULL, WINDOW, STATE), 5, 0, [5, 3, 1]),
        ((FULL, WINDOW, STATE), 2, 0, [2, 2, 1]),
        ((FULL, WINDOW, STATE), 5, 3, [5, 2, 1]),
        ((FULL, CHUNKS), 6, 0, [6, 2]),
        ((FULL, CHUNKS), 4, 0, [4, 0]),
        ((WINDOW,), 5, 0, [3]),
        ((STATE,), 5, 4, [1]),
    ],
)
def test_one_lookup_is_for_all_groups(groups: Any, hits: int, start: int, counts: list[int]) -> None:
    daemon, namespace = joined(*groups)
    daemon.reply = Acquired(1, 7, hits, 0, refs(*range(sum(counts))))
    lease = namespace.acquire(names(6), resume=Resume(start))
    assert daemon.sent[0].start == start and not daemon.odd
    assert [(part, count) for part, count in lease.parts] == list(zip(groups, counts, strict=True))
    assert [slot.group for slot in lease.slots] == [
        group for group, n in zip(groups, counts, strict=True) for _ in range(n)
    ]
    before = counts[0] - 1 if groups[0] is FULL else 0
    assert daemon.connection.leases == {7: refs(*range(before, sum(counts)))}, "what a next daemon is told"
    lease.release()
    assert isinstance(daemon.sent[1], Release) and not daemon.connection.leases


@pytest.mark.parametrize("slots", [refs(*range(5)), refs(*range(7)), refs(*range(4), size=BYTES)])
def test_an_odd_answer_is_a_miss(slots: bytes) -> None:
    """Too few references, too many, and some outside of the region."""
    daemon, namespace = joined(FULL, WINDOW)
    daemon.reply = Acquired(1, 7, 3, 0, slots)
    assert namespace.acquire(names(6)).failed and daemon.odd


@pytest.mark.parametrize(
    ("tail", "hits", "good"), [(0, 6, True), (1, 7, True), (2, 1, True), (3, 7, False), (-1, 3, False), (1, 8, False)]
)
def test_a_tail_is_one_more_hit(tail: int, hits: int, good: bool) -> None:
    daemon, namespace = joined(FULL, STATE)
    daemon.reply = Acquired(1, 7, hits, 0, refs(*range(hits + 1)), tail=tail)
    lease = namespace.acquire(names(6), resume=Resume(0, names(2), 1))
    assert (lease.failed, lease.tail) == (not good, tail if good else 0)


@pytest.mark.parametrize(("divergence", "good"), [(6, True), (7, False), (-1, False), (0, True)])
def test_a_lookup_returns_the_divergence(divergence: int, good: bool) -> None:
    """It is within what was asked for."""
    daemon, namespace = joined(FULL, WINDOW)
    daemon.reply = Acquired(1, 0, 0, 0, b"", divergence=divergence)
    lease = namespace.acquire(names(6))
    assert (lease.failed, lease.divergence) == (not good, divergence if good else 0)


def test_a_divergence_lies_above_what_is_cached() -> None:
    daemon, namespace = joined(FULL, WINDOW)
    daemon.reply = Acquired(1, 0, 0, 0, b"", 3, divergence=3)
    assert namespace.acquire(names(6)).failed and daemon.odd
    daemon.reply = Acquired(1, 0, 0, 0, b"", 3, divergence=4)
    assert namespace.acquire(names(6)).divergence == 4


def test_the_references_of_each_group_are_checked() -> None:
    daemon, namespace = joined(FULL, STATE, WINDOW)
    for places, good in (((0, 64, 128), True), ((BYTES, 0, 0), False), ((0, BYTES, 0), False), ((0, 0, BYTES), False)):
        daemon.odd.clear()
        daemon.reply = Acquired(1, 7, 1, 0, b"".join(BlockRef(place, 1).pack() for place in places))
        assert namespace.acquire(names(1)).failed is not good


def test_sums_are_those_of_all_references() -> None:
    daemon, namespace = joined(FULL, WINDOW)
    for slots, good in ((6, True), (3, False)):
        daemon.reply = Acquired(1, 7, 3, 0, refs(*range(6)), 0, b"\1" * 8 * slots)
        assert namespace.acquire(names(6), verify=True).failed is not good


def test_one_reservation_of_several_groups() -> None:
    """A place that lies nowhere is refused, whatever the group."""
    daemon, namespace = joined(FULL, STATE)
    answers = bytes([Refusal.GRANTED, Refusal.PRESENT, Refusal.GRANTED, Refusal.GRANTED])
    runs = [Run(names(3), None), Run(names(3)[2:], None, 1)]
    for places, good in (((0, 64, 512), True), ((0, BYTES, 64), False), ((0, 64, BYTES), False)):
        daemon.reply = Reserved(1, 9, answers, b"".join(BlockRef(place, 1).pack() for place in places))
        reservation = namespace.reserve_runs_later(runs).poll()
        assert reservation is not None and reservation.failed is not good
        if good:
            assert isinstance(daemon.sent[-1], Reserve) and daemon.sent[-1].runs == runs
            assert reservation.granted == [0, 2, 3]
            assert [slot.group for slot in reservation.slots] == [FULL, FULL, STATE]
            reservation.abort()
            assert daemon.sent[-1].reservation == 9
    assert daemon.odd


def test_a_run_names_a_group_of_the_namespace() -> None:
    _, namespace = joined(FULL, STATE)
    with pytest.raises(Exception, match="group 2: this namespace has 2"):
        namespace.reserve_runs_later([Run(names(1), None, 2)])
