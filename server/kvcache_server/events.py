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

from kvcache_proto.endpoint import SCHEME
from kvcache_proto.errors import NotPermitted
from kvcache_server.cache import Cache
from kvcache_server.config import Config
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

_NOW = int(zmq.NOBLOCK)


class Events:
    """The publisher: `flush` after each drain, `close` at the end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: zmq.Context[zmq.Socket[bytes]], config: Config, cache: Cache
    ) -> None:
        """Bind `config.events`, and `config.events_replay` if there is one. Raises NotPermitted where it cannot."""
        self._loop, self._config = loop, config
        # Milliseconds, with room for a thousand batches in each: a daemon's numbers begin above its last one's.
        first = time.time_ns() // 1_000_000 << 10
        self._stream = Stream(
            *(cache, config.events_topic, config.events_buffer, first, config.events_dialect, config.events_hashes)
        )
        self.changes = self._stream.changes
        self._topic_in_replay = config.events_dialect == "0.26"
        self._counts: Counter[str] = Counter()
        self._subscriptions = 0
        self._announcement: Iterator[Batch] | None = None
        self._announced = False
        self._replays: dict[bytes, _Replay] = {}
        self._busy = False  # whether `_go_on` is to be called
        self._places: list[Place] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self._pub = self._bind(context, zmq.XPUB, config.events)
            self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)  # tell of every subscription, and of its end
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)  # a queue that is full is an error here, and is counted
            self._router = self._bind(context, zmq.ROUTER, config.events_replay) if config.events_replay else None
        except BaseException:
            self.close()
            raise
        loop.add_reader(int(self._pub.getsockopt(zmq.FD)), self._hear_subscriptions)
        if self._router is not None:
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            loop.add_reader(int(self._router.getsockopt(zmq.FD)), self._hear_requests)
        loop.call_soon(self._hear_requests)
        loop.call_soon(self._hear_subscriptions)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 100)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
        socket.setsockopt(zmq.SNDHWM, self._config.events_buffer if kind == zmq.XPUB else QUEUE)
        socket.setsockopt(zmq.RCVHWM, 2 * REPLAYS)
        try:
            with private():
                socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise NotPermitted(f"events endpoint {endpoint}: cannot be bound: {error}") from None
        if endpoint.startswith(SCHEME):
            self._places.append(Place(endpoint.removeprefix(SCHEME)))
            admit(self._places[-1].path, self._config.allow_uids, self._config.allow_gids)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        for place in self._places:
            place.remove()

    def report(self) -> dict[str, Any]:
        """Return endpoints as they were bound, subscriptions, and counts of batches and replays."""
        bound = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]
        return {
            "endpoint": bound[0],
            "replay": bound[1] if len(bound) > 1 else "",
            "subscriptions": self._subscriptions,
            **{name: self._counts[name] for name in ("batches", "batches_lost", "replays", "replays_cut", "nonsense")},
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
        while True:
            try:
                heard = self._pub.recv(_NOW)
            except zmq.Again:
                return
            if heard[:1] == b"\x01":
                self._subscriptions += 1
                if not self._announced:
                    self._announced = True
                    self._announcement = self._stream.announce(time.time())
                    self._soon()
            elif heard[:1] == b"\x00":
                self._subscriptions -= 1
            else:
                self._counts["nonsense"] += 1

    # Telling again.

    def _hear_requests(self) -> None:
        while self._router is not None and len(self._replays) < REPLAYS:
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
