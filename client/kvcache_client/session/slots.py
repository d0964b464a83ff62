"""A slot as it was given to this process."""

from __future__ import annotations

from typing import NamedTuple

from kvcache_client.session.region import Region
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import GroupSpec, SlotRef, unpack_refs


class Slot(NamedTuple):
    """One block's place: its reference, how the block is cut, the region it lies in, and whether it may be written."""

    ref: SlotRef
    group: GroupSpec
    region: Region
    writable: bool

    def view(self, shard: int = 0) -> memoryview:
        """Return the bytes of `shard`, writable under a reservation, read-only under a lease.

        Raises BadArgument for a shard that the block does not have, RegionError where the slot is the block's no more.
        """
        shards = self.group.shards
        if not 0 <= shard < len(shards):
            raise BadArgument(f"shard {shard}: this block has {len(shards)}")
        view = self.region.rows.slot_view(self.ref, self.group.shard_offset(shard), shards[shard])
        return view if self.writable else view.toreadonly()


def unpack_slots(packed: bytes, group: GroupSpec, region: Region | None, writable: bool) -> list[Slot]:
    """Return the slots of `packed`, REF_BYTES each, in their order."""
    if region is None:
        return []
    return [Slot(ref, group, region, writable) for ref in unpack_refs(packed)]
