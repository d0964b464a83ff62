"""The mapped region: what is refused, and that the vectorised check says what the one-by-one check says."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator

import pytest

from kvcache_client.session.region import Region
from kvcache_proto.errors import RegionError
from kvcache_proto.region import RegionRows, RowBody, plan_geometry
from kvcache_proto.types import PoolGeometry, SlotRef

REGION_ID = bytes(range(16))
GEOMETRY = plan_geometry(REGION_ID, 64 << 20, 4 << 20)


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
        Region(formatted, plan_geometry(bytes(16), 64 << 20, 4 << 20))


def test_a_file_that_is_too_short_is_refused(formatted: int) -> None:
    os.ftruncate(formatted, GEOMETRY.region_bytes // 2)
    with pytest.raises(RegionError, match="cannot map"):
        Region(formatted, GEOMETRY)


def test_an_absurd_geometry_is_refused(formatted: int) -> None:
    with pytest.raises(RegionError, match="extents"):
        Region(formatted, PoolGeometry(REGION_ID, 4096, 4096, 1 << 16, 4096))


def test_current_says_of_every_reference_what_the_rows_say(formatted: int) -> None:
    region, draw = Region(formatted, GEOMETRY), random.Random(1)
    refs = []
    for extent, slot_bytes in enumerate((4096, 65536, 1 << 20, 3 << 20)):
        slots = region.rows.cut(extent, slot_bytes, generation=100 + extent)
        for slot in range(slots):
            generation = draw.getrandbits(63)
            region.rows.open_row(region.rows.row_offset(extent, slot), generation, 1, 0, RowBody(1, 0, b"h" * 32))
            refs.append(SlotRef(region.rows.extent_start(extent) + slot * slot_bytes, generation, 100 + extent))
    assert region.current(b"".join(ref.pack() for ref in refs)).all()
    for ref in draw.sample(refs, 300):  # new writers, and one extent cut anew
        extent = (ref.offset - GEOMETRY.data_offset) // GEOMETRY.extent_bytes
        slot = (ref.offset - region.rows.extent_start(extent)) // region.rows.extent_row(extent)[0]
        region.rows.open_row(region.rows.row_offset(extent, slot), draw.getrandbits(63), 2, 0, RowBody(1, 0, b"n" * 32))
    region.rows.cut(2, 8192, generation=7)
    odd = [0, 1, GEOMETRY.data_offset - 1, GEOMETRY.data_offset + 64, GEOMETRY.region_bytes, 1 << 63, (1 << 64) - 1]
    refs += [SlotRef(offset, draw.getrandbits(64), 100) for offset in odd]
    refs += [SlotRef(region.rows.extent_start(9), 0, 0)]  # an extent that was never cut
    found = region.current(b"".join(ref.pack() for ref in refs)).tolist()
    assert found == [region.rows.is_current(ref) for ref in refs]
    assert any(found)
    assert not all(found)


def test_offsets_and_odd_lengths(formatted: int) -> None:
    region = Region(formatted, GEOMETRY)
    assert region.offsets(SlotRef(5, 1, 1).pack() + SlotRef(1 << 40, 2, 2).pack()).tolist() == [5, 1 << 40]
    assert region.current(b"").tolist() == []
    with pytest.raises(RegionError, match="24 each"):
        region.offsets(bytes(23))
