"""A lookup of many hashes, in slices. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcache_proto.errors import UnknownHandle
from kvcache_proto.types import check_hashes
from kvcache_server.core.index import GONE, Block, Group
from kvcache_server.core.sessions import Session
from kvcache_server.core.slices import LOOK, Steps

if TYPE_CHECKING:
    from kvcache_server.core.cache import Cache


def long_prefix(cache: Cache, session: Session, group: Group, hashes: Sequence[bytes]) -> Steps[list[Block]]:
    """Return the blocks of the longest visible prefix.

    Raises BadArgument for hashes of another length, or too many, UnknownHandle where the session leaves meanwhile.

    The last one that was found is pinned between two slices, and keeps those above it. Where blocks are distrusted
    meanwhile, it begins anew: they may be among those that were found.
    """
    check_hashes(hashes, group.hash_bytes)
    yield
    _check_here(session)
    found: list[Block] = []
    forgotten = cache.distrusts
    while True:
        piece = group.prefix(hashes[len(found) : len(found) + LOOK])
        found += piece
        if len(piece) < LOOK or len(found) == len(hashes):
            return found
        last = found[-1]
        last.pins += 1
        cache.writing.held[session] = last
        try:
            yield
        finally:
            del cache.writing.held[session]
            if last.pins != GONE:
                last.unpin()
        _check_here(session)
        if cache.distrusts != forgotten:
            found, forgotten = [], cache.distrusts


def _check_here(session: Session) -> None:
    if not session.here:
        raise UnknownHandle(f"session {session.id} has left")
