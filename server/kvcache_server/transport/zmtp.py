"""ZMTP 3.0 as one of our sockets speaks it to one peer: bytes in; messages, and bytes to be sent back, out. Pure.

Source: https://rfc.zeromq.org/spec/23. Our own, because libzmq bounds neither the connections of a socket nor the parts
of a message, ends the process where descriptors run out, and costs a message two threads. Peers are greeted as version
3.0, so that libzmq sends subscriptions as messages, as in spec/29, and not as the commands of 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcache_proto.codec import MAX_DOOR_FRAME, MAX_FRAME
from kvcache_proto.errors import BadFrame

MAX_SKIPPED = 2 * MAX_FRAME  # up to here a sender is told that its frame is too long; beyond, it is cut off
MAX_PARTS = 128  # likewise of a message; and commands between two messages

_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_GREETING_BYTES = 64
_NULL = b"NULL".ljust(20, b"\0")


class Role(NamedTuple):
    """What a socket of ours is, and what it takes from its peers.

    Attributes:
        kind: its type, as READY has it.
        peers: types of sockets that may talk to it.
        limit: bytes of the longest frame, at first.
        skipped: up to so many bytes a longer frame is refused and left out; beyond, its sender is cut off.
        parts: of a message, at most; a message of more is refused.
    """

    kind: bytes
    peers: frozenset[bytes]
    limit: int
    skipped: int
    parts: int


ROUTER = Role(b"ROUTER", frozenset((b"DEALER", b"REQ", b"ROUTER")), MAX_DOOR_FRAME, MAX_SKIPPED, 1)


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return bytes((_COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


GREETING = b"\xff".ljust(9, b"\0") + b"\x7f\x03\x00" + _NULL + bytes(32)


def ready(kind: bytes) -> bytes:
    """Return what a socket of that type says when it is ready."""
    return _command(b"READY", _property(b"Socket-Type", kind) + _property(b"Identity", b""))


READY = ready(b"ROUTER")


def header(size: int) -> bytes:
    """Return what goes before a message of `size` bytes."""
    return bytes((0, size)) if size < 256 else b"\2" + size.to_bytes(8, "big")


def headers(parts: Sequence[bytes]) -> list[bytes]:
    """Return what goes before each part of a message."""
    last = len(parts) - 1
    before = [header(len(part)) for part in parts]
    return [bytes((each[0] | (_MORE if at < last else 0),)) + each[1:] for at, each in enumerate(before)]


class CutOff(Exception):
    """The peer speaks another protocol, or says more than it may: nothing that it says can be understood any more."""


class Receiver:
    """Takes in what one peer sends.

    Attributes:
        ready: whether its messages may come.
        routing_id: what its socket calls itself, once it is ready.
        answers: bytes that the protocol has us send back; whoever sends them clears the list.
        limit: bytes of its longest frame.
    """

    __slots__ = (
        *("answers", "limit", "ready", "routing_id"),
        *("_at", "_commands", "_data", "_earlier", "_greeted", "_need", "_parts", "_rest", "_role", "_skip"),
    )

    def __init__(self, role: Role = ROUTER) -> None:
        self.ready = False
        self.routing_id = b""
        self.answers: list[bytes] = []
        self.limit = role.limit
        self._role = role
        self._greeted = False
        self._data, self._at = b"", 0  # what is to be looked at, and from where on
        self._rest = bytearray()  # the beginning of a frame
        self._need = 0  # bytes that it wants, before it is worth another look
        self._skip = 0  # bytes of a frame that was refused, still to come
        self._parts = self._commands = 0  # of the message that is coming; since the last bytes came
        self._earlier: list[bytes] = []  # parts of a message before its last one, where there may be several

    @property
    def held(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return len(self._rest)

    def feed(self, data: bytes) -> None:
        """Take in bytes, once `take` has returned None."""
        self._commands = 0
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return
            data, self._rest = bytes(self._rest), bytearray()
        self._data, self._at = data, 0

    def take(self) -> bytes | None:
        """Return the next message, of several parts the last one; None where no whole one is left.

        Raises:
            BadFrame: the next one is no message of ours. It is left out; go on.
            CutOff: end the connection.
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
            if (not (flags & ~_LONG or self._parts) and self.ready) or self._take_other(flags, body):
                return body
        self._rest += memoryview(data)[at:]
        self._need = need
        self._data, self._at = b"", 0
        return None

    def take_parts(self) -> list[bytes] | None:
        """Return the parts of the next message, None where no whole one is left. Raises as `take` does."""
        last = self.take()
        if last is None:
            return None
        parts, self._earlier = [*self._earlier, last], []
        return parts

    def _greet(self, greeting: bytes) -> None:
        if greeting[0] != 0xFF or not greeting[9] & 1 or greeting[10] < 3:
            raise CutOff("no peer of ZMTP 3")
        if greeting[12:32] != _NULL:
            raise CutOff("a mechanism other than NULL")
        self._greeted = True
        self.answers.append(ready(self._role.kind))

    def _refuse(self, flags: int, size: int) -> None:
        if not self.ready or self._parts or flags & ~_LONG or size > self._role.skipped:
            raise CutOff(f"a frame of {size} bytes")
        raise BadFrame(f"frame of {size} bytes: at most {self.limit}")

    def _take_other(self, flags: int, body: bytes) -> bool:
        """Take a command, or a part of a message of several. Returns whether that message is whole."""
        if flags & _COMMAND and not flags & _MORE:
            self._commands += 1
            if self._commands > MAX_PARTS:
                raise CutOff("nothing but commands")
            self._obey(body)
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
        raise BadFrame("a message is one frame" if most == 1 else f"a message of {parts} parts: at most {most}")

    def _obey(self, body: bytes) -> None:
        name, data = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"READY" and not self.ready:
            properties = _properties(data)
            if properties.get(b"socket-type") not in self._role.peers:
                raise CutOff(f"no socket that talks to {self._role.kind.decode()}")
            self.routing_id = properties.get(b"identity", b"")
            self.ready = True
        elif name == b"PING" and self.ready:
            self.answers.append(_command(b"PONG", data[2:18]))  # behind the time to live, its context
        elif name in (b"READY", b"ERROR", b""):
            raise CutOff("a command out of place")


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the metadata of a READY, names in small letters. Raises CutOff."""
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
