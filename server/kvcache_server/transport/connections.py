"""Connections that speak ZMTP in the daemon's loop, and whose messages are looked at when.

A turn of messages is short, so that doors and timers have theirs. Whoever has more to say waits, on its own side, and
those who wait are heard by turns. What a peer does not read piles up to a bound; until it reads, nothing is taken from
it.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from kvcache_server.transport.zmtp import GREETING, ROUTER, Receiver, Role, headers

LINGER = 1.0  # seconds for which a closed connection waits for its peer to read
LONG = 64 << 10  # bytes from which on a message is sent without copying it behind its header


class ZmtpConnection(asyncio.Protocol):
    """One peer of a socket of ours, which is `role`; `turns` hears it."""

    UNREAD = 1 << 20  # bytes that a peer leaves unread, before nothing more is taken from it

    __slots__ = ("_transport", "_turns", "cut", "paused", "receiver", "waiting")

    def __init__(self, turns: ZmtpServer[Any], role: Role = ROUTER) -> None:
        self.receiver = Receiver(role)
        self.cut = False  # whether what it says is of no interest any more
        self.paused = False  # whether what it is sent piles up
        self.waiting = False  # whether it is in the queue of those that have more to say
        self._turns = turns
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport.set_write_buffer_limits(self.UNREAD)
        self._transport.write(GREETING)
        self._turns.entered(self)

    def data_received(self, data: bytes) -> None:
        self.receiver.feed(data)
        self._turns.heard(self)

    def pause_writing(self) -> None:
        self.paused = True
        self.listen(False)

    def resume_writing(self) -> None:
        self.paused = False
        self._turns.go_on_with(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._turns.left(self)

    def listen(self, on: bool) -> None:
        """Read what it sends, or let it wait."""
        if self._transport is not None and not self.cut:
            (self._transport.resume_reading if on else self._transport.pause_reading)()

    @property
    def may_go_on(self) -> bool:
        """Whether what it has said may be answered: it reads what it is sent."""
        return not self.paused

    def send_parts(self, parts: Sequence[bytes]) -> None:
        """Send a message of several parts, if the peer is still there."""
        transport = self._transport
        if transport is None:
            return
        before = headers(parts)
        if len(parts[-1]) < LONG:
            transport.write(b"".join(each for pair in zip(before, parts, strict=True) for each in pair))
            return
        transport.write(b"".join(each for pair in zip(before, parts[:-1], strict=False) for each in pair) + before[-1])
        transport.write(parts[-1])

    def send_answers(self) -> None:
        """Send what the protocol wants to be sent."""
        if self._transport is not None:
            self._transport.write(b"".join(self.receiver.answers))
        self.receiver.answers.clear()

    def close(self) -> None:
        """Close it, once what is unsent has left, or soon; one that does not read, at once."""
        if self._transport is not None:
            transport = self._transport
            (transport.abort if self.paused else transport.close)()
            if transport.get_write_buffer_size():
                self._turns.loop.call_later(LINGER, transport.abort)


C = TypeVar("C", bound=ZmtpConnection)


class ZmtpServer(abc.ABC, Generic[C]):
    """Hears connections by turns. Whoever derives from it says what a message is answered with."""

    SECONDS = 0.01  # of messages, before doors and timers have their turn

    def __init__(self, loop: asyncio.AbstractEventLoop, answered: Callable[[], None] = lambda: None) -> None:
        """`answered()` follows each turn."""
        self.loop, self._answered = loop, answered
        self._waiting: deque[C] = deque()  # with messages that had no time yet; each once
        self._turn = self._until = 0.0  # the loop's time at which the turn began; when it is over

    @abc.abstractmethod
    def entered(self, connection: C) -> None:
        """It has connected."""

    @abc.abstractmethod
    def left(self, connection: C) -> None:
        """It has gone."""

    @abc.abstractmethod
    def _take(self, connection: C, until: float) -> bool:
        """Answer messages until that time, one at least. Returns whether there may be more."""

    def heard(self, connection: C) -> None:
        """Answer what has come by it, now or when its turn comes."""
        if connection.waiting:
            return
        self._take_now(connection)
        self._answered()

    def _take_now(self, connection: C) -> None:
        """Answer what it has said, or let it wait where this turn has had its time."""
        now = self.loop.time()  # the same as long as the loop looks through what has come at one time
        if now != self._turn:
            self._turn, self._until = now, time.monotonic() + self.SECONDS
        if self._waiting or self._take(connection, self._until):
            self._let_wait(connection)

    def go_on_with(self, connection: C) -> None:
        """Go on with one that has read what it was sent."""
        if not connection.waiting:
            self._let_wait(connection)

    def _let_wait(self, connection: C) -> None:
        connection.waiting = True
        connection.listen(False)
        if not self._waiting:
            self.loop.call_soon(self._go_on)
        self._waiting.append(connection)

    def _go_on(self) -> None:
        """Take a message of each connection that waits, again and again, until the turn is over."""
        until = time.monotonic() + self.SECONDS
        try:
            while self._waiting:
                connection = self._waiting.popleft()
                if connection.may_go_on and self._take(connection, 0.0):
                    self._waiting.append(connection)
                else:
                    connection.waiting = False
                    connection.listen(not connection.paused)
                if time.monotonic() > until:
                    break
        finally:
            if self._waiting:
                self.loop.call_soon(self._go_on)
            self._answered()
