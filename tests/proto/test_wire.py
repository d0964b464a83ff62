"""The wire as one table of (message, bytes). The bytes are frozen: a change of them is a change of the protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_proto import codec, messages
from kvcache_proto.errors import (
    BadArgument,
    BadFrame,
    GeometryMismatch,
    KVCacheError,
    ServerError,
    VersionMismatch,
    from_wire,
)
from kvcache_proto.types import (
    MAX_HASHES,
    SUFFIX,
    BlockRef,
    Finding,
    GroupSpec,
    NamespaceSpec,
    PoolGeometry,
    check_hashes,
    unpack_refs,
)

TOKEN = bytes(range(16))
REGION = b"\xaa" * 16
LLAMA = NamespaceSpec("llama", (GroupSpec(16, 65536),), {"dtype": "bfloat16"}, 8)
TWO_SHARDS = NamespaceSpec("m", (GroupSpec(32, (256, 512)),))
HYBRID = NamespaceSpec("h", (GroupSpec(32, 256, needs_next_block=True), GroupSpec(32, 512, SUFFIX, 4, 8)))
GEOMETRY = PoolGeometry(REGION, 10 << 20, 4096, 2048, 2 << 20)

T = "c410 000102030405060708090a0b0c0d0e0f"
R = "c410 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
H0, H1, H2 = b"hash-000", b"hash-001", b"hash-002"
H0x, H1x, H2x = "c408 686173682d303030", "c408 686173682d303031", "c408 686173682d303032"

DOOR = [
    (
        messages.Hello(1, "e1", "sched", "kvcache-client 0.1.0"),
        "97 a568656c6c6f 01 a26531 a57363686564 b46b7663616368652d636c69656e7420302e312e30 00 c400",
    ),
    (messages.Hello(2, "e1", "", "", 300, TOKEN), f"97 a568656c6c6f 02 a26531 a0 a0 cd012c {T}"),
    (
        messages.Welcome(1, 3, TOKEN, GEOMETRY, "d"),
        f"97 a777656c636f6d65 01 03 {T} 95 {R} ce00a00000 cd1000 cd0800 ce00200000 a164 c2",
    ),
    (messages.Error(0, "not_permitted", "uid 7"), "94 a56572726f72 00 ad6e6f745f7065726d6974746564 a57569642037"),
]

REQUESTS = [
    (
        messages.Attach(1, TOKEN, LLAMA, (0,), 1 << 30),
        f"97 a6617474616368 01 {T} 94 a56c6c616d61 91 96 10 ce00010000 a466756c6c 00 00 c2"
        "81 a56474797065 a862666c6f61743136 08 91 00 ce40000000 c2",
    ),
    (
        messages.Attach(2, TOKEN, TWO_SHARDS),
        f"97 a6617474616368 02 {T} 94 a16d 91 96 20 92 cd0100 cd0200 a466756c6c 00 00 c2 80 20 90 00 c2",
    ),
    (
        messages.Attach(2, TOKEN, HYBRID, reports_leaving=True),
        f"97 a6617474616368 02 {T} 94 a168 92 96 20 cd0100 a466756c6c 00 00 c3"
        "96 20 cd0200 a6737566666978 04 08 c2 80 20 90 00 c3",
    ),
    (
        messages.Acquire(3, TOKEN, 1, [H1, H2]),
        f"9e a761637175697265 03 {T} 01 92 {H1x} {H2x} 00 c3 c2 a0 00 c2 00 90 00",
    ),
    (
        messages.Acquire(
            *(3, TOKEN, 1, [], 0),
            pin=False,
            verify=True,
            request="cmpl-7",
            tokens=300,
            salted=True,
            start=7,
            tails=[H1, H2],
            tails_per_block=2,
        ),
        f"9e a761637175697265 03 {T} 01 90 00 c2 c3 a6636d706c2d37 cd012c c3 07 92 {H1x} {H2x} 02",
    ),
    (messages.Release(4, TOKEN, [9]), f"94 a772656c65617365 04 {T} 91 09"),
    (messages.Detach(5, TOKEN, 1), f"94 a6646574616368 05 {T} 01"),
    (
        messages.Reserve(5, TOKEN, 1, [messages.Run([H1, H2], H0, 0, 1, 7, 2), messages.Run([H1], None, 2)]),
        f"96 a772657365727665 05 {T} 01 92 96 92 {H1x} {H2x} {H0x} 00 01 07 02 96 91 {H1x} c0 02 00 00 00 00",
    ),
    (
        messages.Settle(6, TOKEN, REGION, 70_000, (0, 1), 0, [0], b"sum-of-0sum-of-1"),
        f"99 a6736574746c65 06 {T} {R} ce00011170 92 00 01 00 91 00 c410 73756d2d6f662d30 73756d2d6f662d31",
    ),
    (messages.Settle(6, TOKEN, REGION, 4, (1,), 2), f"99 a6736574746c65 06 {T} {R} 04 91 01 02 90 c400"),
    (
        messages.Invalidate(7, TOKEN, REGION, BlockRef(1, 2).pack(), 5, Finding.DIFFERENT),
        f"97 aa696e76616c6964617465 07 {T} {R} c410 0100000000000000 0200000000000000 05 01",
    ),
    (messages.Ping(7, TOKEN), f"93 a470696e67 07 {T}"),
    (messages.Stats(8, TOKEN), f"93 a57374617473 08 {T}"),
    (messages.Clear(9, TOKEN, "0011223344556677"), f"94 a5636c656172 09 {T} b030303131323233333434353536363737"),
    (
        messages.Reclaim(1, TOKEN, 1 << 41, [(9, BlockRef(1, 2).pack())]),
        f"95 a77265636c61696d 01 {T} cf0000020000000000 91 92 09c410 0100000000000000 0200000000000000",
    ),
    (messages.Fence(9, TOKEN, 12), f"94 a566656e6365 09 {T} 0c"),
    (
        messages.ReportClient(9, TOKEN, 1, {"probes": 300}),
        f"95 ad7265706f72745f636c69656e74 09 {T} 01 81 a670726f626573 cd012c",
    ),
    (
        messages.ReportMisses(
            10, TOKEN, 1, [messages.MissNote("r1", "down", 1500), messages.MissNote("r2", "paused", 0, [H1])]
        ),
        f"96 ad7265706f72745f6d6973736573 0a {T} 01 92 94 a27231 a4646f776e cd05dc 90 "
        f"94 a27232 a6706175736564 00 91 {H1x} 00",
    ),
    (
        messages.ReportDevice(10, TOKEN, 1, [H1], [H2]),
        f"97 ad7265706f72745f646576696365 0a {T} 01 91 {H1x} 91 {H2x} 00",
    ),
    (messages.Why(11, TOKEN, "cmpl-7"), f"94 a3776879 0b {T} a6636d706c2d37"),
    (messages.TraceLookups(12, TOKEN, 5), f"94 ad74726163655f6c6f6f6b757073 0c {T} 05"),
    (
        messages.Retain(13, TOKEN, 1, [H1, H2], 3600.0, 0, "r1"),
        f"98 a672657461696e 0d {T} 01 92 {H1x} {H2x} cb40ac200000000000 00 a27231",
    ),
    (
        messages.Retain(13, TOKEN, 1, [H1], 0.5),
        f"98 a672657461696e 0d {T} 01 91 {H1x} cb3fe0000000000000 00 a0",
    ),
    (messages.Drop(14, TOKEN, 1, [H1, H2], 1, 0, "r1"), f"98 a464726f70 0e {T} 01 92 {H1x} {H2x} 01 00 a27231"),
    (
        messages.Pin(15, TOKEN, "0f3820adcd3cf066", [H1], 0, "sys"),
        f"97 a370696e 0f {T} b030663338323061646364336366303636 91 {H1x} 00 a3737973",
    ),
    (messages.Unpin(16, TOKEN, 3), f"94 a5756e70696e 10 {T} 03"),
    (messages.Chain(17, TOKEN, "cmpl-7"), f"96 a5636861696e 11 {T} a6636d706c2d37 c400 a0"),
    (
        messages.PollJobs(18, TOKEN, "disk", 1 << 20),
        f"98 a9706f6c6c5f6a6f6273 12 {T} a46469736b ce00100000 a67365636f6e64 a0 a0",
    ),
    (
        messages.JobResults(19, TOKEN, [(1, b"\1\0")], [(2, b"\1")], [(3, b"")], "full"),
        f"98 ab6a6f625f726573756c7473 13 {T} 91 92 01 c402 0100 91 92 02 c401 01 91 92 03 c400 a466756c6c a0",
    ),
    (messages.Chain(17, TOKEN, "", H1, "ns"), f"96 a5636861696e 11 {T} a0 {H1x} a26e73"),
]

REPLIES = [
    (messages.Attached(1, 1), "93 a86174746163686564 01 01"),
    (
        messages.Acquired(3, 9, 1, 1, BlockRef(2 << 20, 1 << 63).pack(), 5, b"sum-of-0"),
        "9c a86163717569726564 03 09 01 01 c410 0000200000000000 0000000000000080 05c408 73756d2d6f662d30 00 00 00 00",
    ),
    (
        messages.Acquired(3, 0, 0, 1, b"", coming=3, eta_ms=250, divergence=4, tail=2),
        "9c a86163717569726564 03 00 00 01 c400 00 c400 03 ccfa 04 02",
    ),
    (
        messages.Reserved(5, 4, bytes([1, 0]), BlockRef(1, 2).pack()),
        "95 a87265736572766564 05 04 c402 0100 c410 0100000000000000 0200000000000000",
    ),
    (messages.Settled(6, b"\x00\x03"), "93 a7736574746c6564 06 c402 0003"),
    (messages.Invalidated(7, 3, [("e1", 4), ("", 0)]), "94 ab696e76616c696461746564 07 03 92 92 a26531 04 92 a0 00"),
    (messages.Pong(7), "92 a4706f6e67 07"),
    (
        messages.Report(8, codec.packed({"pool": {"blocks": 2}})),
        "93 a67265706f7274 08 81 a4706f6f6c 81 a6626c6f636b73 02",
    ),
    (messages.Cleared(9, 2), "93 a7636c6561726564 09 02"),
    (messages.Reclaimed(1, [9]), "93 a97265636c61696d6564 01 91 09"),
    (messages.Fenced(9, 4), "93 a666656e636564 09 04"),
    (messages.Explained(11, codec.packed({"asked": "r1"})), "93 a96578706c61696e6564 0b 81 a561736b6564 a27231"),
    (
        messages.TracedLookups(12, 6, 1, True, [messages.LookupRecord(1500, "e1", "r1", 1, 0, 16, 300, 1, [H1, H2])]),
        f"96 ae7472616365645f6c6f6f6b757073 0c 06 01 c3 91 99 cd05dc a26531 a27231 01 00 10 cd012c 01 92 {H1x} {H2x}",
    ),
    (messages.Retained(13, 2, "quota"), "94 a872657461696e6564 0d 02 a571756f7461"),
    (messages.Dropped(14, 1), "93 a764726f70706564 0e 01"),
    (messages.Pinned(15, 3, 1), "94 a670696e6e6564 0f 03 01"),
    (messages.Unpinned(16, 1), "93 a8756e70696e6e6564 10 01"),
    (
        messages.Chained(17, ["r1"], "ns", "llama", 0, 16, 1, [H1, H2]),
        f"99 a7636861696e6564 11 91 a27231 a26e73 a56c6c616d61 00 10 01 92 {H1x} {H2x}",
    ),
    (
        messages.Jobs(
            18,
            [TWO_SHARDS],
            [messages.Exists(1, "ns", 0, [H1])],
            [messages.Fetch(2, "ns", 0, H0, [H1]), messages.Fetch(3, "ns", 1, None, [H2])],
            [messages.Store(4, "ns", 0, [H2], BlockRef(1, 2).pack(), b"sum-of-0")],
        ),
        "96 a46a6f6273 12 91 94 a16d 91 96 20 92 cd0100 cd0200 a466756c6c 00 00 c2 80 20"
        f"91 94 01 a26e73 00 91 {H1x} 92 95 02 a26e73 00 {H0x} 91 {H1x} 95 03 a26e73 01 c0 91 {H2x}"
        f"91 96 04 a26e73 00 91 {H2x} c410 0100000000000000 0200000000000000 c408 73756d2d6f662d30",
    ),
    (messages.Error(0, "bad_frame", "x"), "94 a56572726f72 00 a96261645f6672616d65 a178"),
]

Decode = Callable[[bytes], Any]
TABLE: list[tuple[Decode, Any, str]] = [
    *((codec.decode_handshake, *line) for line in DOOR),
    *((codec.decode_request, *line) for line in REQUESTS),
    *((codec.decode_reply, *line) for line in REPLIES),
]
each_line = pytest.mark.parametrize(
    ("decode", "message", "frame"), TABLE, ids=[f"{n}-{type(line[1]).__name__}" for n, line in enumerate(TABLE)]
)


@each_line
def test_messages_survive_encoding_and_decoding(decode: Decode, message: Any, frame: str) -> None:
    assert codec.encode(message).hex() == bytes.fromhex(frame).hex()
    assert decode(bytes.fromhex(frame)) == message
    assert decode(memoryview(bytes.fromhex(frame))) == message


@each_line
def test_fields_of_a_newer_peer_are_ignored(decode: Decode, message: Any, frame: str) -> None:
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(bytes.fromhex(frame)), {"from": "a newer version"}])
    assert decode(longer) == message


@each_line
def test_a_cut_frame_is_a_bad_frame(decode: Decode, message: Any, frame: str) -> None:
    whole = bytes.fromhex(frame)
    for end in range(len(whole)):
        with pytest.raises(BadFrame):
            decode(whole[:end])
    with pytest.raises(BadFrame):
        decode(whole + b"\x00")


def test_every_message_is_in_the_table() -> None:
    kinds = {
        *msgspec_union(messages.REQUESTS),
        *msgspec_union(messages.REPLIES),
        *msgspec_union(messages.HandshakeMessage),
    }
    assert {type(message) for _, message, _ in TABLE} == kinds


def msgspec_union(union: Any) -> tuple[type, ...]:
    members: tuple[type, ...] = union.__args__
    return members


def test_an_older_peer_omits_fields_with_a_default() -> None:
    shorter = bytes.fromhex(f"95 a761637175697265 03 {T} 01 91 {H1x}")
    assert codec.decode_request(shorter) == messages.Acquire(3, TOKEN, 1, [H1], group=0, pin=True)


NO_MESSAGE = [
    ("", "nothing"),
    ("c0", "nil"),
    ("90", "an empty array"),
    ("91 a470696e67", "a ping without its fields"),
    (f"93 a470696e67 a137 {T}", "an id that is a string"),
    (f"93 a4706f6b65 07 {T}", "an unknown tag"),
    (f"93 07 07 {T}", "a tag that is a number"),
    ("82 a2696407 a5746f6b656e c400", "a map"),
    (f"97 a761637175697265 03 {T} 01 91 a8686173682d303031 00 c3", "a hash that is a string"),
    (f"97 a761637175697265 03 {T} 01 91 {H1x} 00 01", "a flag that is a number"),
    (f"94 a3776879 0b {T} da0101 {'61' * 257}", "a name that is too long to be remembered"),
    ("93 a4706f6e67 07 c2", "a reply"),
    ("95 a568656c6c6f 01 a26531 a57363686564 a0", "a message of the door"),
    ("93 a470696e67 cfffffffffffffffff", "half a ping"),
    ("91" * 4000, "arrays without end"),
    ("ff" * 64, "noise"),
]


@pytest.mark.parametrize("frame", [line[0] for line in NO_MESSAGE], ids=[line[1] for line in NO_MESSAGE])
def test_a_frame_that_is_not_a_request_is_a_bad_frame(frame: str) -> None:
    with pytest.raises(BadFrame):
        codec.decode_request(bytes.fromhex(frame))


def test_frames_have_a_maximum_size() -> None:
    with pytest.raises(BadFrame, match="at most"):
        codec.decode_request(bytes(codec.MAX_FRAME + 1))
    with pytest.raises(BadFrame, match="at most"):
        codec.decode_handshake(bytes(codec.MAX_HANDSHAKE_FRAME + 1))


def test_the_largest_request_fits_a_frame() -> None:
    hashes = [n.to_bytes(32, "big") for n in range(MAX_HASHES)]
    frame = codec.encode(messages.Reserve(1 << 63, TOKEN, 1 << 31, [messages.Run(hashes, hashes[0])], 15))
    assert len(frame) <= codec.MAX_FRAME
    assert codec.decode_request(frame).runs[0].hashes == hashes


@given(st.binary(max_size=256))
def test_random_bytes_are_an_error_or_a_message(frame: bytes) -> None:
    for decode in (codec.decode_request, codec.decode_reply, codec.decode_handshake):
        with contextlib.suppress(BadFrame, BadArgument):
            decode(frame)


@given(st.sampled_from(TABLE), st.data())
def test_a_flipped_byte_is_an_error_or_a_message(line: tuple[Decode, Any, str], data: st.DataObject) -> None:
    frame = bytearray.fromhex(line[2])
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BadFrame, BadArgument):
        line[0](bytes(frame))


# Values.


def attach_of(spec: list[Any]) -> bytes:
    return msgspec.msgpack.encode(["attach", 1, TOKEN, spec])


BAD_SPECS = [
    (["", [[16, 64, "full"]], {}, 32], "model name"),
    (["m" * 257, [[16, 64, "full"]], {}, 32], "model name"),
    (["m", [[16, 64, "full"]], {"a": "x" * 2048, "b": "x" * 2047}, 32], "identity"),
    (["m", [], {}, 32], "0 groups"),
    (["m", [[16, 64, "full"]] * 17, {}, 32], "17 groups"),
    (["m", [[0, 64, "full"]], {}, 32], "block_tokens 0"),
    (["m", [[(1 << 20) + 1, 64, "full"]], {}, 32], "block_tokens"),
    (["m", [[16, 0, "full"]], {}, 32], "shard_bytes 0"),
    (["m", [[16, -64, "full"]], {}, 32], "shard_bytes -64"),
    (["m", [[16, (1 << 40) + 1, "full"]], {}, 32], "shard_bytes"),
    (["m", [[16, [], "full"]], {}, 32], "0 shards"),
    (["m", [[16, [64] * 65, "full"]], {}, 32], "65 shards"),
    (["m", [[16, [64, 0], "full"]], {}, 32], "shard_bytes 0"),
    (["m", [[16, 64, "window"]], {}, 32], "kind 'window'"),
    (["m", [[16, 64, "suffix"]], {}, 32], "window_blocks 0"),
    (["m", [[16, 64, "suffix", 8193]], {}, 32], "window_blocks 8193"),
    (["m", [[16, 64, "full", 1]], {}, 32], "window_blocks 1"),
    (["m", [[16, 64, "suffix", 1, -1]], {}, 32], "chunk_blocks -1"),
    (["m", [[16, 64, "full", 0, 1]], {}, 32], "chunk_blocks 1"),
    (["m", [[16, 64, "suffix", 1, 0, True]], {}, 32], "'suffix' has no needs_next_block"),
    (["m", [[16, 64, "full", 0, 0, True]], {}, 32], "needs_next_block only beside"),
    (["m", [[16, 64, "suffix", 8000], [16, 64, "suffix", 193]], {}, 32], "8193 blocks"),
    (["m", [[16, 64, "full"], [32, 64, "suffix", 1]], {}, 32], "same block_tokens"),
    (["m", [[16, 64, "suffix", 1], [16, 64, "full"]], {}, 32], "the first"),
    (["m", [[16, 64, "full"], [16, 64, "full"], [16, 64, "suffix", 1]], {}, 32], "the first"),
    (["m", [[16, 64, "full"], [16, [64, 64], "full"]], {}, 32], "same number of shards"),
    (["m", [[16, 64, "full"]], {}, 7], "hash_bytes 7"),
    (["m", [[16, 64, "full"]], {}, 33], "hash_bytes 33"),
]


@pytest.mark.parametrize(("spec", "named"), BAD_SPECS, ids=[line[1] for line in BAD_SPECS])
def test_a_value_out_of_bounds_is_named(spec: list[Any], named: str) -> None:
    with pytest.raises(BadArgument, match=named):
        codec.decode_request(attach_of(spec))


def test_the_id_of_a_namespace_is_frozen() -> None:
    assert LLAMA.id == "0f3820adcd3cf066"


def test_the_id_of_a_namespace_depends_on_identity_not_on_geometry() -> None:
    plain = NamespaceSpec("m", (GroupSpec(16, 64),), {"a": "1", "b": "2"})
    assert plain.id == NamespaceSpec("m", (GroupSpec(32, 128),), {"b": "2", "a": "1"}).id
    assert plain.id != NamespaceSpec("m", (GroupSpec(16, 64),), {"a": "1", "b": "3"}).id
    assert plain.id != NamespaceSpec("m", (GroupSpec(16, 64),), {"a": "1b", "": "2"}).id


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (NamespaceSpec("m", (GroupSpec(16, 64),), hash_bytes=16), "hashes of 16 bytes; registered with 32"),
        (NamespaceSpec("m", (GroupSpec(16, 64), GroupSpec(16, 64))), "2 groups; registered with 1"),
        (NamespaceSpec("m", (GroupSpec(16, 64, SUFFIX, 1),)), "group 0: kind suffix; registered with full"),
        (NamespaceSpec("m", (GroupSpec(32, 64),)), "group 0: block_tokens 32; registered with 16"),
        (NamespaceSpec("m", (GroupSpec(16, (32, 32)),)), r"group 0: shards \(32, 32\); registered with \(64,\)"),
    ],
)
def test_another_geometry_names_its_first_difference(other: NamespaceSpec, named: str) -> None:
    with pytest.raises(GeometryMismatch, match=named):
        NamespaceSpec("m", (GroupSpec(16, 64),)).check_same_geometry(other)


def test_a_single_shard_can_be_a_number_or_a_list() -> None:
    NamespaceSpec("m", (GroupSpec(16, 64),)).check_same_geometry(NamespaceSpec("m", (GroupSpec(16, (64,)),)))


def test_shards_are_contiguous() -> None:
    group = GroupSpec(16, (100, 30, 7))
    assert [group.shard_offset(n) for n in range(3)] == [0, 100, 130]
    assert group.block_bytes == 137


def test_hashes_are_checked_by_number_and_length() -> None:
    check_hashes([], 32)
    check_hashes([bytes(32)] * MAX_HASHES, 32)
    with pytest.raises(BadArgument, match="at most"):
        check_hashes([bytes(32)] * (MAX_HASHES + 1), 32)
    with pytest.raises(BadArgument, match="hash of 5 bytes"):
        check_hashes([bytes(32), bytes(5), bytes(32)], 32)


word = st.integers(0, (1 << 64) - 1)


@given(st.lists(st.builds(BlockRef, word, word), max_size=8))
def test_a_reference_is_two_words(refs: list[BlockRef]) -> None:
    assert unpack_refs(b"".join(ref.pack() for ref in refs)) == refs


CODES = {
    *("bad_argument", "bad_frame", "bad_token", "client_error", "config_error", "endpoint_lost", "endpoint_taken"),
    *("error", "geometry_mismatch", "not_permitted", "region_error", "server_error", "unavailable", "unknown_handle"),
    "version_mismatch",
}


def test_an_error_is_decoded_as_its_class() -> None:
    def family(cls: type[KVCacheError]) -> list[type[KVCacheError]]:
        return [cls, *(c for child in cls.__subclasses__() for c in family(child))]

    # Those of other modules, a device's, say, never cross the wire.
    every = [cls for cls in family(KVCacheError) if cls.__module__ == KVCacheError.__module__]
    assert {cls.code for cls in every} == CODES  # of released daemons: a class's new name would be a new code
    assert len(every) == len(CODES)
    for cls in every:
        error = from_wire(cls.code, "why")
        assert type(error) is cls
        assert str(error) == "why"
    assert type(from_wire("from_a_newer_daemon", "why")) is ServerError
    assert type(from_wire("version_mismatch", "")) is VersionMismatch
