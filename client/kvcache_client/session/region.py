"""This process's mapping of the region."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache_client.address_ranges import Runs
from kvcache_proto.errors import RegionError
from kvcache_proto.mapping import map_file
from kvcache_proto.region import (
    ALIGN,
    HEADER,
    LEAST_PAGE,
    MAX_PAGES,
    MOST_PAGE,
    ROW,
    ROW_FIELDS,
    RegionRows,
    pages_of,
    pieces,
)
from kvcache_proto.types import REF_BYTES, BlockRef, PoolGeometry

_READ = ("generation", "run_pages")  # fields of a row that copies need
_ROW = np.dtype(
    {
        "names": list(_READ),
        "formats": [ROW_FIELDS[name][0] for name in _READ],
        "offsets": [ROW_FIELDS[name][1] for name in _READ],
        "itemsize": ROW,
    }
)
_REF = np.dtype([("offset", "<u8"), ("generation", "<u8")])


class Placed(NamedTuple):
    """The places of n blocks: block i begins at offsets[i]. If `runs` is given, it translates the offsets from the
    region's end on, which are of blocks with several runs of pages."""

    offsets: npt.NDArray[np.int64]
    runs: Runs | None = None


class Region:
    """One mapping of the region; it exists as long as references to it or to its buffer exist."""

    def __init__(self, descriptor: int, geometry: PoolGeometry) -> None:
        """Map the file behind `descriptor`, which the caller may close afterwards. Raises RegionError."""
        _check(geometry)
        try:
            self.buffer = map_file(descriptor, geometry.region_bytes)  # writable
        except (OSError, ValueError, OverflowError, ctypes.ArgumentError) as error:
            raise RegionError(f"cannot map the region of {geometry.region_bytes} bytes: {error}") from None
        self.geometry = geometry
        self.id = geometry.region_id  # 16 bytes, unique to this region
        self.bytes = geometry.region_bytes
        self.rows = RegionRows(self.buffer, geometry)
        self.rows.check_header()
        self._words: npt.NDArray[np.uint64] = np.frombuffer(self.buffer, dtype=np.uint64)
        self._rows: npt.NDArray[Any] = np.frombuffer(self.buffer, dtype=_ROW, count=geometry.pages, offset=HEADER)
        self.address = int(self._words.ctypes.data)  # of `buffer`; page-aligned

    @property
    def present(self) -> int:
        """The number of bytes, from the first one on, that are in memory: the daemon makes the pages in order."""
        ready = self.rows.ready_pages
        return (
            self.bytes if ready == self.geometry.pages else self.geometry.data_offset + ready * self.geometry.page_bytes
        )

    def place(self, packed: bytes, block_bytes: int) -> Placed | None:
        """Return the places of the blocks of `block_bytes` that `packed` refers to, REF_BYTES per reference.

        None unless each reference is to such a block of this region. Only then may an address be computed from it.
        """
        if not self.holds(packed):
            return None
        refs, page_bytes = _refs(packed), self.geometry.page_bytes
        offsets = refs["offset"].astype(np.int64)
        pages = pages_of(block_bytes, page_bytes)
        first = (offsets - self.geometry.data_offset) // page_bytes
        # The rows may already be another block's, of any size.
        whole = (self._rows["run_pages"][first] >= pages) & (first <= self.geometry.pages - pages)
        if whole.all():
            return Placed(offsets)
        begins, sizes, at, end = [], [], [], self.bytes
        for number in np.flatnonzero(~whole).tolist():
            ref = BlockRef(int(refs["offset"][number]), int(refs["generation"][number]))
            try:
                runs = self.rows.runs(ref, pages)
            except RegionError:
                return None
            offsets[number] = end
            for offset, size in pieces(self.geometry, runs, 0, pages * page_bytes):
                begins.append(end)
                at.append(offset)
                sizes.append(size)
                end += size
        return Placed(offsets, Runs(np.array(begins, np.uint64), np.array(at, np.uint64), np.array(sizes, np.uint64)))

    def views(self, packed: bytes, block_bytes: int, begin: int, size: int) -> list[list[memoryview]]:
        """Return `size` bytes from `begin` on of each block, as its runs lie.

        Raises RegionError unless all of `packed` refers to such blocks of this region.
        """
        placed = self.place(packed, block_bytes)
        if placed is None:
            raise RegionError(f"no blocks of {block_bytes} bytes: they were given to others")
        begins = (placed.offsets + begin).tolist()
        if placed.runs is None:
            return [[self.buffer[at : at + size]] for at in begins]
        return [[self.buffer[at : at + part] for at, part in placed.runs.pieces(first, size)] for first in begins]

    def holds(self, packed: bytes) -> bool:
        """Return True if `packed` consists of whole references, each to a page of this region."""
        if len(packed) % REF_BYTES:
            return False
        if not packed:
            return True
        g = self.geometry
        offsets = _refs(packed)["offset"]
        if int(offsets.min()) < g.data_offset or int(offsets.max()) > self.bytes - g.page_bytes:
            return False
        return not ((offsets - np.uint64(g.data_offset)) % np.uint64(g.page_bytes)).any()

    def current(self, packed: bytes) -> npt.NDArray[np.bool_]:
        """Return, for each reference in `packed`, which the region `holds`, whether it still refers to its block.

        Bytes copied out of a block belong to it only if this holds after the copy. Generations change before the bytes
        do, so a copy that met a new writer is detected.
        """
        refs, g = _refs(packed), self.geometry
        pages = (refs["offset"].astype(np.int64) - g.data_offset) // g.page_bytes
        there = (pages >= 0) & (pages < g.pages)
        current: npt.NDArray[np.bool_] = there & (
            self._rows["generation"][np.where(there, pages, 0)] == refs["generation"]
        )
        return current


def _check(geometry: PoolGeometry) -> None:
    """Raise RegionError for a geometry that no region has."""
    g = geometry
    sound = 0 < g.pages <= MAX_PAGES and LEAST_PAGE <= g.page_bytes <= MOST_PAGE and not g.page_bytes & g.page_bytes - 1
    sound = sound and g.data_offset >= HEADER + g.pages * ROW and not g.data_offset % ALIGN
    if not sound or g.region_bytes != g.data_offset + g.pages * g.page_bytes:
        raise RegionError(
            f"region of {g.region_bytes} bytes: {g.pages} pages of {g.page_bytes} from {g.data_offset} on"
        )


def _refs(packed: bytes) -> npt.NDArray[Any]:
    if len(packed) % REF_BYTES:
        raise RegionError(f"{len(packed)} bytes of references: {REF_BYTES} each")
    return np.frombuffer(packed, dtype=_REF)
