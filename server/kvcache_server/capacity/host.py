"""What fits into the memory of a host: what is left of it beside a region. Pure."""

from __future__ import annotations

from kvcache_proto.errors import ConfigError
from kvcache_proto.types import MAX_SHARD_BYTES, MAX_SHARDS

GIB = 1 << 30
LEFT_SHARE, LEFT_LEAST = 0.1, 8 * GIB  # of the host: kernel, page cache, everything that is no engine
LEFT_A_RANK = 8 * GIB  # an engine's process of one rank: libraries, staging, weights on their way to the device
INDEX_BYTES = 344  # of the daemon's own memory a block, as `kvcache-server bench` measures it


def left_for_host(ram: int, ranks: int) -> int:
    """Return the bytes that a region should leave of a host with `ranks` ranks of engines; a rule of thumb."""
    return round(max(LEFT_SHARE * ram, LEFT_LEAST)) + ranks * LEFT_A_RANK


def check_block(shards: int, shard_bytes: int) -> None:
    """Raise ConfigError where the protocol has no name for such a block."""
    if shards > MAX_SHARDS or shard_bytes > MAX_SHARD_BYTES:
        raise ConfigError(f"{shards} shards of {shard_bytes:,} bytes: at most {MAX_SHARDS} of {MAX_SHARD_BYTES:,}")
