"""The wire: the connections that requests come by, one per session, each served in its turn.

A connection belongs to the session whose token it bears, in the routing id of its socket or else in its first message.
Until then it may say little, and there are few of its kind. The end of the connection is the end of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import cast

from kvcache_proto.codec import MAX_FRAME
from kvcache_proto.endpoint import socket_path, token_of
from kvcache_proto.errors import BadFrame, BadToken
from kvcache_server.sockets import Listener, Peer, Place
from kvcache_server.zmtp import GREETING, CutOff, Receiver, header

TURN_SECONDS = 0.01  # for messages, before doors and timers have their turn
READ_BYTES = 256 << 10
LAST_READS = 8  # of what a session has sent that ends: more than the kernel keeps for it
UNREAD_BYTES = 1 << 20  # replies that a peer leaves unread, before nothing more is taken from it
MOST_UNREAD_BYTES = 8 << 20  # of replies that were due already; what is beyond that is dropped
HELD_BYTES = 64 << 20  # beginnings of frames, of all connections together
UNBOUND = 64  # connections that have shown no token
LONG = 64 << 10  # bytes from which on a reply is sent without copying it behind its header


class Connection(asyncio.Protocol):
    """One peer. `session` is whose it is, 0 as long as it has shown no token."""

    __slots__ = ("_transport", "_wire", "cut", "held", "paused", "peer", "receiver", "session", "waiting")

    def __init__(self, wire: Wire, peer: Peer) -> None:
        self.peer = peer
        self.session = 0
        self.receiver = Receiver()
        self.cut = False  # whether what it says is of no interest any more
        self.held = 0  # bytes of the beginning of a frame, as the wire has them in its sum
        self.paused = False  # whether its replies pile up
        self.waiting = False  # whether it is in the wire's queue
        self._wire = wire
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport.set_write_buffer_limits(UNREAD_BYTES)
        self._transport.write(GREETING)
        self._wire.entered(self)

    def data_received(self, data: bytes) -> None:
        self.receiver.feed(data)
        self._wire.heard(self)

    def pause_writing(self) -> None:
        self.paused = True
        self.listen(False)

    def resume_writing(self) -> None:
        self.paused = False
        self._wire.go_on_with(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._wire.left(self)

    def listen(self, on: bool) -> None:
        """Read what it sends, or let it wait."""
        if self._transport is not None:
            (self._transport.resume_reading if on else self._transport.pause_reading)()

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

    def send_answers(self) -> None:
        """Send what the protocol wants to be sent."""
        if self._transport is not None:
            self._transport.write(b"".join(self.receiver.answers))
        self.receiver.answers.clear()

    def rest(self) -> bytes:
        """Return what has come and was not read yet, READ_BYTES at most."""
        if self._transport is None:
            return b""
        with contextlib.suppress(OSError):
            return os.read(self._transport.get_extra_info("socket").fileno(), READ_BYTES)
        return b""

    def close(self) -> None:
        """Close it, once what is unsent has left; one that does not read, at once."""
        if self._transport is not None:
            transport = self._transport
            (transport.abort if self.paused else transport.close)()


class Wire:
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
        self._loop, self._tokens = loop, tokens
        self._answer, self._answered, self._lost = answer, answered, lost
        self.cuts: Counter[str] = Counter()  # connections that were refused or ended, by reason
        self._bound: dict[int, Connection] = {}
        self._unbound: dict[Connection, None] = {}  # the one that came first is first
        self._coming: set[asyncio.Task[object]] = set()
        self._waiting: deque[Connection] = deque()  # with messages that had no time yet; each once
        self._held = 0
        self._turn = self._until = 0.0  # the loop's time at which the turn began; when it is over
        self._listener = Listener(loop, socket_path(endpoint), endpoint, self._enter, self._count)

    @property
    def place(self) -> Place:
        return self._listener.place

    def let_in(self, uids: tuple[int, ...], gids: tuple[int, ...]) -> None:
        """Let these users and groups connect from now on, and nobody else. Raises OSError."""
        self._listener.let_in(uids, gids)

    def figures(self) -> dict[str, int | dict[str, int]]:
        """Return how many connections there are, and how many were cut, by reason."""
        return {"open": len(self._bound) + len(self._unbound), "unbound": len(self._unbound), "cut": dict(self.cuts)}

    def close(self) -> None:
        """Take no more, and end those that there are. Not while the loop runs."""
        self._listener.close()
        for task in self._coming:
            task.cancel()
        self._lost = lambda session: None  # sessions outlive this daemon
        for connection in [*self._bound.values(), *self._unbound]:
            connection.cut = True
            connection.close()
        self._loop.run_until_complete(asyncio.sleep(0))  # replies that are unsent leave, and descriptors are closed

    # Connections.

    def _count(self, reason: str) -> None:
        self.cuts[reason] += 1

    def _enter(self, sock: socket.socket, peer: Peer) -> bool:
        if not self._listener.admits(peer):
            self._count("not_permitted")
            sock.close()
            return False
        task = self._loop.create_task(self._connect(sock, peer))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)
        return True

    async def _connect(self, sock: socket.socket, peer: Peer) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self, peer), sock)
        except OSError:  # it has gone already
            self._count("left")
            sock.close()

    def entered(self, connection: Connection) -> None:
        self._unbound[connection] = None
        if len(self._unbound) > UNBOUND:  # who has most of them waits for the others
            uid, _ = Counter(each.peer.uid for each in self._unbound).most_common(1)[0]
            self._cut(next(each for each in self._unbound if each.peer.uid == uid), "crowded_out")

    def bind(self, connection: Connection, session: int) -> None:
        """Let the connection be the session's. Raises BadToken where one of them has another already."""
        if connection.session or session in self._bound:
            raise BadToken("a session has one connection, and a connection one session")
        self._unbound.pop(connection, None)
        connection.session = session
        connection.receiver.limit = MAX_FRAME
        self._bound[session] = connection

    def left(self, connection: Connection) -> None:
        self._unbound.pop(connection, None)
        if self._bound.get(connection.session) is connection:
            self._take(connection, math.inf, to_the_end=True)
            del self._bound[connection.session]
            self._lost(connection.session)
            self._answered()
        self._hold(connection, 0)

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

    def heard(self, connection: Connection) -> None:
        """Answer what has come by it, now or when its turn comes."""
        if connection.waiting:
            return
        now = self._loop.time()  # the same as long as the loop looks through what has come at one time
        if now != self._turn:
            self._turn, self._until = now, time.monotonic() + TURN_SECONDS
        if self._waiting or self._take(connection, self._until):
            self._let_wait(connection)
        self._answered()

    def go_on_with(self, connection: Connection) -> None:
        """Go on with one that has read its replies."""
        if not connection.waiting:
            self._let_wait(connection)

    def hear_out(self, session: int) -> None:
        """Answer all that the session has sent so far."""
        connection = self._bound.get(session)
        if connection is None:
            return
        for _ in range(LAST_READS):
            self._take(connection, math.inf, to_the_end=True)
            rest = connection.rest()
            if not rest:
                break
            connection.receiver.feed(rest)
        self._answered()

    def _let_wait(self, connection: Connection) -> None:
        connection.waiting = True
        connection.listen(False)
        if not self._waiting:
            self._loop.call_soon(self._go_on)
        self._waiting.append(connection)

    def _go_on(self) -> None:
        """Take a message of each connection that waits, again and again, until the turn is over."""
        until = time.monotonic() + TURN_SECONDS
        try:
            while self._waiting:
                connection = self._waiting.popleft()
                if not connection.paused and self._take(connection, 0.0):
                    self._waiting.append(connection)
                else:
                    connection.waiting = False
                    connection.listen(not connection.paused)
                if time.monotonic() > until:
                    break
        finally:
            if self._waiting:
                self._loop.call_soon(self._go_on)
            self._answered()

    def _take(self, connection: Connection, until: float, to_the_end: bool = False) -> bool:
        """Answer messages until that time, one at least. Returns whether there may be more."""
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
            if message is None:
                if receiver.held != connection.held:
                    self._hold(connection, receiver.held)
                return False
            self._answer(connection, message)
            if (connection.paused and not to_the_end) or time.monotonic() > until:
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
