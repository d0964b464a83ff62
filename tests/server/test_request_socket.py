"""The request socket in its own loop: ending sessions are drained, and others do not wait for that."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcache_proto.codec import MAX_HANDSHAKE_FRAME
from kvcache_proto.endpoint import routing_id, socket_path
from kvcache_proto.errors import BadFrame
from kvcache_server.daemon.request_socket import Connection, RequestSocket
from kvcache_server.transport.zmtp import GREETING, header

TOKENS = {b"a" * 16: 1, b"b" * 16: 2}
LATER = b"c" * 16  # of session 3, which connects later
SLOW = 0.001  # seconds that each message takes
MANY = 200


class Served:
    """A wire that answers each message with as many bytes, and the peers of two sessions."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.heard: list[tuple[int, bytes]] = []
        self.lost: list[int] = []
        self.endpoint = f"ipc://{folder}/kv.sock"
        tokens = {**TOKENS, LATER: 3}
        self.wire = RequestSocket(self.loop, self.endpoint, tokens, self._answer, lambda: None, self._lose)
        self.peers = {session: self.connect(token) for token, session in TOKENS.items()}
        self.run(lambda: self.wire.figures().open == 2 and self.wire.figures().unbound == 0)

    def connect(self, token: bytes, said: bytes = b"") -> socket.socket:
        """Connect a peer that sends its handshake and `said` at once."""
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(socket_path(self.endpoint))
        name = routing_id(token)
        ready = b"\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity" + len(name).to_bytes(4, "big") + name
        peer.sendall(GREETING + bytes((4, len(ready))) + ready + said)
        return peer

    def _answer(self, connection: Connection, message: bytes | BadFrame) -> None:
        assert isinstance(message, bytes)
        time.sleep(SLOW)
        self.heard.append((connection.session, message))
        connection.send(message)

    def _lose(self, session: int) -> None:
        self.lost.append(session)

    def say(self, session: int, count: int) -> None:
        for number in range(count):
            self.peers[session].sendall(header(9) + b"%9d" % number)

    def run(self, until: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not until():
                await asyncio.sleep(0)

        self.loop.run_until_complete(asyncio.wait_for(wait(), 30))

    def everything_of(self, session: int) -> list[int]:
        return [int(message) for whose, message in self.heard if whose == session]


@pytest.fixture
def served(short_folder: Path) -> Iterator[Served]:
    served = Served(short_folder)
    yield served
    served.wire.close()
    served.loop.close()
    for peer in served.peers.values():
        peer.close()


def test_a_long_message_may_come_with_the_handshake(served: Served) -> None:
    """A connection that presents a session's token in its routing id is bound before its first message is taken."""
    long = bytes(MAX_HANDSHAKE_FRAME + 1)
    with served.connect(LATER, header(len(long)) + long):
        served.run(lambda: bool(served.heard))
    assert served.heard == [(3, long)]


def test_a_second_connection_of_a_session_is_not_heard(served: Served) -> None:
    with served.connect(next(iter(TOKENS)), header(3) + b"abc"):
        served.run(lambda: served.wire.figures().cut == {"second_connection": 1})
        served.say(2, 1)
        served.run(lambda: bool(served.heard))
    assert served.heard == [(2, b"%9d" % 0)]


def test_a_session_whose_door_closes_is_drained_in_turn(served: Served) -> None:
    served.say(1, MANY)
    served.say(2, 1)
    ended: list[int] = []
    served.wire.drain(1, lambda: ended.append(len(served.everything_of(1))))
    assert len(served.heard) < MANY and not ended, "others wait for all that it has said"
    served.run(lambda: bool(ended))
    assert ended == [MANY] and served.everything_of(1) == list(range(MANY))
    assert served.heard.index((2, b"%9d" % 0)) < MANY
    served.say(1, 1)
    served.say(2, 1)
    served.run(lambda: len(served.everything_of(2)) == 2)
    assert len(served.everything_of(1)) == MANY, "what comes after the end is of no interest"
    served.wire.leave(1)
    served.run(lambda: served.wire.figures().open == 1)


def test_a_session_whose_connection_ends_is_drained_in_turn(served: Served) -> None:
    served.say(1, MANY)
    served.say(2, 1)
    served.run(lambda: len(served.heard) >= 2)
    served.peers[1].close()  # with answers unread: to write one more fails
    served.run(lambda: bool(served.lost))
    assert served.lost == [1] and served.everything_of(1) == list(range(MANY))
    assert served.heard.index((2, b"%9d" % 0)) < MANY
    assert served.wire.figures().open == 1


def test_a_client_reconnects_while_both_connections_of_its_session_are_ending(served: Served) -> None:
    served.say(1, MANY)
    ended: list[str] = []
    served.wire.drain(1, lambda: ended.append("door"))
    served.peers[1].close()
    served.wire.drain(1, lambda: ended.append("again"))
    heard = len(served.everything_of(1))
    assert heard < MANY and not ended
    served.wire.cut_short(1)
    assert ended == ["door", "again"] and len(served.everything_of(1)) == heard
    assert served.wire.figures().cut == {"cut_short": 1}
    served.wire.cut_short(2)  # which is not about to end
    served.say(2, 3)
    served.run(lambda: len(served.everything_of(2)) == 3)
    assert len(served.everything_of(1)) == heard
