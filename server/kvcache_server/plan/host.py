"""What fits into the memory of a host: slots of a region, and what is left for the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcache_proto.errors import ConfigError, RegionError
from kvcache_proto.region import ALIGN, SLOT_ROW, plan_geometry, slot_size, slots_per_extent
from kvcache_proto.types import MAX_SHARD_BYTES, MAX_SHARDS, PoolGeometry

GIB = 1 << 30
LEFT_SHARE, LEFT_LEAST = 0.1, 8 * GIB  # of the host: kernel, page cache, everything that is no engine
LEFT_A_RANK = 8 * GIB  # an engine's process of one rank: libraries, staging, weights on their way to the device
INDEX_BYTES = 344  # of the daemon's own memory a block, as `kvcache-server bench` measures it
LARGEST_EXTENT = 1 << 30
WASTE = 0.01  # of the region, from which on another extent size is worth a flag


class Room(NamedTuple):
    """A region of `size` bytes, as `serve --size --extent-size` makes it, for blocks of `block_bytes`."""

    size: int
    geometry: PoolGeometry
    block_bytes: int

    @property
    def slots(self) -> int:
        """Blocks that it holds."""
        return self.geometry.extents * slots_per_extent(self.geometry.extent_bytes, slot_size(self.block_bytes))

    @property
    def region_bytes(self) -> int:
        return self.geometry.region_bytes

    @property
    def waste(self) -> float:
        """The part of `size` in which no block lies."""
        return 1 - self.slots * self.block_bytes / self.size


def room(size: int, block_bytes: int, extent_bytes: int = 0) -> Room:
    """Return what a daemon with that size holds, without `extent_bytes` in extents of the best size: the default one
    where another is hardly better, else the smallest one that wastes next to nothing.

    Raises ConfigError where it holds no block.
    """
    try:
        default = Room(size, plan_geometry(bytes(16), size, extent_bytes), block_bytes)
    except RegionError as error:
        raise ConfigError(f"no region: {error}") from None
    rooms = [] if extent_bytes or (default.slots and default.waste < WASTE) else list(_rooms(default))
    most = max((each.slots for each in rooms), default=0)
    found = default
    if most > default.slots * (1 + WASTE):
        found = next(each for each in rooms if each.slots >= most * (1 - WASTE / 2))
    if not found.slots:
        raise ConfigError(
            f"a block of {block_bytes:,} bytes does not fit an extent of {found.geometry.extent_bytes:,}: a larger "
            "size or --extent-size, or a smaller --block-size"
        )
    return found


def _rooms(default: Room) -> Iterator[Room]:
    """Yield the rooms whose extents some number of slots just fills, the smallest extents first."""
    slot = slot_size(default.block_bytes) + SLOT_ROW
    least, most = default.geometry.extent_bytes // 2, min(LARGEST_EXTENT, default.size)
    fitting = (-(-slots * slot // ALIGN) * ALIGN for slots in range(max(1, least // slot), most // slot + 1))
    for extent in dict.fromkeys(fitting):
        if least <= extent <= most:
            yield Room(default.size, plan_geometry(bytes(16), default.size, extent), default.block_bytes)


def slots_by_default(size: int, block_bytes: int) -> int:
    """Return the blocks that a daemon holds which is told its size alone."""
    return Room(size, plan_geometry(bytes(16), size), block_bytes).slots


def left_for_host(ram: int, ranks: int) -> int:
    """Return the bytes that a region should leave of a host with `ranks` ranks of engines; a rule of thumb."""
    return round(max(LEFT_SHARE * ram, LEFT_LEAST)) + ranks * LEFT_A_RANK


def check_block(shards: int, shard_bytes: int) -> None:
    """Raise ConfigError where the protocol has no name for such a block."""
    if shards > MAX_SHARDS or shard_bytes > MAX_SHARD_BYTES:
        raise ConfigError(f"{shards} shards of {shard_bytes:,} bytes: at most {MAX_SHARDS} of {MAX_SHARD_BYTES:,}")
