"""A lane and its registration where the device does what the test says: who waits, who comes first, who survives."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache_client.devices import Job, registration
from kvcache_client.devices.lane import Lane
from kvcache_client.devices.paths import Straight
from kvcache_client.devices.registration import Registration
from kvcache_client.layout import Fragment

SLOT, CHUNK = 4096, 1 << 16
SECONDS = 30.0


class Device:
    """A runtime whose events are over when the test lets them be."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.over: set[int] = set()
        self.changed = threading.Condition()
        self.locks: list[tuple[str, int]] = []

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
        self.locks.append(("lock", address))

    def unregister(self, address: int) -> None:
        self.locks.append(("unlock", address))

    def nothing(self, *arguments: Any) -> None:
        """The rest leaves no trace here."""

    enter_thread = record = wait = finish = copy_batch = destroy_event = destroy_stream = synchronize = nothing


def region(chunks: int, address: int = 1 << 30) -> Any:
    return SimpleNamespace(address=address, bytes=chunks * CHUNK, holes=[])


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def device() -> Device:
    return Device()


def make_lane(device: Device, locked: Registration, make_ring: Any = None) -> Lane:
    path = Straight(device, [Fragment(0, SLOT, SLOT)], saves=False)  # type: ignore[arg-type]
    return Lane(device, path, locked, make_ring, SLOT, saves=False)  # type: ignore[arg-type]


def test_only_for_a_load_about_to_end_does_an_idle_step_wait(device: Device) -> None:
    locked, memory, ended = Registration(device, CHUNK), region(1), threading.Event()  # type: ignore[arg-type]
    locked.register(memory)
    wait_until(lambda: locked.progress()[0])
    lane = make_lane(device, locked)
    number = lane.put(Job(memory, np.arange(2), np.array([0, SLOT]), lambda job: ended.set()), 0)
    entry = lane.find(number)
    assert entry is not None
    lane.linger(SECONDS)  # its last part has not begun: this returns at once
    assert not ended.is_set()
    device.let(entry.events.near)
    lingering = threading.Thread(target=lane.linger, args=(SECONDS,))
    lingering.start()
    lingering.join(0.1)
    assert lingering.is_alive()
    device.let(entry.events.end)
    lingering.join(SECONDS)
    assert not lingering.is_alive() and ended.is_set()
    lane.close()
    locked.close()


def test_a_copy_that_breaks_its_thread_fails_alone(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Else whoever waits for it, or for one behind it, waits for ever."""
    ended: list[Job] = []

    def make_ring(path: Any) -> Any:
        raise MemoryError("no room")

    lane = make_lane(device, Registration(device, CHUNK), make_ring)  # type: ignore[arg-type]
    for _ in range(3):
        lane.put(Job(region(1), np.arange(1), np.array([0]), ended.append), 0)
    assert lane.drain(SECONDS)
    assert [job.error for job in ended] == ["MemoryError: no room"] * 3
    assert "a copy has failed" in caplog.text
    lane.close()


def test_what_the_daemon_has_given_back_is_not_locked(device: Device) -> None:
    locked, memory = Registration(device, CHUNK), region(8)  # type: ignore[arg-type]
    memory.holes = [(2 * CHUNK - 4096, 3 * CHUNK), (7 * CHUNK, CHUNK)]
    locked.register(memory)
    wait_until(lambda: locked.progress() == (True, 5 * CHUNK))
    assert {address - memory.address for _, address in device.locks} == {n * CHUNK for n in (0, 1, 4, 5, 6)}
    locked.close()
    assert len(device.locks) == 10


def test_a_region_that_replaces_another_does_not_wait_for_all_of_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_REST", "_REST_WANTED"):
        monkeypatch.setattr(registration, name, 0.0)
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
