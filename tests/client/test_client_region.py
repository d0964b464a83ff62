"""The mapped region: what is refused, and that the vectorised check says what the one-by-one check says."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from kvcache_client.session.region import Region
from kvcache_proto.errors import RegionError
from kvcache_proto.region import RegionRows, RowBody, plan_geometry, row_of
from kvcache_proto.types import BlockRef, PoolGeometry

REGION_ID = bytes(range(16))
PAGE = 4096
GEOMETRY = plan_geometry(REGION_ID, 64 << 20, PAGE)


@pytest.fixture
def descriptor() -> Iterator[int]:
    found = os.memfd_create("region", os.MFD_CLOEXEC)
    os.ftruncate(found, GEOMETRY.region_bytes)
    yield found
    os.close(found)


@pytest.fixture
def formatted(descriptor: int) -> int:
    RegionRows(memoryview(mmap.mmap(descriptor, GEOMETRY.region_bytes)), GEOMETRY).format()
    return descriptor


def test_the_mapping_outlives_its_descriptor_and_is_shared(formatted: int) -> None:
    copy = os.dup(formatted)
    region = Region(copy, GEOMETRY)
    os.close(copy)
    region.buffer[GEOMETRY.data_offset] = 7
    assert os.pread(formatted, 1, GEOMETRY.data_offset) == b"\x07"
    assert (region.id, region.bytes, region.address % 4096) == (REGION_ID, GEOMETRY.region_bytes, 0)


def test_what_is_no_region_is_refused(descriptor: int) -> None:
    with pytest.raises(RegionError, match="magic"):
        Region(descriptor, GEOMETRY)


def test_another_region_is_refused(formatted: int) -> None:
    with pytest.raises(RegionError, match="another region"):
        Region(formatted, plan_geometry(bytes(16), 64 << 20, PAGE))


def test_a_file_that_is_too_short_is_refused(formatted: int) -> None:
    os.ftruncate(formatted, GEOMETRY.region_bytes // 2)
    with pytest.raises(RegionError, match="cannot map"):
        Region(formatted, GEOMETRY)


@pytest.mark.parametrize(
    "absurd",
    [
        PoolGeometry(REGION_ID, 4096, 4096, 1 << 16, 4096),
        replace(GEOMETRY, page_bytes=0),
        replace(GEOMETRY, page_bytes=GEOMETRY.page_bytes + 1),
        replace(GEOMETRY, pages=0),
        replace(GEOMETRY, pages=-1),
        replace(GEOMETRY, pages=1 << 42),
        replace(GEOMETRY, data_offset=0),
        replace(GEOMETRY, data_offset=GEOMETRY.data_offset + 64),
        replace(GEOMETRY, region_bytes=GEOMETRY.region_bytes + 1),
    ],
)
def test_an_absurd_geometry_is_refused(formatted: int, absurd: PoolGeometry) -> None:
    with pytest.raises(RegionError, match="pages of"):
        Region(formatted, absurd)


def write(region: Region, generation: int, *runs: tuple[int, int]) -> BlockRef:
    """Write the rows of a block with these runs of pages."""
    further = [*(page + 1 for page, _ in runs[1:]), 0]
    for (page, count), following in zip(runs[1:], further[1:], strict=True):
        region.rows.continue_row(row_of(page), generation, count, following)
    page, count = runs[0]
    region.rows.open_row(row_of(page), generation, 1, 0, RowBody(1, 0, b"h" * 32), count, further[0])
    return BlockRef(GEOMETRY.data_offset + page * PAGE, generation)


def packed(refs: Sequence[BlockRef]) -> bytes:
    return b"".join(ref.pack() for ref in refs)


def test_current_says_of_every_reference_what_the_rows_say(formatted: int) -> None:
    region, draw = Region(formatted, GEOMETRY), random.Random(1)
    refs, page = [], 0
    while page + 300 < GEOMETRY.pages:
        count = draw.choice((1, 16, 256))
        refs.append(write(region, draw.getrandbits(62), (page, count)))
        page += count
    assert region.current(packed(refs)).all()
    changed = draw.sample(refs, 30)
    for ref in changed[:20]:  # new writers, and blocks that are gone
        write(region, draw.getrandbits(62), (region.rows.page_of(ref.offset), 1))
    for ref in changed[20:]:
        region.rows.close_row(row_of(region.rows.page_of(ref.offset)))
    odd = [0, 1, GEOMETRY.data_offset - 1, GEOMETRY.region_bytes, 1 << 63, (1 << 64) - 1]
    refs += [BlockRef(offset, draw.getrandbits(64)) for offset in odd]
    refs += [BlockRef(GEOMETRY.region_bytes - PAGE, 5)]  # a page that was never given
    found = region.current(packed(refs)).tolist()
    assert found == [region.rows.is_current(ref) for ref in refs]
    assert any(found)
    assert not all(found)


def test_what_is_no_page_of_this_region_is_not_held(formatted: int) -> None:
    region, ref = Region(formatted, GEOMETRY), BlockRef(GEOMETRY.data_offset, 1).pack()
    assert region.holds(b"")
    assert region.holds(ref * 2)
    assert not region.holds(ref[:-1])
    for offset in (0, GEOMETRY.data_offset - PAGE, GEOMETRY.data_offset + 64, GEOMETRY.region_bytes, 1 << 63):
        assert not region.holds(ref + BlockRef(offset, 1).pack()), offset


def test_odd_lengths(formatted: int) -> None:
    region = Region(formatted, GEOMETRY)
    assert region.current(b"").tolist() == []
    with pytest.raises(RegionError, match="16 each"):
        region.current(bytes(15))
    assert region.place(bytes(15), PAGE) is None
    placed = region.place(b"", PAGE)
    assert placed is not None
    assert placed.offsets.tolist() == []


# Blocks in several runs of pages.


def test_blocks_in_one_run_and_in_several_are_seen_side_by_side(formatted: int) -> None:
    region, size = Region(formatted, GEOMETRY), 4 * PAGE + 77
    pages = [[(0, 5)], [(20, 1), (9, 3), (30, 1)], [(40, 5)], [(50, 2), (60, 3)]]
    refs = [write(region, number + 1, *runs) for number, runs in enumerate(pages)]
    draw = random.Random(2)
    expected = []
    for runs in pages:
        data = draw.randbytes(5 * PAGE)
        expected.append(data[:size])
        at = 0
        for page, count in runs:
            part = min(count * PAGE, len(data) - at)
            begin = GEOMETRY.data_offset + page * PAGE
            region.buffer[begin : begin + part] = data[at : at + part]
            at += part
    placed = region.place(packed(refs), size)
    assert placed is not None
    assert placed.runs is not None
    assert (placed.offsets < region.bytes).tolist() == [True, False, True, False]
    for begin, part in ((0, size), (0, 0), (PAGE - 1, 2), (PAGE, PAGE), (100, 3 * PAGE), (size - 1, 1)):
        found = region.views(packed(refs), size, begin, part)
        assert [b"".join(views) for views in found] == [data[begin : begin + part] for data in expected], begin
        one_by_one = [b"".join(region.rows.views(ref, size, begin, part)) for ref in refs]
        assert one_by_one == [data[begin : begin + part] for data in expected], begin


def test_a_block_whose_rows_contradict_themselves_is_placed_nowhere(formatted: int) -> None:
    region, last = Region(formatted, GEOMETRY), GEOMETRY.pages
    wrong = {
        "too few": [(0, 2)],
        "too many": [(2, 2), (10, 3)],
        "beyond the end": [(last - 3, 2), (last - 1, 2)],
        "nothing": [(20, 2), (30, 0), (40, 2)],
    }
    for number, (name, runs) in enumerate(wrong.items()):
        ref = write(region, number + 1, *runs)
        assert region.place(ref.pack(), 4 * PAGE) is None, name
        with pytest.raises(RegionError):
            region.views(ref.pack(), 4 * PAGE, 0, 1)
    # The second run is another block's now, or the first says that it goes on without end.
    ref = write(region, 90, (50, 2), (60, 2))
    assert region.place(ref.pack(), 4 * PAGE) is not None
    write(region, 91, (60, 2))
    assert region.place(ref.pack(), 4 * PAGE) is None
    ref = write(region, 92, (70, 1), (70, 1))
    assert region.place(ref.pack(), 4 * PAGE) is None
    # One run that ends behind the region's end.
    ref = write(region, 93, (last - 2, 9))
    assert region.place(ref.pack(), 4 * PAGE) is None
