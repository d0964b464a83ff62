"""What a tier stores says which block it is."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash

from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_tiers.records import key_prefix, make_header, merge_hot, pack_hot, read_header, unpack_hot

SPEC = NamespaceSpec("model", (GroupSpec(16, (4096, 64)), GroupSpec(32, (128, 128))))
SIZES, SUMS = (4096, 64), struct.pack("<2Q", 7, 9)


def test_keys_differ_wherever_bytes_may() -> None:
    specs = [
        SPEC,
        NamespaceSpec("other", SPEC.groups),
        NamespaceSpec("model", SPEC.groups, {"dtype": "float16"}),
        NamespaceSpec("model", (GroupSpec(16, (4096, 128)), GroupSpec(32, (128, 128)))),
        NamespaceSpec("model", SPEC.groups, hash_bytes=16),
    ]
    prefixes = {key_prefix(spec, group) for spec in specs for group in (0, 1)}
    assert len(prefixes) == 2 * len(specs) - 1  # of the fourth, group 1 is that of the first
    assert {len(prefix) for prefix in prefixes} == {18}


def test_a_header_gives_its_checksums_back() -> None:
    assert read_header(make_header(b"key", SIZES, SUMS), b"key", SIZES) == SUMS


@pytest.mark.parametrize("key", [b"kez", b"keyy"])
def test_a_header_of_another_block(key: bytes) -> None:
    assert read_header(make_header(b"key", SIZES, SUMS), key, SIZES) is None
    assert read_header(make_header(b"key", SIZES, SUMS), b"key", (4096, 65)) is None


def test_a_header_that_has_changed() -> None:
    header = make_header(b"key", SIZES, SUMS)
    for at in range(len(header)):
        assert read_header(header[:at], b"key", SIZES) is None
        flipped = bytearray(header)
        flipped[at] ^= 1
        assert read_header(bytes(flipped), b"key", SIZES) is None


def test_a_list_of_hot_prefixes_is_read_only_if_it_is_whole() -> None:
    runs = [(b"", [b"a" * 32, b"b" * 32]), (b"a" * 32, [b"c" * 32])]
    packed = pack_hot(runs)
    assert unpack_hot(packed) == runs
    for wrong in (b"", packed[:-1], packed + b"x", b"x" + packed[1:], packed[:20] + b"\xff" + packed[21:]):
        assert unpack_hot(wrong) is None
    foreign = msgspec.msgpack.encode({"runs": 7})
    assert unpack_hot(packed[:4] + xxhash.xxh3_64_digest(foreign) + foreign) is None


def test_an_older_list_continues_a_new_one() -> None:
    old = [(b"", [b"1", b"2", b"3"]), (b"2", [b"4"]), (b"4", [b"5"])]
    new = [(b"", [b"0"]), (b"", [b"1", b"2", b"4"])]
    assert merge_hot(new, old) == [*new, (b"2", [b"3"]), (b"4", [b"5"])]
    assert merge_hot([], old) == old and merge_hot(new, []) == new


def test_lists_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_tiers.records.MAX_HOT", 3)
    assert merge_hot([(b"", [b"1", b"2"])], [(b"", [b"3", b"4"]), (b"", [b"5"])]) == [
        (b"", [b"1", b"2"]),
        (b"", [b"3"]),
    ]
