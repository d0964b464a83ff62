"""The subscriptions of each subscriber. A subscription is a prefix of topics, as in ZeroMQ. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

IN_ALL = 8  # all subscribers together may have this many times as many subscriptions as one

S = TypeVar("S", bound=Hashable)


class Topics(Generic[S]):
    """Subscriptions by topic and by subscriber; `len` is the number of topics with a subscriber."""

    def __init__(self, most: int) -> None:
        """A subscriber may have `most` subscriptions, all subscribers together IN_ALL times as many."""
        self._most = most
        self._by_topic: dict[bytes, dict[S, None]] = {}
        self._of: dict[S, dict[bytes, None]] = {}
        self._lengths: Counter[int] = Counter()  # of topics, so that the prefixes of a name are found in few steps
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_topic)

    def add(self, subscriber: S, topic: bytes) -> S | None:
        """Add a subscription; adding it again changes nothing. O(1) within the bounds.

        Return the subscriber that must be disconnected, if any: this one if it has too many subscriptions, or the one
        with the most if all together have too many.
        """
        own = self._of.setdefault(subscriber, {})
        if topic in own:
            return None
        own[topic] = None
        self._by_topic.setdefault(topic, {})[subscriber] = None
        self._lengths[len(topic)] += 1
        self._count += 1
        if len(own) > self._most:
            return subscriber
        if self._count > IN_ALL * self._most:
            return max(self._of, key=lambda each: len(self._of[each]))
        return None

    def discard(self, subscriber: S, topic: bytes) -> None:
        """Remove a subscription, if it exists."""
        own = self._of.get(subscriber, {})
        if topic not in own:
            return
        del own[topic]
        if not own:
            del self._of[subscriber]
        self._count -= 1
        self._lengths[len(topic)] -= 1
        if not self._lengths[len(topic)]:
            del self._lengths[len(topic)]
        those = self._by_topic[topic]
        del those[subscriber]
        if not those:
            del self._by_topic[topic]

    def leave(self, subscriber: S) -> int:
        """Remove all subscriptions of a subscriber. Return their number."""
        own = list(self._of.get(subscriber, ()))
        for topic in own:
            self.discard(subscriber, topic)
        return len(own)

    def of(self, name: bytes) -> list[S]:
        """Return the subscribers that receive messages published under `name`, each once."""
        found: dict[S, None] = {}
        for length in self._lengths:
            if length <= len(name) and (those := self._by_topic.get(name[:length])):
                found.update(those)
        return list(found)
