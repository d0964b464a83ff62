"""Frames to messages and back: MessagePack, with one reused encoder and one reused decoder per direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvcache_proto.errors import BadFrame
from kvcache_proto.messages import DoorMessage, Reply, Request
from kvcache_proto.text import escaped

MAX_FRAME = 4 << 20  # `status` and a `restate` of many leases are the longest
MAX_DOOR_FRAME = 64 << 10

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode

_request = msgspec.msgpack.Decoder(Request)
_reply = msgspec.msgpack.Decoder(Reply)
_door = msgspec.msgpack.Decoder(DoorMessage)


def packed(value: object) -> msgspec.Raw:
    """Return a part of a reply whose type only its writer and some readers know."""
    return msgspec.Raw(encode(value))


def decode_request(frame: bytes | memoryview) -> Request:
    """Return the request in `frame`. Raises BadFrame, or BadArgument if a value is out of bounds."""
    message: Request = _decode(_request, frame, MAX_FRAME)
    return message


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Return the reply in `frame`. Raises BadFrame."""
    message: Reply = _decode(_reply, frame, MAX_FRAME)
    return message


def decode_door(frame: bytes | memoryview) -> DoorMessage:
    """Return the handshake message in `frame`. Raises BadFrame."""
    message: DoorMessage = _decode(_door, frame, MAX_DOOR_FRAME)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], frame: bytes | memoryview, limit: int) -> Any:
    if len(frame) > limit:
        raise BadFrame(f"frame of {len(frame)} bytes: at most {limit}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(escaped(str(error))) from None
