"""KV events on two sockets that speak ZMTP, in the daemon's loop: one publishes them, one tells them again.

Nothing waits for who listens. What a subscriber does not read waits for it as long as it is kept for replays, so that
it takes no memory of its own; then it is lost, which is counted, and which the subscriber sees by the numbers. What it
has lost it may ask for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from kvcache_proto.endpoint import socket_path
from kvcache_proto.types import MAX_NAME
from kvcache_server.config import Config
from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import Change
from kvcache_server.events.batches import Batch, Batches
from kvcache_server.events.sequence_file import Numbers
from kvcache_server.events.subscribers import TELLS_AGAIN, Audience, Guest, Reader, Subscriber, publishes
from kvcache_server.events.topics import Topics

log = logging.getLogger(__name__)

END = Batch(b"", (1 << 64) - 1, b"")  # the replay has ended; its number is -1
REPLAYS = 8  # at one time, one a reader; more wait for their turn
TURN = 4  # steps of an announcement or of one replay between two looks at messages: a millisecond
TURN_SECONDS = 0.005  # of publishing between two looks at messages
PATIENCE = 5.0  # seconds for which a replay waits for its reader
PAUSE = 0.01  # seconds between two looks at a reader that does not read
TOPIC_BYTES = 256  # beside the topic's form
TOPICS = 1024  # that one subscriber may name, unless there may be more namespaces


class Publisher:
    """The publisher: `flush` after each drain, `close` at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Config, cache: Cache) -> None:
        """Bind `config.events`, and `config.events_replay` if there is one.

        Raises NotPermitted where one cannot be bound, EndpointTaken, ConfigError.
        """
        self._loop = loop
        # Milliseconds, with room for a thousand batches in each.
        path = socket_path(config.endpoint).removesuffix(".sock") + ".numbers"
        self._numbers = Numbers(path, time.time_ns() // 1_000_000 << 10)
        self._batches = Batches(
            *(cache, config.events_topic, config.events_buffer, self._numbers.first),
            *(config.events_dialect, config.events_hashes),
        )
        self._topic_in_replay = config.events_dialect == "0.26"
        self._buffer = config.events_buffer
        self._counts: Counter[str] = Counter()
        self._topics: Topics[Subscriber] = Topics(max(TOPICS, config.max_namespaces))
        self._unpublished: deque[Batch] = deque()
        self._behind: dict[Subscriber, None] = {}  # for whom batches wait
        self._announcement: Iterator[Batch] | None = None
        self._announced = False
        self._replays: dict[Reader, _Replay] = {}
        self._asked: dict[Reader, _Replay] = {}  # replays that have not begun
        self._busy = False  # whether `_go_on` is to be called
        self._audience = Audience(loop, self._hear, self._gone, lambda subscriber: self._soon())
        topic = config.events_topic
        role = publishes(TOPIC_BYTES + len(topic.encode()) + (4 * MAX_NAME if "{model}" in topic else 0))
        try:
            self._endpoints = [self._audience.bind(config.events, role, Subscriber)]
            if config.events_replay:
                self._endpoints.append(self._audience.bind(config.events_replay, TELLS_AGAIN, Reader))
            self.let_in(config)
        except BaseException:
            self.close()
            raise

    def let_in(self, config: Config) -> None:
        """Let those users and groups connect that `config` names, and nobody else. Who is connected stays."""
        self._audience.let_in(config.allow_uids, config.allow_gids)

    def close(self) -> None:
        """End all connections. Not while the loop runs."""
        self._audience.close()
        self._numbers.close()

    def report(self) -> dict[str, Any]:
        """Return endpoints as they were bound, topics subscribed to, connections, counts of batches and refusals."""
        counts = ("batches", "batches_lost", "replays", "replays_cut", "subscriptions_cut", "nonsense")
        return {
            "endpoint": self._endpoints[0],
            "replay": self._endpoints[1] if len(self._endpoints) > 1 else "",
            "subscriptions": len(self._topics),
            **{name: self._counts[name] for name in counts},
            "connections": self._audience.figures(),
        }

    # Publishing.

    def follow(self, changes: Iterable[Change]) -> None:
        """Note what the core reports."""
        self._batches.follow(changes)

    def flush(self) -> None:
        """Publish what has changed; what is too much for one turn follows in the next ones."""
        if not (self._unpublished or self._batches.changes):
            return
        if not self._unpublished:
            self._unpublished.extend(self._batches.due(time.time()))
        until = time.monotonic() + TURN_SECONDS
        while self._unpublished:
            self._publish(self._unpublished.popleft())
            if time.monotonic() > until:
                break
        if self._batches.changes or self._unpublished:
            self._soon()

    def _publish(self, batch: Batch) -> None:
        self._numbers.give(batch.number)
        self._counts["batches"] += 1
        sequence = self._counts["batches"]
        parts = _parts(batch)
        for subscriber in self._topics.of(batch.topic):
            if subscriber.tell(sequence, parts):
                self._behind[subscriber] = None
        for subscriber in self._behind:
            self._counts["batches_lost"] += subscriber.forget(sequence - self._buffer + 1)

    def _send_on(self) -> None:
        """Send what waits for those who have read again."""
        for subscriber in list(self._behind):
            if not subscriber.send_on(TURN):
                del self._behind[subscriber]

    # What is heard.

    def _hear(self, guest: Guest, parts: list[bytes]) -> None:
        if not (self._subscribe(guest, parts) if isinstance(guest, Subscriber) else self._ask(guest, parts)):
            self._counts["nonsense"] += 1

    def _gone(self, guest: Guest) -> None:
        if isinstance(guest, Subscriber):
            self._topics.leave(guest)
            self._behind.pop(guest, None)
        elif isinstance(guest, Reader):
            self._counts["replays_cut"] += self._forget_replay(guest)

    def _subscribe(self, subscriber: Subscriber, parts: list[bytes]) -> bool:
        """Take a subscription, or its end. Returns whether it is one."""
        what, topic = (parts[0][:1], parts[0][1:]) if parts else (b"", b"")
        if what == b"\x00":
            self._topics.discard(subscriber, topic)
            return True
        if what != b"\x01":
            return False
        subscriber.used = True
        if (excess := self._topics.add(subscriber, topic)) is not None:
            self._cut_off(excess)
            return True
        if not self._announced:
            self._announced = True
            self._announcement = self._batches.announce(time.time())
            self._soon()
        return True

    def _cut_off(self, subscriber: Subscriber) -> None:
        count = self._topics.leave(subscriber)
        if not self._counts["subscriptions_cut"]:
            log.warning("a subscriber to events is cut off: %d topics of %s are too many", count, subscriber.whose)
        self._counts["subscriptions_cut"] += count
        self._audience.cut(subscriber, "too_many_topics")

    # Telling again.

    def _ask(self, reader: Guest, parts: list[bytes]) -> bool:
        """Take a request for a replay. Returns whether it is one."""
        # A REQ puts an empty frame before the number; what follows it, vLLM's have nothing, is a topic.
        if not isinstance(reader, Reader) or len(parts) not in (2, 3) or parts[0] or len(parts[1]) != 8:
            return False
        reader.used = True
        self._counts["replays_cut"] += self._forget_replay(reader)  # who asks again wants that instead
        self._counts["replays"] += 1
        batches = self._batches.replay(int.from_bytes(parts[1], "big"), b"".join(parts[2:]), time.time())
        self._asked[reader] = _Replay(reader, batches)
        self._begin_replays()
        return True

    def _forget_replay(self, reader: Reader) -> bool:
        """Drop the replay of a reader. Returns whether there was one."""
        forgotten = self._asked.pop(reader, None) or self._replays.pop(reader, None)
        self._begin_replays()
        return forgotten is not None

    def _begin_replays(self) -> None:
        while self._asked and len(self._replays) < REPLAYS:
            reader = next(iter(self._asked))
            replay = self._replays[reader] = self._asked.pop(reader)
            replay.at = time.monotonic()
            self._soon()

    def _replay_on(self, replay: _Replay, now: float) -> bool:
        """Take it some steps further, as far as it is read. Returns whether there are more."""
        for _ in range(TURN):
            if replay.reader.paused:
                return True
            batch = next(replay.batches, END)
            replay.at = now
            if batch is not None:
                replay.reader.send_parts((b"", *_parts(batch)[not self._topic_in_replay :]))
            if batch is END:
                return False
        return True

    # Both, a little at a time.

    def _soon(self, delay: float = 0.0) -> None:
        if not self._busy:
            self._busy = True
            self._loop.call_later(delay, self._go_on)

    def _go_on(self) -> None:
        self._busy = False
        self._send_on()
        if self._batches.changes or self._unpublished:
            self.flush()
        now, idle = time.monotonic(), False
        if self._announcement is not None:
            if not self._unpublished:  # their numbers come first
                self._announce_on(self._announcement)
            for replay in self._replays.values():
                replay.at = now  # it waits, or it would end in the midst of the announcement
        else:
            idle = not self._replay_all(now)
        if self._batches.changes or self._unpublished or self._announcement is not None or self._can_send_on():
            self._soon()
        elif self._replays:
            self._soon(PAUSE if idle else 0.0)

    def _can_send_on(self) -> bool:
        return any(not subscriber.paused for subscriber in self._behind)

    def _announce_on(self, announcement: Iterator[Batch]) -> None:
        for _ in range(TURN):
            batch = next(announcement, None)
            if batch is None:
                self._announcement = None
                return
            self._publish(batch)

    def _replay_all(self, now: float) -> bool:
        """Take the one further that waits longest and is read. Returns whether there was one."""
        for replay in list(self._replays.values()):
            more = self._replay_on(replay, now)
            if more and now - replay.at >= PATIENCE:
                self._counts["replays_cut"] += 1
                more = False
            del self._replays[replay.reader]
            if more:
                self._replays[replay.reader] = replay  # the last in turn
            else:
                self._begin_replays()
            if replay.at == now:
                return True
        return False


def _parts(batch: Batch) -> tuple[bytes, bytes, bytes]:
    return batch.topic, batch.number.to_bytes(8, "big"), batch.payload


class _Replay:
    """One reader's, and when it came further last."""

    def __init__(self, reader: Reader, batches: Iterator[Batch | None]) -> None:
        self.reader, self.batches = reader, batches
        self.at = 0.0
