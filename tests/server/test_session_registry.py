"""Sessions that open, leave and resume: which files the daemon checks, and when it notices an end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_cache import make_cache

from kvcache_proto.messages import Hello
from kvcache_server.core.journal import Manifest
from kvcache_server.daemon.handshake import Admission
from kvcache_server.daemon.session_registry import LOOKS, SessionRegistry
from kvcache_server.storage.folder import Folder
from kvcache_server.storage.session_locks import SessionFiles
from kvcache_server.storage.state_file import StateFile
from kvcache_server.storage.warm_start import WarmStart
from kvcache_server.transport.sockets import Peer

SESSIONS = 3 * LOOKS


class Files(SessionFiles):
    """Session files that count how often each is looked at."""

    def __init__(self, folder: Folder, name: str) -> None:
        super().__init__(folder, name)
        self.looks: Counter[str] = Counter()

    def locked(self, name: str) -> bool:
        self.looks[name] += 1
        return super().locked(name)


class House:
    """Sessions in a row, without a door: a ticket's file is the life of its process."""

    def __init__(self, folder: Path) -> None:
        home = Folder(str(folder))
        self.files, self.failures = Files(home, "sessions"), []
        state = StateFile(home, "state", Manifest(b"r" * 16))
        self.cache = make_cache()
        opened = WarmStart(None, state, self.files, self.cache, {})  # type: ignore[arg-type]
        self.attendance = SessionRegistry(
            opened, lambda session: None, lambda number, error: self.failures.append(error)
        )
        self.lives: dict[int, int] = {}
        self.close = state.close

    def enter(self) -> Admission:
        ticket = self.attendance.open(Hello(2, f"engine {len(self.lives)}"), Peer(1, 1, frozenset()))
        self.lives[ticket.session] = ticket.file
        return ticket

    def die(self, session: int) -> None:
        os.close(self.lives.pop(session))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    for session in list(house.lives):
        house.die(session)
    house.close()
    assert not house.failures


def test_only_the_files_of_disconnected_sessions_are_checked(house: House) -> None:
    sessions = [house.enter().session for _ in range(SESSIONS)]
    for session in sessions:
        house.attendance.leave(session)
    assert set(house.files.looks.values()) == {1}
    assert len(house.cache.registry.disconnected) == SESSIONS
    late = house.enter().session
    house.die(late)
    house.attendance.leave(late)
    assert late not in house.cache.registry.disconnected, "its process is gone: its end is seen at once"
    assert house.files.looks.total() == SESSIONS + 1


def test_each_sweep_checks_a_few_sessions_in_turn(house: House) -> None:
    sessions = [house.enter().session for _ in range(SESSIONS)]
    for session in sessions:
        house.attendance.leave(session)
    house.files.looks.clear()
    for turn in (1, 2):
        for number in range(1, SESSIONS // LOOKS + 1):
            house.attendance.sweep()
            assert house.files.looks.total() == LOOKS * number + SESSIONS * (turn - 1)
        assert set(house.files.looks.values()) == {turn}
    for session in sessions[::2]:
        house.die(session)
    for _ in range(SESSIONS // LOOKS):
        house.attendance.sweep()
    assert sorted(house.cache.registry.disconnected) == sessions[1::2]
    assert len(os.listdir(house.files.folder)) == SESSIONS // 2


def test_a_session_that_was_fenced_off_leaves_no_file(house: House) -> None:
    first, second = (house.enter().session for _ in range(2))
    for session in (first, second):
        house.attendance.leave(session)
    house.cache.fence_off(first, 0.0)
    house.attendance.look_after(first)
    house.attendance.look_after(first)
    assert list(house.cache.registry.disconnected) == [second]
    assert [name.partition("-")[0] for name in os.listdir(house.files.folder)] == [str(second)]


def test_a_resumed_session_is_not_checked(house: House) -> None:
    ticket = house.enter()
    house.attendance.leave(ticket.session)
    house.files.looks.clear()
    hello: Any = Hello(2, "engine 0", "", "", ticket.session, ticket.token)
    back = house.attendance.open(hello, Peer(1, 1, frozenset()))
    assert (back.session, back.resumed) == (ticket.session, True)
    house.lives[back.session + 1000] = back.file
    house.attendance.sweep()
    assert not house.files.looks
