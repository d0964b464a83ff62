"""Frames to messages and back: MessagePack, with one reused encoder and one reused decoder per direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from kvcache_proto.errors import BadFrame
from kvcache_proto.messages import REPLIES, REQUESTS, HandshakeMessage, Reply, Request
from kvcache_proto.text import escaped

T = TypeVar("T")

MAX_FRAME = 4 << 20  # `status` and a `reclaim` of many leases are the longest
MAX_HANDSHAKE_FRAME = 64 << 10

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(REQUESTS)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(REPLIES)
_handshake: msgspec.msgpack.Decoder[HandshakeMessage] = msgspec.msgpack.Decoder(HandshakeMessage)


def packed(value: object) -> msgspec.Raw:
    """Return a part of a reply whose type only its writer and some readers know."""
    return msgspec.Raw(encode(value))


def decode_request(frame: bytes | memoryview) -> Request:
    """Return the request in `frame`. Raises BadFrame, or BadArgument if a value is out of bounds."""
    return _decode(_requests, frame, MAX_FRAME)


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Return the reply in `frame`. Raises BadFrame."""
    return _decode(_replies, frame, MAX_FRAME)


def decode_handshake(frame: bytes | memoryview) -> HandshakeMessage:
    """Return the handshake message in `frame`. Raises BadFrame."""
    return _decode(_handshake, frame, MAX_HANDSHAKE_FRAME)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview, limit: int) -> T:
    if len(frame) > limit:
        raise BadFrame(f"frame of {len(frame)} bytes: at most {limit}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(escaped(str(error))) from None
