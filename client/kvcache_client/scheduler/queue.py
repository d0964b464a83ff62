"""Requests in the engine's queue: while they wait, the daemon evicts their blocks last, and tiers fetch missing ones.
Pure.

A request is looked up, and its blocks are leased, when the engine schedules it. A request that a schedule has left in
the queue, or has preempted, is announced to the daemon before that, with a lookup that pins nothing. Announcements
follow the order of arrival, and the daemon refuses those for which it has no room, so that a long queue does not evict
what its first requests need. Requests whose hint says `fetch` come first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvcache_client.scheduler.cache import CacheNamespace, Counts
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.views import RequestView
from kvcache_proto.errors import KVCacheError

AT_FIRST = 8  # announced requests, before the daemon has accepted any; one more with each that it accepts
MOST_ANNOUNCED = 256  # requests; the daemon counts the lookups of the last 1,024 of an engine once
REPEATED_AFTER = 30.0  # seconds; the daemon takes a request for aborted that it has not heard of for a minute


@dataclass(slots=True)
class _Announced:
    """A request that was announced, `alone` if there was no other; `missed`: some blocks were not cached then."""

    request: RequestView
    first: bool
    alone: bool
    at: float
    missed: bool = False


class Queue:
    """The requests that were queued and not yet looked up."""

    def __init__(self, group: FullAttention, counters: Counts) -> None:
        self._group, self._counters = group, counters
        self._first: dict[str, RequestView] = {}  # those that are not announced, in order, and come first
        self._others: dict[str, RequestView] = {}
        self._announced: dict[str, _Announced] = {}  # the one whose announcement is to be repeated next is first
        self._left: dict[str, None] = {}  # announced ones that have left, and were not looked up since
        self._answers: deque[tuple[_Announced, bool]] = deque()  # by another thread; whether the daemon has refused it
        self._most = AT_FIRST

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
        self._left[request_id] = None
        return announced.missed

    def looked_up(self, request_id: str) -> None:
        """Note that a request is looked up with a lease: the daemon then knows that it does not wait."""
        self._left.pop(request_id, None)

    def has_news(self, now: float) -> bool:
        """Whether `announce` has something to do."""
        return bool(self._left or self._answers or self.waiting) or self._is_stale(now)

    def _is_stale(self, now: float) -> bool:
        return bool(self._announced) and now - next(iter(self._announced.values())).at >= REPEATED_AFTER

    def announce(self, namespace: CacheNamespace, now: float) -> None:
        """Have the daemon keep the blocks of waiting requests, and fetch missing ones. Never waits.

        A lookup with a lease ends that. Requests that were aborted, or that need none, are announced without blocks.
        """
        for name in self._left:
            namespace.prefetch((), request=name)
        self._left.clear()
        if self._answers:
            self._take_answers()
        if self._is_stale(now):
            name, former = next(iter(self._announced.items()))
            former.at = now
            self._announced[name] = self._announced.pop(name)
            self._prefetch(namespace, former)
        while (waiting := self.waiting) and len(self._announced) < self._most:
            request = next(iter(waiting.values()))
            del waiting[request.id]
            if self._group.loadable(request):
                announced = _Announced(request, waiting is self._first, not self._announced, now)
                self._announced[request.id] = announced
                self._prefetch(namespace, announced)

    def _take_answers(self) -> None:
        """Let requests that the daemon has refused wait until there is room, unless there is never enough."""
        refused: list[_Announced] = []
        while self._answers:
            announced, is_refused = self._answers.popleft()
            if self._announced.get(announced.request.id) is not announced:
                continue  # it has left
            if is_refused:
                del self._announced[announced.request.id]
                refused.append(announced)
            else:
                self._most = min(self._most + 1, MOST_ANNOUNCED)
        if refused:
            self._most = max(len(self._announced), 1)
            back = [each for each in refused if not each.alone]
            self._first = {each.request.id: each.request for each in back if each.first} | self._first
            self._others = {each.request.id: each.request for each in back if not each.first} | self._others

    def _prefetch(self, namespace: CacheNamespace, announced: _Announced) -> None:
        request = announced.request
        keys = self._group.keys(request.hashes)[: self._group.loadable(request) + self._group.volatile]

        def answered(hits: int, withheld: int) -> None:
            announced.missed = hits < len(keys)
            self._answers.append((announced, withheld > 0))

        prompt, salted = request.prompt_tokens, request.salted
        try:
            sent = namespace.prefetch(keys, request=request.id, tokens=prompt, salted=salted, then=answered)
            self._counters.add("prefetches", int(sent))
        except KVCacheError as error:
            self._counters.warn("prefetches_refused", f"lookups are refused: {error}")
