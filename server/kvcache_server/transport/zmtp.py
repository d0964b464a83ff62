"""Parses what one peer sends to one of our sockets, and makes the answers that ZMTP 3.0 requires. Pure.

The specification is https://rfc.zeromq.org/spec/23. We do not use libzmq here: it limits neither the connections of a
socket nor the parts of a message, aborts the process when descriptors run out, and passes each message through two
threads. We announce version 3.0, so that libzmq sends subscriptions as messages (spec/29), not as the commands of 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcache_proto.codec import MAX_FRAME, MAX_HANDSHAKE_FRAME
from kvcache_proto.errors import BadFrame

MAX_SKIPPED = 2 * MAX_FRAME  # bytes; too long a frame is refused up to this size, beyond it the sender is cut off
MAX_PARTS = 128  # the sender of a message with more parts, or of more commands in one `feed`, is cut off

_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_GREETING_BYTES = 64
_NULL = b"NULL".ljust(20, b"\0")


class Role(NamedTuple):
    """The type of one of our sockets, and its limits for peers.

    Attributes:
        kind: the socket type that READY announces.
        peers: socket types that may talk to it.
        limit: bytes of the longest frame, until the receiver's own `limit` is raised.
        skipped: bytes up to which too long a frame is refused and skipped; the sender of a longer one is cut off.
        parts: maximum number of parts of a message; a message with more is refused.
    """

    kind: bytes
    peers: frozenset[bytes]
    limit: int
    skipped: int
    parts: int


ROUTER = Role(b"ROUTER", frozenset((b"DEALER", b"REQ", b"ROUTER")), MAX_HANDSHAKE_FRAME, MAX_SKIPPED, 1)


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


GREETING = b"\xff".ljust(9, b"\0") + b"\x7f\x03\x00" + _NULL + bytes(32)


def ready(kind: bytes) -> bytes:
    """Return the READY command of a socket of type `kind`."""
    return _command(b"READY", _property(b"Socket-Type", kind) + _property(b"Identity", b""))


def header(size: int) -> bytes:
    """Return the header of a message of `size` bytes."""
    return bytes((0, size)) if size < 256 else b"\2" + size.to_bytes(8, "big")


def headers(parts: Sequence[bytes]) -> list[bytes]:
    """Return the header of each part of a message."""
    last = len(parts) - 1
    before = [header(len(part)) for part in parts]
    return [bytes((each[0] | (_MORE if at < last else 0),)) + each[1:] for at, each in enumerate(before)]


class CutOff(Exception):
    """The peer speaks another protocol or exceeds a limit: its further bytes cannot be interpreted."""


class Receiver:
    """Parses the data from one peer.

    Attributes:
        ready: whether the handshake is complete.
        routing_id: the identity of the peer's socket, once it is ready.
        answers: bytes to send back; the caller clears the list.
        limit: bytes of the longest frame.
    """

    __slots__ = (
        *("answers", "limit", "ready", "routing_id"),
        *("_at", "_commands", "_data", "_earlier", "_greeted", "_limit_of", "_need", "_parts", "_rest", "_role"),
        "_skip",
    )

    def __init__(self, role: Role = ROUTER, limit_of: Callable[[bytes], int] | None = None) -> None:
        """`limit_of(routing_id)` returns the limit for the peer's frames once it is ready."""
        self.ready = False
        self.routing_id = b""
        self.answers: list[bytes] = []
        self.limit = role.limit
        self._role, self._limit_of = role, limit_of
        self._greeted = False
        self._data, self._at = b"", 0  # received data, and the position up to which it is parsed
        self._rest = bytearray()  # an incomplete frame
        self._need = 0  # bytes needed before it is worth parsing again
        self._skip = 0  # bytes of a refused frame that are still to come
        self._parts = self._commands = 0  # numbers: of the current message; since the last call of `feed`
        self._earlier: list[bytes] = []  # parts of the current message before its last one

    @property
    def held(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._rest)

    def feed(self, data: bytes) -> None:
        """Add received bytes. Call it only after `take` has returned None."""
        self._commands = 0
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data, self._rest = bytes(self._rest), bytearray()
        self._data, self._at = data, 0

    def take(self) -> bytes | None:
        """Return the next message, or the last part if it has several; None if no complete one is left.

        Raises:
            BadFrame: the next message is not valid and was skipped; call `take` again.
            CutOff: close the connection.
        """
        data = self._data
        while True:
            at = self._at
            if self._skip:
                skipped = min(self._skip, len(data) - at)
                self._skip -= skipped
                at += skipped
            left = len(data) - at
            if not left:
                need = 0
                break
            if not self._greeted:
                need = _GREETING_BYTES
                if left < need:
                    break
                self._at = at + need
                self._greet(data[at : self._at])
                continue
            flags = data[at]
            need = 9 if flags & _LONG else 2
            if left < need:
                break
            begin = at + need
            size = int.from_bytes(data[at + 1 : begin], "big")
            if size > self.limit:
                self._at, self._skip = begin, size
                self._refuse(flags, size)
            need += size
            if left < need:
                break
            self._at = at + need
            body = data[begin : self._at]
            if (not (flags & ~_LONG or self._parts) and self.ready) or self._handle_other(flags, body):
                return body
        self._rest += memoryview(data)[at:]
        self._need = need
        self._data, self._at = b"", 0
        return None

    def next_parts(self) -> list[bytes] | None:
        """Return the parts of the next message, None if no complete one is left. Raises the errors of `take`."""
        last = self.take()
        if last is None:
            return None
        parts, self._earlier = [*self._earlier, last], []
        return parts

    def _greet(self, greeting: bytes) -> None:
        if greeting[0] != 0xFF or not greeting[9] & 1 or greeting[10] < 3:
            raise CutOff("not a ZMTP 3 peer")
        if greeting[12:32] != _NULL:
            raise CutOff("a mechanism other than NULL")
        self._greeted = True
        self.answers.append(ready(self._role.kind))

    def _refuse(self, flags: int, size: int) -> None:
        if not self.ready or self._parts or flags & ~_LONG or size > self._role.skipped:
            raise CutOff(f"a frame of {size} bytes")
        raise BadFrame(f"frame of {size} bytes: at most {self.limit}")

    def _handle_other(self, flags: int, body: bytes) -> bool:
        """Handle a command or one part of a message. Return True if a message is complete."""
        if flags & _COMMAND and not flags & _MORE:
            self._commands += 1
            if self._commands > MAX_PARTS:
                raise CutOff("nothing but commands")
            self._handle_command(body)
            return False
        if flags & ~(_LONG | _MORE) or not self.ready:
            raise CutOff("a message before it is ready")
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise CutOff(f"a message of more than {MAX_PARTS} parts")
        most = self._role.parts
        if flags & _MORE:
            if self._parts < most:
                self._earlier.append(body)
            return False
        parts, self._parts = self._parts, 0
        if parts <= most:
            return True
        self._earlier = []
        raise BadFrame("a message must be one frame" if most == 1 else f"a message of {parts} parts: at most {most}")

    def _handle_command(self, body: bytes) -> None:
        name, data = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"READY" and not self.ready:
            properties = _properties(data)
            if properties.get(b"socket-type") not in self._role.peers:
                raise CutOff(f"a socket type that cannot talk to {self._role.kind.decode()}")
            self.routing_id = properties.get(b"identity", b"")
            self.ready = True
            if self._limit_of is not None:  # now: the first message may have come with the handshake
                self.limit = self._limit_of(self.routing_id)
        elif name == b"PING" and self.ready:
            self.answers.append(_command(b"PONG", data[2:18]))  # the ping's context, which follows the time to live
        elif name in (b"READY", b"ERROR", b""):
            raise CutOff("a command out of place")


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the metadata of a READY command, with names in lower case. Raises CutOff."""
    found = {}
    at = 0
    while at < len(data):
        begin = at + 1 + data[at]
        end = begin + 4 + int.from_bytes(data[begin : begin + 4], "big")
        if end > len(data):
            raise CutOff("metadata that ends too early")
        found[data[at + 1 : begin].lower()] = data[begin + 4 : end]
        at = end
    return found
