"""The words of the region's header that clients of all versions read, as bytes: section 6.6 of PROTOCOL.md."""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from typing import Any

import pytest

from kvcache_client import GroupSpec, NamespaceSpec, Region, Session
from kvcache_proto.errors import RegionError
from kvcache_proto.types import PoolGeometry, SlotRef

MIB = 1 << 20
ID = bytes(range(16))
GEOMETRY = PoolGeometry(ID, 10 * MIB, 4 * MIB, 2, 2 * MIB)

HEADER = (
    b"KVCREGN1"  # magic
    + (1).to_bytes(8, "little")  # format
    + ID
    + (10 * MIB).to_bytes(8, "little")  # region_bytes
    + (4 * MIB).to_bytes(8, "little")  # extent_bytes
    + (2).to_bytes(8, "little")  # extents
    + (2 * MIB).to_bytes(8, "little")  # data_offset
)
EXTENT_1 = 4096 + 64  # of 64 bytes each, from 4,096 on
START_1 = (2 + 4) * MIB
SLOT, ROWS = 65536, 10 * MIB - 63 * 128
EXTENT_ROW = struct.pack("<QQQQ", SLOT, 77, ROWS, 63)  # slot bytes, generation, slot rows, slots
GENERATION = 24  # in a slot row of 128 bytes


def a_region(header: bytes = HEADER, row: bytes = EXTENT_ROW, generation: int = 5) -> Region:
    """A region that no code of ours has written: extent 1 is cut, its slot 3 holds a block. All else is 0xee."""
    descriptor = os.memfd_create("frozen")
    os.ftruncate(descriptor, 10 * MIB)
    os.pwrite(descriptor, b"\xee" * 8192, 0)
    os.pwrite(descriptor, header + zlib.crc32(header[8:]).to_bytes(8, "little"), 0)
    os.pwrite(descriptor, row, EXTENT_1)
    os.pwrite(descriptor, b"\xee" * 63 * 128, ROWS)
    os.pwrite(descriptor, generation.to_bytes(8, "little"), ROWS + 3 * 128 + GENERATION)
    os.pwrite(descriptor, b"block 3!", START_1 + 3 * SLOT)
    try:
        return Region(descriptor, GEOMETRY)
    finally:
        os.close(descriptor)


def test_a_client_reads_only_these_header_words() -> None:
    region, ref = a_region(), SlotRef(START_1 + 3 * SLOT, 5, 77)
    assert region.current(ref.pack()).tolist() == [True]
    assert region.rows.is_current(ref)
    assert bytes(region.rows.slot_view(ref, 0, 8)) == b"block 3!"


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": 6},
        {"row": struct.pack("<QQQQ", SLOT, 78, ROWS, 63)},
        {"row": struct.pack("<QQQQ", SLOT, 77, ROWS, 3)},
        {"row": struct.pack("<QQQQ", SLOT, 77, ROWS + 128, 62)},
        {"row": struct.pack("<QQQQ", SLOT // 2 + 64, 77, ROWS, 63)},
        {"row": struct.pack("<QQQQ", 0, 77, ROWS, 63)},
    ],
)
def test_each_header_word_matters(changed: dict[str, Any]) -> None:
    region, ref = a_region(**changed), SlotRef(START_1 + 3 * SLOT, 5, 77)
    assert region.current(ref.pack()).tolist() == [False]
    assert not region.rows.is_current(ref)


@pytest.mark.parametrize("at", [0, 8, 16, 31, 32, 40, 48, 56])
def test_a_different_header_is_refused(at: int) -> None:
    torn = bytearray(HEADER)
    torn[at] ^= 1
    with pytest.raises(RegionError):
        a_region(bytes(torn))


def test_a_daemon_writes_the_header_words(daemon: Any) -> None:
    with Session.connect(daemon.endpoint, engine="e1", deadline=10.0) as session:
        namespace = session.attach(NamespaceSpec(model="frozen", groups=[GroupSpec(16, 4000)]), shards=(0,))
        hashes = [secrets.token_bytes(32) for _ in range(5)]
        reservation = namespace.reserve(hashes)
        for slot in reservation.slots:
            session.view(slot)[:] = b"x" * 4000
        reservation.commit()
        region = session.region
        assert region is not None
        raw, g = region.buffer, region.geometry

        def words(at: int, count: int = 1) -> tuple[int, ...]:
            return struct.unpack_from(f"<{count}Q", raw, at)

        assert bytes(raw[:8]) == b"KVCREGN1"
        assert words(8) == (1,)
        assert bytes(raw[16:32]) == g.region_id
        assert words(32, 4) == (g.region_bytes, g.extent_bytes, g.extents, g.data_offset)
        assert words(64) == (zlib.crc32(raw[8:64]),)
        with namespace.acquire(hashes) as lease:
            for slot in lease.slots:
                extent, inside = divmod(slot.ref.offset - g.data_offset, g.extent_bytes)
                slot_bytes, generation, rows, slots = words(4096 + 64 * extent, 4)
                assert (slot_bytes, generation) == (4032, slot.ref.extent_generation)
                assert slots == g.extent_bytes // (4032 + 128)
                assert rows == g.data_offset + (extent + 1) * g.extent_bytes - 128 * slots
                number, rest = divmod(inside, slot_bytes)
                assert rest == 0
                assert words(rows + 128 * number + 24) == (slot.ref.generation,)
