"""Parsing ZMTP: the same messages however the bytes are split, and input that violates the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_proto.codec import MAX_FRAME, MAX_HANDSHAKE_FRAME
from kvcache_proto.errors import BadFrame
from kvcache_server.transport.zmtp import (
    GREETING,
    MAX_PARTS,
    MAX_SKIPPED,
    ROUTER,
    CutOff,
    Receiver,
    Role,
    header,
    headers,
)
from kvcache_server.transport.zmtp import (
    ready as ready_as,
)

READY = ready_as(b"ROUTER")
HELLO = GREETING + READY.replace(b"ROUTER", b"DEALER")
NAMED = HELLO[:-4] + (4).to_bytes(4, "big") + b"name"
NAMED = NAMED[:65] + bytes((NAMED[65] + 4,)) + NAMED[66:]


def message(body: bytes) -> bytes:
    return header(len(body)) + body


def hear(receiver: Receiver, data: bytes, take: Callable[[Receiver], Any] = Receiver.take) -> list[Any]:
    """Return what is parsed from `data`: messages, errors, and finally why the peer was cut off."""
    came: list[Any] = []
    receiver.feed(data)
    while True:
        try:
            taken = take(receiver)
        except BadFrame as error:
            came.append(str(error))
        except CutOff as error:
            return [*came, f"cut: {error}"]
        else:
            if taken is None:
                return came
            came.append(taken)


def ready(limit: int = MAX_FRAME) -> Receiver:
    receiver = Receiver()
    assert hear(receiver, HELLO) == []
    receiver.limit = limit
    receiver.answers.clear()
    return receiver


bodies = st.one_of(st.binary(max_size=40), st.sampled_from([255, 256, 70_000]).map(bytes))
PING = b"\4\x09\4PING\0\1ab"
said = st.lists(
    st.one_of(
        bodies.map(message),
        st.just(PING),
        st.just(b"\4\4\3ODD"),
        st.lists(bodies, min_size=1, max_size=4).map(
            lambda parts: b"".join(bytes((message(p)[0] | 1,)) + message(p)[1:] for p in parts) + message(b"the last")
        ),
        st.just(message(bytes(80_000))),
    ),
    max_size=8,
).map(b"".join)


@given(said, st.data())
def test_messages_do_not_depend_on_how_bytes_are_split(stream: bytes, data: st.DataObject) -> None:
    stream = NAMED + stream
    whole, pieces = Receiver(), Receiver()
    whole.limit = pieces.limit = MAX_HANDSHAKE_FRAME + 5000
    expected = hear(whole, stream)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    came = [each for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True) for each in hear(pieces, stream[a:b])]
    assert came == expected
    assert pieces.answers == whole.answers
    assert (pieces.ready, pieces.routing_id) == (True, b"name")
    assert pieces.held == 0


def test_the_limit_of_a_routing_id_holds_for_what_came_with_it() -> None:
    limits = {b"name": MAX_FRAME, b"": MAX_HANDSHAKE_FRAME}
    long = bytes(MAX_HANDSHAKE_FRAME + 1)
    assert hear(Receiver(limit_of=limits.__getitem__), NAMED + message(long)) == [long]
    (refusal,) = hear(Receiver(limit_of=limits.__getitem__), HELLO + message(long))
    assert f"at most {MAX_HANDSHAKE_FRAME}" in refusal


@given(st.binary(max_size=200), st.booleans())
def test_any_input_gives_messages_or_known_errors(stream: bytes, greeted: bool) -> None:
    receiver = ready() if greeted else Receiver()
    for byte in stream:
        came = hear(receiver, bytes((byte,)))
        if came and str(came[-1]).startswith("cut"):
            return
    assert receiver.held <= len(stream)


def test_a_frame_that_is_too_long_is_refused_and_skipped() -> None:
    receiver = ready(limit=100)
    stream = message(b"before") + message(bytes(101)) + message(b"after") + message(bytes(100))
    assert hear(receiver, stream) == [b"before", "frame of 101 bytes: at most 100", b"after", bytes(100)]
    assert hear(receiver, header(MAX_SKIPPED) + b"x") == [f"frame of {MAX_SKIPPED} bytes: at most 100"]
    for _ in range(MAX_SKIPPED >> 20):
        assert hear(receiver, bytes(1 << 20)) == [] or receiver.held < 100


@pytest.mark.parametrize(
    "stream",
    [
        *(b"GET / HTTP/1.1\r\n" * 4, GREETING.replace(b"\x7f\3", b"\x7f\2"), GREETING.replace(b"NULL\0", b"PLAIN")),
        *(GREETING + message(b"too soon"), GREETING + b"\5\0", GREETING + READY.replace(b"ROUTER", b"PUB\0\0\0")),
        *(HELLO + READY, HELLO + b"\4\6\5ERROR", HELLO + b"\4\0", HELLO + b"\x08\0", HELLO + b"\5\1x"),
        *(HELLO + header(MAX_SKIPPED + 1), HELLO + b"\2" + b"\xff" * 8, HELLO + PING * 200),
        *(HELLO + b"\1\0" * (MAX_PARTS + 1), GREETING + b"\4\x0b\5READY\5a\0\0\0\1"),
    ],
)
def test_peers_that_are_cut_off(stream: bytes) -> None:
    came = hear(Receiver(), stream)
    assert len(came) == 1 and str(came[0]).startswith("cut: "), came


def test_a_ping_is_answered_with_its_context() -> None:
    receiver = ready()
    assert hear(receiver, PING) == []
    assert receiver.answers == [b"\4\7\4PONGab"]


# Other sockets than the one that requests come by.

SEVERAL = Role(b"ROUTER", ROUTER.peers, limit=300, skipped=0, parts=3)


def whole(parts: list[bytes]) -> bytes:
    return b"".join(each for pair in zip(headers(parts), parts, strict=True) for each in pair)


@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), max_size=6), st.data())
def test_multipart_messages_do_not_depend_on_how_bytes_are_split(
    messages: list[list[bytes]], data: st.DataObject
) -> None:
    stream = HELLO + b"".join(map(whole, messages))
    expected = [each if len(each) <= 3 else f"a message of {len(each)} parts: at most 3" for each in messages]
    receiver = Receiver(SEVERAL)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert [each for piece in pieces for each in hear(receiver, piece, Receiver.next_parts)] == expected


def test_a_frame_that_is_too_long_cuts_off_if_skipping_is_disabled() -> None:
    for said in (whole([bytes(301)]), whole([b"", bytes(301)]), whole([b""] * (MAX_PARTS + 1))):
        (came,) = hear(Receiver(SEVERAL), HELLO + said, Receiver.next_parts)
        assert str(came).startswith("cut: ")


@pytest.mark.parametrize(("kind", "cut"), [(b"SUB", False), (b"XSUB", False), (b"DEALER", True), (b"PUB", True)])
def test_a_socket_announces_its_type_and_accepts_only_matching_peers(kind: bytes, cut: bool) -> None:
    receiver = Receiver(Role(b"XPUB", frozenset((b"SUB", b"XSUB")), limit=300, skipped=0, parts=1))
    came = hear(receiver, GREETING + ready_as(kind) + header(2) + b"\x01x")
    assert receiver.answers == [ready_as(b"XPUB")]
    assert came == (["cut: a socket type that cannot talk to XPUB"] if cut else [b"\x01x"])
