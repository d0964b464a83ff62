"""KV events on two ZMTP sockets in the daemon's loop: one publishes them, the other replays them.

Nothing waits for subscribers. Batches that a subscriber has not read yet are kept only as long as for replays, and so
take no memory of their own. After that they are lost for this subscriber: the loss is counted, and the subscriber sees
a gap in the numbers. It can ask for a replay.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator

from kvcache_proto.endpoint import socket_path
from kvcache_proto.types import MAX_NAME
from kvcache_server.config import Config
from kvcache_server.core.cache import Cache
from kvcache_server.events.batches import Batch, Batches
from kvcache_server.events.sequence_file import SequenceFile
from kvcache_server.events.subscribers import (
    REPLAY_ROLE,
    EventConnection,
    ReplayClient,
    Subscriber,
    SubscriberServer,
    publisher_role,
)
from kvcache_server.events.topics import Topics
from kvcache_server.status import Events

log = logging.getLogger(__name__)

END = Batch(b"", (1 << 64) - 1, b"")  # marks the end of a replay; its number is -1
REPLAYS = 8  # at the same time, one per client; further ones wait for their turn
TURN = 4  # steps of an announcement or a replay in one turn of the loop: a millisecond
TURN_SECONDS = 0.005  # of publishing in one turn of the loop
PATIENCE = 5.0  # seconds for which a replay waits for its client to read
PAUSE = 0.01  # seconds between two checks of a client that does not read
TOPIC_BYTES = 256  # beyond the configured topic's own length
TOPICS = 1024  # topics of one subscriber, unless there may be more namespaces


class Publisher:
    """Publishes the changes that the core reports. Call `follow` with changes, `flush` after each turn, and `close` at
    the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Config, cache: Cache) -> None:
        """Bind `config.events`, and `config.events_replay` if it is set.

        Raises NotPermitted if a socket cannot be bound, EndpointTaken, ConfigError.
        """
        self._loop = loop
        # The clock's milliseconds, with room for a thousand batches in each.
        path = socket_path(config.endpoint).removesuffix(".sock") + ".numbers"
        self._sequence_file = SequenceFile(path, time.time_ns() // 1_000_000 << 10)
        self._batches = Batches(
            *(cache, config.events_topic, config.events_buffer, self._sequence_file.first),
            *(config.events_dialect, config.events_hashes),
        )
        self.follow = self._batches.follow
        self._topic_in_replay = config.events_dialect == "0.26"
        self._buffer = config.events_buffer
        self._counts: Counter[str] = Counter()
        self._topics: Topics[Subscriber] = Topics(max(TOPICS, config.max_namespaces))
        self._unpublished: deque[Batch] = deque()
        self._behind: dict[Subscriber, None] = {}  # subscribers with unsent batches
        self._announcement: Iterator[Batch] | None = None
        self._announced = False
        self._replaying: dict[ReplayClient, None] = {}  # those that have waited longest come first
        self._asked: dict[ReplayClient, None] = {}  # their replays have not begun
        self._busy = False  # whether a call of `_continue` is scheduled
        self._server = SubscriberServer(loop, self._receive, self._gone, self._soon)
        self.allow_users = self._server.allow_users
        topic = config.events_topic
        role = publisher_role(TOPIC_BYTES + len(topic.encode()) + (4 * MAX_NAME if "{model}" in topic else 0))
        try:
            self._endpoints = [self._server.bind(config.events, role, Subscriber)]
            if config.events_replay:
                self._endpoints.append(self._server.bind(config.events_replay, REPLAY_ROLE, ReplayClient))
            self.allow_users(config.allow_uids, config.allow_gids)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections. The loop must not be running."""
        self._server.close()
        self._sequence_file.close()

    def report(self) -> Events:
        """Return figures for `status`."""
        return Events(
            endpoint=self._endpoints[0],
            replay=self._endpoints[1] if len(self._endpoints) > 1 else "",
            subscriptions=len(self._topics),
            batches=self._counts["batches"],
            batches_lost=self._counts["batches_lost"],
            replays=self._counts["replays"],
            replays_cut=self._counts["replays_cut"],
            subscriptions_cut=self._counts["subscriptions_cut"],
            nonsense=self._counts["nonsense"],
            connections=self._server.figures(),
        )

    # Publishing.

    def flush(self) -> None:
        """Publish the changes. Those that do not fit in one turn follow in later ones."""
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
        self._sequence_file.give(batch.number)
        self._counts["batches"] += 1
        sequence = self._counts["batches"]
        parts = _parts(batch)
        for subscriber in self._topics.subscribers_of(batch.topic):
            if subscriber.publish(sequence, parts):
                self._behind[subscriber] = None
        for subscriber in self._behind:
            self._counts["batches_lost"] += subscriber.forget(sequence - self._buffer + 1)

    def _send_on(self) -> None:
        """Send unsent batches to subscribers that have resumed reading."""
        for subscriber in list(self._behind):
            if not subscriber.send_on(TURN):
                del self._behind[subscriber]

    # Messages.

    def _receive(self, connection: EventConnection, parts: list[bytes]) -> None:
        if isinstance(connection, Subscriber):
            known = self._subscribe(connection, parts)
        else:
            known = isinstance(connection, ReplayClient) and self._ask(connection, parts)
        self._counts["nonsense"] += not known

    def _gone(self, connection: EventConnection) -> None:
        if isinstance(connection, Subscriber):
            self._topics.leave(connection)
            self._behind.pop(connection, None)
        elif isinstance(connection, ReplayClient):
            self._forget_replay(connection)

    def _subscribe(self, subscriber: Subscriber, parts: list[bytes]) -> bool:
        """Handle a subscription or its end. Return True if the message is one."""
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
            log.warning("disconnected a subscriber of %s: %d topics are too many", subscriber.owner, count)
        self._counts["subscriptions_cut"] += count
        self._server.cut(subscriber, "too_many_topics")

    # Replays.

    def _ask(self, client: ReplayClient, parts: list[bytes]) -> bool:
        """Handle a request for a replay. Return True if the message is one."""
        # A REQ socket puts an empty frame before the number. A topic may follow; vLLM's clients send none.
        if len(parts) not in (2, 3) or parts[0] or len(parts[1]) != 8:
            return False
        client.used = True
        self._forget_replay(client)  # a new request replaces the previous one
        self._counts["replays"] += 1
        client.replay = self._batches.replay(int.from_bytes(parts[1], "big"), b"".join(parts[2:]), time.time())
        self._asked[client] = None
        self._begin_replays()
        return True

    def _forget_replay(self, client: ReplayClient) -> None:
        """Drop the client's replay, if it has one."""
        for clients in (self._asked, self._replaying):
            if client in clients:
                del clients[client]
                self._counts["replays_cut"] += 1
        self._begin_replays()

    def _begin_replays(self) -> None:
        while self._asked and len(self._replaying) < REPLAYS:
            client = next(iter(self._asked))
            del self._asked[client]
            self._replaying[client] = None
            client.replayed_at = time.monotonic()
            self._soon()

    def _replay_on(self, client: ReplayClient, now: float) -> bool:
        """Send a few more batches if the client reads them. Return True if there are more."""
        for _ in range(TURN):
            if client.paused:
                return True
            batch = next(client.replay, END)
            client.replayed_at = now
            if batch is not None:
                client.send_parts((b"", *_parts(batch)[not self._topic_in_replay :]))
            if batch is END:
                return False
        return True

    # One turn of the loop.

    def _soon(self, delay: float = 0.0) -> None:
        if not self._busy:
            self._busy = True
            self._loop.call_later(delay, self._continue)

    def _continue(self) -> None:
        self._busy = False
        self._send_on()
        if self._batches.changes or self._unpublished:
            self.flush()
        now, idle = time.monotonic(), False
        if self._announcement is not None:
            if not self._unpublished:  # their numbers are lower
                self._announce_on(self._announcement)
            for client in self._replaying:
                client.replayed_at = now  # replays wait for the announcement: they would otherwise end in the middle
        else:
            idle = not self._replay_all(now)
        can_send_on = any(not subscriber.paused for subscriber in self._behind)
        if self._batches.changes or self._unpublished or self._announcement is not None or can_send_on:
            self._soon()
        elif self._replaying:
            self._soon(PAUSE if idle else 0.0)

    def _announce_on(self, announcement: Iterator[Batch]) -> None:
        for _ in range(TURN):
            batch = next(announcement, None)
            if batch is None:
                self._announcement = None
                return
            self._publish(batch)

    def _replay_all(self, now: float) -> bool:
        """Advance the replay that has waited longest among those whose clients read. Return True if there was one."""
        for client in list(self._replaying):
            more = self._replay_on(client, now)
            if more and now - client.replayed_at >= PATIENCE:
                self._counts["replays_cut"] += 1
                more = False
            del self._replaying[client]
            if more:
                self._replaying[client] = None  # at the end of the queue
            else:
                client.replay = iter(())  # it refers to all blocks of a namespace
                self._begin_replays()
            if client.replayed_at == now:
                return True
        return False


def _parts(batch: Batch) -> tuple[bytes, bytes, bytes]:
    return batch.topic, batch.number.to_bytes(8, "big"), batch.payload
