"""Finds the hashes of a prompt that an operator names: by a request, or by the last block. Pure."""

from __future__ import annotations

from kvcache_proto.codec import decode_request
from kvcache_proto.errors import BadArgument
from kvcache_proto.messages import Acquire, Chain, Chained
from kvcache_proto.types import MAX_HASHES, MIN_HASH_BYTES
from kvcache_server.core.cache import Cache
from kvcache_server.core.index import GONE, Block, Group
from kvcache_server.core.limits import LOOK
from kvcache_server.core.sessions import Namespace
from kvcache_server.insight.miss_log import Lookup, MissLog
from kvcache_server.slices import Steps

MOST_MATCHES = 10


def chain(cache: Cache, misses: MissLog, request: Chain) -> Steps[Chained]:
    """Return the chain that is meant, cut to MAX_HASHES blocks, or the candidates if that is ambiguous.

    Raises BadArgument unless the request names either a request or at least MIN_HASH_BYTES bytes of a hash.
    """
    if bool(request.request) == bool(request.hash) or (request.hash and len(request.hash) < MIN_HASH_BYTES):
        raise BadArgument(f"a request, or at least {MIN_HASH_BYTES} bytes of a hash")
    yield
    if request.request:
        return (yield from _of_request(cache, misses, request))
    return (yield from _of_block(cache, request))


def _of_request(cache: Cache, misses: MissLog, request: Chain) -> Steps[Chained]:
    lookups: dict[str, Lookup] = {}  # the last one of each request
    for at, each in enumerate(list(misses.lookups)):
        if request.request in each.request:
            lookups[each.request] = each
        if at % LOOK == 0:
            yield
    found = [request.request] if request.request in lookups else list(lookups)[-MOST_MATCHES:]
    if len(found) != 1:
        return Chained(request.id, found)
    asked = decode_request(lookups[found[0]].frame)
    assert isinstance(asked, Acquire)
    yield
    namespace = cache.namespaces.get(asked.namespace)
    if namespace is None or request.namespace not in ("", namespace.id):
        return Chained(request.id, [])
    return _chained(request.id, found[0], namespace, namespace.groups[asked.group], asked.hashes[:MAX_HASHES])


def _of_block(cache: Cache, request: Chain) -> Steps[Chained]:
    found: list[Block] = []
    for namespace in cache.namespaces.values():
        exact = [group.visible.get(request.hash) for group in namespace.groups]
        found += [block for block in exact if block is not None]
    if not found:
        found = yield from _ending_in(cache, request.hash)
    meant = [(cache.namespaces.get(block.account.group.namespace), block) for block in found]
    known = [(space, block) for space, block in meant if space is not None and block.pins != GONE]
    found_in = [(space, block) for space, block in known if request.namespace in ("", space.id)]
    if len(found_in) != 1:
        return Chained(request.id, [namespace.id for namespace, _ in found_in[:MOST_MATCHES]])
    namespace, block = found_in[0]
    hashes = [each.hash for each in block.ancestors()][::-1][:MAX_HASHES]
    return _chained(request.id, namespace.id, namespace, block.account.group, hashes)


def _ending_in(cache: Cache, end: bytes) -> Steps[list[Block]]:
    """Return at most MOST_MATCHES blocks that lookups find and whose hashes end with `end`. O(pages)."""
    found: list[Block] = []
    for at in range(0, cache.geometry.pages, LOOK):
        yield
        some = [each for each in cache.blocks_at(at, at + LOOK) if each.hash.endswith(end)]
        found += [each for each in some if each.is_found]
        if len(found) >= MOST_MATCHES:
            return found
    return found


def _chained(number: int, match: str, namespace: Namespace, group: Group, hashes: list[bytes]) -> Chained:
    cached = len(group.prefix(hashes))
    tokens = group.spec.block_tokens
    return Chained(number, [match], namespace.id, namespace.spec.model, group.number, tokens, cached, hashes)
