"""The number of blocks that a region has room for. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvcache_proto.errors import ConfigError, RegionError
from kvcache_proto.region import pages_of, plan_geometry
from kvcache_proto.types import PoolGeometry


class Room(NamedTuple):
    """A region of `size` bytes, as made by `serve --size --page-size`, for blocks of `block_bytes`."""

    size: int
    geometry: PoolGeometry
    block_bytes: int

    @property
    def blocks(self) -> int:
        """The number of blocks that fit into it."""
        return self.geometry.pages // pages_of(self.block_bytes, self.geometry.page_bytes)

    @property
    def waste(self) -> float:
        """The fraction of `size` that no block can use: rows, and the ends of last pages."""
        return 1 - self.blocks * self.block_bytes / self.size


def room(size: int, block_bytes: int, page_bytes: int = 0) -> Room:
    """Return the room in a region of that size. Raises ConfigError if no block fits."""
    try:
        found = Room(size, plan_geometry(bytes(16), size, page_bytes), block_bytes)
    except RegionError as error:
        raise ConfigError(f"no region: {error}") from None
    if not found.blocks:
        raise ConfigError(
            f"a block of {block_bytes:,} bytes does not fit into a region of {size:,}: choose a larger size, or a "
            "smaller --block-size"
        )
    return found
