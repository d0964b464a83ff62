"""The rights to write slots: reservations and their grants. Pure; time is an argument."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvcache_proto.region import SLOT_ROW
from kvcache_proto.types import Verdict
from kvcache_server.core.index import Block, Group
from kvcache_server.core.pool import Extent


class Grant:
    """One WRITING slot of a reservation: which shards are settled, and what became of it.

        pending --- last shard settles ---> ready          all committed, nobody took its place
                                      +---> given back     `fate` says why

    `fate` is None, or the Verdict for which the block cannot become visible any more.
    """

    __slots__ = (
        *("block", "claimed", "extent", "fate", "ready", "reservation", "row", "settled", "slot"),
        "tainted_until",
    )

    def __init__(self, block: Block, extent: Extent, slot: int, reservation: Reservation) -> None:
        self.block = block
        self.extent = extent
        self.slot = slot
        self.row = extent.rows + slot * SLOT_ROW  # the byte offset of the slot's row
        self.reservation = reservation
        self.settled = 0  # bit set of shards
        self.claimed = 0  # those that have failed, and are settled once all below the block is doomed
        self.ready = False
        self.fate: Verdict | None = None
        self.tainted_until = 0.0  # the end of the quarantine that a dead writer asks for

    @property
    def taken(self) -> int:
        """The shards that nobody can settle any more."""
        return self.settled | self.claimed

    @property
    def whole(self) -> bool:
        return self.settled == self.reservation.all_shards


class Reservation:
    """The grants of one Reserve. `writers[shard]` is the session that may write that shard; `crew` numbers them.

    `told` is false while it is being granted: nobody may settle it yet.
    """

    __slots__ = ("all_shards", "created", "crew", "grants", "group", "id", "owner", "told", "unsettled", "writers")

    def __init__(self, number: int, group: Group, owner: int, writers: tuple[int, ...], created: float) -> None:
        self.id = number
        self.group = group
        self.owner = owner
        self.writers = writers
        self.all_shards = (1 << len(writers)) - 1
        self.created = created
        self.crew = 0
        self.told = True
        self.grants: list[Grant] = []
        self.unsettled = 0


class Quarantine:
    """Slots that a dead writer's DMA may still reach, until their time is over."""

    def __init__(self) -> None:
        self._slots: list[tuple[float, int, int, Extent]] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, until: float, extent: Extent, slot: int) -> None:
        self.bytes += extent.slot_bytes
        heapq.heappush(self._slots, (until, extent.index, slot, extent))

    def over(self, now: float) -> Iterator[tuple[Extent, int]]:
        """Take out the slots whose time is over, one after the other."""
        while self._slots and self._slots[0][0] <= now:
            _, _, slot, extent = heapq.heappop(self._slots)
            self.bytes -= extent.slot_bytes
            yield extent, slot

    def slots(self) -> list[tuple[Extent, int]]:
        return [(extent, slot) for _, _, slot, extent in self._slots]
