"""Shrinks the pool while it is in use, one extent after the other. Pure."""

from __future__ import annotations

from kvcache_proto.errors import BadArgument
from kvcache_server.core.effects import Effects
from kvcache_server.core.eviction.policy import Eviction
from kvcache_server.core.journal import ExtentRetired, Resized
from kvcache_server.core.pool import Pool
from kvcache_server.core.slices import Steps


class Resizing:
    """`wanted` is the requested size of the pool in bytes; 0 if no other size was requested."""

    def __init__(self, pool: Pool, eviction: Eviction, effects: Effects) -> None:
        self.wanted = 0
        self._pool, self._eviction, self._effects = pool, eviction, effects

    def ask(self, size: int) -> int:
        """Request a size of `size` bytes, rounded down to whole extents; return the rounded size.

        Raises BadArgument if it is less than one extent or more than the current size.
        """
        pool = self._pool
        extents = size // pool.extent_bytes
        if not 1 <= extents * pool.extent_bytes <= pool.capacity:
            raise BadArgument(
                f"{size} bytes: must be {pool.extent_bytes} (one extent) to {pool.capacity} (the current size); "
                "to enlarge the pool, restart the daemon with a larger size"
            )
        self.wanted = extents * pool.extent_bytes
        self._effects.records.append(Resized(self.wanted))
        return self.wanted

    def shrink(self) -> Steps[int | None]:
        """Retire one extent on the way to the requested size; return its number: its memory may be returned now.

        Returns None if the size is reached, or if all extents are being read or written: try again later.
        """
        if not self.wanted or self.wanted >= self._pool.capacity:
            return None
        extent = yield from self._eviction.idle()
        if extent is None or self.wanted >= self._pool.capacity:
            return None
        self._effects.records.append(ExtentRetired(extent))
        self._pool.retire(extent)
        return extent
