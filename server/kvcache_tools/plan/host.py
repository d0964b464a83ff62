"""The part of a host's memory that a region should leave free. Pure."""

from __future__ import annotations

from kvcache_proto.errors import ConfigError
from kvcache_proto.types import MAX_SHARD_BYTES, MAX_SHARDS

GIB = 1 << 30
LEFT_SHARE, LEFT_LEAST = 0.1, 8 * GIB  # of the host: kernel, page cache, everything but engines
LEFT_PER_RANK = 8 * GIB  # per rank of an engine: libraries, staging, weights on their way to the device
INDEX_BYTES = 344  # of the daemon's own memory per block, as `kvcache-server bench` measures it
PAGE_INDEX_BYTES = 9  # the same per page, whether or not there is a block: see Pool.blocks and Pool.read


def left_for_host(ram: int, ranks: int) -> int:
    """Return the bytes that a region should leave free on a host with `ranks` ranks of engines; a rule of thumb."""
    return round(max(LEFT_SHARE * ram, LEFT_LEAST)) + ranks * LEFT_PER_RANK


def check_block(shards: int, shard_bytes: int) -> None:
    """Raise ConfigError if the protocol does not support such a block."""
    if shards > MAX_SHARDS or shard_bytes > MAX_SHARD_BYTES:
        raise ConfigError(f"{shards} shards of {shard_bytes:,} bytes: at most {MAX_SHARDS} of {MAX_SHARD_BYTES:,}")
