"""The keys and headers of the values that tiers store. Pure.

A key names the bytes of a block for good: format version, namespace, geometry, group and the block's hash. A header has
the data to check whether they are the right ones: the key again, the sizes of the shards and their checksums.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec
import xxhash

from kvcache_proto.types import SUM_BYTES, NamespaceSpec

FORMAT = 1
_FIXED = struct.Struct("<4sBBHI")  # magic, format, length of the key, shards, checksum of the rest
_MAGIC = b"kvb\0"


def key_prefix(spec: NamespaceSpec, group: int) -> bytes:
    """Return the common prefix of the keys of all blocks of a group: 18 bytes.

    The geometry is part of it: stores outlive the daemons that forbid two geometries in one namespace.
    """
    each = spec.groups[group]
    rule = [each.kind, each.window_blocks, each.chunk_blocks, each.needs_next_block]
    facts = [each.block_tokens, each.shards, *rule, spec.hash_bytes]
    geometry = hashlib.sha256(msgspec.msgpack.encode(facts)).digest()[:8]
    return bytes([FORMAT, group]) + bytes.fromhex(spec.id) + geometry


def make_header(key: bytes, sizes: Sequence[int], sums: bytes) -> bytes:
    """Return the header of the block `key`, whose shards have `sizes` and the checksums `sums`, SUM_BYTES each.

    Blocks of one group have headers of one length.
    """
    rest = key + struct.pack(f"<{len(sizes)}Q", *sizes) + sums
    return _FIXED.pack(_MAGIC, FORMAT, len(key), len(sizes), xxhash.xxh3_64_intdigest(rest) & 0xFFFFFFFF) + rest


def read_header(header: bytes, key: bytes, sizes: Sequence[int]) -> bytes | None:
    """Return the checksums of the shards, or None if the header is not this block's."""
    if len(header) != _FIXED.size + len(key) + len(sizes) * (8 + SUM_BYTES):
        return None
    rest = header[_FIXED.size :]
    if header != make_header(key, sizes, rest[len(key) + 8 * len(sizes) :]):
        return None
    return rest[len(key) + 8 * len(sizes) :]
