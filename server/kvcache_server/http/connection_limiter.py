"""How HTTP clients come in: a few at a time, each for one request and a short while, so that they cannot hurt the loop.

The daemon's loop serves engines; whoever can reach the port shares it with them. So connections are taken at a bounded
rate, bounded in number, in time and in bytes, whatever is said in them; what waits meanwhile waits in the kernel.
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
OPEN = 32  # at one time
SECONDS = 10.0  # of one connection, whatever it does
BYTES = 64 << 10  # that one may send, head and body together
BACKLOG = 128
LINES_A_MINUTE = 20  # of a log, about requests that are no HTTP
LOOKS = 4  # of the garbage collector at what is new, and what survives them is none of HTTP's


def listen(setting: str, address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    """Return a socket that listens there. Raises ConfigError, which names the setting, where none can be had."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((str(address), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"{setting} {address}:{port}: {error.strerror}") from None


def where(listener: socket.socket) -> str:
    """Return the URL of what listens there."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def quiet(name: str, told: Callable[[], bool]) -> logging.Logger:
    """Return a log of that name for aiohttp's own words, which it has for each request that is no HTTP.

    `told()` counts one, and returns whether it may be logged: in one line then.
    """
    spared = logging.getLogger(name)

    def sparing(record: logging.LogRecord) -> bool:
        what = f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else ''}"
        record.msg, record.args, record.exc_info = "http: " + " ".join(what.split()), (), None
        return told() and record.levelno > logging.DEBUG

    spared.setLevel(logging.DEBUG)  # what is not told is counted
    spared.filters[:] = [sparing]
    return spared


class Connection(asyncio.Protocol):
    """One connection, between its socket and the protocol that understands what is said in it."""

    def __init__(self, inner: asyncio.Protocol, limiter: ConnectionLimiter) -> None:
        self._inner = inner
        self._limiter = limiter
        self._heard = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
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
        """End it at once, without a word."""
        if self._transport is not None:
            self._limiter.cuts[reason] += 1
            self._limiter.left(self)  # now, for the next one that comes at once; its end comes with a later turn
            self._transport.abort()
            self._transport = None


class ConnectionLimiter:
    """Takes connections from a listening socket for as long as it is open."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        seconds: float = SECONDS,
    ) -> None:
        """`protocol()` makes what serves one connection, for `seconds` at most."""
        self.cuts: Counter[str] = Counter()  # connections that were ended, by reason
        self._loop, self._protocol, self._seconds = loop, protocol, seconds
        self._open: dict[Connection, asyncio.TimerHandle] = {}  # the one that came first is first
        self._wait = 0  # calls of `collect` until what has left is looked through; 0 where nobody has
        self._acceptor = Acceptor(loop, listener, "http", self._enter, self._count, Rate(A_SECOND, AT_ONCE))

    def close(self) -> None:
        """Take no more, and end those that are there."""
        self._acceptor.close()
        for connection in list(self._open):
            connection.cut("stopped")

    def collect(self) -> None:
        """Free what connections have left in cycles: an error of aiohttp's parser holds the frame that holds it.

        Only while nobody is here, for what is in use at this look becomes old, and the old is never looked at. Call it
        a few times a second: it also sees to it that this look has little to look through.
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
            # Answers are made at once: who has been here longest is who does not ask, or does not listen.
            next(iter(self._open)).cut("crowded_out")
        self._open[connection] = self._loop.call_later(self._seconds, connection.cut, "too_slow")

    def left(self, connection: Connection) -> None:
        self._wait = 2  # in the first one aiohttp may still be at work on its end
        timer = self._open.pop(connection, None)
        if timer is not None:
            timer.cancel()
