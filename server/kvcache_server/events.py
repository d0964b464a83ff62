"""KV events on two ZeroMQ sockets, in the daemon's loop: one that publishes them, one that tells them again.

Nothing waits for who listens. A subscriber that does not read loses batches once its queue is full, which is counted,
and sees it by their numbers; what it has lost it may ask for. As elsewhere, a socket is drained after each send to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import zmq

from kvcache_proto.endpoint import SCHEME, socket_path
from kvcache_proto.errors import NotPermitted
from kvcache_proto.types import MAX_NAME
from kvcache_server.cache import Cache
from kvcache_server.config import Config
from kvcache_server.numbers import Numbers
from kvcache_server.sockets import Place, admit, private
from kvcache_server.stream import Batch, Stream

log = logging.getLogger(__name__)

END = Batch(b"", (1 << 64) - 1, b"")  # the replay has ended; its number is -1
REPLAYS = 8  # at one time, one a reader; more wait on their side
TURN = 4  # steps of an announcement or of one replay between two looks at messages: a millisecond
PATIENCE = 5.0  # seconds for which a replay waits for its reader
PAUSE = 0.01  # seconds between two looks at a reader that does not read
QUEUE = 64  # batches of a replay that wait for its reader
REQUEST_BYTES = 4096
TOPIC_BYTES = 256  # beside the topic's form; libzmq takes 50 bytes of memory for one of a topic
TOPICS = 1024  # subscribed to at one time, unless there may be more namespaces
HEARD = 16  # messages of a socket that are looked at in one turn: 0.1 ms

_NOW = int(zmq.NOBLOCK)


class Events:
    """The publisher: `flush` after each drain, `close` at the end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: zmq.Context[zmq.Socket[bytes]], config: Config, cache: Cache
    ) -> None:
        """Bind `config.events`, and `config.events_replay` if there is one. Raises NotPermitted where it cannot."""
        self._loop, self._context, self._config = loop, context, config
        # Milliseconds, with room for a thousand batches in each.
        path = socket_path(config.endpoint).removesuffix(".sock") + ".numbers"
        self._numbers = Numbers(path, time.time_ns() // 1_000_000 << 10)
        self._stream = Stream(
            *(cache, config.events_topic, config.events_buffer, self._numbers.first),
            *(config.events_dialect, config.events_hashes),
        )
        self.changes = self._stream.changes
        self._topic_in_replay = config.events_dialect == "0.26"
        self._counts: Counter[str] = Counter()
        self._topics: set[bytes] = set()  # that somebody has subscribed to; libzmq tells of the first and last one
        self._most_topics = max(TOPICS, config.max_namespaces)
        self._announcement: Iterator[Batch] | None = None
        self._announced = False
        self._replays: dict[bytes, _Replay] = {}
        self._busy = False  # whether `_go_on` is to be called
        self._places: dict[str, Place] = {}
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._pub = self._open(zmq.XPUB, config.events)
            self._router = self._open(zmq.ROUTER, config.events_replay) if config.events_replay else None
        except BaseException:
            self.close()
            raise
        self._endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]
        loop.add_reader(int(self._pub.getsockopt(zmq.FD)), self._hear_subscriptions)
        if self._router is not None:
            loop.add_reader(int(self._router.getsockopt(zmq.FD)), self._hear_requests)
        loop.call_soon(self._hear_requests)
        loop.call_soon(self._hear_subscriptions)

    def _open(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._make(kind)
        self._sockets.append(socket)
        try:
            self._bind(socket, endpoint)
        except zmq.ZMQError as error:
            raise NotPermitted(f"events endpoint {endpoint}: cannot be bound: {error}") from None
        return socket

    def _make(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 100)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.IPV6, "[" in self._config.events)
            topic = self._config.events_topic
            model = 4 * MAX_NAME if "{model}" in topic else 0
            socket.setsockopt(zmq.MAXMSGSIZE, TOPIC_BYTES + len(topic.encode()) + model)
            socket.setsockopt(zmq.SNDHWM, self._config.events_buffer)
            socket.setsockopt(zmq.XPUB_NODROP, 1)  # a queue that is full is an error here, and is counted
        else:
            socket.setsockopt(zmq.IPV6, "[" in self._config.events_replay)
            socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
            socket.setsockopt(zmq.SNDHWM, QUEUE)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.RCVHWM, 2 * REPLAYS)
        return socket

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        with private():
            socket.bind(endpoint)
        if endpoint.startswith(SCHEME):
            place = Place(endpoint.removeprefix(SCHEME))
            self._places[endpoint] = place
            admit(place.path, self._config.allow_uids, self._config.allow_gids)

    def let_in(self, config: Config) -> None:
        """Let those users and groups connect that `config` names, and nobody else. Who is connected stays."""
        self._config = config
        for place in self._places.values():
            if place.is_ours():
                admit(place.path, config.allow_uids, config.allow_gids)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        for place in self._places.values():
            place.remove()
        self._numbers.close()

    def report(self) -> dict[str, Any]:
        """Return endpoints as they were bound, topics subscribed to, and counts of batches, replays and refusals."""
        counts = ("batches", "batches_lost", "replays", "replays_cut", "subscriptions_cut", "nonsense")
        return {
            "endpoint": self._endpoints[0],
            "replay": self._endpoints[1] if len(self._endpoints) > 1 else "",
            "subscriptions": len(self._topics),
            **{name: self._counts[name] for name in counts},
        }

    # Publishing.

    def flush(self) -> None:
        """Publish what has changed; what is too much for one turn follows in the next ones."""
        for batch in self._stream.batches(time.time()):
            self._publish(batch)
        self._hear_subscriptions()
        if self.changes:
            self._soon()

    def _publish(self, batch: Batch) -> None:
        self._numbers.give(batch.number)
        frames = (batch.topic, batch.number.to_bytes(8, "big"), batch.payload)
        self._counts["batches"] += 1
        try:
            self._pub.send_multipart(frames, _NOW)
        except zmq.Again:
            self._counts["batches_lost"] += 1  # by one subscriber at least; the others get it
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, _NOW)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def _hear_subscriptions(self) -> None:
        for _ in range(HEARD):
            try:
                heard = self._pub.recv(_NOW)
            except zmq.Again:
                return
            if heard[:1] == b"\x01":
                self._topics.add(heard[1:])
                if len(self._topics) > self._most_topics:
                    self._start_over()
                    return
                if not self._announced:
                    self._announced = True
                    self._announcement = self._stream.announce(time.time())
                    self._soon()
            elif heard[:1] == b"\x00":
                self._topics.discard(heard[1:])  # of one that was none, too, are we told
            else:
                self._counts["nonsense"] += 1
        self._soon()

    def _start_over(self) -> None:
        """Cut all subscribers off, who come back by themselves, and see by the numbers what they have missed.

        libzmq does not say who subscribes to what, and remembers even what XPUB_MANUAL refuses, as long as the peer is
        connected: only to close the socket gives the memory back.
        """
        if not self._counts["subscriptions_cut"]:
            log.warning("more than %d topics are subscribed to: all subscribers are cut off", self._most_topics)
        self._counts["subscriptions_cut"] += len(self._topics)
        self._topics.clear()
        self._loop.remove_reader(int(self._pub.getsockopt(zmq.FD)))
        self._pub.close(linger=0)
        if place := self._places.pop(self._endpoints[0], None):
            place.remove()
        self._pub = self._sockets[0] = self._make(zmq.XPUB)
        self._bind_again()

    def _bind_again(self, wait: float = PAUSE) -> None:
        """Bind the new publisher once the old one has left, which libzmq closes in a thread of its own."""
        if self._pub.closed:
            return
        endpoint = self._endpoints[0]
        try:
            self._bind(self._pub, endpoint)
        except zmq.ZMQError as error:
            if wait > 1.0:
                log.error("events endpoint %s: cannot be bound again yet: %s", endpoint, error)
            self._loop.call_later(wait, self._bind_again, min(2 * wait, 10.0))
            return
        self._loop.add_reader(int(self._pub.getsockopt(zmq.FD)), self._hear_subscriptions)
        self._soon()

    # Telling again.

    def _hear_requests(self) -> None:
        for _ in range(HEARD):
            if self._router is None or len(self._replays) >= REPLAYS:
                return
            try:
                frames = self._router.recv_multipart(_NOW)
            except zmq.Again:
                return
            # A REQ puts an empty frame before the number; what follows it, vLLM's have nothing, is a topic.
            if len(frames) not in (3, 4) or frames[1] or len(frames[2]) != 8:
                self._counts["nonsense"] += 1
                continue
            start, prefix = int.from_bytes(frames[2], "big"), b"".join(frames[3:])
            batches = self._stream.replay(start, prefix, time.time())
            self._counts["replays_cut"] += frames[0] in self._replays  # who asks again wants that instead
            self._replays[frames[0]] = _Replay(frames[0], batches, time.monotonic())
            self._counts["replays"] += 1
            self._soon()
        self._soon()  # there may be more

    def _replay_on(self, replay: _Replay, now: float) -> bool:
        """Take it some steps further. Returns whether there are more. Raises zmq.ZMQError where nobody reads it."""
        assert self._router is not None
        for _ in range(TURN):
            batch = replay.next()
            if batch is not None:
                frames = [batch.topic, batch.number.to_bytes(8, "big"), batch.payload]
                self._router.send_multipart([replay.reader, b"", *frames[not self._topic_in_replay :]], _NOW)
            replay.came_further(now)
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
        if self.changes:
            self.flush()
        now, idle = time.monotonic(), False
        if self._announcement is not None:
            self._announce_on(self._announcement)
            for replay in self._replays.values():
                replay.at = now  # it waits, or it would end in the midst of the announcement
        else:
            idle = not self._replay_all(now)
        self._hear_requests()
        self._hear_subscriptions()
        if self.changes or self._announcement is not None or self._replays:
            self._soon(PAUSE if idle else 0.0)

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
            try:
                more = self._replay_on(replay, now)
            except zmq.Again:
                more = now - replay.at < PATIENCE
                self._counts["replays_cut"] += not more
            except zmq.ZMQError:
                more = False
                self._counts["replays_cut"] += 1
            del self._replays[replay.reader]
            if more:
                self._replays[replay.reader] = replay  # the last in turn
            if replay.at == now:
                return True
        return False


class _Replay:
    """One reader's, and how far it has come."""

    def __init__(self, reader: bytes, batches: Iterator[Batch | None], now: float) -> None:
        self.reader = reader
        self.at = now  # when it came further last
        self._batches = batches
        self._unsent: Batch | None = None

    def next(self) -> Batch | None:
        """Take a step, unless there is what is not sent yet. Returns what is to be sent, END at last."""
        if self._unsent is None:
            self._unsent = next(self._batches, END)
        return self._unsent

    def came_further(self, now: float) -> None:
        self._unsent = None
        self.at = now
