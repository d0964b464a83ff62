"""The RequestSocket the connections that requests come by, one per session, each served in its turn.

A connection belongs to the session whose token it bears, in the routing id of its socket or else in its first message.
Until then it may say little, and there are few of its kind. The end of the connection is the end of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable

from kvcache_proto.codec import MAX_FRAME
from kvcache_proto.endpoint import socket_path, token_of
from kvcache_proto.errors import BadFrame, BadToken
from kvcache_server.transport.connections import LONG, ZmtpConnection, ZmtpServer
from kvcache_server.transport.sockets import Listener, Peer, SocketFile, choose_victim
from kvcache_server.transport.zmtp import CutOff, header

READ_BYTES = 256 << 10
LAST_READS = 8  # of what a session has sent that ends: more than the kernel keeps for it
MOST_UNREAD_BYTES = 8 << 20  # of replies that were due already; what is beyond that is dropped
HELD_BYTES = 64 << 20  # beginnings of frames, of all connections together
UNBOUND = 64  # connections that have shown no token


class Connection(ZmtpConnection):
    """One peer. `session` is whose it is, 0 as long as it has shown no token."""

    __slots__ = ("ends", "held", "peer", "reads", "session")

    def __init__(self, request_socket: RequestSocket, peer: Peer) -> None:
        super().__init__(request_socket)
        self.peer = peer
        self.session = 0
        self.held = 0  # bytes of the beginning of a frame, as the wire has them in its sum
        self.ends: list[Callable[[], object]] = []  # what follows once all that it has said is answered
        self.reads = 0  # how often more of that may be read

    def send(self, message: bytes) -> str:
        """Send a reply. Returns "", or why it is dropped: peer_gone, peer_slow."""
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
        """Return what has come and was not read yet, READ_BYTES at most, LAST_READS times."""
        self.reads -= 1
        if self._transport is None or self.reads < 0:
            return b""
        with contextlib.suppress(OSError):
            return os.read(self._transport.get_extra_info("socket").fileno(), READ_BYTES)
        return b""


class RequestSocket(ZmtpServer[Connection]):
    """Listens at the endpoint.

    `tokens` leads from a token to its session. `answer(connection, message)` answers a message, which may be an error:
    then it was none; `answered()` follows each turn. `lost(session)` is called where a session's connection has ended.
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
        self.cuts: Counter[str] = Counter()  # connections that were refused or ended, by reason
        self._bound: dict[int, Connection] = {}
        self._unbound: dict[Connection, None] = {}  # the one that came first is first
        self._held = 0
        self._listener = Listener(loop, socket_path(endpoint), endpoint, self._enter, self._count)

    @property
    def socket_file(self) -> SocketFile:
        return self._listener.socket_file

    def allow_users(self, uids: tuple[int, ...], gids: tuple[int, ...]) -> None:
        """Let these users and groups connect from now on, and nobody else. Raises OSError."""
        self._listener.allow_users(uids, gids)

    def figures(self) -> dict[str, int | dict[str, int]]:
        """Return how many connections there are, and how many were cut, by reason."""
        return {"open": len(self._bound) + len(self._unbound), "unbound": len(self._unbound), "cut": dict(self.cuts)}

    def close(self) -> None:
        """Take no more, and end those that there are. Not while the loop runs."""
        self._listener.close()
        self._lost = lambda session: None  # sessions outlive this daemon
        for connection in [*self._bound.values(), *self._unbound]:
            connection.cut = True
            connection.close()
        self.loop.run_until_complete(asyncio.sleep(0))  # replies that are unsent leave, and descriptors are closed

    # Connections.

    def _count(self, reason: str) -> None:
        self.cuts[reason] += 1

    def _enter(self, sock: socket.socket, peer: Peer) -> bool:
        if not self._listener.allows(peer):
            self._count("not_permitted")
            sock.close()
            return False
        self._listener.connect(sock, lambda: Connection(self, peer))
        return True

    def connected(self, connection: Connection) -> None:
        self._unbound[connection] = None
        if len(self._unbound) > UNBOUND:  # who has most of them waits for the others
            self._cut(choose_victim(self._unbound, lambda each: each.peer.uid), "crowded_out")

    def bind(self, connection: Connection, session: int) -> None:
        """Let the connection be the session's. Raises BadToken where one of them has another already."""
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
        """End the connection of a session that has ended."""
        if connection := self._bound.pop(session, None):
            connection.close()

    def _cut(self, connection: Connection, reason: str) -> None:
        self._count(reason)
        self._unbound.pop(connection, None)  # now: its end comes with a later turn
        connection.cut = True
        connection.close()

    # Messages.

    def drain(self, session: int, then: Callable[[], object]) -> None:
        """Answer all that the session has sent so far, by turns with the others; then call `then`, now or later."""
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
        """Let what was to follow once a session is heard out follow now. What is not answered yet never is."""
        connection = self._bound.get(session)
        if connection is not None and connection.ends:
            self._count("cut_short")
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        connection.cut = True  # nothing that comes counts any more
        while connection.ends:
            connection.ends.pop(0)()

    def _take(self, connection: Connection, until: float) -> bool:
        """Answer messages until that time, one at least. Returns whether there may be more."""
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

    def _show_token(self, connection: Connection) -> None:
        """Bind a connection that has become ready, if it shows a token."""
        session = self._tokens.get(token_of(connection.receiver.routing_id), 0)
        connection.receiver.routing_id = b""
        if session:
            try:
                self.bind(connection, session)
            except BadToken:
                self._cut(connection, "second_connection")

    def _hold(self, connection: Connection, size: int) -> None:
        """Note how much of an unfinished frame a connection has sent; cut those off that have most, past the bound."""
        self._held += size - connection.held
        connection.held = size
        while self._held > HELD_BYTES:
            largest = max(self._bound.values(), key=lambda each: each.held)
            self._held -= largest.held
            largest.held = 0
            self._cut(largest, "too_much_held")
