"""The door: one Hello, one Welcome with two descriptors, then silence until one side ends."""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from typing import NamedTuple

from kvcache_client.session import forks
from kvcache_client.session.bell import readable
from kvcache_proto import __version__
from kvcache_proto.codec import MAX_DOOR_FRAME, decode_door, encode
from kvcache_proto.endpoint import closed_folder, door_path
from kvcache_proto.errors import BadFrame, NotPermitted, Unavailable, VersionMismatch, from_wire
from kvcache_proto.messages import OLDEST_VERSION, PROTOCOL_VERSION, Error, Hello, Welcome
from kvcache_proto.trust import check_server

_LENGTH = struct.Struct("<I")
_DESCRIPTORS = 2


class Door(NamedTuple):
    """An open door: the session lives as long as `connection` is open in one process, its lock as long as `lock` is."""

    welcome: Welcome
    connection: int
    region: int
    lock: int

    def still_open(self) -> bool:
        """Whether the daemon is behind it; it never says a word, so that anything to be read is its end."""
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
    """Say Hello at the door of `endpoint` and return it open, within `timeout` seconds.

    `last` is the welcome of a session whose daemon went away: it asks to go on. `server_uids` may serve besides root
    and this user: nothing is said to others. Raises ConfigError for an unusable
    endpoint, Unavailable where nobody answers in time or `interrupt`, a descriptor, turned readable, NotPermitted where
    the door may not be opened, or another user serves there, VersionMismatch, and what else the daemon answers.
    """
    path = door_path(endpoint)
    until = time.monotonic() + timeout
    with forks.guard:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        forks.adopt(connection.fileno())
    received: list[int] = []
    try:
        _connect(connection, path)
        check_server(connection, endpoint, server_uids)
        resume, secret = (last.session, last.token) if last else (0, b"")
        hello = encode(Hello(PROTOCOL_VERSION, engine, label, f"python/{__version__}", resume, secret))
        connection.sendall(_LENGTH.pack(len(hello)) + hello)
        welcome = _check(decode_door(_read_frame(connection, received, until, interrupt)))
        if len(received) != _DESCRIPTORS:
            raise BadFrame(f"{len(received)} descriptors with the welcome: {_DESCRIPTORS} expected")
    except BaseException as error:
        for descriptor in [*received, connection.detach()]:
            forks.close(descriptor)
        if isinstance(error, OSError):
            raise Unavailable(f"the door {path} closed while it was being opened: {error.strerror}") from None
        raise
    return Door(welcome, connection.detach(), *received)


def _connect(connection: socket.socket, path: str) -> None:
    try:
        connection.connect(path)
    except PermissionError:
        if folder := closed_folder(path):
            raise NotPermitted(f"no permission for {path}: uid {os.geteuid()} may not enter {folder}") from None
        raise NotPermitted(f"no permission for {path}: this user is not on the daemon's allowed list") from None
    except BlockingIOError:
        raise Unavailable(f"the daemon behind {path} does not take new sessions: its queue is full") from None
    except OSError as error:
        if _is_removed(os.path.dirname(path)):
            raise Unavailable(
                f"no daemon at {path}: {os.path.dirname(path)} was removed on the host after it was mounted here, and "
                "a new one does not show in this mount: restart this container"
            ) from None
        raise Unavailable(f"no daemon at {path} ({error.strerror}): start one with `kvcache-server serve`") from None


def _is_removed(folder: str) -> bool:
    """Whether the folder has no name any more: only a mount of it leads there."""
    try:
        return os.stat(folder).st_nlink == 0
    except OSError:
        return False


def _check(message: object) -> Welcome:
    ours = f"kvcache-server {__version__} speaks protocol {OLDEST_VERSION} to {PROTOCOL_VERSION}"
    if isinstance(message, Error):
        # One line names both versions; older daemons say only theirs.
        unnamed = message.code == VersionMismatch.code and __version__ not in message.message
        raise from_wire(message.code, f"{message.message} (this client: {ours})" if unnamed else message.message)
    if not isinstance(message, Welcome):
        raise BadFrame(f"{type(message).__name__} at the door: Welcome or Error expected")
    if not OLDEST_VERSION <= message.version <= PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the daemon (kvcache-server {message.daemon}) speaks protocol {message.version}; this client: {ours}: "
            "bring the older of the two up to date"
        )
    return message


def _read_frame(connection: socket.socket, received: list[int], until: float, interrupt: int | None) -> bytes:
    buffer = b""
    wanted = _LENGTH.size
    while len(buffer) < wanted:
        _wait_readable(connection, until, interrupt)
        with forks.guard:
            data, ancillary, _, _ = connection.recvmsg(
                wanted - len(buffer), socket.CMSG_SPACE(8 * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors = array.array("i")
                    descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
                    received.extend(forks.adopt(descriptor) for descriptor in descriptors)
        if not data:
            raise Unavailable("the daemon closed the door without an answer")
        buffer += data
        if wanted == _LENGTH.size == len(buffer):
            (size,) = _LENGTH.unpack(buffer)
            if not 0 < size <= MAX_DOOR_FRAME:
                raise BadFrame(f"door frame of {size} bytes: at most {MAX_DOOR_FRAME}")
            wanted += size
    return buffer[_LENGTH.size :]


def _wait_readable(connection: socket.socket, until: float, interrupt: int | None) -> None:
    watched = [connection.fileno(), *([] if interrupt is None else [interrupt])]
    ready = readable(watched, max(0.0, until - time.monotonic()))
    if connection.fileno() not in ready:
        raise Unavailable("knocking was called off" if ready else "the daemon did not answer the door in time")
