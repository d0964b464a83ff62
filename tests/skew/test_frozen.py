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
from kvcache_proto.types import BlockRef, PoolGeometry

MIB = 1 << 20
ID = bytes(range(16))
GEOMETRY = PoolGeometry(ID, 4 * MIB, 4096, 512, 2 * MIB)

HEADER = (
    b"KVCREGN1"  # magic
    + (3).to_bytes(8, "little")  # format
    + ID
    + (4 * MIB).to_bytes(8, "little")  # region_bytes
    + (4096).to_bytes(8, "little")  # page_bytes
    + (512).to_bytes(8, "little")  # pages
    + (2 * MIB).to_bytes(8, "little")  # data_offset
)
ROWS = 4096  # of 128 bytes each, from there on
GENERATION, RUN = 24, 104  # in a row
REF = BlockRef(2 * MIB + 3 * 4096, 5)


def a_region(header: bytes = HEADER, generation: int = 5, runs: tuple[int, int, int, int] = (1, 9 + 1, 1, 0)) -> Region:
    """A region that no code of ours has written: a block of pages 3 and 9. All else is 0xee."""
    descriptor = os.memfd_create("frozen")
    os.ftruncate(descriptor, 4 * MIB)
    os.pwrite(descriptor, b"\xee" * (4096 + 512 * 128), 0)
    os.pwrite(descriptor, header + zlib.crc32(header[8:]).to_bytes(8, "little"), 0)
    for page, run in ((3, runs[:2]), (9, runs[2:])):
        os.pwrite(descriptor, generation.to_bytes(8, "little"), ROWS + page * 128 + GENERATION)
        os.pwrite(descriptor, struct.pack("<II", *run), ROWS + page * 128 + RUN)
    os.pwrite(descriptor, b"page 3!!", 2 * MIB + 4 * 4096 - 8)
    os.pwrite(descriptor, b"page 9!!", 2 * MIB + 9 * 4096)
    try:
        return Region(descriptor, GEOMETRY)
    finally:
        os.close(descriptor)


def test_a_client_reads_only_these_words() -> None:
    region = a_region()
    assert region.current(REF.pack()).tolist() == [True]
    assert region.rows.is_current(REF)
    assert [bytes(view) for view in region.rows.views(REF, 8000, 4088, 16)] == [b"page 3!!", b"page 9!!"]
    assert region.place(REF.pack(), 8000) is not None


def test_the_generation_matters() -> None:
    region = a_region(generation=6)
    assert region.current(REF.pack()).tolist() == [False]
    assert not region.rows.is_current(REF)


@pytest.mark.parametrize(
    "runs", [(0, 10, 1, 0), (1, 0, 1, 0), (1, 11, 1, 0), (1, 10, 2, 0), (1, 10, 1, 4), (1, 10, 0, 0)]
)
def test_each_word_of_a_run_matters(runs: tuple[int, int, int, int]) -> None:
    region = a_region(runs=runs)
    assert region.place(REF.pack(), 8000) is None
    with pytest.raises(RegionError):
        region.rows.views(REF, 8000, 0, 8000)


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
        reservation.commit()
        region = session.region
        assert region is not None
        raw, g = region.buffer, region.geometry

        def words(at: int, count: int = 1) -> tuple[int, ...]:
            return struct.unpack_from(f"<{count}Q", raw, at)

        assert bytes(raw[:8]) == b"KVCREGN1"
        assert words(8) == (3,)
        assert bytes(raw[16:32]) == g.region_id
        assert words(32, 4) == (g.region_bytes, g.page_bytes, g.pages, g.data_offset)
        assert words(64) == (zlib.crc32(raw[8:64]),)
        with namespace.acquire(hashes) as lease:
            for slot in lease.slots:
                page, rest = divmod(slot.ref.offset - g.data_offset, g.page_bytes)
                assert rest == 0
                assert words(4096 + 128 * page + 24) == (slot.ref.generation,)
                assert words(4096 + 128 * page + 104) == (1,)
