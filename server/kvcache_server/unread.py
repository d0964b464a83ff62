"""Long replies that have not left the daemon yet, by peer. ZeroMQ bounds their number, not their length."""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Tracker(Protocol):
    """Knows whether a message has left: a `zmq.MessageTracker`."""

    @property
    def done(self) -> bool: ...


class Unread:
    """At most `limit` bytes a peer; of one that has nothing unread, any one reply. Pure."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._replies: dict[bytes, deque[tuple[Tracker, int]]] = {}

    def has_room(self, peer: bytes, size: int) -> bool:
        waiting = self._replies.get(peer)
        if waiting is None:
            return True
        while waiting and waiting[0][0].done:
            waiting.popleft()
        return not waiting or sum(length for _, length in waiting) + size <= self._limit

    def add(self, peer: bytes, tracker: Tracker, size: int) -> None:
        self._replies.setdefault(peer, deque()).append((tracker, size))

    def tidy(self) -> None:
        """Forget peers that have read all, or have gone."""
        for peer in [each for each, waiting in self._replies.items() if all(tracker.done for tracker, _ in waiting)]:
            del self._replies[peer]
