"""The subscriptions of each subscriber. A subscription is a prefix of topics, as in ZeroMQ. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

IN_ALL = 8  # all subscribers together may have this many times as many subscriptions as one

S = TypeVar("S", bound=Hashable)


class Topics(Generic[S]):
    """Subscriptions by subscriber; `len` is the number of topics with a subscriber."""

    def __init__(self, most: int) -> None:
        """A subscriber may have `most` subscriptions, all subscribers together IN_ALL times as many."""
        self._most = most
        self._of: dict[S, set[bytes]] = {}

    def __len__(self) -> int:
        return len(set().union(*self._of.values()))

    def add(self, subscriber: S, topic: bytes) -> S | None:
        """Add a subscription; adding it again changes nothing. O(subscribers).

        Return the subscriber that must be disconnected, if any: this one if it has too many subscriptions, or the one
        with the most if all together have too many.
        """
        own = self._of.setdefault(subscriber, set())
        if topic in own:
            return None
        own.add(topic)
        if len(own) > self._most:
            return subscriber
        if sum(map(len, self._of.values())) > IN_ALL * self._most:
            return max(self._of, key=lambda each: len(self._of[each]))
        return None

    def discard(self, subscriber: S, topic: bytes) -> None:
        """Remove a subscription, if it exists."""
        own = self._of.get(subscriber, set())
        own.discard(topic)
        if not own:
            self._of.pop(subscriber, None)

    def leave(self, subscriber: S) -> int:
        """Remove all subscriptions of a subscriber. Return their number."""
        return len(self._of.pop(subscriber, ()))

    def of(self, name: bytes) -> list[S]:
        """Return the subscribers that receive messages published under `name`, each once. O(subscriptions)."""
        return [subscriber for subscriber, own in self._of.items() if name.startswith(tuple(own))]
