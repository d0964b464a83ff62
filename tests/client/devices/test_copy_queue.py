"""A queue and its registration where the device does what the test says: who waits, who comes first, who survives."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache_client.devices import CopyError, Job, registration
from kvcache_client.devices.copy_paths import Straight
from kvcache_client.devices.copy_queue import CopyQueue
from kvcache_client.devices.layout import Fragment, sections
from kvcache_client.devices.registration import Registration

GROWS = 0.05  # seconds between two looks
SLOT, CHUNK = 4096, 1 << 16
SECONDS = 30.0


class Device:
    """A runtime whose events are over when the test lets them be."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.over: set[int] = set()
        self.changed = threading.Condition()
        self.locks: list[tuple[str, int]] = []
        self.sizes: list[int] = []  # of what was locked
        self.largest = 1 << 60  # that can be locked by one call

    def create_stream(self) -> int:
        return next(self.numbers)

    def create_event(self, timed: bool = False) -> int:
        return next(self.numbers)

    def is_over(self, event: int) -> bool:
        return event in self.over

    def let(self, *events: int) -> None:
        with self.changed:
            self.over.update(events)
            self.changed.notify_all()

    def wait_host(self, event: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: event in self.over, SECONDS)

    def seconds(self, begin: int, end: int) -> float:
        return 1.0

    def register(self, address: int, size: int) -> None:
        if size > self.largest:
            raise CopyError("too much")
        self.locks.append(("lock", address))
        self.sizes.append(size)

    def unregister(self, address: int) -> None:
        self.locks.append(("unlock", address))

    def nothing(self, *arguments: Any) -> None:
        """The rest leaves no trace here."""

    enter_thread = record = wait = finish = copy_batch = destroy_event = destroy_stream = synchronize = nothing


def region(chunks: int, address: int = 1 << 30) -> Any:
    return SimpleNamespace(address=address, bytes=chunks * CHUNK, present=chunks * CHUNK)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def device() -> Device:
    return Device()


def make_queue(device: Device, locked: Registration, make_buffers: Any = None) -> CopyQueue:
    path = Straight(device, sections([Fragment(0, SLOT, SLOT)], []), saves=False)  # type: ignore[arg-type]
    return CopyQueue(device, path, locked, make_buffers, saves=False)  # type: ignore[arg-type]


def test_only_for_a_load_about_to_end_does_an_idle_step_wait(device: Device) -> None:
    locked, memory, ended = Registration(device, CHUNK), region(1), threading.Event()  # type: ignore[arg-type]
    locked.register(memory)
    wait_until(lambda: locked.progress()[0])
    queue = make_queue(device, locked)
    number = queue.put(Job(memory, np.arange(2), np.array([0, SLOT]), lambda job: ended.set()), 0)
    entry = queue.find(number)
    assert entry is not None
    queue.linger(SECONDS)  # its last part has not begun: this returns at once
    assert not ended.is_set()
    device.let(entry.events.near)
    lingering = threading.Thread(target=queue.linger, args=(SECONDS,))
    lingering.start()
    lingering.join(0.1)
    assert lingering.is_alive()
    device.let(entry.events.end)
    lingering.join(SECONDS)
    assert not lingering.is_alive() and ended.is_set()
    queue.close()
    locked.close()


def test_a_copy_that_breaks_its_thread_fails_alone(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Else whoever waits for it, or for one behind it, waits for ever."""
    ended: list[Job] = []

    def make_buffers(path: Any) -> Any:
        raise MemoryError("no room")

    queue = make_queue(device, Registration(device, CHUNK), make_buffers)  # type: ignore[arg-type]
    for _ in range(3):
        queue.put(Job(region(1), np.arange(1), np.array([0]), ended.append), 0)
    assert queue.drain(SECONDS)
    assert [job.error for job in ended] == ["MemoryError: no room"] * 3
    assert "a copy has failed" in caplog.text
    queue.close()


@pytest.mark.parametrize("call", ["copy_batch", "borrow"])
def test_a_copy_that_breaks_the_engines_thread_fails_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """The engine goes on, and whoever closes the queue does not wait for ever."""
    locked, memory, ended = Registration(device, CHUNK), region(1), []  # type: ignore[arg-type]
    locked.register(memory)
    wait_until(lambda: locked.progress()[0])
    queue = make_queue(device, locked)

    def fail(*_: Any) -> None:
        raise ValueError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(device if call == "copy_batch" else locked, call, fail)
        number = queue.put(Job(memory, np.arange(1), np.array([0]), ended.append), 0)
    if call == "copy_batch":  # what was queued before may still run
        assert not queue.drain(0.05)
        entry = queue.find(number)
        assert entry is not None
        device.let(entry.events.end)
    queue.put(Job(memory, np.arange(1), np.array([0]), ended.append), 0)
    wait_until(lambda: len(ended) == 1)
    last = queue.find(number + 1)
    assert last is not None
    device.let(last.events.end)
    assert queue.drain(SECONDS)
    assert [job.error for job in ended] == ["ValueError: a defect", ""]
    assert "a copy has failed" in caplog.text
    queue.close()
    locked.close()


def test_pieces_are_locked_in_large_calls(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "CALL", 3 * CHUNK)
    locked, memory = Registration(device, CHUNK), region(5)  # type: ignore[arg-type]
    locked.register(memory)
    wait_until(lambda: locked.progress() == (True, 5 * CHUNK))
    assert device.locks == [("lock", memory.address), ("lock", memory.address + 3 * CHUNK)]
    assert device.sizes == [3 * CHUNK, 2 * CHUNK]
    locked.close()
    assert len(device.locks) == 4


def test_a_region_that_replaces_another_does_not_wait_for_all_of_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "CALL", CHUNK)
    locked, old, new = Registration(device, CHUNK), region(8), region(8, 1 << 40)  # type: ignore[arg-type]
    locked.register(old)
    wait_until(lambda: locked.progress() == (True, old.bytes))
    device.locks.clear()
    locked.register(new)
    wait_until(lambda: len(device.locks) == 16)
    assert [what for what, _ in device.locks[:6]] == ["unlock", "lock"] * 3
    assert {address for what, address in device.locks if what == "unlock"} == {(1 << 30) + n * CHUNK for n in range(8)}
    assert locked.progress() == (True, new.bytes)
    locked.close()
    assert {address for what, address in device.locks[16:]} == {(1 << 40) + n * CHUNK for n in range(8)}


def test_where_much_cannot_be_locked_at_once_less_is_tried(device: Device) -> None:
    device.largest = 3 * CHUNK
    locked, memory = Registration(device, CHUNK), region(8)  # type: ignore[arg-type]
    locked.register(memory)
    assert locked.wait(SECONDS)
    assert locked.progress() == (True, memory.bytes)
    assert max(device.sizes) <= 3 * CHUNK
    locked.close()


def test_memory_is_locked_as_the_daemon_makes_it(device: Device) -> None:
    locked, memory = Registration(device, CHUNK), region(8)  # type: ignore[arg-type]
    memory.present = 2 * CHUNK + 1
    locked.register(memory)
    wait_until(lambda: locked.progress() == (False, 2 * CHUNK))
    assert not locked.wait(3 * GROWS), "it waits for the rest"
    memory.present = 8 * CHUNK
    assert locked.wait(SECONDS)
    assert locked.progress() == (True, memory.bytes)
    assert device.locks[0] == ("lock", memory.address) and device.sizes[0] == 2 * CHUNK
    locked.close()


def test_an_engine_that_serves_has_locked_what_copies_ask_for_while_it_is_idle(device: Device) -> None:
    locked, memory, idle = Registration(device, CHUNK), region(8), threading.Event()  # type: ignore[arg-type]
    asked = threading.Event()

    def is_idle() -> bool:
        asked.set()
        return idle.is_set()

    locked.serve(is_idle)
    locked.register(memory)
    job = Job(memory, np.arange(1), np.array([5 * CHUNK]), lambda job: None)
    assert locked.borrow(job, SLOT) is None
    assert asked.wait(SECONDS)  # it wants to, and may not
    assert device.locks == []
    idle.set()
    wait_until(lambda: device.locks == [("lock", memory.address + 5 * CHUNK)])
    borrowed = locked.borrow(job, SLOT)
    assert borrowed is not None
    locked.give_back(borrowed)
    assert locked.progress() == (False, CHUNK)  # and nothing that nobody has asked for
    locked.close()


def test_a_save_that_has_not_begun_is_cancelled_when_its_block_is_given_away(device: Device) -> None:
    """The one that the bounce buffers is at ends with its present part; nobody waits for the others."""
    at_it, go_on, ended = threading.Event(), threading.Event(), []

    class SlowBuffers:
        def load(self, job: Job) -> None:
            at_it.set()
            assert go_on.wait(SECONDS)

        def close(self) -> None:
            pass

    queue = make_queue(device, Registration(device, CHUNK), lambda path: SlowBuffers())  # type: ignore[arg-type]
    jobs = [Job(region(1), np.array([number]), np.array([0]), ended.append) for number in range(4)]
    for job in jobs:
        queue.put(job, 0)
    assert at_it.wait(SECONDS)
    given = np.zeros(8, np.bool_)
    given[[1, 3]] = True
    queue.cancel(given)
    assert [job.cancelled for job in jobs] == [False, True, False, True]
    go_on.set()
    wait_until(lambda: (entry := queue.find(3)) is None or entry.queued)
    for number in (1, 3):
        entry = queue.find(number)
        if entry is not None:
            device.let(entry.events.end)
    assert queue.drain(SECONDS)
    assert len(ended) == 4 and [bool(job.error) for job in jobs] == [False, True, False, True]
    queue.close()
