"""What operators have done to the blocks and the pool: clear, shrink. Pure; time is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_proto.errors import BadArgument, ClientError, Unavailable
from kvcache_proto.messages import Clear, Cleared
from kvcache_server.core.pool import Pool
from kvcache_server.core.sessions import Session
from kvcache_server.core.slices import Steps

if TYPE_CHECKING:
    from kvcache_server.core.cache import Cache


def smaller(pool: Pool, size: int) -> int:
    """Return the bytes of the whole extents in `size` bytes. Raises BadArgument where that is none, or too much."""
    extents = size // pool.extent_bytes
    if not 1 <= extents * pool.extent_bytes <= pool.capacity:
        raise BadArgument(
            f"{size} bytes: {pool.extent_bytes}, an extent, to {pool.capacity}, what there is; "
            "only another region, of a daemon that is started anew, is larger"
        )
    return extents * pool.extent_bytes


def shrinking(cache: Cache, now: float) -> Steps[int | None]:
    """As Cache.shrinking."""
    if not cache.wanted or cache.wanted >= cache.pool.capacity:
        return None
    extent = yield from cache.misses.throughout(cache.room.idle(), now, "", 0)
    if extent is not None and cache.wanted < cache.pool.capacity:
        cache.retire(extent)
        return extent
    return None


def clear_and_tell(cache: Cache, session: Session, request: Clear, now: float) -> Steps[Cleared]:
    return Cleared(request.id, (yield from clearing(cache, request.namespace, session.engine.name, now)))


def clearing(cache: Cache, namespace: str, by: str, now: float) -> Steps[int]:
    """As Cache.clearing."""
    only = cache.by_id.get(namespace)
    if namespace and only is None:
        raise ClientError(f"no namespace {namespace!r}; there are: {', '.join(cache.by_id) or 'none'}")
    if cache.room.frozen:
        raise Unavailable("engines are coming back after a restart, what they read is not known yet: try again")
    accounts = [each for each in cache.shares.accounts if only is None or each.group.namespace == only.number]
    cleared = yield from cache.misses.throughout(cache.room.clear(accounts), now, by, 0)
    if cache.watcher is not None:
        for each in list(cache.namespaces.values()) if only is None else [only]:
            if each.number in cache.namespaces and not any(group.visible for group in each.groups):
                cache.watcher.emptied(each)
    return cleared
