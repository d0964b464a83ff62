"""A region with a corrupted header or rows: refused by name, or read without leaving its bounds."""

from __future__ import annotations

import contextlib
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
from kvcache_proto.region import HEADER, READY, ROW, RegionRows, RowBody, pages_of, plan_geometry, row_of
from kvcache_proto.types import REF_BYTES, BlockRef, PoolGeometry

MIB = 1 << 20
GEOMETRY = plan_geometry(bytes(range(16)), 5 * MIB, 4096)
BLOCKS = 40  # that lie in it
SIZES = (4096, 9000, 20_000)  # of blocks, in turns; those of the last size have three runs
WORD = st.one_of(
    st.integers(0, (1 << 64) - 1),
    st.sampled_from([0, 1, 63, 64, 128, 4096, 2 * MIB, 4 * MIB, 8 * MIB, 1 << 32, 1 << 63, (1 << 64) - 1]),
    st.integers(-4096, 4096).map(lambda near: GEOMETRY.region_bytes + near),
)
RUN = st.builds(
    lambda following, count: following << 32 | count,
    st.integers(0, 200) | st.integers(GEOMETRY.pages - 2, GEOMETRY.pages + 2) | st.just((1 << 32) - 1),
    st.integers(0, 8) | st.sampled_from([GEOMETRY.pages, GEOMETRY.pages + 1, 1 << 31, (1 << 32) - 1]),
)


def sound(buffer: memoryview) -> list[BlockRef]:
    """Fill `buffer` with a region of some blocks; return them."""
    rows, refs, page = RegionRows(buffer, GEOMETRY), [], 0
    rows.format()
    for number in range(BLOCKS):
        generation, pages = number + 1, pages_of(size_of(number), GEOMETRY.page_bytes)
        runs = [(page, pages)] if pages < 5 else [(page + 7, 2), (page + 4, 2), (page, 1)]
        further = 0
        for first, count in runs[:0:-1]:
            rows.continue_row(row_of(first), generation, count, further)
            further = first + 1
        begin = runs[0][0]
        rows.open_row(row_of(begin), generation, 1, 0, RowBody(1, 0, bytes([number]) * 32), runs[0][1], further)
        rows.set_state(row_of(begin), READY)
        refs.append(BlockRef(GEOMETRY.data_offset + begin * GEOMETRY.page_bytes, generation))
        page += 10
    return refs


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


class File(NamedTuple):
    """A region in memory: its bytes, what they were when it was sound, and what lies in it."""

    descriptor: int
    buffer: memoryview
    was: bytes
    refs: list[BlockRef]

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


def check_places(file: File, refs: list[BlockRef]) -> None:
    """Whatever the rows say: bytes that are given out are those of pages, as many as were asked for."""
    rows, region = RegionRows(file.buffer, GEOMETRY), Region(file.descriptor, GEOMETRY)
    for page in range(10 * BLOCKS):
        rows.read_row(row_of(page))
        rows.read_run(row_of(page), page // 10 + 1)
    for number, ref in enumerate(refs):
        for size in {size_of(number), 1, 4096, MIB, 1 << 40}:
            with contextlib.suppress(RegionError):
                runs = rows.runs(ref, pages_of(size, GEOMETRY.page_bytes))
                assert all(0 <= page < page + count <= GEOMETRY.pages for page, count in runs)
                assert sum(count for _, count in runs) == pages_of(size, GEOMETRY.page_bytes)
                views = rows.views(ref, size, 0, size)
                assert sum(map(len, views)) == size
        check_placed(region, ref.pack(), size_of(number))
    check_placed(region, b"".join(ref.pack() for ref in refs), SIZES[0])
    check_placed(region, b"".join(ref.pack() for ref in refs), SIZES[-1])


def check_placed(region: Region, packed: bytes, size: int) -> None:
    placed = region.place(packed, size)
    if placed is None:
        return
    for offset in placed.offsets.tolist():
        parts = [(offset, size)] if offset < region.bytes else placed.runs.pieces(offset, size)  # type: ignore[union-attr]
        assert sum(part for _, part in parts) == size
        assert all(GEOMETRY.data_offset <= at < at + part <= region.bytes for at, part in parts)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 10 * BLOCKS - 1), RUN | WORD), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
@example([(27, 28 << 32 | 1)], random.Random(1))  # a cycle of one
@example([(27, 25 << 32 | 1), (24, 28 << 32 | 1)], random.Random(1))  # a cycle of two
@example([(27, (1 << 32) - 1)], random.Random(1))  # a run of all pages and more
@example([(27, ((1 << 32) - 1) << 32 | 1)], random.Random(1))  # beyond the last
def test_forged_runs(file: File, changes: list[tuple[int, int]], draw: random.Random) -> None:
    descriptor, buffer, was, refs = file
    rows = slice(HEADER, row_of(GEOMETRY.pages))
    try:
        for page, run in changes:
            struct.pack_into("<Q", buffer, row_of(page) + 104, run)
        asked = refs + [ref._replace(offset=draw.getrandbits(64)) for ref in refs[:10]]
        asked += [ref._replace(offset=draw.randrange(8 * MIB)) for ref in refs[:10]]
        asked += [ref._replace(offset=GEOMETRY.data_offset + 4096 * draw.randrange(2000)) for ref in refs[:10]]
        check_places(file, asked)
        region = Region(descriptor, GEOMETRY)
        # Others than those that begin with a page are refused before: `current` does not look at them again.
        held = [ref for ref in asked if not (ref.offset - GEOMETRY.data_offset) % GEOMETRY.page_bytes]
        current = region.current(b"".join(ref.pack() for ref in held)).tolist()
        assert current == [region.rows.is_current(ref) for ref in held]
    finally:
        buffer[rows] = was[rows]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, ROW * 10 * BLOCKS - 1), st.integers(0, 255)), min_size=1, max_size=30))
def test_damaged_rows(file: File, changes: list[tuple[int, int]]) -> None:
    """What was not touched is read as before; what was is FREE, or says what its checksum covers as before."""
    buffer, rows = file.buffer, RegionRows(file.buffer, GEOMETRY)
    before = [rows.read_row(row_of(page)) for page in range(10 * BLOCKS)]
    try:
        for at, value in changes:
            buffer[HEADER + at] = value
        check_places(file, file.refs)
        spoilt = {at // ROW for at, _ in changes}
        for page, was in enumerate(before):
            found = rows.read_row(row_of(page))
            assert found == was if page not in spoilt else found is None or was is None or found.body == was.body
        Region(file.descriptor, GEOMETRY).current(b"".join(ref.pack() for ref in file.refs))
    finally:
        buffer[HEADER : row_of(10 * BLOCKS)] = file.was[HEADER : row_of(10 * BLOCKS)]


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
    WORD | st.just(GEOMETRY.page_bytes),
    WORD | st.integers(-5, 5) | st.just(GEOMETRY.pages),
    WORD | st.just(GEOMETRY.data_offset),
)
@example(GEOMETRY.region_id, 1 << 63, GEOMETRY.page_bytes, GEOMETRY.pages, GEOMETRY.data_offset)
@example(GEOMETRY.region_id, GEOMETRY.region_bytes, 0, GEOMETRY.pages, GEOMETRY.data_offset)
@example(GEOMETRY.region_id, GEOMETRY.region_bytes, 2 * GEOMETRY.page_bytes, GEOMETRY.pages // 2, GEOMETRY.data_offset)
@example(GEOMETRY.region_id, 4096, 0, -1, 0)
def test_a_geometry_that_differs_from_the_header_is_refused(
    file: File, name: bytes, size: int, page: int, count: int, data: int
) -> None:
    """As a daemon gone mad might announce it."""
    geometry = PoolGeometry(name, size, page, count, data)
    if geometry == GEOMETRY:
        return
    with pytest.raises(RegionError):
        Region(file[0], geometry)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_references_of_any_length(file: File, packed: bytes) -> None:
    region = Region(file[0], GEOMETRY)
    try:
        assert len(region.current(packed)) == len(packed) // REF_BYTES
        check_placed(region, packed, 4096)
    except RegionError:
        assert len(packed) % REF_BYTES
        assert not region.holds(packed)
