"""Connections that speak ZMTP in the daemon's loop, served round-robin.

The loop spends a short time slice on messages, so that handshakes and timers are not delayed. A connection with more
messages than fit waits in a queue, and is not read meanwhile. Replies that a peer does not read are buffered up to a
limit; beyond that, nothing is read from it until it reads again.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, cast

from kvcache_server.transport.zmtp import GREETING, ROUTER, Receiver, Role, headers

LINGER = 1.0  # seconds for which a closed connection waits for its peer to read the rest
LONG = 64 << 10  # bytes; a message of that size or more is sent without being copied behind its header


class ZmtpConnection(asyncio.Protocol):
    """The connection of one peer to a socket of ours with the role `role`; `server` handles its messages."""

    UNREAD = 1 << 20  # bytes that a peer may leave unread before we stop reading from it

    __slots__ = ("_server", "_transport", "cut", "paused", "receiver", "waiting")

    def __init__(
        self, server: ZmtpServer[Any], role: Role = ROUTER, limit_of: Callable[[bytes], int] | None = None
    ) -> None:
        self.receiver = Receiver(role, limit_of)
        self.cut = False  # whether its further messages are ignored
        self.paused = False  # whether it leaves too much unread
        self.waiting = False  # whether it is in the server's queue
        self._server = server
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass
        self._transport.set_write_buffer_limits(self.UNREAD)
        self._transport.write(GREETING)
        self._server.connected(self)

    def data_received(self, data: bytes) -> None:
        self.receiver.feed(data)
        self._server.received(self)

    def pause_writing(self) -> None:
        self.paused = True
        self.listen(False)

    def resume_writing(self) -> None:
        self.paused = False
        self._server.resume(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.disconnected(self)

    def listen(self, on: bool) -> None:
        """Start or stop reading from the peer."""
        if self._transport is not None and not self.cut:
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    @property
    def may_answer(self) -> bool:
        """Whether its messages may be answered: the peer reads the replies."""
        return not self.paused

    def send_parts(self, parts: Sequence[bytes]) -> None:
        """Send a message of several parts, if the peer is still connected."""
        transport = self._transport
        if transport is None:
            return
        *head, last = (piece for pair in zip(headers(parts), parts, strict=True) for piece in pair)
        if len(last) < LONG:
            transport.write(b"".join((*head, last)))
        else:
            transport.write(b"".join(head))
            transport.write(last)

    def send_answers(self) -> None:
        """Send the protocol's own answers, such as READY and PONG."""
        if self._transport is not None:
            self._transport.write(b"".join(self.receiver.answers))
        self.receiver.answers.clear()

    def close(self) -> None:
        """Close the connection once everything is sent, or after LINGER; at once if the peer does not read."""
        if self._transport is not None:
            transport = self._transport
            (transport.abort if self.paused else transport.close)()
            if transport.get_write_buffer_size():
                self._server.loop.call_later(LINGER, transport.abort)


C = TypeVar("C", bound=ZmtpConnection)


class ZmtpServer(abc.ABC, Generic[C]):
    """Serves connections round-robin. Subclasses answer the messages."""

    SECONDS = 0.01  # of a time slice for messages

    def __init__(self, loop: asyncio.AbstractEventLoop, answered: Callable[[], None] = lambda: None) -> None:
        """`answered()` is called after each time slice."""
        self.loop, self._answered = loop, answered
        self.cuts: Counter[str] = Counter()  # refused and terminated connections, by reason
        self._waiting: deque[C] = deque()  # connections with messages that did not fit in a slice; each once
        self._slice = self._until = 0.0  # the loop's time at which the slice began; when it ends

    @abc.abstractmethod
    def connected(self, connection: C) -> None:
        """The peer has connected."""

    @abc.abstractmethod
    def disconnected(self, connection: C) -> None:
        """The peer has disconnected."""

    @abc.abstractmethod
    def _take(self, connection: C, until: float) -> bool:
        """Answer messages until `until`, at least one. Return True if there may be more."""

    def count(self, reason: str) -> None:
        """Count a connection that was refused or terminated."""
        self.cuts[reason] += 1

    def close_all(self, connections: Iterable[C]) -> None:
        """Close connections, and ignore further messages from them. The loop must not be running."""
        for connection in list(connections):
            connection.cut = True
            connection.close()
        self.loop.run_until_complete(asyncio.sleep(0))  # sends unsent messages, and closes descriptors

    def received(self, connection: C) -> None:
        """Answer received messages, now or when it is the connection's turn."""
        if connection.waiting:
            return
        self._take_now(connection)
        self._answered()

    def _take_now(self, connection: C) -> None:
        """Answer messages, or let the connection wait if the slice is used up."""
        now = self.loop.time()  # constant during one iteration of the loop
        if now != self._slice:
            self._slice, self._until = now, time.monotonic() + self.SECONDS
        if self._waiting or self._take(connection, self._until):
            self._enqueue(connection)

    def resume(self, connection: C) -> None:
        """Resume a connection whose peer has read its replies."""
        if not connection.waiting:
            self._enqueue(connection)

    def _enqueue(self, connection: C) -> None:
        connection.waiting = True
        connection.listen(False)
        if not self._waiting:
            self.loop.call_soon(self._continue)
        self._waiting.append(connection)

    def _continue(self) -> None:
        """Answer one message of each waiting connection, over and over, until the slice is used up."""
        until = time.monotonic() + self.SECONDS
        try:
            while self._waiting:
                connection = self._waiting.popleft()
                if connection.may_answer and self._take(connection, 0.0):
                    self._waiting.append(connection)
                else:
                    connection.waiting = False
                    connection.listen(not connection.paused)
                if time.monotonic() > until:
                    break
        finally:
            if self._waiting:
                self.loop.call_soon(self._continue)
            self._answered()
