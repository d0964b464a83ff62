"""The format of packs, and the index of them."""

from __future__ import annotations

import xxhash

from kvcache_tiers.backend import MAX_HEADER, MAX_KEY
from kvcache_tiers.packs import (
    MOST_DATA,
    Index,
    Place,
    first_name,
    head_bytes,
    make_head,
    make_name,
    read_head,
    runs,
    written_at,
)

VALUES = [(b"one", b"header 1", 100), (b"two", b"", 1), (b"three", b"header 3", 5000)]
HEAD = make_head(VALUES)
SIZE = len(HEAD) + 5101
PACK = make_name(1_700_000_000_123, HEAD, 7)


def test_a_head_says_where_the_values_are() -> None:
    begin = len(HEAD)
    assert read_head(PACK, HEAD, SIZE) == {
        b"one": Place(PACK, begin, 100, b"header 1"),
        b"two": Place(PACK, begin + 100, 1, b""),
        b"three": Place(PACK, begin + 101, 5000, b"header 3"),
    }
    assert read_head(PACK, make_head([]), len(make_head([]))) == {}


def test_no_byte_of_a_head_can_change() -> None:
    for at in range(len(HEAD)):
        for bit in range(8):
            broken = bytearray(HEAD)
            broken[at] ^= 1 << bit
            assert read_head(PACK, bytes(broken), SIZE) is None


def test_a_pack_that_is_not_whole() -> None:
    for length in range(len(HEAD)):
        assert read_head(PACK, HEAD[:length], SIZE) is None
    assert read_head(PACK, HEAD + b"\0", SIZE) is None
    assert read_head(PACK, HEAD, SIZE - 1) is None and read_head(PACK, HEAD, SIZE + 1) is None


def test_heads_that_lie() -> None:
    """With right checksums: each number of a head at each extreme."""
    extremes = (0, 1, 2, 4, 255, 65535, 1 << 31, (1 << 32) - 1, (1 << 64) - 1)
    fixed, rows = HEAD[:24], HEAD[32:]
    numbers = [(0, at, size) for at, size in ((8, 4), (12, 4), (16, 8))]
    numbers += [(1, at, size) for at, size in ((0, 2), (2, 2), (4, 8))]
    for part, at, size in numbers:
        for value in extremes:
            parts = [bytearray(fixed), bytearray(rows)]
            parts[part][at : at + size] = min(value, (1 << 8 * size) - 1).to_bytes(size, "little")
            checksum = xxhash.xxh3_64_intdigest(parts[0] + parts[1])
            head = bytes(parts[0]) + checksum.to_bytes(8, "little") + bytes(parts[1])
            assert head == HEAD or read_head(PACK, head, SIZE) is None


def test_packs_that_no_tier_writes() -> None:
    """With right checksums: they are larger than memory allows, or a key is longer than that of any value."""
    for values in (
        [(b"one", b"", MOST_DATA), (b"two", b"", 1)],
        [(b"one", b"", 1 << 62), (b"two", b"", 1 << 62)],
        [(b"k" * (MAX_KEY + 1), b"", 1)],
        [(b"k", b"h" * (MAX_HEADER + 1), 1)],
    ):
        head = make_head(values)
        assert read_head(PACK, head, len(head) + sum(size for _, _, size in values)) is None
    for values in ([(b"one", b"", MOST_DATA - 1), (b"two", b"", 1)], [(b"one", b"", 1 << 62)]):
        head = make_head(values)
        assert read_head(PACK, head, len(head) + sum(size for _, _, size in values)) is not None


def test_names_of_heads_that_cannot_be() -> None:
    for length in (0, 1, 31, (1 << 20) + 1, (1 << 32) - 1):
        assert head_bytes(f"1700000000123-{length:08x}-{7:016x}") is None


def test_names_sort_by_time() -> None:
    names = [make_name(time, HEAD, 2**64 - 1 - time) for time in (1, 9, 10, 1_700_000_000_000)]
    assert names == sorted(names) and [written_at(name) for name in names] == [1, 9, 10, 1_700_000_000_000]
    assert [first_name(10) < name for name in names] == [False, False, True, True]
    assert {head_bytes(name) for name in names} == {len(HEAD)}
    assert first_name(-5) == first_name(0)


def test_foreign_names() -> None:
    for name in (
        "",
        "readme.txt",
        PACK + "x",
        PACK[:-1],
        "folder/" + PACK,
        PACK.replace("-", "_"),
        PACK.upper() + "\n",
    ):
        assert head_bytes(name) is None


def test_runs() -> None:
    a, b, c = (Place("p", offset, 10, b"") for offset in (0, 10, 20))
    apart, other = Place("p", 31, 10, b""), Place("q", 41, 10, b"")
    wanted = [*enumerate([c, other, a, apart, b])]
    assert runs(wanted, 30) == [[(2, a), (4, b), (0, c)], [(3, apart)], [(1, other)]]
    assert runs(wanted, 29) == [[(2, a), (4, b)], [(0, c)], [(3, apart)], [(1, other)]]
    assert [len(run) for run in runs(wanted, 1)] == [1] * 5
    assert runs([], 30) == []


def test_a_value_of_two_packs() -> None:
    index = Index()
    first = {key: Place("1", 0, 8, b"h") for key in (b"a", b"b")}
    second = {key: Place("2", 0, 8, b"h") for key in (b"b", b"c")}
    index.add("1", first)
    index.add("2", second)
    index.add("2", {})
    assert len(index) == 3 and index.values("1") == first and index.values("2") == second
    assert index.packs_with([b"b", b"?"]) == ["1", "2"] and index.packs_with([b"c"]) == ["2"]
    assert index.drop("2") and not index.drop("2")
    assert index.find(b"b") == first[b"b"] and index.find(b"c") is None and b"c" not in index
    assert index.drop("1") and len(index) == 0 and not index.packs
