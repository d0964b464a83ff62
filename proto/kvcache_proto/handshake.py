"""The handshake, for all clients: connect, frame messages, judge the answer.

A message of the handshake is preceded by its length, as four bytes in little-endian order.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from kvcache_proto import __version__
from kvcache_proto.codec import MAX_HANDSHAKE_FRAME, decode_handshake, encode
from kvcache_proto.endpoint import closed_folder, handshake_path
from kvcache_proto.errors import BadFrame, NotPermitted, Unavailable, VersionMismatch, from_wire
from kvcache_proto.messages import OLDEST_VERSION, PROTOCOL_VERSION, SPOKEN, Error, HandshakeMessage, Hello, Welcome

LENGTH = struct.Struct("<I")


def connect(connection: socket.socket, endpoint: str) -> None:
    """Connect `connection` to the handshake socket of `endpoint`.

    Raises ConfigError for an unusable endpoint, Unavailable if no daemon listens there or its queue is full, and
    NotPermitted if this user may not connect. The message has the remedy.
    """
    path = handshake_path(endpoint)
    try:
        connection.connect(path)
    except PermissionError:
        uid = os.geteuid()
        if folder := closed_folder(path):
            raise NotPermitted(f"no permission for {path}: uid {uid} may not enter {folder}") from None
        raise NotPermitted(
            f"no permission for {path}: run this as the daemon's user, or start the daemon with --allow-uids {uid}"
        ) from None
    except (BlockingIOError, TimeoutError):
        raise Unavailable(f"the daemon at {endpoint} accepts no new sessions: its queue is full") from None
    except OSError as error:
        folder = os.path.dirname(path)
        if _is_removed(folder):
            raise Unavailable(
                f"no daemon at {endpoint}: {folder} was removed on the host after it was mounted here, and the new one "
                "is not visible in this mount: restart this container"
            ) from None
        raise Unavailable(
            f"no daemon at {endpoint} ({error.strerror or error}): start one with "
            f"`kvcache-server serve --endpoint {endpoint}`, or choose another endpoint"
        ) from None


def frame(message: HandshakeMessage) -> bytes:
    body = encode(message)
    return LENGTH.pack(len(body)) + body


def send_hello(connection: socket.socket, hello: Hello) -> None:
    """Send `hello`. If the daemon has already closed the connection, its last message has the reason: read that
    next."""
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(frame(hello))


def missing(received: bytes | bytearray) -> int:
    """Return the minimum number of bytes missing of the message that `received` begins with.

    0 means that it is complete; a negative number counts the bytes after it. Raises BadFrame for a length out of
    bounds.
    """
    if len(received) < LENGTH.size:
        return LENGTH.size - len(received)
    (size,) = LENGTH.unpack_from(received)
    if not 0 < size <= MAX_HANDSHAKE_FRAME:
        raise BadFrame(f"handshake frame of {size} bytes: at least 1, at most {MAX_HANDSHAKE_FRAME}")
    return LENGTH.size + int(size) - len(received)


def read_welcome(received: bytes) -> Welcome:
    """Return the welcome in a complete frame.

    Raises the error that the daemon sent instead, VersionMismatch, or BadFrame for any other message.
    """
    message = decode_handshake(received[LENGTH.size :])
    ours = f"kvcache-server {__version__} speaks {SPOKEN}"
    if isinstance(message, Error):
        # One line names both versions; older daemons name only theirs.
        unnamed = message.code == VersionMismatch.code and __version__ not in message.message
        raise from_wire(message.code, f"{message.message} (this client: {ours})" if unnamed else message.message)
    if not isinstance(message, Welcome):
        raise BadFrame(f"{type(message).__name__} in the handshake: Welcome or Error expected")
    if not OLDEST_VERSION <= message.version <= PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the daemon (kvcache-server {message.daemon}) speaks protocol {message.version}; this client: {ours}: "
            "upgrade the older of the two"
        )
    return message


def _is_removed(folder: str) -> bool:
    """Return True if the folder no longer has a name, so that only a mount leads to it."""
    try:
        return os.stat(folder).st_nlink == 0
    except OSError:
        return False
