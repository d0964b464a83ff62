"""The region: header, rows and pages in one mapped file.

    0            header, HEADER bytes
    HEADER       one row of ROW bytes per page
    data_offset  page 0 | page 1 | ...

A block takes as many pages as its bytes need: one run of pages, or several. The row of its first page describes the
block, and the row of the first page of each run has the run's number of pages, and the place where the next run begins.
All numbers are native, aligned u64 words (every host that this runs on is little-endian), so each is written by one
store. Only the daemon writes rows; all clients write data. PROTOCOL.md is the normative text.

The functions work on any writable buffer: on a `bytearray` in tests, and on the mapping in the daemon.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from kvcache_proto.errors import RegionError
from kvcache_proto.types import BlockRef, PoolGeometry

MAGIC = int.from_bytes(b"KVCREGN1", "little")
FORMAT_VERSION = 3  # of the parts that clients read: header, generations, runs
ROWS_FORMAT = 3  # of the parts that only the daemon reads
ROWS_GIVEN_UP = (1 << 64) - 1  # in its place: no later daemon may read the rows
WORD = 8
HEADER = 4096
ALIGN = 2 << 20  # pages begin and end on huge pages
ROW = 128
LEAST_PAGE, MOST_PAGE = 4096, ALIGN
MAX_PAGES = 1 << 22
MAX_REGION = MAX_PAGES * MOST_PAGE
SMALL_REGION, SMALL_PAGE, COMMON_PAGE = 256 << 20, 4096, 16384
FREED = 1 << 63  # in the generation of a row: the block is gone, and its pages may be another block's

# DOOMED: a writer may still write there, and it will never be READY. CONTINUED: the first page of a further run.
FREE, WRITING, READY, DOOMED, CONTINUED = 0, 1, 2, 3, 4

# Words of the header.
_H_MAGIC, _H_VERSION, _H_ID, _H_BYTES, _H_PAGE_BYTES, _H_PAGES, _H_DATA, _H_CHECK = 0, 1, 2, 4, 5, 6, 7, 8
_H_ROWS, _H_READY = 9, 10
# Words of a row. State, tick, settled shards and parent change individually, by one store each. The checksum covers the
# generation and the body, which are written once per block; in a CONTINUED row, the generation and the run.
_R_STATE, _R_TICK, _R_SETTLED, _R_GENERATION, _R_RUN, _R_PARENT, _R_CHECK = 0, 1, 2, 3, 13, 14, 15
_BODY = struct.Struct("=QIHHQQII32sI4xQ")
_CONTINUED = struct.Struct("=QQ")
CHECKED = range(_R_GENERATION * WORD, _R_PARENT * WORD)  # bytes of a row under its checksum
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
    "run_pages": ("<u4", 104),
    "next": ("<u4", 108),
    "parent": ("<u8", 112),
    "check": ("<u8", 120),
}


class RowBody(NamedTuple):
    """The fields of a row that describe the block granted there."""

    namespace: int
    group: int
    block_hash: bytes
    owner: int = 0  # the session that reserved it
    reservation: int = 0
    position: int = 0  # in its reservation
    writers: int = 0  # the daemon's number for the set of sessions that write its shards
    engine: int = 0  # the daemon's number for the owner's engine


RowFields = tuple[int, int, bytes, int, int, int, int, int]  # of a RowBody, which takes longer to create than to write
Run = tuple[int, int]  # the first page, and the number of pages


class Row(NamedTuple):
    """The row of a block as it was read."""

    state: int
    generation: int
    tick: int
    settled: int
    parent: int  # the generation of the parent's row, 0 for a root
    body: RowBody


def plan_geometry(region_id: bytes, size: int, page_bytes: int = 0) -> PoolGeometry:
    """Return the geometry of a region whose pages and their rows take at most `size` bytes.

    The header, and the rest of the last huge page of rows, come on top. With `page_bytes` 0, it is `default_page`.
    Raises RegionError for an invalid page size, or if there are too few or too many pages.
    """
    page_bytes = page_bytes or default_page(size)
    if not LEAST_PAGE <= page_bytes <= MOST_PAGE or page_bytes & (page_bytes - 1):
        raise RegionError(f"pages of {page_bytes} bytes: a power of two, {LEAST_PAGE} to {MOST_PAGE}")
    together = ALIGN // page_bytes
    pages = size // (page_bytes + ROW) // together * together
    if not pages:
        raise RegionError(f"{size} bytes: at least {ALIGN + together * ROW} with pages of {page_bytes}")
    if pages > MAX_PAGES:
        if size > MAX_REGION:
            raise RegionError(f"{size} bytes: a region holds at most {MAX_REGION}; choose a smaller size")
        raise RegionError(
            f"{pages} pages of {page_bytes} bytes: at most {MAX_PAGES}; choose pages of {default_page(size)} or larger"
        )
    data = -(-(HEADER + pages * ROW) // ALIGN) * ALIGN
    return PoolGeometry(region_id, data + pages * page_bytes, page_bytes, pages, data)


def default_page(size: int) -> int:
    """Return the page size for a region of `size` bytes: large enough that there are at most MAX_PAGES.

    Half a page of each block is unused on average: with the common page size, under 1 % of blocks of 1 MiB.
    """
    page = SMALL_PAGE if size < SMALL_REGION else COMMON_PAGE
    while size // (page + ROW) > MAX_PAGES and page < MOST_PAGE:
        page *= 2
    return page


def pages_of(block_bytes: int, page_bytes: int) -> int:
    return -(-block_bytes // page_bytes)


def found_geometry(header: memoryview) -> PoolGeometry | None:
    """Return the geometry of the region whose first HEADER bytes are `header`.

    Returns None if no region was formatted there, or if its daemon gave it up. Raises RegionError if it is damaged or
    has another format.
    """
    w = header[:HEADER].cast("Q")
    if w[_H_MAGIC] == 0 or w[_H_ROWS] == ROWS_GIVEN_UP:
        return None
    geometry = _geometry(header)
    if w[_H_ROWS] != ROWS_FORMAT:
        raise RegionError(f"rows of format {w[_H_ROWS]}: this version reads {ROWS_FORMAT}")
    return geometry


def is_given_up(header: memoryview) -> bool:
    return bool(header[:HEADER].cast("Q")[_H_ROWS] == ROWS_GIVEN_UP)


def _geometry(header: memoryview) -> PoolGeometry:
    """Return the geometry in a header. Raises RegionError if it is damaged or has another format."""
    w = header[:HEADER].cast("Q")
    if w[_H_MAGIC] != MAGIC:
        raise RegionError("no region: the magic is missing")
    if w[_H_VERSION] != FORMAT_VERSION:
        raise RegionError(f"region format {w[_H_VERSION]}: this version reads {FORMAT_VERSION}")
    if w[_H_CHECK] != _header_checksum(header):
        raise RegionError("torn region: the header's checksum fails")
    region_id = bytes(header[_H_ID * WORD : (_H_ID + 2) * WORD])
    return PoolGeometry(region_id, w[_H_BYTES], w[_H_PAGE_BYTES], w[_H_PAGES], w[_H_DATA])


def _check(header: memoryview, geometry: PoolGeometry) -> None:
    found = _geometry(header)
    if found.region_id != geometry.region_id:
        raise RegionError("another region: its id differs from the one handed over")
    if found != geometry:
        raise RegionError(f"region divided as {found}, announced as {geometry}")


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
        """Write the header, and rows that are FREE. The magic is written last, so that a partial header is none."""
        g = self.geometry
        self.buffer[:HEADER] = bytes(HEADER)
        for begin in range(HEADER, HEADER + g.pages * ROW, ALIGN):
            end = min(begin + ALIGN, HEADER + g.pages * ROW)
            self.buffer[begin:end] = bytes(end - begin)
        w = self._words
        w[_H_VERSION] = FORMAT_VERSION
        w[_H_ID], w[_H_ID + 1] = struct.unpack("=QQ", g.region_id)
        w[_H_BYTES], w[_H_PAGE_BYTES], w[_H_PAGES], w[_H_DATA] = g.region_bytes, g.page_bytes, g.pages, g.data_offset
        w[_H_ROWS] = ROWS_FORMAT
        w[_H_CHECK] = _header_checksum(self.buffer)
        w[_H_MAGIC] = MAGIC

    @property
    def ready_pages(self) -> int:
        """The number of pages present in memory, from the first one on: the daemon makes them in order."""
        return min(int(self._words[_H_READY]), self.geometry.pages)

    @ready_pages.setter
    def ready_pages(self, pages: int) -> None:
        self._words[_H_READY] = pages

    def give_up(self) -> None:
        """Mark the region so that no later daemon reads it. Its clients continue, and new ones may attach."""
        self._words[_H_ROWS] = ROWS_GIVEN_UP

    def check_header(self) -> None:
        """Raise RegionError, which names the difference, unless the header is that of this region in this format."""
        _check(self.buffer, self.geometry)

    # Rows. `row` is the byte offset of one, see `row_of`.

    def open_row(
        self, row: int, generation: int, tick: int, parent: int, body: RowFields, run_pages: int, further: int = 0
    ) -> None:
        """Make a FREE row WRITING. `body` is a RowBody, or a tuple of its fields.

        Its first run has `run_pages` pages; `further` is the first page of the next run plus 1, 0 if there is none. The
        rows of further runs are written before, by `continue_row`. The generation is written first: readers of the old
        block notice, and the checksum is wrong until the last store, so that an incomplete row counts as FREE.
        """
        w, at = self._words, row // WORD
        w[at + _R_GENERATION] = generation
        w[at + _R_TICK] = tick
        w[at + _R_SETTLED] = 0
        w[at + _R_PARENT] = parent
        w[at + _R_STATE] = WRITING
        namespace, group, block_hash, owner, reservation, position, writers, engine = body
        fields = (namespace, group, len(block_hash), owner, reservation, position, writers, block_hash, engine)
        checked = _BODY.pack(generation, *fields, further << 32 | run_pages)
        begin = row + CHECKED.start + WORD  # after the generation
        self.buffer[begin : row + CHECKED.stop] = checked[WORD:]
        w[at + _R_CHECK] = zlib.crc32(checked)

    def continue_row(self, row: int, generation: int, run_pages: int, further: int) -> None:
        """Make a FREE row the first one of a further run of the block with that generation; see `open_row`."""
        w, at = self._words, row // WORD
        run = further << 32 | run_pages
        w[at + _R_GENERATION] = generation
        w[at + _R_RUN] = run
        w[at + _R_CHECK] = zlib.crc32(_CONTINUED.pack(generation, run))
        w[at + _R_STATE] = CONTINUED

    def close_row(self, row: int) -> None:
        """Make a row FREE, before its pages are given to another block. Readers notice by the generation."""
        w, at = self._words, row // WORD
        w[at + _R_GENERATION] |= FREED
        w[at + _R_STATE] = FREE

    def states(self) -> list[int]:
        """Return the states of all rows."""
        begin = HEADER // WORD
        return self._words[begin : begin + self.geometry.pages * ROW // WORD : ROW // WORD].tolist()

    def set_parent(self, row: int, parent: int) -> None:
        """Make the block with the generation `parent`, which has replaced the former one, the parent of a row."""
        self._words[row // WORD + _R_PARENT] = parent

    def set_state(self, row: int, state: int) -> None:
        self._words[row // WORD + _R_STATE] = state

    def set_settled(self, row: int, shards: int) -> None:
        """Store the bit set of the settled shards."""
        self._words[row // WORD + _R_SETTLED] = shards

    def set_tick(self, row: int, tick: int) -> None:
        self._words[row // WORD + _R_TICK] = tick

    def read_row(self, row: int) -> Row | None:
        """Return the row of a block, or None if it is FREE or CONTINUED, or its checksum is wrong."""
        w, at = self._words, row // WORD
        state = w[at + _R_STATE]
        if state not in (WRITING, READY, DOOMED):
            return None
        checked = self.buffer[row + CHECKED.start : row + CHECKED.stop]
        if w[at + _R_CHECK] != zlib.crc32(checked):
            return None
        generation, namespace, group, length, owner, reservation, position, writers, name, engine, _ = _BODY.unpack(
            checked
        )
        body = RowBody(namespace, group, name[:length], owner, reservation, position, writers, engine)
        return Row(state, generation, w[at + _R_TICK], w[at + _R_SETTLED], w[at + _R_PARENT], body)

    def read_run(self, row: int, generation: int) -> tuple[int, int] | None:
        """Return the number of pages of a further run of the block with that generation, and the next run, as for
        `open_row`; None if the row is not one, or its checksum is wrong."""
        w, at = self._words, row // WORD
        run = w[at + _R_RUN]
        if w[at + _R_STATE] != CONTINUED or w[at + _R_GENERATION] != generation:
            return None
        if w[at + _R_CHECK] != zlib.crc32(_CONTINUED.pack(generation, run)) or not run & 0xFFFFFFFF:
            return None
        return run & 0xFFFFFFFF, run >> 32

    # For readers.

    def runs(self, ref: BlockRef, pages: int) -> list[Run]:
        """Return the runs of the block of `pages` pages that `ref` refers to.

        Raises RegionError if there are none of that size: any process that maps the region may have written the rows.
        """
        page, left = self.page_of(ref.offset), pages
        found: list[Run] = []
        if pages > self.geometry.pages:  # a forged chain of runs may be a cycle
            raise RegionError(f"no block of {pages} pages: the region has {self.geometry.pages}")
        while left > 0:
            at = row_of(page) // WORD
            run = self._words[at + _R_RUN]
            count, following = run & 0xFFFFFFFF, run >> 32
            if self._words[at + _R_GENERATION] != ref.generation or not 1 <= count <= left:
                raise RegionError(f"no block of {pages} pages at offset {ref.offset}: it was given to another one")
            beyond = page + count > self.geometry.pages or following > self.geometry.pages
            if beyond or bool(following) != (count < left):
                raise RegionError(f"the rows of the block at offset {ref.offset} contradict themselves")
            found.append((page, count))
            left -= count
            page = following - 1
        return found

    def views(self, ref: BlockRef, block_bytes: int, begin: int, size: int) -> list[memoryview]:
        """Return `size` bytes from `begin` on of the block of `block_bytes` that `ref` refers to, one view per run.

        Raises RegionError if the block has no such bytes, or is now another one.
        """
        if begin < 0 or size < 0 or begin + size > block_bytes:
            raise RegionError(f"bytes {begin} to {begin + size} of a block of {block_bytes}")
        page_bytes = self.geometry.page_bytes
        runs = self.runs(ref, pages_of(block_bytes, page_bytes))
        return [self.buffer[offset : offset + count] for offset, count in pieces(self.geometry, runs, begin, size)]

    def is_current(self, ref: BlockRef) -> bool:
        """Return True if `ref` still refers to the block that it was given for. Call it after the copy."""
        try:
            page = self.page_of(ref.offset)
        except RegionError:
            return False
        return bool(self._words[row_of(page) // WORD + _R_GENERATION] == ref.generation)

    def page_of(self, offset: int) -> int:
        """Return the page that begins at `offset`. Raises RegionError if none does."""
        g = self.geometry
        page, rest = divmod(offset - g.data_offset, g.page_bytes)
        if rest or not 0 <= page < g.pages:
            raise RegionError(f"no page begins at offset {offset}")
        return page


def row_of(page: int) -> int:
    """Return the byte offset of a page's row."""
    return HEADER + page * ROW


def pieces(geometry: PoolGeometry, runs: Sequence[Run], begin: int, size: int) -> list[tuple[int, int]]:
    """Return the pieces of `size` bytes from `begin` on of a block with these runs: offsets in the region, sizes."""
    found: list[tuple[int, int]] = []
    end, at = begin + size, 0
    for page, count in runs:
        last = at + count * geometry.page_bytes
        first, stop = max(begin, at), min(end, last)
        if first < stop:
            found.append((geometry.data_offset + page * geometry.page_bytes + first - at, stop - first))
        at = last
    return found
