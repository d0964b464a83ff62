"""The region: header, extent rows, slots and slot rows in one mapped file.

    0            header, one page
    EXTENT_ROWS  one row of EXTENT_ROW bytes per extent
    data_offset  extent 0 | extent 1 | ...

An extent contains `slots * slot_bytes` of data and, at its end, `slots` rows of SLOT_ROW bytes. All numbers are native,
aligned u64 words (every host that this runs on is little-endian), so each is written by one store. Only the daemon
writes rows; all clients write data. PROTOCOL.md is the normative text.

The functions work on any writable buffer: on a `bytearray` in tests, and on the mapping in the daemon.
"""

from __future__ import annotations

import functools
import struct
import zlib
from typing import NamedTuple

from kvcache_proto.errors import RegionError
from kvcache_proto.types import PoolGeometry, SlotRef

MAGIC = int.from_bytes(b"KVCREGN1", "little")
FORMAT_VERSION = 1  # of what clients read: header, extent rows, generations
ROWS_FORMAT = 2  # of what only the daemon reads
ROWS_GIVEN_UP = (1 << 64) - 1  # instead of it: no later daemon may read the rows
WORD = 8
PAGE = 4096
ALIGN = 2 << 20  # extents begin and end on huge pages
SLOT_ALIGN = 64
EXTENT_ROW = 64
SLOT_ROW = 128
EXTENT_ROWS = PAGE
MAX_EXTENTS = 1 << 16
# Powers of two from 64 KiB to 32 MiB, 1.25 and 1.5 times each, and 64 MiB.
_COMMON_BLOCKS = [*(quarters << shift for shift in range(14, 24) for quarters in (4, 5, 6)), 64 << 20]
_LARGE_BLOCK = 128  # a region with fewer of them has too few per extent to choose by
_MOST_EXTENT = 514 << 20

# DOOMED: a writer may still write there, and it will never be READY.
FREE, WRITING, READY, DOOMED = 0, 1, 2, 3

# Words of the header.
_H_MAGIC, _H_VERSION, _H_ID, _H_BYTES, _H_EXTENT_BYTES, _H_EXTENTS, _H_DATA, _H_CHECK = 0, 1, 2, 4, 5, 6, 7, 8
_H_ROWS = 9
# Words of an extent row.
_E_SLOT_BYTES, _E_GENERATION, _E_ROWS, _E_SLOTS, _E_CLEARED = 0, 1, 2, 3, 5
# Words of a slot row. State, tick, settled shards and the parent change individually, by one store each. The checksum
# covers the generation and the body, which are written once per block.
_S_STATE, _S_TICK, _S_SETTLED, _S_GENERATION, _S_PARENT, _S_CHECK = 0, 1, 2, 3, 14, 15
_BODY = struct.Struct("=QIHHQQII32sI12x")
CHECKED = range(_S_GENERATION * WORD, _S_PARENT * WORD)  # bytes of a row under its checksum
# The fields of a row, to read many rows at once: name -> (numpy type, byte).
ROW_FIELDS = {
    "state": ("<u8", 0),
    "tick": ("<u8", 8),
    "settled": ("<u8", 16),
    "generation": ("<u8", 24),
    "namespace": ("<u4", 32),
    "group": ("<u2", 36),
    "hash_bytes": ("<u2", 38),
    "owner": ("<u8", 40),
    "reservation": ("<u8", 48),
    "position": ("<u4", 56),
    "writers": ("<u4", 60),
    "hash": ("V32", 64),
    "engine": ("<u4", 96),
    "parent": ("<u8", 112),
    "check": ("<u8", 120),
}


class RowBody(NamedTuple):
    """What a row says about the block that was granted there.

    `owner` is the session that reserved it, `engine` the daemon's number for its engine, `position` that of the block
    in its `reservation`, and `writers` the daemon's number for the set of sessions that write its shards.
    """

    namespace: int
    group: int
    block_hash: bytes
    owner: int = 0
    reservation: int = 0
    position: int = 0
    writers: int = 0
    engine: int = 0


RowFields = tuple[int, int, bytes, int, int, int, int, int]  # of a RowBody, which takes longer to create than to write


class SlotRow(NamedTuple):
    """One slot row as it was read. `parent` is the generation of the parent's slot, 0 for a root."""

    state: int
    generation: int
    tick: int
    settled: int
    parent: int
    body: RowBody


def plan_geometry(region_id: bytes, size: int, extent_bytes: int = 0) -> PoolGeometry:
    """Return the geometry of a region whose extents take at most `size` bytes, not counting its header.

    With `extent_bytes` 0, the size of extents is the one that common block sizes fill best. Raises RegionError if no
    extent fits.
    """
    if extent_bytes == 0:
        extent_bytes = _default_extent(size)
    if extent_bytes < ALIGN or extent_bytes % ALIGN:
        raise RegionError(f"extent of {extent_bytes} bytes: a multiple of {ALIGN}")
    extents = min(size // extent_bytes, MAX_EXTENTS)
    if extents < 1:
        raise RegionError(f"{size} bytes: at least {extent_bytes}, one extent")
    data = -(-(EXTENT_ROWS + extents * EXTENT_ROW) // ALIGN) * ALIGN
    return PoolGeometry(region_id, data + extents * extent_bytes, extent_bytes, extents, data)


@functools.lru_cache
def _default_extent(size: int) -> int:
    """Return the extent size (1/64 to 1/8 of `size`, 4 to 514 MiB) that leaves the least memory without a block.

    The waste is the mean plus the maximum over the common block sizes that are not large for a region of this size.
    Block sizes exchange memory in whole extents, so large extents have a cost: a quarter of an extent counts as waste.
    """
    blocks = [each for each in _COMMON_BLOCKS if each * _LARGE_BLOCK <= size] or _COMMON_BLOCKS[:1]
    least = min(max(size // 64 // ALIGN * ALIGN, 2 * ALIGN), _MOST_EXTENT // 2 // ALIGN * ALIGN)
    most = min(max(size // 8, least), _MOST_EXTENT)

    def waste(extent: int) -> float:
        extents = size // extent
        wasted = [1 - extents * slots_per_extent(extent, each) * each / size for each in blocks]
        return max(wasted) + sum(wasted) / len(wasted) + extent / size / 4

    return min(range(least, most + 1, ALIGN), key=waste) if size >= least else least


def slots_per_extent(extent_bytes: int, slot_bytes: int) -> int:
    return extent_bytes // (slot_bytes + SLOT_ROW)


def slot_size(block_bytes: int) -> int:
    """Return the bytes of the slot for a block of `block_bytes`."""
    return -(-block_bytes // SLOT_ALIGN) * SLOT_ALIGN


def found_geometry(header: memoryview) -> PoolGeometry | None:
    """Return the geometry of the region whose first page is `header`.

    Returns None if no region was formatted there, or if its daemon gave it up. Raises RegionError if it is damaged or
    has another format.
    """
    w = header[:PAGE].cast("Q")
    if w[_H_MAGIC] == 0 or w[_H_ROWS] == ROWS_GIVEN_UP:
        return None
    region_id = bytes(header[_H_ID * WORD : (_H_ID + 2) * WORD])
    geometry = PoolGeometry(region_id, w[_H_BYTES], w[_H_EXTENT_BYTES], w[_H_EXTENTS], w[_H_DATA])
    _check(header, geometry)
    if w[_H_ROWS] != ROWS_FORMAT:
        raise RegionError(f"rows of format {w[_H_ROWS]}: this version reads {ROWS_FORMAT}")
    return geometry


def is_given_up(header: memoryview) -> bool:
    """Return whether the region whose first page is `header` was given up by its daemon."""
    return bool(header[:PAGE].cast("Q")[_H_ROWS] == ROWS_GIVEN_UP)


def _check(header: memoryview, geometry: PoolGeometry) -> None:
    w, g = header[:PAGE].cast("Q"), geometry
    if w[_H_MAGIC] != MAGIC:
        raise RegionError("no region: the magic is missing")
    if w[_H_VERSION] != FORMAT_VERSION:
        raise RegionError(f"region format {w[_H_VERSION]}: this version reads {FORMAT_VERSION}")
    if w[_H_CHECK] != _header_checksum(header):
        raise RegionError("torn region: the header's checksum fails")
    if bytes(header[_H_ID * WORD : (_H_ID + 2) * WORD]) != g.region_id:
        raise RegionError("another region: its id differs from the one handed over")
    found = (w[_H_BYTES], w[_H_EXTENT_BYTES], w[_H_EXTENTS], w[_H_DATA])
    if found != (g.region_bytes, g.extent_bytes, g.extents, g.data_offset):
        raise RegionError(f"region cut as {found}, announced as {g}")


def _header_checksum(header: memoryview) -> int:
    return zlib.crc32(header[_H_VERSION * WORD : _H_CHECK * WORD])


class RegionRows:
    """Reads and writes the rows of a region in `buffer`, which has `geometry.region_bytes` bytes."""

    def __init__(self, buffer: memoryview, geometry: PoolGeometry) -> None:
        if len(buffer) != geometry.region_bytes:
            raise RegionError(f"mapping of {len(buffer)} bytes: the region has {geometry.region_bytes}")
        self.geometry = geometry
        self.buffer = buffer
        self._words = buffer.cast("Q")

    # The header.

    def format(self) -> None:
        """Write the header and empty extent rows. The magic is written last, so that a partial header is none."""
        g = self.geometry
        rows = EXTENT_ROWS + g.extents * EXTENT_ROW
        self.buffer[:rows] = bytes(rows)
        w = self._words
        w[_H_VERSION] = FORMAT_VERSION
        w[_H_ID], w[_H_ID + 1] = struct.unpack("=QQ", g.region_id)
        w[_H_BYTES], w[_H_EXTENT_BYTES], w[_H_EXTENTS], w[_H_DATA] = (
            g.region_bytes,
            g.extent_bytes,
            g.extents,
            g.data_offset,
        )
        w[_H_ROWS] = ROWS_FORMAT
        w[_H_CHECK] = _header_checksum(self.buffer)
        w[_H_MAGIC] = MAGIC

    def give_up(self) -> None:
        """Mark the region so that no later daemon reads it. Its clients continue, and new ones may attach."""
        self._words[_H_ROWS] = ROWS_GIVEN_UP

    def check_header(self) -> None:
        """Raise RegionError, which names the difference, unless the header is that of this region in this format."""
        _check(self.buffer, self.geometry)

    # Extents.

    def extent_start(self, extent: int) -> int:
        return self.geometry.data_offset + extent * self.geometry.extent_bytes

    def cut(self, extent: int, slot_bytes: int, generation: int, clear: int | None = None) -> int:
        """Cut `extent` into slots of `slot_bytes` and return their number. The first `clear` of them, or all, are FREE.

        The generation changes first, so that readers of the old slots notice.
        """
        at = (EXTENT_ROWS + extent * EXTENT_ROW) // WORD
        w = self._words
        w[at + _E_GENERATION] = generation
        slots = slots_per_extent(self.geometry.extent_bytes, slot_bytes)
        end = self.extent_start(extent) + self.geometry.extent_bytes
        rows = end - slots * SLOT_ROW
        self.clear(extent, rows, 0, slots if clear is None else min(clear, slots))
        w[at + _E_SLOT_BYTES], w[at + _E_ROWS], w[at + _E_SLOTS] = slot_bytes, rows, slots
        return slots

    def clear(self, extent: int, rows: int, first: int, end: int) -> None:
        """Make the slots `first` up to `end` of `extent`, whose rows begin at `rows`, FREE.

        The slots before them are already cleared. Rows after them are left over from before the cut; no later daemon
        reads them.
        """
        self.buffer[rows + first * SLOT_ROW : rows + end * SLOT_ROW] = bytes((end - first) * SLOT_ROW)
        self._words[(EXTENT_ROWS + extent * EXTENT_ROW) // WORD + _E_CLEARED] = end

    def cleared(self, extent: int, slots: int) -> int:
        """Return how many of the `slots` rows of a cut extent have been cleared, from the first one on."""
        return min(self._words[(EXTENT_ROWS + extent * EXTENT_ROW) // WORD + _E_CLEARED], slots)

    def extent_row(self, extent: int) -> tuple[int, int, int, int]:
        """Return (slot bytes, generation, offset of the slot rows, slots); 0 slot bytes means an uncut extent.

        An extent whose row is inconsistent counts as uncut: any process that maps the region may have written it.
        """
        at = (EXTENT_ROWS + extent * EXTENT_ROW) // WORD
        slot_bytes, generation, rows, slots = self._words[at : at + 4]
        most = slots_per_extent(self.geometry.extent_bytes, slot_bytes) if slot_bytes else 0
        if not most or slots != most or rows != self.extent_start(extent + 1) - slots * SLOT_ROW:
            return 0, generation, 0, 0
        return slot_bytes, generation, rows, slots

    # Slots.

    def row_offset(self, extent: int, slot: int) -> int:
        """Return the byte offset of the row of `slot`."""
        return self.extent_row(extent)[2] + slot * SLOT_ROW

    def open_row(self, row: int, generation: int, tick: int, parent: int, body: RowFields) -> None:
        """Make a FREE row WRITING. `body` is a RowBody, or a tuple of its fields.

        The generation is written first: readers of the old block notice, and the checksum is wrong until the last
        store, so that an incomplete row counts as FREE.
        """
        w, at = self._words, row // WORD
        w[at + _S_GENERATION] = generation
        w[at + _S_TICK] = tick
        w[at + _S_SETTLED] = 0
        w[at + _S_PARENT] = parent
        w[at + _S_STATE] = WRITING
        namespace, group, block_hash, owner, reservation, position, writers, engine = body
        fields = (namespace, group, len(block_hash), owner, reservation, position, writers, block_hash, engine)
        checked = _BODY.pack(generation, *fields)
        begin = row + CHECKED.start + WORD  # after the generation
        self.buffer[begin : row + CHECKED.stop] = checked[WORD:]
        w[at + _S_CHECK] = zlib.crc32(checked)

    def states(self, rows: int, slots: int) -> list[int]:
        """Return the states of the `slots` slots whose rows begin at `rows`."""
        return self._words[rows // WORD : (rows + slots * SLOT_ROW) // WORD : SLOT_ROW // WORD].tolist()

    def set_parent(self, row: int, parent: int) -> None:
        """Make the slot with the generation `parent`, which has replaced the former one, the parent of a row."""
        self._words[row // WORD + _S_PARENT] = parent

    def set_state(self, row: int, state: int) -> None:
        self._words[row // WORD + _S_STATE] = state

    def set_settled(self, row: int, shards: int) -> None:
        """Store the bit set of the settled shards."""
        self._words[row // WORD + _S_SETTLED] = shards

    def set_tick(self, row: int, tick: int) -> None:
        self._words[row // WORD + _S_TICK] = tick

    def read_row(self, row: int) -> SlotRow | None:
        """Return the row, or None if it is FREE or its checksum is wrong."""
        w, at = self._words, row // WORD
        state = w[at + _S_STATE]
        if state not in (WRITING, READY, DOOMED):
            return None
        checked = self.buffer[row + CHECKED.start : row + CHECKED.stop]
        if w[at + _S_CHECK] != zlib.crc32(checked):
            return None
        generation, namespace, group, length, owner, reservation, position, writers, name, engine = _BODY.unpack(
            checked
        )
        body = RowBody(namespace, group, name[:length], owner, reservation, position, writers, engine)
        return SlotRow(state, generation, w[at + _S_TICK], w[at + _S_SETTLED], w[at + _S_PARENT], body)

    # For readers.

    def slot_view(self, ref: SlotRef, begin: int, size: int) -> memoryview:
        """Return `size` bytes of the slot from `begin` on. Raises RegionError if they are not inside of a slot."""
        _, slot_bytes = self._locate(ref)
        if begin < 0 or size < 0 or begin + size > slot_bytes:
            raise RegionError(f"bytes {begin} to {begin + size} of a slot of {slot_bytes}")
        return self.buffer[ref.offset + begin : ref.offset + begin + size]

    def is_current(self, ref: SlotRef) -> bool:
        """Return whether `ref` still refers to the block that it was given for. Call it after the copy."""
        try:
            row, _ = self._locate(ref)
        except RegionError:
            return False
        return bool(self._words[row // WORD + _S_GENERATION] == ref.generation)

    def _locate(self, ref: SlotRef) -> tuple[int, int]:
        """Return the offset of the slot's row, and the slot's bytes. Raises RegionError if there is no such slot."""
        g = self.geometry
        extent, inside = divmod(ref.offset - g.data_offset, g.extent_bytes)
        if not 0 <= extent < g.extents:
            raise RegionError(f"offset {ref.offset} is in no extent")
        slot_bytes, generation, rows, slots = self.extent_row(extent)
        if generation != ref.extent_generation or not slot_bytes:
            raise RegionError(f"extent {extent} was cut again")
        slot, rest = divmod(inside, slot_bytes)
        if rest or slot >= slots:
            raise RegionError(f"offset {ref.offset} is not the beginning of a slot")
        return rows + slot * SLOT_ROW, slot_bytes
