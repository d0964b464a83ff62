"""The current lookups, for clients that record them. Pure.

They are only kept while a client asks for them regularly, and only up to a limit. A client that asks too rarely gets
the number of those that it has missed.
"""

from __future__ import annotations

from collections import deque

from kvcache_proto.messages import Acquire, LookupRecord, TracedLookups, TraceLookups

PATIENCE = 10.0  # seconds after the last request
KEPT = 1 << 18  # hashes; each lookup counts as EACH more
EACH = 16
SENT = 1 << 15  # hashes in one reply: one mebibyte


class LookupTap:
    """A ring buffer of numbered lookups; `next` is the number of the next one. Records nothing unless `on`."""

    def __init__(self) -> None:
        self.next = 1
        self.on = False
        self._ring: deque[LookupRecord] = deque()
        self._held = 0
        self._until = 0.0

    def note(self, now: float, engine: str, request: Acquire, block_tokens: int, hits: int) -> None:
        where = (request.namespace, request.group, block_tokens)
        self._ring.append(
            LookupRecord(int(now * 1000), engine, request.request, *where, request.tokens, hits, request.hashes)
        )
        self.next += 1
        self._held += len(request.hashes) + EACH
        while self._held > KEPT:
            self._held -= len(self._ring.popleft().hashes) + EACH

    def since(self, request: TraceLookups, now: float) -> TracedLookups:
        """Return the lookups from number `request.since` on, as many as fit in one reply; 0 means from now on."""
        self.on, self._until = True, now + PATIENCE
        first = self.next - len(self._ring)
        begin = min(request.since or self.next, self.next)
        at = max(begin, first)
        lost, lookups, hashes = at - begin, [], 0
        while at < self.next and hashes < SENT:
            lookups.append(self._ring[at - first])
            hashes += len(lookups[-1].hashes) + EACH
            at += 1
        return TracedLookups(request.id, at, lost, at < self.next, lookups)

    def tick(self, now: float) -> None:
        """Drop all lookups if none were requested for a while."""
        if self.on and now >= self._until:
            self.on, self._held = False, 0
            self._ring.clear()
