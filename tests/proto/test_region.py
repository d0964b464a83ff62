"""The region's layout: byte for byte where it is frozen, round trips where it is not."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_proto import region
from kvcache_proto.errors import RegionError
from kvcache_proto.region import (
    FREE,
    READY,
    SLOT_ROW,
    WRITING,
    RegionRows,
    RowBody,
    plan_geometry,
    slot_size,
    slots_per_extent,
)
from kvcache_proto.types import PoolGeometry, SlotRef

MIB = 1 << 20
ID = bytes(range(16))
HASH = bytes(range(100, 132))


def words(buffer: bytearray, at: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", buffer, at)


def fresh(region_bytes: int = 10 * MIB, extent_bytes: int = 4 * MIB) -> tuple[bytearray, RegionRows]:
    geometry = plan_geometry(ID, region_bytes, extent_bytes)
    buffer = bytearray(geometry.region_bytes)
    rows = RegionRows(memoryview(buffer), geometry)
    rows.format()
    return buffer, rows


def open_at(rows: RegionRows, row: int, generation: int = 11, parent: int = 0, block_hash: bytes = HASH) -> None:
    rows.open_row(row, generation, 5, parent, RowBody(3, 1, block_hash, 42))


# The bytes.


def test_the_header_byte_by_byte() -> None:
    buffer, rows = fresh()
    assert rows.geometry == PoolGeometry(ID, 10 * MIB, 4 * MIB, 2, 2 * MIB)
    assert buffer[:8] == b"KVCREGN1"
    assert words(buffer, 8, 1) == (1,)
    assert buffer[16:32] == ID
    assert words(buffer, 32, 4) == (10 * MIB, 4 * MIB, 2, 2 * MIB)
    assert words(buffer, 64, 1) == (zlib.crc32(buffer[8:64]),)
    assert words(buffer, 72, 1) == (2,)
    assert not any(buffer[80:])
    rows.check_header()


def test_an_extent_row_and_a_slot_row_byte_by_byte() -> None:
    buffer, rows = fresh()
    slots = rows.cut(1, 65536, 7)
    end = 10 * MIB
    assert slots == 63 == 4 * MIB // (65536 + 128)
    assert words(buffer, 4096 + 64, 8) == (65536, 7, end - 63 * 128, 63, 0, 63, 0, 0)
    assert words(buffer, 4096, 8) == (0,) * 8

    first, second = rows.row_offset(1, 0), rows.row_offset(1, 1)
    assert (first, second) == (end - 63 * 128, end - 62 * 128)
    rows.open_row(second, 11, 5, 10, RowBody(3, 1, HASH, 42, 77, 6, 9, 4))
    rows.set_settled(second, 0b10)
    body = struct.pack("<IHHQQII", 3, 1, 32, 42, 77, 6, 9) + HASH + struct.pack("<IIQ", 4, 0, 0)
    assert words(buffer, second, 4) == (WRITING, 5, 0b10, 11)
    assert buffer[second + 32 : second + 112] == body
    assert words(buffer, second + 112, 2) == (10, zlib.crc32(struct.pack("<Q", 11) + body))
    rows.set_parent(second, 12)
    assert words(buffer, second + 112, 1) == (12,)


# The header.


def test_another_format_id_and_geometry_are_distinguished() -> None:
    for word, value, named in [(0, 0, "magic"), (1, 2, "format 2"), (4, 1, "checksum"), (8, 1, "checksum")]:
        buffer, rows = fresh()
        struct.pack_into("<Q", buffer, 8 * word, value)
        with pytest.raises(RegionError, match=named):
            rows.check_header()
    buffer, _ = fresh()
    other_id = PoolGeometry(bytes(16), 10 * MIB, 4 * MIB, 2, 2 * MIB)
    with pytest.raises(RegionError, match="another region"):
        RegionRows(memoryview(buffer), other_id).check_header()
    with pytest.raises(RegionError, match="region cut as"):
        RegionRows(memoryview(buffer), PoolGeometry(ID, 10 * MIB, 8 * MIB, 1, 2 * MIB)).check_header()
    with pytest.raises(RegionError, match="the region has"):
        RegionRows(memoryview(buffer), PoolGeometry(ID, 12 * MIB, 4 * MIB, 2, 2 * MIB))


def test_formatting_again_forgets_everything() -> None:
    _, rows = fresh()
    rows.cut(0, 4096, 1)
    open_at(rows, rows.row_offset(0, 0))
    rows.format()
    assert rows.extent_row(0) == (0, 0, 0, 0)
    assert rows.read_row(rows.extent_start(0) + 4 * MIB - 128) is None


# The cut.


@settings(deadline=None)
@given(st.integers(0, 1 << 42), st.sampled_from([0, 2 * MIB, 4 * MIB, 6 * MIB, 256 * MIB]))
def test_extents_fill_the_size_and_the_header_is_extra(size: int, extent_bytes: int) -> None:
    try:
        g = plan_geometry(ID, size, extent_bytes)
    except RegionError:
        assert size < max(extent_bytes, 4 * MIB)
        return
    assert 1 <= g.extents <= region.MAX_EXTENTS
    assert g.data_offset % region.ALIGN == 0
    assert g.extent_bytes % region.ALIGN == 0
    assert g.data_offset - region.ALIGN < region.EXTENT_ROWS + g.extents * region.EXTENT_ROW <= g.data_offset
    assert g.region_bytes == g.data_offset + g.extents * g.extent_bytes
    assert g.extents * g.extent_bytes <= size
    if g.extents < region.MAX_EXTENTS:
        assert size - g.extents * g.extent_bytes < g.extent_bytes


@pytest.mark.parametrize("extent_bytes", [1, MIB, 3 * MIB, 4 * MIB + 1, -2 * MIB])
def test_extents_end_on_huge_pages(extent_bytes: int) -> None:
    with pytest.raises(RegionError, match="multiple of"):
        plan_geometry(ID, 1 << 30, extent_bytes)


@pytest.mark.parametrize("mib", [256, 512, 1024, 1536, 2048, 4096, 8192, 12288, 16384, 32768, 100 << 10, 1 << 20])
def test_common_blocks_fill_a_region_of_any_size(mib: int) -> None:
    size = mib * MIB
    g = plan_geometry(ID, size)
    blocks = [quarters << shift for shift in range(14, 23) for quarters in (4, 5, 6)]
    wasted = [
        1 - g.extents * slots_per_extent(g.extent_bytes, slot_size(each)) * each / size
        for each in blocks
        if each * 128 <= size
    ]
    assert max(wasted) < 0.065 and sum(wasted) / len(wasted) < 0.025
    assert g.extents >= 8


@given(st.integers(1, 4 * MIB))
def test_slots_and_their_rows_do_not_overlap(block_bytes: int) -> None:
    slot_bytes = slot_size(block_bytes)
    assert block_bytes <= slot_bytes < block_bytes + region.SLOT_ALIGN
    assert slot_bytes % region.SLOT_ALIGN == 0
    slots = slots_per_extent(4 * MIB, slot_bytes)
    assert slots * slot_bytes <= 4 * MIB - slots * SLOT_ROW < (slots + 1) * (slot_bytes + SLOT_ROW)


# Rows.


U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))


@given(
    *(U64, U64, U64, U64),
    st.builds(RowBody, U32, U16, st.binary(min_size=8, max_size=32), U64, U64, U32, U32, U32),
)
def test_a_row_is_read_as_it_was_written(generation: int, tick: int, settled: int, parent: int, body: RowBody) -> None:
    _, rows = fresh(6 * MIB)
    rows.cut(0, 1 << 16, 1)
    row = rows.row_offset(0, 5)
    rows.open_row(row, generation, tick, parent, body)
    rows.set_settled(row, settled)
    found = rows.read_row(row)
    assert found == (WRITING, generation, tick, settled, parent, body)
    rows.set_tick(row, 77)
    rows.set_parent(row, 78)
    rows.set_state(row, READY)
    assert found is not None
    assert rows.read_row(row) == found._replace(state=READY, tick=77, parent=78)
    rows.set_state(row, FREE)
    assert rows.read_row(row) is None


@given(st.integers(24, SLOT_ROW - 1), st.integers(1, 255))
def test_a_torn_row_is_free(at: int, flip: int) -> None:
    buffer, rows = fresh(6 * MIB)
    rows.cut(0, 1 << 16, 1)
    row = rows.row_offset(0, 2)
    open_at(rows, row)
    rows.set_state(row, READY)
    buffer[row + at] ^= flip
    alone = range(112, 120)  # the parent
    assert (rows.read_row(row) is None) == (at not in alone)


def test_an_invalid_state_is_free() -> None:
    buffer, rows = fresh()
    rows.cut(0, 4096, 1)
    row = rows.row_offset(0, 0)
    open_at(rows, row)
    struct.pack_into("<Q", buffer, row, 4)
    assert rows.read_row(row) is None


def test_the_fields_named_for_bulk_readers_are_those_of_the_row() -> None:
    buffer, rows = fresh()
    rows.cut(0, 4096, 21)
    row = rows.row_offset(0, 3)
    rows.open_row(row, 31, 5, 10, RowBody(3, 1, HASH[:16], 42, 77, 6, 9, 4))
    names, types, offsets = zip(*((name, *where) for name, where in region.ROW_FIELDS.items()), strict=True)
    kind = np.dtype({"names": names, "formats": types, "offsets": offsets, "itemsize": SLOT_ROW})
    (found,) = np.frombuffer(buffer, kind, 1, row)
    body = (3, 1, 16, 42, 77, 6, 9)
    fields = ("namespace", "group", "hash_bytes", "owner", "reservation", "position", "writers")
    assert tuple(found[name] for name in fields) == body
    assert tuple(found[name] for name in ("state", "tick", "settled", "generation")) == (WRITING, 5, 0, 31)
    assert (found["engine"], found["parent"], found["hash"].tobytes()) == (4, 10, HASH[:16].ljust(32, b"\0"))
    checked = buffer[row + region.CHECKED.start : row + region.CHECKED.stop]
    assert found["check"] == zlib.crc32(checked)


def test_the_header_gives_the_geometry() -> None:
    buffer, rows = fresh()
    assert region.found_geometry(memoryview(buffer)) == rows.geometry
    assert region.found_geometry(memoryview(bytearray(4096))) is None
    for word, value, named in [(0, 1, "magic"), (1, 2, "format 2"), (4, 1, "checksum"), (9, 1, "rows of format 1")]:
        buffer, _ = fresh()
        struct.pack_into("<Q", buffer, 8 * word, value)
        with pytest.raises(RegionError, match=named):
            region.found_geometry(memoryview(buffer))


# What a reader does.


def test_a_reference_is_current_until_its_slot_or_extent_is_reused() -> None:
    _, rows = fresh()
    rows.cut(0, 4096, 21)
    row = rows.row_offset(0, 3)
    open_at(rows, row, generation=31)
    ref = SlotRef(2 * MIB + 3 * 4096, 31, 21)
    assert rows.is_current(ref)
    rows.set_state(row, READY)
    assert rows.is_current(ref)
    open_at(rows, row, generation=32)
    assert not rows.is_current(ref)
    assert rows.is_current(ref._replace(generation=32))
    rows.cut(0, 8192, 23)
    assert not rows.is_current(ref._replace(generation=32))


def test_a_view_has_the_bytes_of_its_slot() -> None:
    buffer, rows = fresh()
    rows.cut(0, 4096, 21)
    open_at(rows, rows.row_offset(0, 3), generation=31)
    view = rows.slot_view(SlotRef(2 * MIB + 3 * 4096, 31, 21), 100, 5)
    view[:] = b"bytes"
    at = 2 * MIB + 3 * 4096 + 100
    assert buffer[at : at + 5] == b"bytes"
    assert buffer.count(b"bytes") == 1


@pytest.mark.parametrize(
    ("ref", "begin", "size", "named"),
    [
        (SlotRef(0, 31, 21), 0, 1, "in no extent"),
        (SlotRef(10 * MIB, 31, 21), 0, 1, "in no extent"),
        (SlotRef(2 * MIB + 1, 31, 21), 0, 1, "not the beginning of a slot"),
        (SlotRef(6 * MIB - 4096, 31, 21), 0, 1, "not the beginning of a slot"),
        (SlotRef(2 * MIB, 31, 22), 0, 1, "cut again"),
        (SlotRef(6 * MIB, 31, 0), 0, 1, "cut again"),
        (SlotRef(2 * MIB, 31, 21), 4000, 97, "of a slot of 4096"),
        (SlotRef(2 * MIB, 31, 21), -1, 1, "of a slot of 4096"),
        (SlotRef(2 * MIB, 31, 21), 0, -1, "of a slot of 4096"),
    ],
)
def test_a_view_never_leaves_its_slot(ref: SlotRef, begin: int, size: int, named: str) -> None:
    _, rows = fresh()
    rows.cut(0, 4096, 21)
    with pytest.raises(RegionError, match=named):
        rows.slot_view(ref, begin, size)
    if "of a slot" not in named:
        assert not rows.is_current(ref)


@given(st.integers(0, 1 << 64), st.integers(0, 1 << 64), st.integers(0, 1 << 64))
def test_any_three_numbers_are_accepted_as_a_reference(offset: int, generation: int, extent_generation: int) -> None:
    _, rows = fresh(6 * MIB)
    assert not rows.is_current(SlotRef(offset, generation, extent_generation))
