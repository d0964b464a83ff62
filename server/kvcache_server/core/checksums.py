"""The checksums of shards, given by their writers and compared by readers. Pure, over a buffer.

    0       header: magic, region id, the daemon's epoch
    4,096   one u64 per 4,096 bytes of the region: the checksum of the shard that begins there, 0 for none

Engines map the region but not this buffer, so a process that corrupts a block cannot make the checksum match. A group
whose shards are smaller than 4,096 bytes has no checksums: two shards could begin together.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from kvcache_proto.region import LEAST_PAGE, WORD
from kvcache_proto.types import GroupSpec, PoolGeometry

PIECE = 1 << 20  # bytes of the buffer that are allocated together: the checksums of 512 MiB of the region
_PIECE_SHIFT = (PIECE // WORD).bit_length() - 1
_FIRST = LEAST_PAGE // WORD
_MAGIC = b"KVCSUMS1"
_HEADER = struct.Struct("<8s16sQ")
Locate = Callable[[int, int], int]
_REF = struct.Struct("<QQ")


def sums_bytes(geometry: PoolGeometry) -> int:
    """Return the size of the buffer in bytes, in whole pieces."""
    return -(-(LEAST_PAGE + -(-geometry.region_bytes // LEAST_PAGE) * WORD) // PIECE) * PIECE


def sums_header(geometry: PoolGeometry, epoch: int) -> bytes:
    """Return the header of the buffer.

    A buffer with another header belongs to another region, or a daemon in between did not maintain it. It must be
    cleared: a checksum must never be older than the block.
    """
    return _HEADER.pack(_MAGIC, geometry.region_id, epoch)


class Checksums:
    """`have` are the allocated pieces; `get(piece)` allocates another one and returns whether it succeeded."""

    def __init__(self, buffer: memoryview, have: set[int], get: Callable[[int], bool]) -> None:
        self._words = buffer.cast("Q")
        self._have, self._get = have, get

    @staticmethod
    def offsets(spec: GroupSpec) -> tuple[int, ...]:
        """Return the offsets of the shards with checksums in a block of `spec`: all shards or none."""
        if min(spec.shards) < LEAST_PAGE:
            return ()
        return tuple(spec.shard_offset(shard) for shard in range(len(spec.shards)))

    def put(self, offset: int, packed: bytes) -> None:
        """Store the checksum of the shard at `offset` of the region, b"" for none. Without memory, none is stored."""
        word = _FIRST + offset // LEAST_PAGE
        piece = word >> _PIECE_SHIFT
        if piece in self._have or (packed and self._get(piece)):
            self._words[word] = int.from_bytes(packed, "little")

    def read(self, refs: bytes, offsets: Sequence[int], locate: Locate | None = None) -> bytes:
        """Return the checksums of the blocks in `refs`, concatenated references: those at `offsets` of each block.

        `locate` is needed if blocks may lie in several runs of pages; see Pool.locate.
        """
        words, have = self._words, self._have
        places = [(begin, offset) for begin, _ in _REF.iter_unpack(refs) for offset in offsets]
        if locate is None:
            at = [_FIRST + (begin + offset) // LEAST_PAGE for begin, offset in places]
        else:
            at = [_FIRST + locate(begin, offset) // LEAST_PAGE for begin, offset in places]
        found = [words[word] if word >> _PIECE_SHIFT in have else 0 for word in at]
        return struct.pack(f"<{len(found)}Q", *found)
