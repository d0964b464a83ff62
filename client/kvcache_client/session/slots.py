"""A slot that was granted to this process."""

from __future__ import annotations

from typing import NamedTuple

from kvcache_client.session.region import Region
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import GroupSpec, SlotRef, unpack_refs


class Slot(NamedTuple):
    """The slot of one block: its reference, the sizes of its shards, its region, and whether it may be written."""

    ref: SlotRef
    group: GroupSpec
    region: Region
    writable: bool

    def view(self, shard: int = 0) -> memoryview:
        """Return the bytes of `shard`, writable under a reservation, read-only under a lease.

        Raises BadArgument for a shard that the block does not have, RegionError where the slot is another block's now.
        """
        shards = self.group.shards
        if not 0 <= shard < len(shards):
            raise BadArgument(f"shard {shard}: this block has {len(shards)}")
        view = self.region.rows.slot_view(self.ref, self.group.shard_offset(shard), shards[shard])
        return view if self.writable else view.toreadonly()


def unpack_slots(packed: bytes, group: GroupSpec, region: Region | None, writable: bool) -> list[Slot]:
    """Return the slots in `packed`, REF_BYTES per reference, in their order."""
    if region is None:
        return []
    return [Slot(ref, group, region, writable) for ref in unpack_refs(packed)]
