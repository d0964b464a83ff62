"""Requests in the engine's queue: while they wait, the daemon evicts their blocks last, and tiers fetch missing ones.
Pure.

A request is looked up, and its blocks are leased, when the engine schedules it. A request that a schedule has left in
the queue, or has preempted, is announced to the daemon before that, with a lookup that pins nothing. Announced requests
are limited in number and bytes and follow the order of arrival, so that a long queue does not evict what its first
requests need. Requests whose hint says `fetch` come first.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_client.scheduler.cache import CacheNamespace, Counts
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.views import RequestView
from kvcache_proto.errors import KVCacheError

PREFETCH_DIVISOR = 8  # capacity // PREFETCH_DIVISOR bytes of prompts may be announced
MOST_ANNOUNCED = 256  # requests; the daemon counts the lookups of the last 1,024 of an engine once
REPEATED_AFTER = 30.0  # seconds; the daemon takes a request for aborted that it has not heard of for a minute


@dataclass(slots=True)
class _Announced:
    """A request that was announced; `missed`: some of its blocks were not cached then."""

    request: RequestView
    blocks: int
    bytes: int
    at: float
    missed: bool = False


class Queue:
    """The requests that were queued and not yet looked up."""

    def __init__(self, group: FullAttention, block_bytes: int, counters: Counts) -> None:
        self._group, self._block_bytes, self._counters = group, block_bytes, counters
        self._first: dict[str, RequestView] = {}  # those that are not announced, in order, and come first
        self._others: dict[str, RequestView] = {}
        self._announced: dict[str, _Announced] = {}  # the one whose announcement is to be repeated next is first
        self._bytes = 0
        self.left: dict[str, None] = {}  # announced ones that have left, and were not looked up since

    @property
    def waiting(self) -> dict[str, RequestView]:
        """Requests that are not announced, in order: the next ones. If it is empty, there are none."""
        return self._first or self._others

    def add(self, request: RequestView, first: bool = False) -> None:
        """Note a request that the engine has queued, or preempted, after which it comes `first`."""
        self.leave(request.id)
        if not request.uncacheable and not request.skips_cache:
            first = first or (request.hint is not None and request.hint.fetch)
            (self._first if first else self._others)[request.id] = request

    def leave(self, request_id: str) -> bool:
        """Note that a request is scheduled, or has ended; return True if blocks were missing when it was announced."""
        if self.waiting:
            self._first.pop(request_id, None)
            self._others.pop(request_id, None)
        announced = self._announced.pop(request_id, None)
        if announced is None:
            return False
        self._bytes -= announced.bytes
        self.left[request_id] = None
        return announced.missed

    def stale(self, now: float) -> bool:
        """Whether an announcement is to be repeated."""
        return bool(self._announced) and now - next(iter(self._announced.values())).at >= REPEATED_AFTER

    def announce(self, namespace: CacheNamespace, capacity: int, now: float) -> None:
        """Have the daemon keep blocks of waiting requests in its `capacity` bytes, or fetch them. Never waits.

        A lookup with a lease ends that. Requests that were aborted, or that need none, are announced without blocks.
        """
        for name in self.left:
            namespace.prefetch((), request=name)
        self.left.clear()
        if self.stale(now):
            name, former = next(iter(self._announced.items()))
            former.at = now
            self._announced[name] = self._announced.pop(name)
            self._prefetch(namespace, former)
        most = capacity // PREFETCH_DIVISOR
        while (waiting := self.waiting) and len(self._announced) < MOST_ANNOUNCED:
            request = next(iter(waiting.values()))
            blocks = self._group.loadable(request)
            size = blocks * self._block_bytes
            if self._bytes + size > most >= size:
                return  # there is room once earlier requests are scheduled
            del waiting[request.id]
            if blocks and size <= most:
                self._announced[request.id] = announced = _Announced(request, blocks, size, now)
                self._bytes += size
                self._prefetch(namespace, announced)

    def _prefetch(self, namespace: CacheNamespace, announced: _Announced) -> None:
        request = announced.request
        keys = self._group.keys(request.hashes)[: announced.blocks + self._group.volatile]

        def answered(hits: int) -> None:
            announced.missed = hits < len(keys)

        prompt, salted = request.prompt_tokens, request.salted
        try:
            sent = namespace.prefetch(keys, request=request.id, tokens=prompt, salted=salted, then=answered)
            self._counters.add("prefetches", int(sent))
        except KVCacheError as error:
            self._counters.warn("prefetches_refused", f"lookups are refused: {error}")
