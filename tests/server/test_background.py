"""What the loop does between requests: the sweeper's work and long answers, a slice of each per turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from small_cache import make_cache
from test_service import Engine, hashes

from kvcache_proto import messages as m
from kvcache_proto.types import MAX_BLOCKS, Finding
from kvcache_server.daemon.background import Background
from kvcache_server.slices import Steps


class Loop:
    """A loop in which nothing else happens, and what was done in it, in order: "|" ends a turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvcache_server.daemon.background.SLICE_SECONDS", 0.0)
        self.loop = asyncio.new_event_loop()
        cache = make_cache()
        self.sweeper = cache.sweeper
        self.seen: list[str] = []
        self.failures: list[Exception] = []
        self.background = Background(
            self.loop, cache, lambda: self.seen.append("|"), lambda number, error: self.failures.append(error)
        )

    def sweep(self, name: str, count: int, error: Exception | None = None) -> None:
        """Leave work of so many slices to the sweeper. The first one of those that wait is done at once."""
        left = iter(range(count))

        def step() -> bool:
            number = next(left)
            self.seen.append(f"{name}{number}")
            if number == count - 1 and error is not None:
                raise error
            return number < count - 1

        self.sweeper.add(step)
        self.background.schedule()

    def steps(self, name: str, count: int, error: Exception | None = None) -> Steps[str]:
        for number in range(count):
            self.seen.append(f"{name}{number}")
            yield
        if error is not None:
            raise error
        return name

    def run(self, turns: int = 20) -> str:
        for _ in range(turns):
            self.loop.run_until_complete(asyncio.sleep(0))
        return " ".join(self.seen)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop(monkeypatch)
    yield loop
    loop.loop.close()


def test_a_turn_does_a_slice_of_the_sweeper_s_work_and_one_of_an_answer(loop: Loop) -> None:
    loop.sweep("s", 4)
    answers = [loop.background.run(loop.steps(name, 2)) for name in "ab"]
    assert loop.run() == "s0 s1 a0 | s2 b0 | s3 a1 | b1 | | |"
    assert [answer.result() for answer in answers] == ["a", "b"]
    assert loop.failures == []


def test_nothing_is_scheduled_while_there_is_no_work(loop: Loop) -> None:
    loop.background.schedule()
    assert loop.run() == ""
    loop.sweep("s", 1)
    assert loop.run() == "s0"
    loop.sweep("s", 2)
    loop.background.schedule()
    assert loop.run() == "s0 s0 s1 |"


def test_the_sweeper_s_work_goes_on_for_the_time_of_a_turn(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_server.daemon.background.SLICE_SECONDS", 60.0)
    loop.sweep("s", 3)
    loop.sweep("t", 2)
    loop.background.run(loop.steps("a", 2))
    assert loop.run() == "s0 s1 t0 s2 t1 a0 | a1 | |"


def test_an_error_does_not_stop_other_work(loop: Loop) -> None:
    loop.sweep("s", 2, ValueError("no"))
    loop.sweep("t", 2)
    failing, answer = loop.background.run(loop.steps("a", 1, KeyError("no"))), loop.background.run(loop.steps("b", 2))
    assert loop.run() == "s0 s1 a0 | t0 b0 | t1 | b1 | |"
    assert [type(error) for error in loop.failures] == [ValueError]
    assert isinstance(failing.exception(), KeyError) and answer.result() == "b"


def test_who_gives_up_an_answer_does_not_stop_it_and_its_error_is_reported(loop: Loop) -> None:
    given_up, failing = loop.background.run(loop.steps("a", 2)), loop.background.run(loop.steps("b", 1, KeyError("no")))
    given_up.cancel()
    failing.cancel()
    assert loop.run() == "a0 | b0 | a1 | | |"
    assert [type(error) for error in loop.failures] == [KeyError]


# With a daemon.


STORED = 8_000


def used(status: dict[str, Any]) -> int:
    return int(status["pool"]["used_bytes"])


@pytest.mark.parametrize("what", ["invalidate", "clear"])
def test_others_are_answered_and_find_nothing_of_it_while_blocks_are_swept(start_daemon: Any, what: str) -> None:
    daemon = start_daemon(size="128MiB")
    with Engine(daemon.endpoint, "long") as long, Engine(daemon.endpoint, "short") as short:
        swept = False
        for attempt in range(5):
            names = hashes(STORED, STORED * attempt)
            long.store(names)
            slots, region = long.acquire(names[:1], pin=False).slots, long.geometry.region_id
            request = (
                m.Invalidate(0, b"", region, slots, 0, Finding.CORRUPT) if what == "invalidate" else m.Clear(0, b"")
            )
            long.ask(request)
            assert [short.acquire(part, pin=False).hits for part in (names, names[:1])] == [0, 0]
            with_sweep = used(daemon.status())
            short.store(names[:3])  # anew
            assert short.acquire(names, pin=False).hits == 3
            daemon.wait_status(lambda status: used(status) == 3 * 4096, "all blocks swept")
            assert short.acquire(names, pin=False).hits == 3
            long.ask(m.Clear(0, b""))
            daemon.wait_status(lambda status: used(status) == 0, "all blocks swept")
            swept = swept or with_sweep > 0
        assert swept, "never seen to be swept after the reply"
    daemon.check_integrity()


def test_others_are_answered_while_leases_and_reservations_of_who_has_ended_are_swept(daemon: Any) -> None:
    with Engine(daemon.endpoint, "stays") as stays:
        names = hashes(1_000)
        stays.store(names)
        with Engine(daemon.endpoint, "gone") as gone:
            for _ in range(1_000):
                gone.tell(m.Acquire(0, b"", gone.namespace, names))
            for number in range(16):
                gone.tell(m.Reserve(0, b"", gone.namespace, [m.Run(hashes(MAX_BLOCKS, 1_000 * (number + 2)))]))
            gone.ping()
            assert stays.acquire(names, pin=False).hits == len(names)
        status = daemon.wait_status(lambda status: not status["pool"]["blocks_writing"], "all reservations ended")
        assert stays.acquire(names, pin=False).hits == len(names)
        status = daemon.wait_status(lambda status: not status["pool"]["leases"], "all leases ended")
        assert status["pool"]["reservations"] == 0
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
