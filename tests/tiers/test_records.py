"""What a tier stores says which block it is."""

from __future__ import annotations

import struct

import pytest

from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_tiers.records import key_prefix, make_header, read_header

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
