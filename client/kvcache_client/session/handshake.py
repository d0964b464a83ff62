"""The door: one Hello, one Welcome with two descriptors, then silence until one side closes it."""

from __future__ import annotations

import os
import socket
import time
from typing import NamedTuple

from kvcache_client.session import forks
from kvcache_client.session.waker import readable
from kvcache_proto import __version__, door
from kvcache_proto.errors import BadFrame, Unavailable
from kvcache_proto.messages import PROTOCOL_VERSION, Hello, Welcome
from kvcache_proto.trust import check_server

_DESCRIPTORS, _MOST = 2, 8  # with a welcome; that are taken, and closed if they are too many


class Door(NamedTuple):
    """An open door: the session lives as long as `connection` is open in a process, its lock as long as `lock` is."""

    welcome: Welcome
    connection: int
    region: int
    lock: int

    def still_open(self) -> bool:
        """Return True if the daemon is still there; it never sends anything, so anything to be read is its end."""
        try:
            os.read(self.connection, 1)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def knock(
    endpoint: str,
    engine: str,
    label: str,
    timeout: float,
    interrupt: int | None = None,
    last: Welcome | None = None,
    server_uids: frozenset[int] = frozenset(),
) -> Door:
    """Send Hello to the door of `endpoint`, and return it open, within `timeout` seconds.

    Args:
        interrupt: a descriptor; when it becomes readable, the knock is cancelled.
        last: the welcome of a session whose daemon went away, to be resumed.
        server_uids: users that may serve besides root and this user; nothing is sent to other users.
    Raises ConfigError for an unusable endpoint, Unavailable if there is no answer in time or the knock was cancelled,
    NotPermitted if the door may not be opened or another user serves there, VersionMismatch, and any other error that
    the daemon answers.
    """
    until = time.monotonic() + timeout
    with forks.guard:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        forks.adopt(connection.fileno())
    received: list[int] = []
    try:
        door.connect(connection, endpoint)
        check_server(connection, endpoint, server_uids)
        resume, secret = (last.session, last.token) if last else (0, b"")
        hello = Hello(PROTOCOL_VERSION, engine, label, f"python/{__version__}", resume, secret)
        door.send_hello(connection, hello)
        welcome = door.read_welcome(_read_frame(connection, received, until, interrupt))
        if len(received) != _DESCRIPTORS:
            raise BadFrame(f"{len(received)} descriptors with the welcome: {_DESCRIPTORS} expected")
    except BaseException as error:
        for descriptor in [*received, connection.detach()]:
            forks.close(descriptor)
        if isinstance(error, OSError):
            raise Unavailable(f"the door of {endpoint} closed while it was being opened: {error.strerror}") from None
        raise
    return Door(welcome, connection.detach(), *received)


def _read_frame(connection: socket.socket, received: list[int], until: float, interrupt: int | None) -> bytes:
    buffer = b""
    while wanted := door.missing(buffer):
        _wait_readable(connection, until, interrupt)
        with forks.guard:
            data, descriptors, _, _ = socket.recv_fds(connection, wanted, _MOST, socket.MSG_CMSG_CLOEXEC)
            received.extend(map(forks.adopt, descriptors))
        if not data:
            raise Unavailable("the daemon closed the door without an answer")
        buffer += data
    return buffer


def _wait_readable(connection: socket.socket, until: float, interrupt: int | None) -> None:
    watched = [connection.fileno(), *([] if interrupt is None else [interrupt])]
    ready = readable(watched, max(0.0, until - time.monotonic()))
    if connection.fileno() not in ready:
        raise Unavailable("knocking was called off" if ready else "the daemon did not answer the door in time")
