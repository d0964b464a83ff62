"""Requests in the engine's queue, whose missing blocks tiers fetch while they wait. Pure.

A request is looked up, and its blocks are leased, when the engine schedules it. A request that a schedule has left in
the queue is announced to the daemon before that, with a lookup that pins nothing. Announced requests are limited in
bytes and follow the order of the queue, so that a long queue does not evict what its first requests need.
"""

from __future__ import annotations

from kvcache_client.scheduler.cache import CacheNamespace, Counts
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.views import RequestView

PREFETCH_DIVISOR = 8  # capacity // PREFETCH_DIVISOR bytes of prompts may be announced


class Queue:
    """The requests that were queued and not yet looked up."""

    def __init__(self, group: FullAttention, block_bytes: int, counters: Counts) -> None:
        self._group, self._block_bytes, self._counters = group, block_bytes, counters
        self.waiting: dict[str, RequestView] = {}  # those that are not announced, in order
        self._announced: dict[str, int] = {}  # bytes
        self._bytes = 0

    def add(self, request: RequestView) -> None:
        """Note a request that the engine has queued."""
        if not request.uncacheable and not request.skips_cache:
            self.waiting[request.id] = request

    def leave(self, request_id: str) -> None:
        """Note that a request is scheduled, or has ended."""
        if self.waiting:
            self.waiting.pop(request_id, None)
        if self._announced:
            self._bytes -= self._announced.pop(request_id, 0)

    def announce(self, namespace: CacheNamespace, capacity: int) -> None:
        """Have the daemon's tiers fetch blocks of waiting requests into its `capacity` bytes. Never waits."""
        most = capacity // PREFETCH_DIVISOR
        for request in list(self.waiting.values()):
            keys = self._group.keys(request.hashes)[: self._group.loadable(request)]
            size = len(keys) * self._block_bytes
            if size <= most:
                if self._bytes + size > most:
                    return
                if not keys or not namespace.prefetch(
                    keys, request=request.id, tokens=request.prompt_tokens, salted=request.salted
                ):
                    size = 0
                self._counters.add("prefetches", int(size > 0))
                self._announced[request.id] = size
                self._bytes += size
            del self.waiting[request.id]
