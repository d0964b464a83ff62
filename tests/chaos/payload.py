"""The bytes that every block must hold: they follow from its namespace, its hash and the shard. Pure.

A shard begins with 64 bytes that identify it, so that a wrong block can be named. After them comes a stream of words
that differs for each key, so that a wrong block differs soon in every part.
"""

from __future__ import annotations

import functools
import hashlib
import struct

import numpy as np
import numpy.typing as npt

FAMILIES, BRANCHES, LENGTH, SHARED = 24, 3, 16, 6  # prompts: the first SHARED blocks are those of all the family
LARGEST = 1 << 20
POISON = 0xA5  # what a writer puts into a slot first: a block that is seen too early holds some of it

_HEADER = struct.Struct("<8s32s8sqq")
_MAGIC = b"CHAOSBLK"
_STREAM = np.random.Generator(np.random.Philox(key=2026)).integers(0, 1 << 64, LARGEST // 8, dtype=np.uint64)

Bytes = npt.NDArray[np.uint8]


@functools.cache
def block_hash(family: int, branch: int, depth: int) -> bytes:
    """Return the hash of block `depth` of a prompt; branches of a family part after SHARED blocks."""
    path = f"{family}/{branch if depth >= SHARED else 'shared'}/{depth}"
    return hashlib.blake2b(path.encode(), digest_size=32).digest()


def prompt(family: int, branch: int, length: int) -> list[bytes]:
    return [block_hash(family, branch, depth) for depth in range(length)]


def expected(namespace: str, block: bytes, shard: int, size: int) -> Bytes:
    """Return the `size` bytes, a multiple of 8 from 64 on, that `shard` of the block holds."""
    key = hashlib.blake2b(b"%b/%d" % (block, shard), digest_size=16, key=namespace.encode()).digest()
    low, high = struct.unpack("<QQ", key)
    words = _STREAM[: size // 8] ^ np.uint64(low)
    words *= np.uint64(high | 1)
    found = words.view(np.uint8)
    found[: _HEADER.size] = np.frombuffer(_header(namespace, block, shard, size), dtype=np.uint8)
    return found


def _header(namespace: str, block: bytes, shard: int, size: int) -> bytes:
    return _HEADER.pack(_MAGIC, block, bytes.fromhex(namespace), shard, size)


def difference(found: Bytes, wanted: Bytes) -> str:
    """Say where the bytes part and whose they seem to be."""
    wrong = np.flatnonzero(found != wanted)
    magic, block, namespace, shard, size = _HEADER.unpack(found[: _HEADER.size].tobytes())
    whose = (
        f"block {block.hex()[:12]} shard {shard} of {namespace.hex()}, {size} bytes" if magic == _MAGIC else "nobody"
    )
    poisoned = int(np.count_nonzero(found[wrong] == POISON))
    return (
        f"{len(wrong)} of {len(found)} bytes from {wrong[0]} to {wrong[-1]}, {poisoned} of them poison; it is {whose}"
    )
