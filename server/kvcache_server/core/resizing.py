"""Making the pool smaller while it is in use, one extent after the other. Pure."""

from __future__ import annotations

from kvcache_proto.errors import BadArgument
from kvcache_server.core.effects import Effects
from kvcache_server.core.eviction.policy import Eviction
from kvcache_server.core.journal import ExtentRetired, Resized
from kvcache_server.core.pool import Pool
from kvcache_server.core.slices import Steps


class Resizing:
    """`wanted` are the bytes that the pool is to have; 0 where nobody has asked for another size."""

    def __init__(self, pool: Pool, eviction: Eviction, effects: Effects) -> None:
        self.wanted = 0
        self._pool, self._eviction, self._effects = pool, eviction, effects

    def ask(self, size: int) -> int:
        """Want the whole extents in `size` bytes from now on; return how many bytes these are.

        Raises BadArgument where that is none, or more than there is.
        """
        pool = self._pool
        extents = size // pool.extent_bytes
        if not 1 <= extents * pool.extent_bytes <= pool.capacity:
            raise BadArgument(
                f"{size} bytes: {pool.extent_bytes}, an extent, to {pool.capacity}, what there is; "
                "the pool grows only with another region, when the daemon is started again"
            )
        self.wanted = extents * pool.extent_bytes
        self._effects.records.append(Resized(self.wanted))
        return self.wanted

    def shrink(self) -> Steps[int | None]:
        """Give up one extent on the way to the wanted size; return its number, whose memory may go now.

        None where the size is reached, or all extents are being read or written: try again later.
        """
        if not self.wanted or self.wanted >= self._pool.capacity:
            return None
        extent = yield from self._eviction.idle()
        if extent is None or self.wanted >= self._pool.capacity:
            return None
        self._effects.records.append(ExtentRetired(extent))
        self._pool.retire(extent)
        return extent
