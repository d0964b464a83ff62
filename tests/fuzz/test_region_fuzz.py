"""A region with a corrupted header or rows: refused by name, or read without leaving its bounds."""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcache_client.session.region import Region
from kvcache_proto.errors import RegionError
from kvcache_proto.region import EXTENT_ROW, EXTENT_ROWS, READY, SLOT_ROW, RegionRows, RowBody, plan_geometry
from kvcache_proto.types import PoolGeometry, SlotRef

MIB = 1 << 20
GEOMETRY = plan_geometry(bytes(range(16)), 6 * MIB, 2 * MIB)
SLOTS = 40  # of each extent, that are in use
WORD = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.sampled_from([0, 1, 63, 64, 128, 4096, 2 * MIB, 4 * MIB, 8 * MIB, 1 << 32, 1 << 63, (1 << 64) - 1]),
    st.integers(-4096, 4096).map(lambda near: GEOMETRY.region_bytes + near),
)


def sound(buffer: memoryview) -> list[SlotRef]:
    """Fill `buffer` with a region of three extents; return what lies in it."""
    rows, refs = RegionRows(buffer, GEOMETRY), []
    rows.format()
    for extent, slot_bytes in enumerate((4096, 65536 // 4, 192)):
        rows.cut(extent, slot_bytes, 100 + extent)
        for slot in range(SLOTS):
            row, generation = rows.row_offset(extent, slot), 1000 * extent + slot + 1
            rows.open_row(row, generation, 1, 0, RowBody(1, 0, bytes([slot]) * 32))
            rows.set_state(row, READY)
            refs.append(SlotRef(rows.extent_start(extent) + slot * slot_bytes, generation, 100 + extent))
    return refs


class File(NamedTuple):
    """A region in memory: its bytes, what they were when it was sound, and what lies in it."""

    descriptor: int
    buffer: memoryview
    was: bytes
    refs: list[SlotRef]

    def __repr__(self) -> str:
        return "File()"


@pytest.fixture(scope="module")
def file() -> Iterator[File]:
    descriptor = os.memfd_create("region", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, GEOMETRY.region_bytes)
    buffer = memoryview(mmap.mmap(descriptor, GEOMETRY.region_bytes))
    refs = sound(buffer)
    yield File(descriptor, buffer, bytes(buffer), refs)
    os.close(descriptor)


def check_places(buffer: memoryview, refs: list[SlotRef]) -> None:
    """Whatever the rows say: a place that is given out lies inside of its extent."""
    rows = RegionRows(buffer, GEOMETRY)
    for extent in range(GEOMETRY.extents):
        slot_bytes, _, first, slots = rows.extent_row(extent)
        if not slot_bytes:
            continue
        begin, end = rows.extent_start(extent), rows.extent_start(extent + 1)
        assert begin < begin + slots * slot_bytes <= first < first + slots * SLOT_ROW == end
        for slot in range(min(slots, SLOTS)):
            rows.read_row(rows.row_offset(extent, slot))
    for ref in refs:
        for size in (0, 1, 192, 4096, 1 << 40):
            try:
                view = rows.slot_view(ref, 0, size)
            except RegionError:
                continue
            assert len(view) == size


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), WORD), min_size=1, max_size=6), st.randoms())
def test_damaged_extent_rows(file: File, changes: list[tuple[int, int, int]], draw: random.Random) -> None:
    descriptor, buffer, was, refs = file
    rows = slice(EXTENT_ROWS, EXTENT_ROWS + GEOMETRY.extents * EXTENT_ROW)
    try:
        for extent, word, value in changes:
            struct.pack_into("<Q", buffer, EXTENT_ROWS + extent * EXTENT_ROW + 8 * word, value)
        asked = refs + [ref._replace(offset=draw.getrandbits(64)) for ref in refs[:10]]
        asked += [ref._replace(extent_generation=changes[0][2], offset=draw.randrange(8 * MIB)) for ref in refs[:10]]
        check_places(buffer, asked)
        region = Region(descriptor, GEOMETRY)
        current = region.current(b"".join(ref.pack() for ref in asked)).tolist()
        assert current == [region.rows.is_current(ref) for ref in asked]
    finally:
        buffer[rows] = was[rows]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, SLOT_ROW * SLOTS - 1), st.integers(0, 255)), min_size=1, max_size=30))
def test_damaged_slot_rows(file: File, changes: list[tuple[int, int]]) -> None:
    """What was not touched is read as before; what was is FREE, or says what its checksum covers as before."""
    buffer, rows = file.buffer, RegionRows(file.buffer, GEOMETRY)
    first = rows.row_offset(0, 0)
    before = [rows.read_row(first + slot * SLOT_ROW) for slot in range(SLOTS)]
    try:
        for at, value in changes:
            buffer[first + at] = value
        check_places(buffer, file.refs)
        spoilt = {at // SLOT_ROW for at, _ in changes}
        for slot, was in enumerate(before):
            found = rows.read_row(first + slot * SLOT_ROW)
            assert found == was if slot not in spoilt else found is None or found.body == was.body
        Region(file.descriptor, GEOMETRY).current(b"".join(ref.pack() for ref in file.refs))
    finally:
        buffer[first : first + SLOT_ROW * SLOTS] = file.was[first : first + SLOT_ROW * SLOTS]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 71), st.integers(1, 255)), min_size=1, max_size=8))
def test_a_damaged_header_is_refused(file: File, changes: list[tuple[int, int]]) -> None:
    descriptor, buffer, was, _ = file
    try:
        for at, flip in changes:
            buffer[at] ^= flip
        if bytes(buffer[:72]) == was[:72]:
            Region(descriptor, GEOMETRY)
            return
        with pytest.raises(RegionError):
            Region(descriptor, GEOMETRY)
    finally:
        buffer[:72] = was[:72]


@settings(deadline=None, max_examples=200)
@given(
    st.binary(max_size=20) | st.just(GEOMETRY.region_id),
    WORD | st.integers(-5, 5),
    WORD | st.just(GEOMETRY.extent_bytes),
    WORD | st.integers(-5, 5),
    WORD | st.just(GEOMETRY.data_offset),
)
@example(GEOMETRY.region_id, 1 << 63, GEOMETRY.extent_bytes, 3, GEOMETRY.data_offset)
@example(GEOMETRY.region_id, GEOMETRY.region_bytes, 0, 3, GEOMETRY.data_offset)
@example(GEOMETRY.region_id, 4096, 0, -1, 0)
def test_a_geometry_that_differs_from_the_header_is_refused(
    file: File, name: bytes, size: int, extent: int, count: int, data: int
) -> None:
    """As a daemon gone mad might announce it."""
    geometry = PoolGeometry(name, size, extent, count, data)
    if geometry == GEOMETRY:
        return
    with pytest.raises(RegionError):
        Region(file[0], geometry)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_references_of_any_length(file: File, packed: bytes) -> None:
    region = Region(file[0], GEOMETRY)
    try:
        assert len(region.current(packed)) == len(region.offsets(packed)) == len(packed) // 24
    except RegionError:
        assert len(packed) % 24
