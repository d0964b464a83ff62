"""One run of the region, cut into slots of one size. Pure."""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

Resident = TypeVar("Resident")


class Extent(Generic[Resident]):
    """One run of the region, cut into `slots` of `slot_bytes`; `blocks[slot]` is the content of each laid out slot.

    `vacant` is only empty if all slots are laid out and taken.
    """

    __slots__ = (
        *("blocks", "busy", "closed", "generation", "index", "newest", "read", "rows", "slot_bytes", "slots", "start"),
        *("used", "vacant"),
    )

    def __init__(self, index: int, start: int, slot_bytes: int, slots: int, rows: int, generation: int) -> None:
        self.index = index
        self.start = start
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.rows = rows
        self.generation = generation
        self.blocks: list[Resident | None] = []
        self.read = bytearray()  # by slot: 0 if no lookup has found the block since it was placed
        self.vacant = array("I")  # not a list: freeing a long one takes long
        self.used = 0
        self.busy = 0  # slots that may still be written: WRITING or in quarantine
        self.closed = False  # it is being emptied: its slots are not granted
        self.newest = 0  # the latest tick of its blocks; ancestors are touched through their descendants

    def lay_out(self, slots: int) -> int:
        """Lay out up to `slots` more slots; return the first of them."""
        first = len(self.blocks)
        slots = min(slots, self.slots - first)
        self.blocks += [None] * slots
        self.read += b"\1" * slots
        self.vacant[:0] = array("I", range(first + slots - 1, first - 1, -1))
        return first
