"""The checksums that writers gave of their shards, as they will be compared by readers. Pure, over a buffer.

    0       header, one page: magic, region id, number of the daemon's life
    4,096   one u64 for each page of the region: the sum of the shard that begins there, 0 for none

Engines map the region and not this, so that who spoils a block cannot make its sum fit. A group whose shards are
smaller than a page has none: two of them might begin in one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvcache_proto.region import PAGE, WORD
from kvcache_proto.types import GroupSpec, PoolGeometry

_MAGIC = b"KVCSUMS1"
_HEADER = struct.Struct("<8s16sQ")
_REF = struct.Struct("<QQQ")


def sums_bytes(geometry: PoolGeometry) -> int:
    """Return how long the buffer is."""
    return PAGE + -(-geometry.region_bytes // PAGE) * WORD


class Sums:
    def __init__(self, buffer: memoryview, geometry: PoolGeometry, life: int = 1) -> None:
        """Take what the last daemon of this region has left in `buffer`, `sums_bytes` long.

        Of another region, or where a daemon between did not keep it, it is cleared: a sum must never be older than what
        its shard's slot holds.
        """
        self._words = buffer.cast("Q")
        headers = [_HEADER.pack(_MAGIC, geometry.region_id, number) for number in (life - 1, life)]
        if buffer[: _HEADER.size] != headers[0]:
            buffer[:] = bytes(len(buffer))
        buffer[: _HEADER.size] = headers[1]

    @staticmethod
    def offsets(spec: GroupSpec) -> tuple[int, ...]:
        """Return where in a slot of `spec` the shards begin that have a sum: all or none."""
        if min(spec.shards) < PAGE:
            return ()
        return tuple(spec.shard_offset(shard) for shard in range(len(spec.shards)))

    def put(self, offset: int, packed: bytes) -> None:
        """Note the sum of the shard at `offset` of the region; b"" is none."""
        self._words[PAGE // WORD + offset // PAGE] = int.from_bytes(packed, "little")

    def read(self, refs: bytes, offsets: Sequence[int]) -> bytes:
        """Return the sums of the blocks in `refs`, references one after the other: those at `offsets` of each slot."""
        words, first = self._words, PAGE // WORD
        found = [words[first + (begin + at) // PAGE] for begin, _, _ in _REF.iter_unpack(refs) for at in offsets]
        return struct.pack(f"<{len(found)}Q", *found)
