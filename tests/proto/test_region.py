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
    CONTINUED,
    FREE,
    FREED,
    MAX_PAGES,
    READY,
    ROW,
    WRITING,
    RegionRows,
    RowBody,
    default_page,
    pages_of,
    pieces,
    plan_geometry,
    row_of,
)
from kvcache_proto.types import BlockRef, PoolGeometry

KIB, MIB = 1 << 10, 1 << 20
ID = bytes(range(16))
HASH = bytes(range(100, 132))
PAGES = 2048  # of `fresh()`
DATA = 2 * MIB  # where they begin


def words(buffer: bytearray, at: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", buffer, at)


def fresh(size: int = 10 * MIB, page_bytes: int = 4096) -> tuple[bytearray, RegionRows]:
    geometry = plan_geometry(ID, size, page_bytes)
    buffer = bytearray(geometry.region_bytes)
    rows = RegionRows(memoryview(buffer), geometry)
    rows.format()
    return buffer, rows


def open_at(
    rows: RegionRows, page: int, generation: int = 11, parent: int = 0, pages: int = 1, further: int = 0
) -> None:
    rows.open_row(row_of(page), generation, 5, parent, RowBody(3, 1, HASH, 42), pages, further)


def scatter(rows: RegionRows, runs: list[tuple[int, int]], generation: int = 31) -> BlockRef:
    """Write the rows of a block that has these runs, as the daemon does."""
    further = 0
    for page, count in runs[:0:-1]:
        rows.continue_row(row_of(page), generation, count, further)
        further = page + 1
    open_at(rows, runs[0][0], generation, 0, runs[0][1], further)
    return at(runs[0][0], generation)


def at(page: int, generation: int = 31) -> BlockRef:
    return BlockRef(DATA + page * 4096, generation)


# The bytes.


def test_the_header_byte_by_byte() -> None:
    buffer, rows = fresh()
    assert rows.geometry == PoolGeometry(ID, 10 * MIB, 4096, PAGES, DATA)
    assert buffer[:8] == b"KVCREGN1"
    assert words(buffer, 8, 1) == (3,)
    assert buffer[16:32] == ID
    assert words(buffer, 32, 4) == (10 * MIB, 4096, PAGES, DATA)
    assert words(buffer, 64, 1) == (zlib.crc32(buffer[8:64]),)
    assert words(buffer, 72, 1) == (3,)
    assert not any(buffer[80:])
    rows.check_header()


def test_a_row_byte_by_byte() -> None:
    buffer, rows = fresh()
    row = row_of(5)
    assert row == 4096 + 5 * 128
    rows.open_row(row, 11, 5, 10, RowBody(3, 1, HASH, 42, 77, 6, 9, 4), 3, 9 + 1)
    rows.set_settled(row, 0b10)
    body = struct.pack("<IHHQQII", 3, 1, 32, 42, 77, 6, 9) + HASH + struct.pack("<IIII", 4, 0, 3, 10)
    assert words(buffer, row, 4) == (WRITING, 5, 0b10, 11)
    assert buffer[row + 32 : row + 112] == body
    assert words(buffer, row + 112, 2) == (10, zlib.crc32(struct.pack("<Q", 11) + body))
    rows.set_parent(row, 12)
    assert words(buffer, row + 112, 1) == (12,)
    assert not any(buffer[4096:row]) and not any(buffer[row + 128 :])


def test_the_row_of_a_further_run_byte_by_byte() -> None:
    buffer, rows = fresh()
    row = row_of(9)
    rows.continue_row(row, 11, 4, 20 + 1)
    assert words(buffer, row, 4) == (CONTINUED, 0, 0, 11) == (4, 0, 0, 11)
    assert not any(buffer[row + 32 : row + 104])
    run = struct.pack("<II", 4, 21)
    assert buffer[row + 104 : row + 112] == run
    assert words(buffer, row + 112, 2) == (0, zlib.crc32(struct.pack("<Q", 11) + run))


def test_a_closed_row_has_another_generation() -> None:
    buffer, rows = fresh()
    open_at(rows, 5)
    rows.close_row(row_of(5))
    assert words(buffer, row_of(5), 4) == (FREE, 5, 0, 11 | 1 << 63)
    assert FREED == 1 << 63


# The header.


def test_another_format_id_and_geometry_are_distinguished() -> None:
    for word, value, named in [(0, 0, "magic"), (1, 2, "format 2"), (4, 1, "checksum"), (8, 1, "checksum")]:
        buffer, rows = fresh()
        struct.pack_into("<Q", buffer, 8 * word, value)
        with pytest.raises(RegionError, match=named):
            rows.check_header()
    buffer, _ = fresh()
    other_id = PoolGeometry(bytes(16), 10 * MIB, 4096, PAGES, DATA)
    with pytest.raises(RegionError, match="another region"):
        RegionRows(memoryview(buffer), other_id).check_header()
    with pytest.raises(RegionError, match="region divided as"):
        RegionRows(memoryview(buffer), PoolGeometry(ID, 10 * MIB, 8192, PAGES // 2, DATA)).check_header()
    with pytest.raises(RegionError, match="the region has"):
        RegionRows(memoryview(buffer), PoolGeometry(ID, 12 * MIB, 4096, PAGES + 512, DATA))


def test_formatting_again_forgets_everything() -> None:
    buffer, rows = fresh()
    open_at(rows, 0)
    scatter(rows, [(PAGES - 1, 1), (7, 2)])
    rows.format()
    assert rows.read_row(row_of(0)) is None
    assert not any(buffer[80:DATA])


def test_the_header_gives_the_geometry() -> None:
    buffer, rows = fresh()
    assert region.found_geometry(memoryview(buffer)) == rows.geometry
    assert region.found_geometry(memoryview(bytearray(4096))) is None
    for word, value, named in [(0, 1, "magic"), (1, 2, "format 2"), (4, 1, "checksum"), (9, 1, "rows of format 1")]:
        buffer, _ = fresh()
        struct.pack_into("<Q", buffer, 8 * word, value)
        with pytest.raises(RegionError, match=named):
            region.found_geometry(memoryview(buffer))


def test_a_region_that_was_given_up_is_none() -> None:
    buffer, rows = fresh()
    assert not region.is_given_up(memoryview(buffer))
    rows.give_up()
    assert region.is_given_up(memoryview(buffer))
    assert region.found_geometry(memoryview(buffer)) is None
    rows.check_header()  # its clients continue


# How the region is divided.


@settings(deadline=None)
@given(st.integers(0, 1 << 42), st.sampled_from([0, *(4096 << shift for shift in range(10))]))
def test_pages_and_rows_fill_the_size_and_the_header_is_extra(size: int, page_bytes: int) -> None:
    try:
        g = plan_geometry(ID, size, page_bytes)
    except RegionError:
        page_bytes = page_bytes or default_page(size)
        assert size < 2 * MIB + (2 * MIB // page_bytes) * ROW or size > MAX_PAGES * (page_bytes + ROW)
        return
    assert 1 <= g.pages <= MAX_PAGES
    assert g.page_bytes == page_bytes or not page_bytes
    assert g.data_offset % region.ALIGN == g.region_bytes % region.ALIGN == 0
    assert g.data_offset - region.ALIGN < row_of(g.pages) <= g.data_offset
    assert g.region_bytes == g.data_offset + g.pages * g.page_bytes
    assert (
        g.pages * (g.page_bytes + ROW)
        <= size
        < g.pages * (g.page_bytes + ROW) + 2 * MIB * (g.page_bytes + ROW) // (g.page_bytes)
    )


@pytest.mark.parametrize("page_bytes", [1, 2048, 4097, 12 * KIB, 4 * MIB, -4096])
def test_pages_are_powers_of_two_and_within_huge_pages(page_bytes: int) -> None:
    with pytest.raises(RegionError, match="a power of two"):
        plan_geometry(ID, 1 << 30, page_bytes)


@pytest.mark.parametrize(
    ("size", "page_bytes"), [(0, 0), (2 * MIB, 0), (2 * MIB + 512 * ROW - 1, 4096), (2 * MIB, 2 * MIB)]
)
def test_a_size_without_room_for_a_huge_page_names_the_least(size: int, page_bytes: int) -> None:
    with pytest.raises(RegionError, match="at least") as error:
        plan_geometry(ID, size, page_bytes)
    least = int(str(error.value).split("at least ")[1].split()[0])
    assert plan_geometry(ID, least, page_bytes).pages * (page_bytes or 4096) == 2 * MIB


def test_too_many_pages_name_the_page_size_that_will_do() -> None:
    with pytest.raises(RegionError, match="at most 4194304; choose pages of 65536") as error:
        plan_geometry(ID, 256 << 30, 4096)
    assert plan_geometry(ID, 256 << 30, int(str(error.value).split()[-3])).pages <= MAX_PAGES


def test_the_default_page_size() -> None:
    GIB = 1 << 30
    sizes = [4 * MIB, 255 * MIB, 256 * MIB, 4 * GIB, 64 * GIB, 65 * GIB, 128 * GIB, 1024 * GIB, 1 << 60]
    assert [default_page(size) // KIB for size in sizes] == [4, 4, 16, 16, 16, 32, 32, 256, 2048]


@pytest.mark.parametrize("mib", [256, 512, 1024, 1536, 2048, 4096, 8192, 12288, 16384, 32768, 100 << 10])
def test_common_blocks_fill_a_region_of_any_size(mib: int) -> None:
    size = mib * MIB
    g = plan_geometry(ID, size)
    blocks = [quarters << shift for shift in range(14, 23) for quarters in (4, 5, 6)]
    wasted = [1 - g.pages // pages_of(each, g.page_bytes) * each / size for each in blocks if each * 128 <= size]
    assert max(wasted) < (0.03 if g.page_bytes == 16 * KIB else 0.3), wasted
    assert sum(wasted) / len(wasted) < 0.025


@given(st.integers(1, 4 * MIB), st.sampled_from([4096, 16384, 2 * MIB]))
def test_a_block_fits_its_pages(block_bytes: int, page_bytes: int) -> None:
    pages = pages_of(block_bytes, page_bytes)
    assert (pages - 1) * page_bytes < block_bytes <= pages * page_bytes


# Rows.


U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))


@settings(deadline=None)
@given(
    *(U64, U64, U64, U64, U32, U32),
    st.builds(RowBody, U32, U16, st.binary(min_size=8, max_size=32), U64, U64, U32, U32, U32),
)
def test_a_row_is_read_as_it_was_written(
    generation: int, tick: int, settled: int, parent: int, pages: int, further: int, body: RowBody
) -> None:
    _, rows = fresh(3 * MIB)
    row = row_of(5)
    rows.open_row(row, generation, tick, parent, body, pages, further)
    rows.set_settled(row, settled)
    found = rows.read_row(row)
    assert found == (WRITING, generation, tick, settled, parent, body)
    rows.set_tick(row, 77)
    rows.set_parent(row, 78)
    rows.set_state(row, READY)
    assert found is not None
    assert rows.read_row(row) == found._replace(state=READY, tick=77, parent=78)
    assert rows.states()[4:7] == [FREE, READY, FREE]
    rows.close_row(row)
    assert rows.read_row(row) is None
    assert not any(rows.states())


@settings(deadline=None)
@given(st.integers(24, ROW - 1), st.integers(1, 255))
def test_a_torn_row_is_free(at: int, flip: int) -> None:
    buffer, rows = fresh(3 * MIB)
    row = row_of(2)
    open_at(rows, 2)
    rows.set_state(row, READY)
    buffer[row + at] ^= flip
    alone = range(112, 120)  # the parent
    assert (rows.read_row(row) is None) == (at not in alone)


@settings(deadline=None)
@given(st.integers(0, ROW - 1), st.integers(1, 255))
def test_a_torn_row_of_a_further_run_is_none(at: int, flip: int) -> None:
    buffer, rows = fresh(3 * MIB)
    row = row_of(2)
    rows.continue_row(row, 11, 4, 20)
    assert rows.read_run(row, 11) == (4, 20)
    buffer[row + at] ^= flip
    read = {*range(8), *range(24, 32), *range(104, 112), *range(120, 128)}
    assert rows.read_run(row, 11) == (None if at in read else (4, 20))


@pytest.mark.parametrize("state", [4, 5, 1 << 32, (1 << 64) - 1])
def test_an_invalid_state_is_free(state: int) -> None:
    buffer, rows = fresh(3 * MIB)
    open_at(rows, 0)
    struct.pack_into("<Q", buffer, row_of(0), state)
    assert rows.read_row(row_of(0)) is None


def test_the_rows_of_blocks_and_of_further_runs_are_told_apart() -> None:
    _, rows = fresh(3 * MIB)
    scatter(rows, [(3, 2), (9, 4)])
    assert rows.read_row(row_of(3)) is not None and rows.read_run(row_of(3), 31) is None
    assert rows.read_row(row_of(9)) is None and rows.read_run(row_of(9), 31) == (4, 0)
    assert rows.read_run(row_of(9), 32) is None
    rows.continue_row(row_of(9), 31, 0, 0)  # no pages
    assert rows.read_run(row_of(9), 31) is None
    rows.close_row(row_of(9))
    assert rows.read_run(row_of(9), 31) is None


def test_the_fields_named_for_bulk_readers_are_those_of_the_row() -> None:
    buffer, rows = fresh(3 * MIB)
    row = row_of(3)
    rows.open_row(row, 31, 5, 10, RowBody(3, 1, HASH[:16], 42, 77, 6, 9, 4), 8, 21)
    names, types, offsets = zip(*((name, *where) for name, where in region.ROW_FIELDS.items()), strict=True)
    kind = np.dtype({"names": names, "formats": types, "offsets": offsets, "itemsize": ROW})
    (found,) = np.frombuffer(buffer, kind, 1, row)
    body = (3, 1, 16, 42, 77, 6, 9)
    fields = ("namespace", "group", "hash_bytes", "owner", "reservation", "position", "writers")
    assert tuple(found[name] for name in fields) == body
    assert tuple(found[name] for name in ("state", "tick", "settled", "generation")) == (WRITING, 5, 0, 31)
    assert (found["engine"], found["parent"], found["hash"].tobytes()) == (4, 10, HASH[:16].ljust(32, b"\0"))
    assert (found["run_pages"], found["next"]) == (8, 21)
    checked = buffer[row + region.CHECKED.start : row + region.CHECKED.stop]
    assert found["check"] == zlib.crc32(checked)


# What a reader does.


def test_a_reference_is_current_until_its_pages_are_free_or_reused() -> None:
    _, rows = fresh()
    open_at(rows, 3, 31)
    assert rows.is_current(at(3))
    rows.set_state(row_of(3), READY)
    assert rows.is_current(at(3))
    rows.close_row(row_of(3))
    assert not rows.is_current(at(3))
    with pytest.raises(RegionError, match="given to another"):
        rows.runs(at(3), 1)
    open_at(rows, 3, 32)
    assert not rows.is_current(at(3))
    assert rows.is_current(at(3, 32))


def test_views_have_the_bytes_of_their_block() -> None:
    buffer, rows = fresh()
    open_at(rows, 3, 31, pages=2)
    (view,) = rows.views(at(3), 8000, 4094, 5)
    view[:] = b"bytes"
    begin = DATA + 3 * 4096 + 4094
    assert buffer[begin : begin + 5] == b"bytes"
    assert buffer.count(b"bytes") == 1


def test_views_of_a_block_in_several_runs() -> None:
    buffer, rows = fresh()
    runs = [(10, 2), (4, 1), (PAGES - 1, 1), (20, 3)]
    ref = scatter(rows, runs)
    size = 7 * 4096 - 100
    assert rows.runs(ref, 7) == runs
    whole = bytes(number % 251 for number in range(size))
    views = rows.views(ref, size, 0, size)
    assert [len(view) for view in views] == [2 * 4096, 4096, 4096, 3 * 4096 - 100]
    done = 0
    for view in views:
        view[:] = whole[done : done + len(view)]
        done += len(view)
    assert buffer[DATA + 4 * 4096 : DATA + 5 * 4096] == whole[2 * 4096 : 3 * 4096]
    assert buffer[DATA + 20 * 4096 : DATA + 23 * 4096 - 100] == whole[4 * 4096 :]
    for begin, end in [(0, 0), (0, 1), (8191, 8193), (8192, 12288), (5000, 20000), (12287, size), (size, size)]:
        assert b"".join(rows.views(ref, size, begin, end - begin)) == whole[begin:end]


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_pieces_are_the_bytes_of_the_runs_in_order(counts: list[int], data: st.DataObject) -> None:
    geometry = PoolGeometry(ID, 10 * MIB, 4096, PAGES, DATA)
    first = data.draw(st.permutations(range(len(counts))))
    runs = [(100 * page, count) for page, count in zip(first, counts, strict=True)]
    size = sum(counts) * 4096
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    places = [(DATA + page * 4096, DATA + (page + count) * 4096) for page, count in runs]
    flat = np.concatenate([np.arange(*place) for place in places])
    found = pieces(geometry, runs, begin, end - begin)
    assert all(count > 0 for _, count in found)
    assert [*np.concatenate([[], *(np.arange(place, place + count) for place, count in found)])] == [*flat[begin:end]]


@pytest.mark.parametrize(
    ("ref", "begin", "size", "named"),
    [
        (BlockRef(0, 31), 0, 1, "no page begins"),
        (BlockRef(10 * MIB, 31), 0, 1, "no page begins"),
        (BlockRef(DATA - 4096, 31), 0, 1, "no page begins"),
        (BlockRef(DATA + 3 * 4096 + 1, 31), 0, 1, "no page begins"),
        (at(4), 0, 1, "given to another"),
        (at(3, 32), 0, 1, "given to another"),
        (at(2, 0), 0, 1, "given to another"),
        (at(3), 8000, 97, "of a block of 8096"),
        (at(3), -1, 1, "of a block of 8096"),
        (at(3), 0, -1, "of a block of 8096"),
    ],
)
def test_views_never_leave_their_block(ref: BlockRef, begin: int, size: int, named: str) -> None:
    _, rows = fresh()
    open_at(rows, 3, 31, pages=2)
    with pytest.raises(RegionError, match=named):
        rows.views(ref, 8096, begin, size)
    if "of a block" not in named:
        assert not rows.is_current(ref) or ref.generation == 0


def test_a_block_of_another_size_is_none() -> None:
    _, rows = fresh()
    ref = scatter(rows, [(10, 2), (4, 1)])
    assert rows.runs(ref, 3) == [(10, 2), (4, 1)]
    for pages in (1, 2, 4, 100):
        with pytest.raises(RegionError):
            rows.runs(ref, pages)


@pytest.mark.parametrize(
    ("page", "run", "named"),
    [
        (10, 0, "given to another"),  # no pages
        (10, 4, "given to another"),  # more than it has
        (10, 2, "contradict"),  # no further run
        (10, 5 << 32 | 3, "contradict"),  # one too many
        (10, 6 << 32 | 2, "given to another"),  # another block's
        (10, 11 << 32 | 1, "contradict|given to another"),  # itself
        (10, (PAGES + 1) << 32 | 2, "contradict"),  # beyond the last
        (10, 0xFFFFFFFF << 32 | 2, "contradict"),
        (4, 11 << 32 | 1, "contradict"),  # back to the first
        (4, 2, "given to another"),
        (4, 0, "given to another"),
    ],
)
def test_hostile_runs_are_refused(page: int, run: int, named: str) -> None:
    buffer, rows = fresh()
    ref = scatter(rows, [(10, 2), (4, 1)])
    struct.pack_into("<Q", buffer, row_of(page) + 104, run)
    with pytest.raises(RegionError, match=named):
        rows.runs(ref, 3)


def test_a_run_beyond_the_last_page_is_refused() -> None:
    _, rows = fresh()
    open_at(rows, PAGES - 1, 31, pages=2)
    with pytest.raises(RegionError, match="contradict"):
        rows.runs(at(PAGES - 1), 2)


@settings(deadline=None)
@given(st.integers(0, 1 << 64), st.integers(0, 1 << 64))
def test_any_two_numbers_are_accepted_as_a_reference(offset: int, generation: int) -> None:
    _, rows = fresh(3 * MIB)
    assert not rows.is_current(BlockRef(offset, generation)) or not generation
