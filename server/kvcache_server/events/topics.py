"""The topics to which subscribers subscribe: prefixes, as in ZeroMQ. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

IN_ALL = 8  # all subscribers together may have this many times as many subscriptions as one

S = TypeVar("S", bound=Hashable)


class Topics(Generic[S]):
    """Subscriptions by topic and by subscriber; `len()` is the number of topics with a subscriber."""

    def __init__(self, most: int) -> None:
        """A subscriber may have `most` subscriptions, all subscribers together IN_ALL times as many."""
        self._most = most
        self._by_topic: dict[bytes, dict[S, None]] = {}
        self._by_subscriber: dict[S, dict[bytes, None]] = {}
        self._lengths: Counter[int] = Counter()  # subscriptions by length, to look up only possible prefixes
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_topic)

    def add(self, subscriber: S, topic: bytes) -> S | None:
        """Add a subscription; adding it again changes nothing. O(1) within the bounds.

        Return the subscriber that must be disconnected, if any: this one if it has too many subscriptions, or the one
        with the most if all together have too many.
        """
        topics = self._by_subscriber.setdefault(subscriber, {})
        if topic in topics:
            return None
        topics[topic] = None
        self._by_topic.setdefault(topic, {})[subscriber] = None
        self._lengths[len(topic)] += 1
        self._count += 1
        if len(topics) > self._most:
            return subscriber
        if self._count > IN_ALL * self._most:
            return max(self._by_subscriber, key=lambda each: len(self._by_subscriber[each]))
        return None

    def discard(self, subscriber: S, topic: bytes) -> None:
        """Remove a subscription, if it exists."""
        topics = self._by_subscriber.get(subscriber, {})
        if topic not in topics:
            return
        del topics[topic]
        if not topics:
            del self._by_subscriber[subscriber]
        self._count -= 1
        self._lengths[len(topic)] -= 1
        if not self._lengths[len(topic)]:
            del self._lengths[len(topic)]
        subscribers = self._by_topic[topic]
        del subscribers[subscriber]
        if not subscribers:
            del self._by_topic[topic]

    def leave(self, subscriber: S) -> int:
        """Remove all subscriptions of a subscriber. Return their number."""
        topics = list(self._by_subscriber.get(subscriber, ()))
        for topic in topics:
            self.discard(subscriber, topic)
        return len(topics)

    def subscribers_of(self, name: bytes) -> list[S]:
        """Return the subscribers with a prefix of `name` among their topics, each once."""
        found: dict[S, None] = {}
        for length in self._lengths:
            if length <= len(name) and (subscribers := self._by_topic.get(name[:length])):
                found.update(subscribers)
        return list(found)
