"""A slot that was granted to this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcache_client.session.region import Region
from kvcache_proto.errors import BadArgument, RegionError
from kvcache_proto.types import FULL, REF_BYTES, BlockRef, GroupSpec, NamespaceSpec, unpack_refs

Parts = Sequence[tuple[GroupSpec, int]]  # packed references: number in a row to slots of the group


class Slot(NamedTuple):
    """The place of one block: its reference, the sizes of its shards, its region, and whether it may be written."""

    ref: BlockRef
    group: GroupSpec
    region: Region
    writable: bool

    def views(self, shard: int = 0) -> list[memoryview]:
        """Return the bytes of `shard` as they lie, in one piece or in several; writable under a reservation, read-only
        under a lease.

        Raises BadArgument for a shard that the block does not have, RegionError if the place now belongs to another
        block.
        """
        shards = self.group.shards
        if not 0 <= shard < len(shards):
            raise BadArgument(f"shard {shard}: this block has {len(shards)}")
        begin, size = self.group.shard_offset(shard), shards[shard]
        views = self.region.rows.views(self.ref, self.group.block_bytes, begin, size)
        return views if self.writable else [view.toreadonly() for view in views]

    def view(self, shard: int = 0) -> memoryview:
        """Return the bytes of `shard` in one piece: a copy under a lease if they lie in several.

        Raises the errors of `views`, and RegionError if they are to be written and lie in several pieces.
        """
        views = self.views(shard)
        if len(views) == 1:
            return views[0]
        if self.writable:
            raise RegionError(f"shard {shard} lies in {len(views)} pieces: write to `views`")
        return memoryview(b"".join(views))


def parts_of_hits(spec: NamespaceSpec, group: int, hits: int, start: int) -> Parts:
    """Return the parts of the references that a lookup returns for `hits`, by an engine that has the tails of the
    first `start` blocks."""
    if not spec.tails:
        return ((spec.groups[group], hits),)
    least = max(0, hits - start)
    return [(each, each.needed(hits) if each.kind == FULL else min(each.needed(hits), least)) for each in spec.groups]


def split(packed: bytes, parts: Parts) -> Iterator[tuple[GroupSpec, bytes]]:
    """Yield each part's group and references."""
    at = 0
    for group, count in parts:
        yield group, packed[at : (at := at + count * REF_BYTES)]


def unpack_slots(packed: bytes, parts: Parts, region: Region | None, writable: bool) -> list[Slot]:
    """Return the slots in `packed`, REF_BYTES per reference, in their order."""
    if region is None:
        return []
    return [Slot(ref, group, region, writable) for group, refs in split(packed, parts) for ref in unpack_refs(refs)]
