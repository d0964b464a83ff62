"""Long work of several sessions in one loop: the order of answers, waiting messages, and sessions that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_service import Engine, hashes

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_reply
from kvcache_proto.errors import Unavailable
from kvcache_proto.types import MAX_BLOCKS, Finding
from kvcache_server.core.slices import Chores, Steps
from kvcache_server.daemon.long_work import WAITING, WAITING_BYTES, LongWork


class Loop:
    """A loop in which nothing else happens, and what was done in it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvcache_server.daemon.long_work.SLICE_SECONDS", 0.0)  # a step a turn
        self.loop = asyncio.new_event_loop()
        self.chores = Chores()
        self.seen: list[str] = []
        self.failures: list[Exception] = []
        self.underway = LongWork(
            *(self.loop, self.chores, self.answer, lambda: None, lambda number, error: self.failures.append(error))
        )

    def answer(self, identity: bytes, frame: bytes) -> None:
        self.seen.append((identity + frame).decode())

    def steps(self, name: str, count: int, error: Exception | None = None) -> Steps[str]:
        for number in range(count):
            self.seen.append(f"{name}{number}")
            yield
        if error is not None:
            raise error
        return name

    def told(self, name: str) -> Callable[[Any, Exception | None], None]:
        return lambda reply, error: self.seen.append(f"{name}: {error or reply}")

    def run(self) -> list[str]:
        while self.underway or self.chores:
            self.loop.run_until_complete(asyncio.sleep(0))
        return self.seen


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop(monkeypatch)
    yield loop
    loop.loop.close()
    assert not loop.failures


def test_sessions_take_slices_in_turn_and_their_own_messages_wait(loop: Loop) -> None:
    loop.underway.begin(1, loop.steps("a", 3), loop.told("a"))
    loop.underway.begin(2, loop.steps("b", 1), loop.told("b"))
    loop.underway.wait(1, b"one ", b"asks")
    loop.underway.wait(2, b"two ", b"asks")
    assert 1 in loop.underway and 3 not in loop.underway
    assert loop.run() == ["a0", "b0", "a1", "b: b", "a2", "two asks", "a: a", "one asks"]
    assert 1 not in loop.underway and not loop.underway


def test_errors_are_reported_and_other_work_continues(loop: Loop) -> None:
    loop.underway.begin(1, loop.steps("a", 1, ValueError("no")), loop.told("a"))
    loop.underway.begin(2, loop.steps("b", 2), loop.told("b"))
    assert loop.run() == ["a0", "b0", "a: no", "b1", "b: b"]


def test_a_message_that_has_waited_may_take_long_too(loop: Loop) -> None:
    def answer(identity: bytes, frame: bytes) -> None:
        loop.underway.begin(1, loop.steps("again", 1), loop.told("again"))

    loop.underway._answer = answer
    loop.underway.begin(1, loop.steps("a", 1), loop.told("a"))
    loop.underway.wait(1, b"one ", b"asks")
    loop.underway.wait(1, b"one ", b"asks")
    assert loop.run() == ["a0", "a: a", "again0", "again: again", "again0", "again: again"]


def test_the_number_of_waiting_messages_is_bounded(loop: Loop) -> None:
    loop.underway.begin(1, loop.steps("a", 1), loop.told("a"))
    loop.underway.begin(2, loop.steps("b", 1), loop.told("b"))
    for _ in range(WAITING):
        loop.underway.wait(1, b"", b"x")
    with pytest.raises(Unavailable, match="too many wait"):
        loop.underway.wait(1, b"", b"x")
    loop.underway.wait(2, b"", bytes(WAITING_BYTES))
    with pytest.raises(Unavailable):
        loop.underway.wait(2, b"", b"x")
    loop.run()
    loop.underway.begin(2, loop.steps("b", 1), loop.told("b"))
    loop.underway.wait(2, b"", bytes(WAITING_BYTES))
    loop.run()


def test_a_session_that_leaves_ends_after_its_requests(loop: Loop) -> None:
    loop.underway.after(1, lambda: loop.seen.append("nobody left"))
    loop.underway.begin(1, loop.steps("a", 2), loop.told("a"))
    loop.underway.wait(1, b"one ", b"asks")
    loop.underway.after(1, lambda: loop.seen.append("one left"))
    assert loop.run() == ["nobody left", "a0", "a1", "a: a", "one asks", "one left"]


def test_a_reconnecting_session_ends_at_once_and_its_work_continues_without_replies(loop: Loop) -> None:
    loop.underway.begin(1, loop.steps("a", 3), loop.told("a"))
    loop.underway.wait(1, b"one ", b"asks")
    loop.underway.after(1, lambda: loop.seen.append("one left"))
    loop.underway.cut_short(1)
    loop.underway.cut_short(2)
    assert loop.seen == ["a0", "one asks", "one left"]
    assert loop.run()[3:] == ["a1", "a2"]


def test_work_of_the_daemon_s_own(loop: Loop) -> None:
    done, given_up = loop.underway.run(loop.steps("a", 1)), loop.underway.run(loop.steps("b", 1))
    failing = loop.underway.run(loop.steps("c", 1, ValueError("no")))
    given_up.cancel()
    loop.run()
    assert done.result() == "a" and str(failing.exception()) == "no"
    assert loop.seen == ["a0", "b0", "c0"]


# With a daemon.


def test_other_sessions_see_a_long_distrust_in_progress_and_its_own_session_waits(start_daemon: Any) -> None:
    daemon = start_daemon(size="128MiB")
    with Engine(daemon.endpoint, "long") as long, Engine(daemon.endpoint, "short") as short:
        in_progress = False
        for attempt in range(10):  # who asks may be asleep all the time that it takes
            names = hashes(8_000, 8_000 * attempt)
            long.store(names)
            slots, region = long.acquire(names[:1], pin=False).slots, long.geometry.region_id
            distrust = long.tell(m.Distrust(0, b"", region, slots, 0, Finding.CORRUPT))
            ping = long.tell(m.Ping(0, b""))
            probes = [m.Acquire(0, b"", short.namespace, [name], 0, False) for name in (names[0], names[-1])]
            for _ in range(1_000):
                for probe in probes:
                    short.tell(probe)
            seen = [decode_reply(short._socket.recv()).hits for _ in range(2_000)]
            first, second = (decode_reply(long._socket.recv()) for _ in range(2))
            assert (first.id, second.id) == (distrust, ping)
            assert first.blocks == 8_000
            in_progress = (0, 1) in zip(seen[::2], seen[1::2], strict=True)
            if in_progress:
                break
        assert in_progress, "the first block was never seen to be gone before the last one"
        assert not short.acquire(names, pin=False).hits
    daemon.check_integrity()


def test_an_engine_killed_while_it_reserves_leaves_none(daemon: Any) -> None:
    for count in range(8):
        with Engine(daemon.endpoint, "gone") as gone:
            for number in range(32):
                names = hashes(MAX_BLOCKS, 1_000 * (32 * count + number))
                gone.tell(m.Reserve(0, b"", gone.namespace, [m.Run(names)]))
            if count % 2:
                gone.ping()
    daemon.wait_status(lambda status: not status["sessions"] and not status["away"])
    status = daemon.wait_status(lambda status: not status["pool"]["blocks_writing"])
    assert status["pool"]["reservations"] == 0
    assert status["daemon"]["errors"].get("internal", 0) == 0
    daemon.check_integrity()
