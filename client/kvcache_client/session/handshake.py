"""The handshake: one Hello, one Welcome with two descriptors, then silence until one side closes it."""

from __future__ import annotations

import array
import os
import socket
import time
from typing import NamedTuple

from kvcache_client.session import forks
from kvcache_client.session.waker import readable
from kvcache_proto import __version__, handshake
from kvcache_proto.errors import BadFrame, Unavailable
from kvcache_proto.messages import PROTOCOL_VERSION, Hello, Welcome
from kvcache_proto.trust import check_server

_DESCRIPTORS = 2  # that come with a welcome: of the region, and of the session's file
_MOST_DESCRIPTORS = 8  # that are received at all, and closed if they are too many
_DESCRIPTOR = array.array("i")


class Handshake(NamedTuple):
    """A completed handshake: the session ends when no process has `descriptor` open, and its lock with `lock`."""

    welcome: Welcome
    descriptor: int  # of the connection
    region: int
    lock: int

    def still_open(self) -> bool:
        """Return True if the daemon is still there; it never sends anything, so anything to be read is its end."""
        try:
            os.read(self.descriptor, 1)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def shake_hands(
    endpoint: str,
    engine: str,
    label: str,
    timeout: float,
    interrupt: int | None = None,
    last: Welcome | None = None,
    server_uids: frozenset[int] = frozenset(),
) -> Handshake:
    """Send Hello to the handshake socket of `endpoint`, and return the result within `timeout` seconds.

    Args:
        interrupt: a descriptor; when it becomes readable, the handshake is cancelled.
        last: the welcome of a session whose daemon went away, to be resumed.
        server_uids: users that may serve besides root and this user; nothing is sent to other users.
    Raises ConfigError for an unusable endpoint, Unavailable if there is no answer in time or it was cancelled,
    NotPermitted if this user may not connect or another user serves there, VersionMismatch, and any other error that
    the daemon answers.
    """
    until = time.monotonic() + timeout
    with forks.guard:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        forks.adopt(connection.fileno())
    received: list[int] = []
    try:
        handshake.connect(connection, endpoint)
        check_server(connection, endpoint, server_uids)
        resume, secret = (last.session, last.token) if last else (0, b"")
        hello = Hello(PROTOCOL_VERSION, engine, label, f"python/{__version__}", resume, secret)
        handshake.send_hello(connection, hello)
        welcome = handshake.read_welcome(_read_frame(connection, received, until, interrupt))
        if len(received) != _DESCRIPTORS:
            raise BadFrame(f"{len(received)} descriptors with the welcome: {_DESCRIPTORS} expected")
    except BaseException as error:
        for descriptor in [*received, connection.detach()]:
            forks.close(descriptor)
        if isinstance(error, OSError):
            raise Unavailable(
                f"the daemon at {endpoint} closed the connection during the handshake: {error.strerror}"
            ) from None
        raise
    return Handshake(welcome, connection.detach(), *received)


def _read_frame(connection: socket.socket, received: list[int], until: float, interrupt: int | None) -> bytes:
    buffer = b""
    while wanted := handshake.missing(buffer):
        _wait_readable(connection, until, interrupt)
        with forks.guard:
            # Not socket.recv_fds, which ignores its flags: descriptors would be inherited by programs that are started.
            data, ancillary, _, _ = connection.recvmsg(
                wanted, socket.CMSG_SPACE(_MOST_DESCRIPTORS * _DESCRIPTOR.itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = len(payload) - len(payload) % _DESCRIPTOR.itemsize
                    received.extend(map(forks.adopt, array.array("i", payload[:whole])))
        if not data:
            raise Unavailable("the daemon closed the connection without an answer")
        buffer += data
    return buffer


def _wait_readable(connection: socket.socket, until: float, interrupt: int | None) -> None:
    watched = [connection.fileno(), *([] if interrupt is None else [interrupt])]
    ready = readable(watched, max(0.0, until - time.monotonic()))
    if connection.fileno() not in ready:
        raise Unavailable("the handshake was cancelled" if ready else "the daemon did not answer the handshake in time")
