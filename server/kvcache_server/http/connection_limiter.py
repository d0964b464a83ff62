"""Limits on HTTP connections, so that they cannot hurt the loop that serves engines.

Connections are accepted at a bounded rate and limited in number, duration and bytes, one request each. Connections that
are not accepted yet wait in the kernel.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from typing import cast

from kvcache_proto.errors import ConfigError
from kvcache_server.rates import Rate
from kvcache_server.transport.sockets import Acceptor

A_SECOND, AT_ONCE = 200, 20  # connections; one costs the loop some 0.3 ms
OPEN = 32  # connections at one time
SECONDS = 10.0  # for which one may last
BYTES = 64 << 10  # that one may send, headers and body together
BACKLOG = 128
LINES_A_MINUTE = 20  # in the log, about requests that are not HTTP
LOOKS = 4  # collections of young objects; objects that survive them do not come from HTTP


def listen(setting: str, address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    """Return a socket that listens there. Raises ConfigError, which names the setting, if it cannot be bound."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((str(address), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"{setting} {address}:{port}: {error.strerror}") from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def quiet_logger(name: str, told: Callable[[], bool]) -> logging.Logger:
    """Return a logger of that name for aiohttp's own messages, one for each request that is not HTTP.

    `told()` counts a message and returns whether to log it, as one line.
    """
    logger = logging.getLogger(name)

    def filtered(record: logging.LogRecord) -> bool:
        what = f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else ''}"
        record.msg, record.args, record.exc_info = "http: " + " ".join(what.split()), (), None
        return told() and record.levelno > logging.DEBUG

    logger.setLevel(logging.DEBUG)  # so that `filtered` sees, and counts, every message
    logger.filters[:] = [filtered]
    return logger


class Connection(asyncio.Protocol):
    """One connection: passes data from its socket to the protocol `inner`, within the limits."""

    def __init__(self, inner: asyncio.Protocol, limiter: ConnectionLimiter) -> None:
        self._inner = inner
        self._limiter = limiter
        self._heard = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass
        self._limiter.entered(self)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._heard += len(data)
        if self._heard > BYTES:
            self.cut("too_long")
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.left(self)
        self._inner.connection_lost(exc)

    def cut(self, reason: str) -> None:
        if self._transport is not None:
            self._limiter.cuts[reason] += 1
            self._limiter.left(self)  # make room now: connection_lost comes in a later turn of the loop
            self._transport.abort()
            self._transport = None


class ConnectionLimiter:
    """Accepts connections from a listening socket, within the limits, until `close`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        seconds: float = SECONDS,
    ) -> None:
        """`protocol()` returns the protocol of one connection, which may last `seconds`."""
        self.cuts: Counter[str] = Counter()  # connections that were cut off, by reason
        self._loop, self._protocol, self._seconds = loop, protocol, seconds
        self._open: dict[Connection, asyncio.TimerHandle] = {}  # oldest first
        self._wait = 0  # calls of `collect` until the next collection; 0: none is due
        self._acceptor = Acceptor(loop, listener, "http", self._enter, self._count, Rate(A_SECOND, AT_ONCE))

    def close(self) -> None:
        """Accept no more connections and abort the open ones."""
        self._acceptor.close()
        for connection in list(self._open):
            connection.cut("stopped")

    def collect(self) -> None:
        """Free reference cycles that connections have left: an error of aiohttp's parser holds the frame that holds it.

        Only while no connection is open: an object that is in use during a collection becomes old, and the daemon never
        collects old objects. Call it a few times per second: it also keeps the number of young objects small.
        """
        if self._open or self._acceptor.coming:
            return
        if self._wait:
            self._wait -= 1
            if not self._wait:
                gc.collect(1)
        elif gc.get_count()[1] > LOOKS:
            gc.freeze()

    def _enter(self, sock: socket.socket, address: object) -> bool:
        self._acceptor.connect(sock, lambda: Connection(self._protocol(), self))
        return True

    def _count(self, reason: str) -> None:
        self.cuts[reason] += 1

    def entered(self, connection: Connection) -> None:
        if len(self._open) >= OPEN:
            # Answers are quick, so the oldest connection is one that sends no request or does not read.
            next(iter(self._open)).cut("crowded_out")
        self._open[connection] = self._loop.call_later(self._seconds, connection.cut, "too_slow")

    def left(self, connection: Connection) -> None:
        self._wait = 2  # during the first one aiohttp may still be cleaning up
        timer = self._open.pop(connection, None)
        if timer is not None:
            timer.cancel()
