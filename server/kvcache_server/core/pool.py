"""The pages of the region, and the block on each. Pure.

Changes of rows are written here, except settlements, which `Reservations` writes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice

from kvcache_proto.region import FREED, RegionRows, RowFields, Run, pieces, row_of
from kvcache_proto.types import REF_BYTES, pack_ref
from kvcache_server.core.checksums import Locate
from kvcache_server.core.index import FIRST_TICK, NEXT_TICK, TICK_MASK, TICKS_PER_SECOND, Block

Runs = tuple[Run, ...]

_LOOKS = 16  # free runs of a class that may be too short by less than half


class Pool:
    """Gives out pages and takes them back. Generations never repeat within a region; ticks only increase.

    Attributes: `tick` is the last time given out, `generation` the last generation; `busy` counts the pages that may
    still be written: of blocks that are WRITING, or in quarantine. `blocks` and `read` are by the first page: the
    blocks, and whether a lookup has found them. Only the first `ready` pages are used yet.
    """

    def __init__(self, rows: RegionRows, generation: int, ready: int) -> None:
        """`generation` is the last one used; for a fresh region it is random."""
        self.rows = rows
        self.geometry = rows.geometry
        self._data, self._shift = rows.geometry.data_offset, rows.geometry.page_bytes.bit_length() - 1
        self.tick = FIRST_TICK
        self.generation = generation
        self.quarantine = Quarantine(self.geometry.page_bytes)
        self.busy = 0
        self.blocks: list[Block | None] = [None] * self.geometry.pages
        self.read = bytearray(self.geometry.pages)
        self.free = FreeRuns()
        self.ready = 0
        self.grow(ready)
        self._scattered: dict[int, Runs] = {}  # by the first page: the runs of a block that has several

    @property
    def capacity(self) -> int:
        return self.geometry.pages * self.geometry.page_bytes

    def blocks_of(self, allocated_bytes: int) -> int:
        """Return the number of blocks of `allocated_bytes` bytes that the pool has room for."""
        return self.capacity // max(allocated_bytes, self.geometry.page_bytes)

    @property
    def is_growing(self) -> bool:
        return self.ready < self.geometry.pages

    def grow(self, ready: int) -> None:
        """Use the first `ready` pages from now on; the number never decreases."""
        if ready > self.ready:
            self.free.add(self.ready, ready - self.ready)
            self.ready = self.rows.ready_pages = ready

    @property
    def used(self) -> int:
        """Bytes of the pages that are not free; those that are not ready yet are."""
        return (self.ready - self.free.pages) * self.geometry.page_bytes

    def set_time(self, now: float) -> None:
        """Date uses from now on at `now`, in seconds, but not before the last one."""
        tick = FIRST_TICK + int(now * (TICKS_PER_SECOND // NEXT_TICK)) * NEXT_TICK
        if tick > self.tick:
            self.tick = tick

    @property
    def now(self) -> float:
        """The time in seconds, as given to `set_time`, but not before the last use."""
        return (self.tick - FIRST_TICK) / TICKS_PER_SECOND

    def tick_before(self, seconds: float) -> int:
        """Return the tick that many seconds ago, without a class."""
        return max(self.tick - int(seconds * (TICKS_PER_SECOND // NEXT_TICK)) * NEXT_TICK, FIRST_TICK)

    def place(self, runs: Runs, block: Block, cls: int, parent: int, body: RowFields, used: int = 0) -> int:
        """Put `block` on the pages of `runs`, as used at the tick `used`, or now if that is 0, under a new generation;
        return its row.

        `cls` is its class and pace, as in a tick, `parent` the generation of its parent, `body` its fields of the row.
        The row is WRITING.
        """
        self.generation = generation = (self.generation + 1) % FREED
        self.tick = tick = self.tick + NEXT_TICK
        block.tick = (used or tick) | cls  # even if `cls` is 0: in CPython, a sum takes 16 bytes more
        page, count = runs[0]
        row, further = row_of(page), 0
        if len(runs) > 1:
            self._scattered[page] = runs
            for first, pages in runs[:0:-1]:
                self.rows.continue_row(row_of(first), generation, pages, further)
                further = first + 1
        self.blocks[page] = block
        self.read[page] = 0
        geometry = self.geometry
        block.ref = pack_ref(geometry.data_offset + page * geometry.page_bytes, generation)
        self.rows.open_row(row, generation, block.tick, parent, body, count, further)
        return row

    def runs_of(self, block: Block) -> Runs:
        page = self.page(block)
        return self._scattered.get(page) or ((page, block.account.group.pages),)

    def vacate(self, block: Block, page: int | None = None) -> Runs:
        """Take a block off its pages, of which the first may be given, and return them; `give_back` must follow."""
        page = self.page(block) if page is None else page
        self.blocks[page] = None
        self.rows.close_row(row_of(page))
        runs = self._scattered.pop(page, None)
        if runs is None:
            return ((page, block.account.group.pages),)
        for further, _ in runs[1:]:
            self.rows.close_row(row_of(further))
        return runs

    def give_back(self, runs: Runs) -> None:
        for page, count in runs:
            self.free.add(page, count)

    def touch(self, block: Block, read: int = 0) -> None:
        """Record a use of `block` and, if it was `read`, that a lookup found it, and so the blocks above it."""
        self.tick = tick = self.tick + NEXT_TICK
        block.tick = tick | block.tick & TICK_MASK
        page = self.page(block)  # as in `write_tick`, without the call
        self.rows.set_tick(row_of(page), block.tick)
        if read:
            self.read[page] = 1

    def write_tick(self, block: Block, read: int = 0) -> None:
        """Store the block's tick, which has changed, in its row, and whether it was `read`."""
        page = self.page(block)
        self.rows.set_tick(row_of(page), block.tick)
        if read:
            self.read[page] = 1

    def page(self, block: Block) -> int:
        """Return the first page of `block`."""
        return (int.from_bytes(block.ref[:8], "little") - self._data) >> self._shift

    def row(self, block: Block) -> int:
        """Return the byte offset of the row of `block`."""
        return row_of(self.page(block))

    def locate(self, begin: int, inside: int) -> int:
        """Return the offset in the region of byte `inside` of the block that begins at offset `begin`."""
        geometry = self.geometry
        runs = self._scattered.get((begin - geometry.data_offset) // geometry.page_bytes)
        return begin + inside if runs is None else pieces(geometry, runs, inside, 1)[0][0]

    @property
    def locate_if_scattered(self) -> Locate | None:
        """`locate`, or None if each block lies in one run."""
        return self.locate if self._scattered else None

    def find(self, refs: bytes, at: int = 0) -> Block | None:
        """Return the block that the reference at byte `at` refers to, or None if its pages now have another block."""
        ref = refs[at : at + REF_BYTES]
        page = (int.from_bytes(ref[:8], "little") - self._data) >> self._shift
        block = self.blocks[page] if 0 <= page < self.geometry.pages else None
        return block if block is not None and block.ref == ref else None

    def resume(self, generation: int, free: Iterable[Run]) -> None:
        """Continue after an earlier daemon, whose last generation is given, with only these runs of pages free.
        `adopt` adds its blocks afterwards."""
        self.generation = generation
        self.read = bytearray(b"\1") * self.geometry.pages
        self.free, runs = FreeRuns(), list(free)
        later = sum(max(0, page + count - max(page, self.ready)) for page, count in runs)
        if later < self.geometry.pages - self.ready:  # blocks lie there
            self.ready = self.geometry.pages
        for page, count in runs:
            if page < self.ready:
                self.free.add(page, min(count, self.ready - page))

    def adopt(self, block: Block, runs: Runs) -> None:
        """Note that an earlier daemon has put `block` on these pages."""
        page = runs[0][0]
        self.blocks[page] = block
        if len(runs) > 1 or runs[0][1] != block.account.group.pages:
            self._scattered[page] = runs


class Quarantine:
    """Blocks whose pages DMA of a dead writer may still reach, until a deadline each."""

    def __init__(self, page_bytes: int) -> None:
        self._blocks: list[tuple[float, int, int, Block]] = []
        self._page_bytes = page_bytes
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, until: float, block: Block, pages: int) -> None:
        """Hold `block`, which has `pages` pages."""
        self.bytes += pages * self._page_bytes
        offset = int.from_bytes(block.ref[:8], "little")  # distinct: blocks are not compared
        heapq.heappush(self._blocks, (until, offset, pages, block))

    def pop(self, now: float) -> tuple[Block, int] | None:
        """Remove a block whose deadline has passed, and return it and its number of pages; None if there is none."""
        if not self._blocks or self._blocks[0][0] > now:
            return None
        _, _, pages, block = heapq.heappop(self._blocks)
        self.bytes -= pages * self._page_bytes
        return block, pages

    def blocks(self) -> list[Block]:
        return [block for _, _, _, block in self._blocks]


class FreeRuns:
    """The free pages, as runs. Runs that touch are merged at once.

    A block gets one run if one is long enough: a short one of these, so that long ones stay. Otherwise it gets several,
    the longest first: short pieces are slow to copy.

    Attributes: `pages` is the number of free pages.
    """

    def __init__(self) -> None:
        self.pages = 0
        self._lengths: dict[int, int] = {}  # by the first page
        self._begins: dict[int, int] = {}  # by the page after the last one
        self._classes: list[dict[int, None]] = []  # by the bit length of the runs' lengths: their first pages

    def add(self, page: int, count: int) -> None:
        """Free the `count` pages from `page` on."""
        self.pages += count
        end = page + count
        if (before := self._begins.get(page)) is not None:
            self._remove(before)
            page = before
        if end in self._lengths:
            end += self._remove(end)
        self._insert(page, end - page)

    def take(self, count: int) -> Runs | None:
        """Take `count` pages; None if fewer are free."""
        if count > self.pages:
            return None
        if (page := self._find(count)) is not None:
            return (self._take_from(page, count),)
        runs: list[Run] = []
        for found in reversed(self._classes):
            while found and count:
                page = next(iter(found))
                runs.append(self._take_from(page, min(count, self._lengths[page])))
                count -= runs[-1][1]
        return tuple(runs)

    def take_run(self, count: int) -> Run | None:
        """Take one run of `count` pages; None if there is none."""
        page = self._find(count)
        return self._take_from(page, count) if page is not None else None

    def runs(self) -> list[Run]:
        """Return all runs, in no order."""
        return list(self._lengths.items())

    def _find(self, count: int) -> int | None:
        """Return the first page of a run of at least `count` pages."""
        size = count.bit_length()
        if size < len(self._classes) and self._classes[size]:
            for page in islice(self._classes[size], _LOOKS):
                if self._lengths[page] >= count:
                    return page
        for found in islice(self._classes, size + 1, None):
            if found:
                return next(iter(found))
        return None

    def _take_from(self, page: int, count: int) -> Run:
        length = self._lengths.pop(page)
        left, begin, end = length - count, page + count, page + length
        found, size = self._classes[length.bit_length()], left.bit_length()
        del found[page]
        if left:
            self._lengths[begin], self._begins[end] = left, begin
            (found if size == length.bit_length() else self._classes[size])[begin] = None
        else:
            del self._begins[end]
        self.pages -= count
        return page, count

    def _insert(self, page: int, count: int) -> None:
        size = count.bit_length()
        while size >= len(self._classes):
            self._classes.append({})
        self._classes[size][page] = None
        self._lengths[page] = count
        self._begins[page + count] = page

    def _remove(self, page: int) -> int:
        count = self._lengths.pop(page)
        del self._begins[page + count], self._classes[count.bit_length()][page]
        return count
