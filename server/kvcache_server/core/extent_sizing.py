"""How well blocks fill the extents of a region, and which extents they would fill better. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvcache_proto.errors import ConfigError, RegionError
from kvcache_proto.region import ALIGN, SLOT_ROW, plan_geometry, slot_size, slots_per_extent
from kvcache_proto.types import NamespaceSpec, PoolGeometry

LARGEST_EXTENT = 1 << 30
WASTE = 0.01  # fraction of the region above which another extent size is worthwhile
NOTABLE = 0.05  # fraction of the region above which the operator is notified


class Room(NamedTuple):
    """A region of `size` bytes, as made by `serve --size --extent-size`, for blocks of `block_bytes`."""

    size: int
    geometry: PoolGeometry
    block_bytes: int

    @property
    def slots(self) -> int:
        """How many blocks fit into it."""
        return self.geometry.extents * slots_per_extent(self.geometry.extent_bytes, slot_size(self.block_bytes))

    @property
    def region_bytes(self) -> int:
        return self.geometry.region_bytes

    @property
    def waste(self) -> float:
        """The fraction of `size` that no block can use."""
        return 1 - self.slots * self.block_bytes / self.size


def room(size: int, block_bytes: int, extent_bytes: int = 0) -> Room:
    """Return the layout of a region of that size.

    Without `extent_bytes`, the extent size is the default if another is hardly better, else the smallest one that
    wastes next to nothing. Raises ConfigError if no block fits.
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
            f"a block of {block_bytes:,} bytes does not fit into an extent of {found.geometry.extent_bytes:,}: "
            "choose a larger size or --extent-size, or a smaller --block-size"
        )
    return found


def _rooms(default: Room) -> Iterator[Room]:
    """Yield layouts whose extents are exactly filled by some number of slots, the smallest extents first."""
    slot = slot_size(default.block_bytes) + SLOT_ROW
    least, most = default.geometry.extent_bytes // 2, min(LARGEST_EXTENT, default.size)
    fitting = (-(-slots * slot // ALIGN) * ALIGN for slots in range(max(1, least // slot), most // slot + 1))
    for extent in dict.fromkeys(fitting):
        if least <= extent <= most:
            yield Room(default.size, plan_geometry(bytes(16), default.size, extent), default.block_bytes)


def slots_by_default(size: int, block_bytes: int) -> int:
    """Return how many blocks fit if only the size is configured."""
    return Room(size, plan_geometry(bytes(16), size), block_bytes).slots


class Fit(NamedTuple):
    """How well the blocks of a namespace fill the region, for the KV cache group that fills it worst.

    `overhead` is the fraction of each extent without blocks: slot rows, and the rest at the end. `better_extent` is the
    extent size that would reduce it to `better_overhead` of the region; 0 if the overhead is small or no extent size
    helps.
    """

    block_bytes: int
    overhead: float
    better_extent: int = 0
    better_overhead: float = 0.0


def fit(spec: NamespaceSpec, geometry: PoolGeometry) -> Fit:
    """Return how well the blocks of `spec` fill extents; they must fit into them."""
    extent = geometry.extent_bytes
    worst = max((Fit(each.block_bytes, _overhead(extent, each.block_bytes)) for each in spec.groups), key=_by_overhead)
    slot = slot_size(worst.block_bytes) + SLOT_ROW
    end = extent % slot / extent
    if worst.overhead <= NOTABLE or end <= WASTE:  # rows take a part of every extent
        return worst
    try:
        better = room(geometry.extents * extent, worst.block_bytes)
    except ConfigError:  # the region is smaller than a default extent
        return worst
    if better.geometry.extent_bytes == extent or better.waste > worst.overhead - WASTE:
        return worst
    return worst._replace(better_extent=better.geometry.extent_bytes, better_overhead=better.waste)


def _overhead(extent_bytes: int, block_bytes: int) -> float:
    return 1 - slots_per_extent(extent_bytes, slot_size(block_bytes)) * block_bytes / extent_bytes


def _by_overhead(found: Fit) -> float:
    return found.overhead
