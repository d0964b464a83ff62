"""The request socket: the connections that carry requests, one per session, served round-robin.

A connection belongs to the session whose token it presents, in the routing id of its socket or in its first message.
Until then, its frames and the number of such connections are limited. The end of the connection is the end of the
session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable

from kvcache_proto.codec import MAX_FRAME, MAX_HANDSHAKE_FRAME
from kvcache_proto.endpoint import socket_path, token_of
from kvcache_proto.errors import BadFrame, BadToken
from kvcache_server.status import Connections
from kvcache_server.transport.connections import LONG, ZmtpConnection, ZmtpServer
from kvcache_server.transport.sockets import Listener, Peer, choose_victim
from kvcache_server.transport.zmtp import CutOff, header

READ_BYTES = 256 << 10
LAST_READS = 8  # of the data that an ending session has sent: more than the kernel's buffer contains
MOST_UNREAD_BYTES = 8 << 20  # of unread replies; further ones are dropped
HELD_BYTES = 64 << 20  # incomplete frames of all connections together
UNBOUND = 64  # connections without a token


class Connection(ZmtpConnection):
    """The connection of one peer. `session` is 0 until it has presented a token."""

    __slots__ = ("ends", "held", "peer", "reads", "session")

    def __init__(self, request_socket: RequestSocket, peer: Peer) -> None:
        super().__init__(request_socket, limit_of=request_socket.limit_of)
        self.peer = peer
        self.session = 0
        self.held = 0  # bytes of an incomplete frame that the socket has counted
        self.ends: list[Callable[[], object]] = []  # called once all its messages are answered
        self.reads = 0  # number of further reads that `ends` may take

    def send(self, message: bytes) -> str:
        """Send a reply. Return "", or the reason that it was dropped: peer_gone, peer_slow."""
        transport = self._transport
        if transport is None:
            return "peer_gone"
        size = len(message)
        if self.paused and transport.get_write_buffer_size() + size > MOST_UNREAD_BYTES:
            return "peer_slow"
        if size < LONG:
            transport.write(header(size) + message)
        else:
            transport.write(header(size))
            transport.write(message)
        return ""

    @property
    def may_answer(self) -> bool:
        return not self.paused or bool(self.ends)

    def rest(self) -> bytes:
        """Read more data from the peer: at most READ_BYTES, and at most LAST_READS times."""
        self.reads -= 1
        if self._transport is None or self.reads < 0:
            return b""
        with contextlib.suppress(OSError):
            return os.read(self._transport.get_extra_info("socket").fileno(), READ_BYTES)
        return b""


class RequestSocket(ZmtpServer[Connection]):
    """Listens at the endpoint.

    `tokens` maps tokens to sessions. `answer(connection, message)` answers a message, or an invalid one, given as the
    error. `answered()` is called after each time slice, `lost(session)` when a session's connection has ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: str,
        tokens: dict[bytes, int],
        answer: Callable[[Connection, bytes | BadFrame], None],
        answered: Callable[[], None],
        lost: Callable[[int], None],
    ) -> None:
        """Bind the socket. Raises EndpointTaken, ConfigError, NotPermitted."""
        super().__init__(loop, answered)
        self._tokens, self._answer, self._lost = tokens, answer, lost
        self._bound: dict[int, Connection] = {}
        self._unbound: dict[Connection, None] = {}  # oldest first
        self._held = 0
        self.listener = Listener(loop, socket_path(endpoint), endpoint, self._enter, self.count)

    def figures(self) -> Connections:
        return Connections(len(self._bound) + len(self._unbound), len(self._unbound), dict(self.cuts))

    def close(self) -> None:
        """Stop accepting, and close all connections. The loop must not be running."""
        self.listener.close()
        self._lost = lambda session: None  # sessions outlive this daemon
        self.close_all([*self._bound.values(), *self._unbound])

    # Connections.

    def _enter(self, sock: socket.socket, peer: Peer) -> bool:
        return self.listener.admit(sock, peer, lambda: Connection(self, peer))

    def connected(self, connection: Connection) -> None:
        self._unbound[connection] = None
        if len(self._unbound) > UNBOUND:  # the user with the most of them loses one
            self._cut(choose_victim(self._unbound, lambda each: each.peer.uid), "crowded_out")

    def bind(self, connection: Connection, session: int) -> None:
        """Bind the connection to the session. Raises BadToken if either is already bound."""
        if connection.session or session in self._bound:
            raise BadToken("a session has one connection, and a connection one session")
        self._unbound.pop(connection, None)
        connection.session = session
        connection.receiver.limit = MAX_FRAME
        self._bound[session] = connection

    def disconnected(self, connection: Connection) -> None:
        self._unbound.pop(connection, None)
        if self._bound.get(connection.session) is connection:
            self._drain(connection, lambda: self._gone(connection))
        else:
            self._hold(connection, 0)

    def _gone(self, connection: Connection) -> None:
        self._hold(connection, 0)
        if self._bound.get(connection.session) is connection:
            del self._bound[connection.session]
            self._lost(connection.session)

    def leave(self, session: int) -> None:
        """Close the connection of a session that has ended."""
        if connection := self._bound.pop(session, None):
            connection.close()

    def _cut(self, connection: Connection, reason: str) -> None:
        self.count(reason)
        self._unbound.pop(connection, None)  # now: asyncio reports the end in a later turn
        connection.cut = True
        connection.close()

    # Messages.

    def drain(self, session: int, then: Callable[[], object]) -> None:
        """Answer all messages that the session has sent so far, in turn with other sessions; then call `then`, now or
        later."""
        connection = self._bound.get(session)
        if connection is None:
            then()
        else:
            self._drain(connection, then)

    def _drain(self, connection: Connection, then: Callable[[], object]) -> None:
        connection.ends.append(then)
        if len(connection.ends) > 1:
            return
        connection.reads = LAST_READS
        if not connection.waiting:
            self._take_now(connection)
        self._answered()

    def cut_short(self, session: int) -> None:
        """Stop draining a session and call its `then` now. Unanswered requests are dropped."""
        connection = self._bound.get(session)
        if connection is not None and connection.ends:
            self.count("cut_short")
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.cut = True  # further messages are ignored
        while connection.ends:
            connection.ends.pop(0)()

    def _take(self, connection: Connection, until: float) -> bool:
        """Answer messages until `until`, at least one. Return True if there may be more."""
        more = self._take_some(connection, until)
        if connection.ends and not more:
            self._end(connection)
        return more

    def _take_some(self, connection: Connection, until: float) -> bool:
        receiver = connection.receiver
        while not connection.cut:
            message: bytes | BadFrame | None
            try:
                message = receiver.take()
            except BadFrame as error:
                message = error
            except CutOff:
                self._cut(connection, "bad_protocol")
                return False
            if receiver.answers:
                connection.send_answers()
            if receiver.routing_id:
                self._show_token(connection)
                if connection.cut:
                    return False
            if message is None and connection.ends and (rest := connection.rest()):
                receiver.feed(rest)
                continue
            if message is None:
                if receiver.held != connection.held:
                    self._hold(connection, receiver.held)
                return False
            self._answer(connection, message)
            if not connection.may_answer or time.monotonic() > until:
                return True
        return False

    def limit_of(self, routing_id: bytes) -> int:
        """Return the size in bytes of the longest frame that a peer with this routing id may send at first."""
        return MAX_FRAME if token_of(routing_id) in self._tokens else MAX_HANDSHAKE_FRAME

    def _show_token(self, connection: Connection) -> None:
        """Bind a connection whose handshake is complete, if its routing id has a token."""
        session = self._tokens.get(token_of(connection.receiver.routing_id), 0)
        connection.receiver.routing_id = b""
        if session:
            try:
                self.bind(connection, session)
            except BadToken:
                self._cut(connection, "second_connection")

    def _hold(self, connection: Connection, size: int) -> None:
        """Count a connection's incomplete frame; beyond the bound, disconnect the connections with the most bytes."""
        self._held += size - connection.held
        connection.held = size
        while self._held > HELD_BYTES:
            largest = max(self._bound.values(), key=lambda each: each.held)
            self._held -= largest.held
            largest.held = 0
            self._cut(largest, "too_much_held")
