"""The region as this process maps it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache_proto.errors import RegionError
from kvcache_proto.mapping import map_file
from kvcache_proto.region import EXTENT_ROW, EXTENT_ROWS, MAX_EXTENTS, PAGE, SLOT_ROW, RegionRows
from kvcache_proto.types import REF_BYTES, PoolGeometry

# The leading words of the rows, as in kvcache_proto.region; a reader needs no others.
_EXTENT = np.dtype(
    {"names": ["slot_bytes", "generation", "rows", "slots"], "formats": ["u8"] * 4, "itemsize": EXTENT_ROW}
)
_REF = np.dtype([("offset", "<u8"), ("generation", "<u8"), ("extent_generation", "<u8")])
_WORD = 8
_SLOT_GENERATION = 3  # the word of a slot row


class Region:
    """One mapping of the region; it exists as long as anything refers to it or to its buffer.

    Attributes:
        id: 16 bytes, unique to this region.
        buffer: the whole region, writable.
        address: where `buffer` begins in this process; page-aligned.
        bytes: its length.
        rows: the reader of its header and rows.
    """

    def __init__(self, descriptor: int, geometry: PoolGeometry) -> None:
        """Map the file behind `descriptor`, which the caller may close afterwards. Raises RegionError."""
        _check(geometry)
        try:
            self.buffer = map_file(descriptor, geometry.region_bytes)
        except (OSError, ValueError, OverflowError, ctypes.ArgumentError) as error:
            raise RegionError(f"cannot map the region of {geometry.region_bytes} bytes: {error}") from None
        self.geometry = geometry
        self.id = geometry.region_id
        self.bytes = geometry.region_bytes
        self.rows = RegionRows(self.buffer, geometry)
        self.rows.check_header()
        self._words: npt.NDArray[np.uint64] = np.frombuffer(self.buffer, dtype=np.uint64)
        self._extents: npt.NDArray[Any] = np.frombuffer(
            self.buffer, dtype=_EXTENT, count=geometry.extents, offset=EXTENT_ROWS
        )
        self.address = int(self._words.ctypes.data)

    def offsets(self, packed: bytes) -> npt.NDArray[np.uint64]:
        """Return the offset in the region of each slot in `packed`, REF_BYTES per reference."""
        return np.ascontiguousarray(_refs(packed)["offset"])

    def holds(self, packed: bytes, size: int) -> bool:
        """Return whether `packed` consists of whole references, each to `size` bytes inside the region's extents.

        Only then may an address be computed from a reference.
        """
        if len(packed) % REF_BYTES or size > self.geometry.extent_bytes:
            return False
        offsets = _refs(packed)["offset"]
        return not len(packed) or (
            int(offsets.min()) >= self.geometry.data_offset and int(offsets.max()) <= self.bytes - size
        )

    def current(self, packed: bytes) -> npt.NDArray[np.bool_]:
        """Return for each reference in `packed` whether its slot still holds the block that it was given for.

        Bytes copied out of a slot belong to the block only if this holds after the copy. Generations change before the
        slot's bytes do, so a copy that met a new writer is detected.
        """
        refs, g = _refs(packed), self.geometry
        offset = refs["offset"].astype(np.int64) - g.data_offset
        extent = offset // g.extent_bytes
        current = (offset >= 0) & (extent < g.extents)
        rows = self._extents[np.where(current, extent, 0)]
        # A row counts only if it is consistent with its slot size: any process that maps the region may write there.
        current &= (rows["slot_bytes"] > 0) & (rows["slot_bytes"] < g.extent_bytes)
        slot_bytes = np.where(current, rows["slot_bytes"], 1).astype(np.int64)
        slots = g.extent_bytes // (slot_bytes + SLOT_ROW)
        first = g.data_offset + (extent + 1) * g.extent_bytes - slots * SLOT_ROW
        slot, rest = np.divmod(offset - extent * g.extent_bytes, slot_bytes)
        current &= (rows["generation"] == refs["extent_generation"]) & (rest == 0) & (slot < slots)
        current &= (rows["slots"] == slots.astype(np.uint64)) & (rows["rows"] == first.astype(np.uint64))
        word = (first + slot * SLOT_ROW) // _WORD + _SLOT_GENERATION
        current &= self._words[np.where(current, word, 0)] == refs["generation"]
        return current


def _check(geometry: PoolGeometry) -> None:
    """Raise RegionError for a geometry that no region has."""
    size, extents, begin = geometry.extent_bytes, geometry.extents, geometry.data_offset
    sound = 0 < extents <= MAX_EXTENTS and size > 0 and begin >= EXTENT_ROWS + extents * EXTENT_ROW
    if not sound or geometry.region_bytes != begin + extents * size or size % PAGE or begin % PAGE:
        raise RegionError(f"region of {geometry.region_bytes} bytes: {extents} extents of {size} from {begin} on")


def _refs(packed: bytes) -> npt.NDArray[Any]:
    if len(packed) % REF_BYTES:
        raise RegionError(f"{len(packed)} bytes of slot references: {REF_BYTES} each")
    return np.frombuffer(packed, dtype=_REF)
