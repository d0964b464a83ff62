"""Batches of commands to Redis or Valkey, whose values go directly between the socket and the caller's memory.

redis-py connects, authenticates, and asks sentinels and clusters for the places of keys. Commands and replies are not
left to it: it copies a value twice before it sends it, and once after it has received it, each time with the
interpreter's lock.
"""

from __future__ import annotations

import functools
import io
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvcache_tiers.backend import Failed
from kvcache_tiers.redis_settings import Settings

Buffer = bytes | memoryview
Command = Sequence[bytes | list[Buffer]]  # its name, a key, and the rest; a list is one argument in several pieces
Take = Callable[[int, "Replies"], None]  # reads the data of the reply to a command, by its number

SMALL = 32 << 10  # bytes; less is copied, so that it needs no system call of its own
AHEAD = 64 << 10  # bytes that are received before their place is known, and copied
MOST_LINE = 64 << 10  # bytes of a reply's first line
MOST_OWN = 4 << 20  # bytes of the replies to a command of redis-py's own
MOST_DATA = 512 << 20  # bytes of a reply's data; by default, servers hold no longer strings
STALLS = 3  # times the timeout that the replies of one exchange may take, and
SLOWEST = 128 << 10  # bytes that must come in each second beyond that
NO_ROOM = b"-OOM"
WRONG_TYPE = b"-WRONGTYPE"
MOVING = (b"-ASK", b"-TRYAGAIN")  # the key's slot is on its way to another node of the cluster
_PLAIN = (b"+", b":", b"$", NO_ROOM, WRONG_TYPE, *MOVING)
_DATA = re.compile(rb"\$(-1|[0-9]{1,18})")
# The errors of redis-py, also for invalid replies.
_ERRORS = (
    *(OSError, redis.RedisError, RedisClusterException),
    *(ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError),
)


def pack(commands: Sequence[Command]) -> list[Buffer]:
    """Return the buffers to be sent."""
    packed: list[Buffer] = []
    text = bytearray()
    for command in commands:
        text += b"*%d\r\n" % len(command)
        for argument in command:
            pieces = argument if isinstance(argument, list) else [argument]
            text += b"$%d\r\n" % sum(len(piece) for piece in pieces)
            for piece in pieces:
                if len(piece) < SMALL:
                    text += piece
                else:
                    packed += [bytes(text), piece]
                    text.clear()
            text += b"\r\n"
    packed.append(bytes(text))
    return packed


class Replies:
    """The replies that come from a socket, in order. All methods raise OSError, also for invalid replies.

    Attributes:
        left: bytes of the present reply's data that were not read.
    """

    def __init__(self, source: socket.socket, timeout: float) -> None:
        """All replies together may take STALLS * `timeout` seconds, and one more for each SLOWEST bytes."""
        self.left = 0
        self._file = io.BufferedReader(_Timed(source, timeout), AHEAD)
        self._has_data = False

    def next(self) -> bytes:
        """Return the first line of the next reply: `+OK`, `:1`, `$5` if 5 bytes of data follow, `$-1`, `-ERR why`."""
        self.finish()
        line = self._line()
        if line.startswith(b"$"):
            match = _DATA.fullmatch(line)
            size = int(match[1]) if match else MOST_DATA + 1
            if size > MOST_DATA:
                raise _no_reply(line)
            self._has_data, self.left = size >= 0, max(0, size)
        elif not line.startswith((b"+", b"-", b":")):
            raise _no_reply(line)
        return line

    def read(self, size: int) -> bytes:
        """Return the next bytes of the reply's data, `size` of them, or all that are left."""
        data = self._file.read(min(size, self.left))
        self.left -= len(data)
        return data

    def read_into(self, buffer: memoryview) -> None:
        """Fill a buffer that is not longer than the data left."""
        self.left -= self._file.readinto(buffer)

    def finish(self) -> None:
        """Skip the data that was not read."""
        while self.left:
            self.read(AHEAD)
        if self._has_data:
            self._has_data = False
            if line := self._line():
                raise _no_reply(line)

    def _line(self) -> bytes:
        line = self._file.readline(MOST_LINE)
        if not line.endswith(b"\r\n"):
            raise _no_reply(line)
        return line[:-2]


class _Timed(io.RawIOBase):
    """A socket to read from, which may not be slower than Replies allows."""

    def __init__(self, source: socket.socket, timeout: float) -> None:
        self._socket, self._until = source, time.monotonic() + STALLS * timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._socket.recv_into(buffer)
        if not size:
            raise ConnectionResetError("the server closed the connection")
        self._until += size / SLOWEST
        if time.monotonic() > self._until:
            raise TimeoutError("the server answers too slowly")
        return size


def _no_reply(line: bytes) -> ConnectionError:
    return ConnectionError(f"the server sent what is no reply: {line[:40]!r}")


class _Bounded:
    """A socket for redis-py, which reads the replies to its own commands without any bound of size or time."""

    def __init__(self, inner: Any, timeout: float) -> None:
        self.inner, self._timeout = inner, timeout
        self._left, self._until = MOST_OWN, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sendall(self, data: Buffer) -> None:
        self._left, self._until = MOST_OWN, time.monotonic() + STALLS * self._timeout
        self.inner.sendall(data)

    def recv(self, size: int, flags: int = 0) -> bytes:
        data: bytes = self.inner.recv(size, flags)
        if not flags:  # else redis-py peeks whether an idle connection has ended
            self._spend(len(data))
        return data

    def recv_into(self, buffer: Any, *rest: int) -> int:
        size: int = self.inner.recv_into(buffer, *rest)
        self._spend(size)
        return size

    def _spend(self, size: int) -> None:
        self._left -= size
        if size and (self._left < 0 or time.monotonic() > self._until):  # at an end, redis-py says so itself
            raise ConnectionError("the server answers too much, or too slowly")


@functools.cache
def _bounded(kind: Any) -> Any:
    """Return a class of connections like `kind`, whose sockets are bounded while redis-py reads from them."""
    if getattr(kind, "bounded", False):
        return kind

    def connect(self: Any) -> Any:
        return _Bounded(kind._connect(self), self.socket_timeout)

    return type(kind.__name__, (kind,), {"bounded": True, "_connect": connect})


class Link:
    """A server, the master that sentinels name, or a cluster. All methods may be called from several threads."""

    def __init__(self, settings: Settings) -> None:
        """Connect. Raises Failed."""
        self._settings = settings
        self._cluster: Any = None  # if it is one
        self._sentinels: list[Any] = []
        self._outdated = False  # the cluster's slot places
        try:
            self._client = self._connect()
        except _ERRORS as error:
            raise self._failed(error) from None

    def run(
        self, commands: Sequence[Command], take: Take | None = None, expected: tuple[bytes, ...] = ()
    ) -> list[bytes]:
        """Return the first lines of the replies; `take` is called if data follows, and need not read all of it.

        A server executes the commands in their order, but a cluster's nodes do not wait for each other. Errors raise
        Failed, except those of NO_ROOM, WRONG_TYPE and MOVING, and those `expected`.
        """
        lines = [b""] * len(commands)
        todo: Sequence[int] = range(len(commands))
        try:
            for _ in range(2):  # again if a node of a cluster had to give away slots
                if todo and self._outdated:
                    self._outdated = False
                    if self._cluster is not None:
                        self._cluster.nodes_manager.initialize()
                for pool, numbers in self._by_pool(commands, todo):
                    self._exchange(pool, commands, numbers, lines, take)
                todo = [number for number in todo if lines[number].startswith(b"-MOVED")]
                self._outdated |= bool(todo)
        except _ERRORS as error:
            self._outdated = True
            raise self._failed(error) from None
        for line in lines:
            if not line.startswith((*_PLAIN, *expected)):
                raise self._failed(line[1:].decode(errors="replace"))
        return lines

    def close(self) -> None:
        for each in [self._client, *self._sentinels]:
            each.close()

    def _connect(self) -> Any:
        own = self._settings
        common: dict[str, Any] = {
            "socket_timeout": own.timeout,
            "socket_connect_timeout": own.timeout,
            "protocol": 2,  # in which servers send nothing without a request
        }
        if own.tls:
            common |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
            common |= {"ssl_ca_certs": own.ca or None}
            common |= {"ssl_certfile": own.cert or None, "ssl_keyfile": own.key or None}
        login: dict[str, Any] = {"username": own.user or None, "password": own.password or None}
        once = Retry(NoBackoff(), 0)  # callers should not wait
        if own.cluster:
            nodes = [ClusterNode(host, port) for host, port in own.hosts]
            self._cluster = redis.RedisCluster(startup_nodes=nodes, retry=once, **login, **common)
            return self._cluster
        if own.sentinel:
            asked = {**common, "retry": once, "password": own.sentinel_password or None}
            sentinel = Sentinel(own.hosts, sentinel_kwargs=asked, retry=once, db=own.database, **login, **common)
            self._sentinels = sentinel.sentinels
            return sentinel.master_for(own.sentinel)
        where: dict[str, Any] = {"unix_socket_path": own.path}
        if own.hosts:
            ((host, port),) = own.hosts
            where = {"host": host, "port": port}
        return redis.Redis(**where, retry=once, db=own.database, **login, **common)

    def _by_pool(self, commands: Sequence[Command], numbers: Sequence[int]) -> list[tuple[Any, list[int]]]:
        """Return the connection pools of the servers that have the keys, with the commands' numbers."""
        if self._cluster is None:
            return [(self._client.connection_pool, list(numbers))] if numbers else []
        found: dict[Any, list[int]] = {}
        for number in numbers:
            node = self._cluster.get_node_from_key(commands[number][1])
            found.setdefault(self._cluster.get_redis_connection(node).connection_pool, []).append(number)
        return list(found.items())

    def _exchange(
        self, pool: Any, commands: Sequence[Command], numbers: list[int], lines: list[bytes], take: Take | None
    ) -> None:
        """Send the commands of these numbers, and enter the replies' first lines."""
        pool.connection_class = _bounded(pool.connection_class)
        connection = pool.get_connection()
        try:
            connection.send_packed_command(pack([commands[number] for number in numbers]))
            source = getattr(connection._sock, "inner", connection._sock)  # a cluster has older connections
            replies = Replies(source, self._settings.timeout)
            for number in numbers:
                lines[number] = replies.next()
                if take is not None and replies.left:
                    take(number, replies)
            replies.finish()
            if any(lines[number].startswith(b"-READONLY") for number in numbers):
                connection.disconnect()  # no longer the master: ask the sentinels for the new one
        except BaseException:
            connection.disconnect()  # replies are left in it
            raise
        finally:
            pool.release(connection)

    def _failed(self, why: Exception | str) -> Failed:
        text = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        text = self._settings.without_passwords(text)  # before it is cut: no part of a password remains
        return Failed(f"{self._settings.name}: {text}")
