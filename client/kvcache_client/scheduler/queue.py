"""Requests in the engine's queue, whose missing blocks tiers fetch while they wait. Pure.

A request is looked up, and its blocks are leased, when the engine schedules it. A request that a schedule has left in
the queue is announced to the daemon before that, with a lookup that pins nothing. Announced requests are limited in
number and bytes and follow the order of arrival, so that a long queue does not evict what its first requests need.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_client.scheduler.cache import CacheNamespace, Counts
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.views import RequestView
from kvcache_proto.errors import KVCacheError

PREFETCH_DIVISOR = 8  # capacity // PREFETCH_DIVISOR bytes of prompts may be announced
MOST_ANNOUNCED = 256  # requests; the daemon counts the lookups of the last 1,024 of an engine once


class Queue:
    """The requests that were queued and not yet looked up."""

    def __init__(self, group: FullAttention, block_bytes: int, counters: Counts) -> None:
        self._group, self._block_bytes, self._counters = group, block_bytes, counters
        self.waiting: dict[str, RequestView] = {}  # those that are not announced, in order
        self._announced: dict[str, int] = {}  # bytes
        self._bytes = 0
        self._missed: set[str] = set()  # announced requests with blocks that were not cached then

    def add(self, request: RequestView) -> None:
        """Note a request that the engine has queued."""
        self.leave(request.id)
        if not request.uncacheable and not request.skips_cache:
            self.waiting[request.id] = request

    def leave(self, request_id: str) -> bool:
        """Note that a request is scheduled, or has ended; return True if blocks were missing when it was announced."""
        if self.waiting:
            self.waiting.pop(request_id, None)
        if self._announced:
            self._bytes -= self._announced.pop(request_id, 0)
        missed = request_id in self._missed
        self._missed.discard(request_id)
        return missed

    def announce(self, namespace: CacheNamespace, capacity: int) -> None:
        """Have the daemon's tiers fetch blocks of waiting requests into its `capacity` bytes. Never waits."""
        most = capacity // PREFETCH_DIVISOR
        for request in list(self.waiting.values()):
            if len(self._announced) >= MOST_ANNOUNCED:
                return
            keys = self._group.keys(request.hashes)[: self._group.loadable(request) + self._group.volatile]
            size = len(keys) * self._block_bytes
            if size <= most:
                if self._bytes + size > most:
                    return
                if keys:
                    self._announced[request.id] = size
                    self._bytes += size
                    self._prefetch(namespace, request, keys)
            del self.waiting[request.id]

    def _prefetch(self, namespace: CacheNamespace, request: RequestView, keys: Sequence[bytes]) -> None:
        def answered(hits: int) -> None:
            if hits < len(keys) and request.id in self._announced:
                self._missed.add(request.id)

        prompt, salted = request.prompt_tokens, request.salted
        try:
            sent = namespace.prefetch(keys, request=request.id, tokens=prompt, salted=salted, then=answered)
            self._counters.add("prefetches", int(sent))
        except KVCacheError as error:
            self._counters.warn("prefetches_refused", f"lookups are refused: {error}")
