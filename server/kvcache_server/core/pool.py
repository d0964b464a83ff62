"""Extents, slots and their free lists: which bytes of the region hold which block. Pure.

An extent is cut into slots of one size on demand. An extent that becomes empty stays cut, so that a size that comes and
goes does not pay for the cut each time; it is given to another size when no uncut extent is left. Slots are laid out
LOOK at a time, as the previous ones are taken: with tiny blocks, one extent has millions of them.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from kvcache_proto.errors import BadArgument
from kvcache_proto.region import SLOT_ROW, RegionRows, slots_per_extent
from kvcache_proto.types import SlotRef, pack_ref
from kvcache_server.core.extent import Extent
from kvcache_server.core.index import CLASS_MASK, FIRST_TICK, NEXT_TICK, TICKS_PER_SECOND, Block
from kvcache_server.core.slices import LOOK, Steps
from kvcache_server.core.states import SETTLED


class Survey(NamedTuple):
    """In bytes: the taken slots, those that may still be written, the free space, and the largest block that fits."""

    used: int
    busy: int
    free: int
    largest: int


class Pool:
    """Gives out slots and takes them back. Generations never repeat within a region; ticks only increase."""

    def __init__(self, rows: RegionRows, generation: int) -> None:
        """`generation` is the last one used; for a fresh region it is random."""
        self.rows = rows
        self.tick = FIRST_TICK  # the last time that was given out
        self.geometry = rows.geometry
        self.generation = generation
        self.quarantine = Quarantine()
        self._uncut = list(range(self.geometry.extents - 1, -1, -1))
        self._roomy: dict[int, list[Extent[Block]]] = {}  # by slot size: extents that may have vacant slots
        self.empty: dict[int, Extent[Block]] = {}  # the extents without blocks
        self.extents: dict[int, Extent[Block]] = {}

    @property
    def capacity(self) -> int:
        return self.geometry.extents * self.geometry.extent_bytes

    def slots_of(self, slot_bytes: int) -> int:
        """Return how many slots of that size the pool would have."""
        return self.geometry.extents * slots_per_extent(self.extent_bytes, slot_bytes)

    @property
    def extent_bytes(self) -> int:
        return self.geometry.extent_bytes

    @property
    def uncut(self) -> int:
        return len(self._uncut)

    def surveying(self) -> Steps[Survey]:
        """Add up all extents. What changes between two slices may be counted twice, or not at all. O(extents)."""
        used = busy = free = largest = 0
        empty = self.uncut
        for at, extent in enumerate(list(self.extents.values()), 1):
            size, vacant = extent.slot_bytes, extent.slots - extent.used
            used += extent.used * size
            busy += extent.busy * size
            free += vacant * size
            if not extent.used:
                empty += 1
            elif vacant and size > largest:
                largest = size
            if at % LOOK == 0:
                yield
        return Survey(used, busy, free + self.uncut * self.extent_bytes, self.extent_bytes if empty else largest)

    def check_size(self, slot_bytes: int) -> None:
        """Raise BadArgument if a slot of `slot_bytes` does not fit into an extent."""
        if slots_per_extent(self.extent_bytes, slot_bytes) < 1:
            raise BadArgument(
                f"a block of {slot_bytes} bytes does not fit into an extent of {self.extent_bytes} bytes "
                f"(the region has {self.geometry.extents}): start the daemon with a larger size or extent size"
            )

    def take(self, slot_bytes: int) -> tuple[Extent[Block], int] | None:
        """Return a vacant slot of that size, or None. Cuts an empty extent if no other has room."""
        roomy = self._roomy.setdefault(slot_bytes, [])
        while roomy:
            extent = roomy[-1]
            if extent.slot_bytes == slot_bytes and extent.vacant and self.extents.get(extent.index) is extent:
                if not extent.used:
                    del self.empty[extent.index]
                extent.used += 1
                slot = extent.vacant.pop()
                if not extent.vacant and len(extent.blocks) < extent.slots:
                    self._lay_out(extent)
                elif not extent.vacant:
                    roomy.pop()  # `give_back` adds it again, once
                return extent, slot
            roomy.pop()
        index = self._uncut.pop() if self._uncut else self._empty_extent(slot_bytes)
        if index is None:
            return None
        roomy.append(self._cut(index, slot_bytes))
        return self.take(slot_bytes)

    def has_vacant(self, slot_bytes: int, part: int) -> bool:
        """Whether slots of that size are vacant, as many as one in `part` of the pool and an extent. O(extents)."""
        left = max(slots_per_extent(self.extent_bytes, slot_bytes), self.slots_of(slot_bytes) // part)
        for extent in self._roomy.get(slot_bytes, ()):
            left -= extent.slots - extent.used
            if left <= 0:
                return True
        return False

    def set_time(self, now: float) -> None:
        """Let uses from now on happen at `now`, in seconds, but not before the last one."""
        tick = FIRST_TICK + int(now * (TICKS_PER_SECOND // NEXT_TICK)) * NEXT_TICK
        if tick > self.tick:
            self.tick = tick

    @property
    def now(self) -> float:
        """The time in seconds, as `set_time` was told, but not before the last use."""
        return (self.tick - FIRST_TICK) / TICKS_PER_SECOND

    def place(self, extent: Extent[Block], slot: int, block: Block, cls: int = 0) -> int:
        """Put `block` into the slot, as just used, with its class, under a new generation; return the generation."""
        self.generation = (self.generation + 1) & ((1 << 64) - 1)
        self.tick = extent.newest = tick = self.tick + NEXT_TICK
        block.tick = tick | cls  # even if that is 0: in CPython, a sum takes 16 bytes more
        extent.blocks[slot] = block
        extent.read[slot] = 0
        block.ref = pack_ref(extent.start + slot * extent.slot_bytes, self.generation, extent.generation)
        return self.generation

    def vacate(self, extent: Extent[Block], slot: int) -> None:
        """Remove the block from the slot, which `place` or `give_back` must follow."""
        self.rows.set_state(extent.rows + slot * SLOT_ROW, SETTLED)
        extent.blocks[slot] = None

    def give_back(self, extent: Extent[Block], slot: int) -> None:
        """Free the slot."""
        self.vacate(extent, slot)
        if not extent.vacant and not extent.closed:
            self._roomy[extent.slot_bytes].append(extent)
        extent.vacant.append(slot)
        extent.used -= 1
        if not extent.used:
            self.empty[extent.index] = extent

    def touch(self, block: Block) -> tuple[Extent[Block], int]:
        """Record a use of `block`; return its extent and slot."""
        self.tick = tick = self.tick + NEXT_TICK
        block.tick = tick | block.tick & CLASS_MASK
        extent, slot = self.locate(block)
        self.rows.set_tick(self.row(extent, slot), block.tick)
        extent.newest = tick
        return extent, slot

    def read(self, block: Block) -> None:
        """Record that a lookup found `block`, and the blocks above it."""
        extent, slot = self.touch(block)
        extent.read[slot] = 1

    def write_tick(self, block: Block) -> None:
        """Store the block's tick, which has changed, in its row."""
        self.rows.set_tick(self.row(*self.locate(block)), block.tick)

    def inherit(self, parent: Block, read: int) -> None:
        """Store what `parent` inherits from a removed child: its tick, and whether it was `read`."""
        extent, slot = self.locate(parent)
        self.rows.set_tick(self.row(extent, slot), parent.tick)
        extent.read[slot] |= read

    def close(self, extent: Extent[Block]) -> None:
        """Grant none of its slots until `open`."""
        extent.closed = True
        roomy = self._roomy[extent.slot_bytes]
        roomy[:] = [each for each in roomy if each is not extent]

    def open(self, extent: Extent[Block]) -> None:
        """Undo `close`. Does nothing if the extent has been cut again in the meantime."""
        if self.extents.get(extent.index) is extent:
            extent.closed = False
            if extent.vacant:
                self._roomy[extent.slot_bytes].append(extent)

    def uncut_extent(self, extent: Extent[Block]) -> None:
        """Make an empty extent available to any slot size."""
        del self.empty[extent.index], self.extents[extent.index]
        self._uncut.append(extent.index)

    def locate(self, block: Block) -> tuple[Extent[Block], int]:
        """Return the extent and the slot of `block`."""
        offset = int.from_bytes(block.ref[:8], "little")
        extent = self.extents[(offset - self.geometry.data_offset) // self.geometry.extent_bytes]
        return extent, (offset - extent.start) // extent.slot_bytes

    def find(self, ref: SlotRef) -> Block | None:
        """Return the block that `ref` refers to, or None if the slot has another block now."""
        inside = ref.offset - self.geometry.data_offset
        extent = self.extents.get(inside // self.geometry.extent_bytes)
        if extent is None:
            return None
        slot = (ref.offset - extent.start) // extent.slot_bytes
        block = extent.blocks[slot] if 0 <= slot < len(extent.blocks) else None
        return block if block is not None and block.ref == ref.pack() else None

    def row(self, extent: Extent[Block], slot: int) -> int:
        """Return the byte offset of the slot's row."""
        return extent.rows + slot * SLOT_ROW

    def adopt(self, index: int, slot_bytes: int, generation: int, slots: int, laid_out: int) -> Extent[Block]:
        """Take over an extent as an earlier daemon cut it; the caller fills `blocks` and counts busy slots."""
        start = self.rows.extent_start(index)
        rows = start + self.extent_bytes - slots * SLOT_ROW  # not from the row: engines could write there
        extent = self.extents[index] = Extent(index, start, slot_bytes, slots, rows, generation)
        extent.lay_out(laid_out)
        self.empty[index] = extent
        return extent

    def resume(self, generation: int) -> None:
        """Continue after an earlier daemon, with all extents adopted and filled.

        `generation` is the last one that it used.
        """
        self.generation = generation
        self._uncut = [index for index in range(self.geometry.extents - 1, -1, -1) if index not in self.extents]
        for extent in self.extents.values():
            blocks = extent.blocks
            extent.vacant = array("I", (slot for slot in range(len(blocks) - 1, -1, -1) if blocks[slot] is None))
            extent.used = len(blocks) - len(extent.vacant)
            if not extent.vacant:
                self._lay_out(extent)
            if extent.used:
                del self.empty[extent.index]
            roomy = self._roomy.setdefault(extent.slot_bytes, [])
            if extent.vacant:
                roomy.append(extent)

    def _cut(self, index: int, slot_bytes: int) -> Extent[Block]:
        self.generation = (self.generation + 1) & ((1 << 64) - 1)
        slots = self.rows.cut(index, slot_bytes, self.generation, LOOK)
        return self.adopt(index, slot_bytes, self.generation, slots, LOOK)

    def _lay_out(self, extent: Extent[Block]) -> None:
        """Lay out more slots, if there are any."""
        first = extent.lay_out(LOOK)
        self.rows.clear(extent.index, extent.rows, first, len(extent.blocks))

    def _empty_extent(self, slot_bytes: int) -> int | None:
        for extent in self.empty.values():
            if extent.slot_bytes != slot_bytes:
                self.uncut_extent(extent)
                return self._uncut.pop()
        return None


class Quarantine:
    """Slots that DMA of a dead writer may still reach, until a deadline each."""

    def __init__(self) -> None:
        self._slots: list[tuple[float, int, int, Extent[Block]]] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, until: float, extent: Extent[Block], slot: int) -> None:
        self.bytes += extent.slot_bytes
        heapq.heappush(self._slots, (until, extent.index, slot, extent))

    def over(self, now: float) -> Iterator[tuple[Extent[Block], int]]:
        """Remove the slots whose deadline has passed, and yield them."""
        while self._slots and self._slots[0][0] <= now:
            _, _, slot, extent = heapq.heappop(self._slots)
            self.bytes -= extent.slot_bytes
            yield extent, slot

    def slots(self) -> list[tuple[Extent[Block], int]]:
        return [(extent, slot) for _, _, slot, extent in self._slots]
