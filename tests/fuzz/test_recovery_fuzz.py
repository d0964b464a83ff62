"""Recovery of a region that a client has corrupted: a consistent cache of what is left, or a refusal."""

from __future__ import annotations

import contextlib
import functools
import struct
import zlib
from typing import Any

import msgspec
import pytest
from host import reopen
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache_proto import messages as m
from kvcache_proto.errors import RegionError
from kvcache_proto.region import CHECKED, EXTENT_ROW, EXTENT_ROWS, SLOT_ROW, RegionRows, found_geometry, plan_geometry
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome
from kvcache_server.core import journal
from kvcache_server.core.cache import Cache
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.limits import Limits

MIB = 1 << 20
GEOMETRY = plan_geometry(b"r" * 16, 6 * MIB, 2 * MIB)
SPEC = NamespaceSpec("m", (GroupSpec(16, (2048, 2048)),))
ROWS = 24  # of the first extent that is used
WORD = st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1, 2, 3, 4, 1 << 32, 1 << 63, (1 << 64) - 1])
HALF = st.integers(0, (1 << 32) - 1) | st.sampled_from([0, 1, 2, 3, 4, 65_535, 65_536, 1 << 31, (1 << 32) - 1])


@functools.lru_cache
def last_life() -> tuple[bytes, bytes, int]:
    """A region with blocks that are whole, half settled, and hidden; the state file beside it; where its rows begin."""
    file = bytearray(journal.MAGIC) + journal.pack(journal.Began(GEOMETRY.region_id, 1))

    def note(record: journal.Record) -> None:
        nonlocal file
        file += journal.pack(record)

    buffer = bytearray(GEOMETRY.region_bytes)
    cache = Cache(memoryview(buffer), GEOMETRY, Limits(), 11)

    def deliver() -> None:
        for record in cache.effects.take()[0]:
            note(record)

    session = cache.open_session("engine", "", 0.0)
    deliver()
    note(journal.SessionOpened(session, "engine", "", b"", ""))
    namespace = cache.handle(session, m.Attach(1, b"", SPEC, (0, 1)), 0.0).namespace  # type: ignore[union-attr]
    for chain in range(3):
        run = [bytes([chain, number]) * 16 for number in range(ROWS // 3)]
        reserved = cache.handle(session, m.Reserve(1, b"", namespace, [m.Run(run)]), 0.0)
        assert isinstance(reserved, m.Reserved)
        for shards, positions in (((0, 1), range(5 - 2 * chain)), ((0,), range(6)), ((0, 1), [7])):
            settle = m.Settle(1, b"", GEOMETRY.region_id, reserved.reservation, shards, Outcome.COMMITTED, [*positions])
            cache.handle(session, settle, 0.0)
    deliver()
    used = next(index for index in range(GEOMETRY.extents) if cache.rows.extent_row(index)[0])
    return bytes(buffer), bytes(file), cache.rows.row_offset(used, 0)


def reopened(buffer: bytearray, file: bytes, living: bool) -> None:
    book = journal.read(file)
    book.epoch += 1
    alive = set(book.sessions) if living else set()
    cache = reopen(memoryview(buffer), GEOMETRY, Limits(), book, alive, 0.0)
    check_integrity(cache)
    cache.tick(1000.0)
    for number in alive:
        cache.end_session(number, 1000.0)
    cache.tick(2000.0)
    check_integrity(cache)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, SLOT_ROW // 4 - 1), HALF), max_size=6),
    st.booleans(),
    st.booleans(),
)
@example([(5, 14, (1 << 32) - 1)], True, True)  # the position of a block that is being written
@example([(1, 12, 3)], True, True)  # two rows with one place in one reservation
@example([(0, 13, 1 << 31), (11, 13, 1 << 31)], True, True)  # reservations of numbers that floats cannot tell apart
def test_slot_rows(changes: list[tuple[int, int, int]], sealed: bool, living: bool) -> None:
    """`sealed`: corrupted rows have correct checksums."""
    was, file, rows = last_life()
    buffer = bytearray(was)
    for slot, half, value in changes:
        row = rows + slot * SLOT_ROW
        struct.pack_into("<I", buffer, row + 4 * half, value)
        if sealed:
            struct.pack_into(
                "<Q", buffer, row + SLOT_ROW - 8, zlib.crc32(buffer[row + CHECKED.start : row + CHECKED.stop])
            )
    reopened(buffer, file, living)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, GEOMETRY.extents - 1), st.integers(0, 7), WORD), min_size=1, max_size=4))
def test_extent_rows(changes: list[tuple[int, int, int]]) -> None:
    was, file, _ = last_life()
    buffer = bytearray(was)
    for extent, word, value in changes:
        struct.pack_into("<Q", buffer, EXTENT_ROWS + extent * EXTENT_ROW + 8 * word, value)
    RegionRows(memoryview(buffer), GEOMETRY).check_header()
    reopened(buffer, file, living=True)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4095), st.integers(1, 255)), min_size=1, max_size=5))
def test_headers(changes: list[tuple[int, int]]) -> None:
    header = bytearray(last_life()[0][:4096])
    for at, flip in changes:
        header[at] ^= flip
    with contextlib.suppress(RegionError):
        assert found_geometry(memoryview(header)) in (GEOMETRY, None)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=5),
    st.integers(0, 2000),
    st.binary(max_size=40),
)
def test_state_files(changes: list[tuple[int, int]], cut: int, more: bytes) -> None:
    file = bytearray(last_life()[1])
    for at, value in changes:
        file[at % len(file)] = value
    file[max(len(file) - cut, 0) :] = more
    with contextlib.suppress(RegionError):
        journal.read(bytes(file))


NUMBER = st.sampled_from([-(1 << 63), -1, 0, 1, 1 << 16, 1 << 23, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1])
TEXT = st.sampled_from(["", "../victim", "/etc/passwd", "1-0123abcd/..", "a" * 5000, "\x00"])
RECORDS: list[journal.Record] = [
    journal.NamespaceMade(2, NamespaceSpec("n", (GroupSpec(16, (2048, 2048)),))),
    journal.EngineMade(2, "other"),
    journal.SessionOpened(2, "other", "label", b"t" * 16, "2-01234567", b"f" * 16, "2-89abcdef", 1000),
    journal.WritersNumbered(9, (1, 2)),
    journal.PinMade(1, 1, 0, [b"h" * 32]),
]


def places(value: Any, path: tuple[int | str, ...] = ()) -> list[tuple[int | str, ...]]:
    """Return the path of each number, text and list in `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inside for found in places(each, (*path, key)))]


@settings(deadline=None, max_examples=400)
@given(st.data(), st.booleans())
def test_whole_records_with_odd_values(data: st.DataObject, living: bool) -> None:
    """Each has the right checksum: the region is refused, or a consistent cache starts."""
    buffer, file, _ = last_life()
    chosen = records(file) + [msgspec.msgpack.decode(msgspec.msgpack.encode(each)) for each in RECORDS]
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(chosen) - 1))
        path = data.draw(st.sampled_from(places(chosen[at])[2:] or [(0,)]))
        holder = functools.reduce(lambda value, key: value[key], path[:-1], chosen[at])
        kind = {int: NUMBER, str: TEXT, bytes: st.binary(max_size=80)}.get(type(holder[path[-1]]), st.just([]))
        holder[path[-1]] = data.draw(kind)
    changed = bytearray(journal.MAGIC)
    for each in chosen:
        packed = msgspec.msgpack.encode(each)
        changed += struct.pack("<II", len(packed), zlib.crc32(packed)) + packed
    with contextlib.suppress(RegionError):
        reopened(bytearray(buffer), bytes(changed), living)


def records(file: bytes) -> list[Any]:
    """Return the records of a state file as plain values."""
    found, at = [], len(journal.MAGIC)
    while at < len(file):
        (size,) = struct.unpack_from("<I", file, at)
        found.append(msgspec.msgpack.decode(file[at + 8 : at + 8 + size]))
        at += 8 + size
    return found


@pytest.mark.parametrize("name", ["../victim", "1-0123abcd/../../victim", "/victim"])
def test_names_of_session_files_stay_in_their_folder(name: str) -> None:
    file = last_life()[1] + journal.pack(journal.SessionOpened(7, "engine", "", b"", name))
    with pytest.raises(RegionError, match="file"):
        journal.read(file + journal.pack(journal.SessionEnded(8)))
