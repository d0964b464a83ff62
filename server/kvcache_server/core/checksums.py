"""The checksums that writers gave of their shards, as they will be compared by readers. Pure, over a buffer.

    0       header, one page: magic, region id, the daemon's epoch
    4,096   one u64 for each page of the region: the sum of the shard that begins there, 0 for none

Engines map the region and not this, so that who spoils a block cannot make its sum fit. A group whose shards are
smaller than a page has none: two of them might begin in one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from kvcache_proto.region import PAGE, WORD
from kvcache_proto.types import GroupSpec, PoolGeometry

PIECE = 1 << 20  # bytes of the buffer that get memory together: the sums of 512 MiB of the region
_PIECE_SHIFT = (PIECE // WORD).bit_length() - 1
_FIRST = PAGE // WORD
_MAGIC = b"KVCSUMS1"
_HEADER = struct.Struct("<8s16sQ")
_REF = struct.Struct("<QQQ")


def sums_bytes(geometry: PoolGeometry) -> int:
    """Return how long the buffer is: whole pieces."""
    return -(-(PAGE + -(-geometry.region_bytes // PAGE) * WORD) // PIECE) * PIECE


def sums_header(geometry: PoolGeometry, epoch: int) -> bytes:
    """Return what the buffer begins with.

    One with another header is of another region, or a daemon between did not keep it: it must be begun anew, for a sum
    must never be older than what its shard's slot holds.
    """
    return _HEADER.pack(_MAGIC, geometry.region_id, epoch)


class Checksums:
    """`have` are the pieces that have memory; `get(piece)` gives one more its memory, and says whether it could."""

    def __init__(self, buffer: memoryview, have: set[int], get: Callable[[int], bool]) -> None:
        self._words = buffer.cast("Q")
        self._have, self._get = have, get

    @staticmethod
    def offsets(spec: GroupSpec) -> tuple[int, ...]:
        """Return where in a slot of `spec` the shards begin that have a sum: all or none."""
        if min(spec.shards) < PAGE:
            return ()
        return tuple(spec.shard_offset(shard) for shard in range(len(spec.shards)))

    def put(self, offset: int, packed: bytes) -> None:
        """Note the sum of the shard at `offset` of the region; b"" is none, as is any where there is no memory."""
        word = _FIRST + offset // PAGE
        piece = word >> _PIECE_SHIFT
        if piece in self._have or (packed and self._get(piece)):
            self._words[word] = int.from_bytes(packed, "little")

    def read(self, refs: bytes, offsets: Sequence[int]) -> bytes:
        """Return the sums of the blocks in `refs`, references one after the other: those at `offsets` of each slot."""
        words, have = self._words, self._have
        at = [_FIRST + (begin + offset) // PAGE for begin, _, _ in _REF.iter_unpack(refs) for offset in offsets]
        found = [words[word] if word >> _PIECE_SHIFT in have else 0 for word in at]
        return struct.pack(f"<{len(found)}Q", *found)
