"""The lookups of the moment, for who writes them down. Pure.

They are kept only while somebody asks for them now and then, and only so many: who asks too seldom is told how many it
has lost.
"""

from __future__ import annotations

from collections import deque

from kvcache_proto.messages import Acquire, Seen, Watch, Watched

PATIENCE = 10.0  # seconds after the last question
KEPT = 1 << 18  # hashes, each lookup of which counts for EACH more
EACH = 16
SENT = 1 << 15  # hashes in one answer: one mebibyte


class LookupTap:
    """A ring with numbers; `next` is that of the lookup to come. It takes none in unless it is `on`."""

    def __init__(self) -> None:
        self.next = 1
        self.on = False
        self._ring: deque[Seen] = deque()
        self._held = 0
        self._until = 0.0

    def note(self, now: float, engine: str, request: Acquire, block_tokens: int, hits: int) -> None:
        """Remember a lookup."""
        where = (request.namespace, request.group, block_tokens)
        self._ring.append(Seen(int(now * 1000), engine, request.request, *where, request.tokens, hits, request.hashes))
        self.next += 1
        self._held += len(request.hashes) + EACH
        while self._held > KEPT:
            self._held -= len(self._ring.popleft().hashes) + EACH

    def since(self, request: Watch, now: float) -> Watched:
        """Return the lookups from number `request.since` on, as many as one answer holds; 0 is from now on."""
        self.on, self._until = True, now + PATIENCE
        first = self.next - len(self._ring)
        begin = min(request.since or self.next, self.next)
        at = max(begin, first)
        lost, lookups, hashes = at - begin, [], 0
        while at < self.next and hashes < SENT:
            lookups.append(self._ring[at - first])
            hashes += len(lookups[-1].hashes) + EACH
            at += 1
        return Watched(request.id, at, lost, at < self.next, lookups)

    def tick(self, now: float) -> None:
        """Forget all where nobody has asked for a while."""
        if self.on and now >= self._until:
            self.on, self._held = False, 0
            self._ring.clear()
