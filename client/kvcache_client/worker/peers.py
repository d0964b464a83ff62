"""Ranks of an engine that hold the same KV share loads: the thread that copies from the others' devices.

What it does is decided by `Exchange`.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvcache_client.address_ranges import Runs
from kvcache_client.devices import CopyError, Device, Job, Memory
from kvcache_client.session.counters import Counters
from kvcache_client.worker.exchange import Action, End, Exchange, Fill, Key, Pull, Tell
from kvcache_client.worker.meeting import PAUSE, Hello, Meeting, Message, Ready, There
from kvcache_client.worker.places import Piece
from kvcache_client.worker.rank import copy_pieces

logger = logging.getLogger("vllm.kvcache.worker")

_RATE_BYTES = 256 << 20  # copied before rates are compared
_FASTER = 2.0  # than the region: peers below this share the bus, and nothing is gained


class Shared(NamedTuple):
    """A load, divided among the ranks: the copies of each rank's chunks."""

    region: Memory
    runs: Runs | None
    chunks: Mapping[int, Sequence[Sequence[Piece]]]  # by rank
    bytes: Mapping[int, int]  # of a rank's chunks, in the region
    ended: Callable[[Job], None]


class Peers:
    """The others, by their ranks. The methods are called by the rank's own thread."""

    def __init__(self, engine: str, hello: Hello, others: Sequence[int], device: Device, counts: Counters) -> None:
        """Begin to look for the others, which have the same `engine`. `hello` is what this rank says of itself."""
        self._rank, self._others = hello.rank, others
        self._device, self._counts = device, counts
        self._exchange = Exchange()
        self._loads: dict[Key, tuple[Shared, float]] = {}
        self._events: deque[Callable[[], list[Action]]] = deque()  # for the thread
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))
        self._shared: dict[int, list[bytes]] = {}  # by rank, what it has said in its `Hello`
        self._ready: set[int] = set()  # ranks that can read all others
        self._changed = threading.Condition()  # of `_loads` and `_ended`
        self._open, self._ended = True, False
        self._failed = ""  # the reason that no loads are shared from now on
        self._speed = {"pulled": [0.0, 0.0], "own": [0.0, 0.0]}  # bytes and seconds
        self._meeting = Meeting(self._selector, engine, hello, others, self._heard)
        self._thread = threading.Thread(target=self._run, name="kvcache-peers", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether loads can be shared."""
        return not self._failed and len(self._ready) == len(self._others) + 1

    def begin(self, key: Key, load: Shared) -> bool:
        """Start a load; return False if loads cannot be shared. `load.ended` is called once, on any thread.

        Keys ascend.
        """
        with self._changed:  # until all of its copies have begun, so that the thread's end waits for them
            if self._ended or not self.ready:
                return False
            self._begin(key, load)
            return True

    def _begin(self, key: Key, load: Shared) -> None:
        own = load.chunks[self._rank]
        theirs = {rank: [n for n, each in enumerate(load.chunks[rank]) if each] for rank in self._others}
        self._loads[key] = load, time.monotonic()
        self._counts.add("loads_shared")
        mine = [(chunk, pieces) for chunk, pieces in enumerate(own) if pieces]
        self._put(lambda: self._exchange.begin(key, len(mine), theirs, time.monotonic()))
        for chunk, pieces in mine:

            def landed(job: Job, chunk: int = chunk) -> None:
                if not job.error:
                    self._note("own", load.bytes[self._rank] / len(mine), job.seconds)
                self._put(lambda: self._exchange.landed(key, chunk, job.error, time.monotonic()))

            copy_pieces(self._device.load, load.region, load.runs, pieces, landed)

    def decline(self, key: Key) -> None:
        """Take no part in a load that the others may share."""
        self._put(lambda: self._exchange.decline(key))

    def drain(self, seconds: float) -> bool:
        """Wait at most `seconds` for shared loads; return True if all have ended."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._loads, seconds)

    def close(self) -> None:
        """End all loads, those that run with an error, and leave the others."""
        self._open = False
        self._put(list)
        self._thread.join()
        self._selector.close()
        for each in (self._wake, self._woken):
            each.close()

    def _put(self, event: Callable[[], list[Action]]) -> None:
        self._events.append(event)
        with contextlib.suppress(BlockingIOError):  # it is awake anyway
            self._wake.send(b"\0")

    # The thread.

    def _run(self) -> None:
        try:
            self._open_meeting()
            while self._open:
                self._step()
            self._failed = "the device was closed before the copy ended"
        except Exception as error:  # the engine waits for the loads
            logger.exception("rank %d shares no loads any more", self._rank)
            self._failed = f"{type(error).__name__}: {error}"
        self._meeting.close()
        with self._changed:
            self._ended = True
        while not self._device.drain(PAUSE):
            pass
        for key in [*self._loads]:  # none of their copies can be running
            self._end(End(key, self._failed))

    def _step(self) -> None:
        """Wait for something to do, and do it."""
        now, due = time.monotonic(), self._exchange.deadline()
        looking = not (self._failed or self._meeting.complete)
        if looking:
            due = now + PAUSE if due is None else min(due, now + PAUSE)
        due = now if self._events else due
        for key, _ in self._selector.select(None if due is None else max(0.0, due - now)):
            key.data()
        for _ in range(len(self._events)):  # what comes meanwhile must not keep it from the others' messages
            self._act(self._events.popleft()())
        self._act(self._exchange.expire(time.monotonic()))
        if looking:
            self._meeting.look()
            if self._meeting.is_over and not self._meeting.complete:
                self._give_up("not all ranks that hold the same KV are on this host")

    def _act(self, actions: list[Action]) -> None:
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            if isinstance(action, Tell):
                self._counts.add("peer_messages_unsent", self._meeting.tell(There(action.key, action.chunk)))
            elif isinstance(action, Pull):
                waiting.extend(self._exchange.pulled(*action, self._pull(*action)))
            elif isinstance(action, Fill):
                self._fill(action)
            else:
                self._end(action)

    def _pull(self, key: Key, rank: int, chunk: int) -> str:
        """Return the error, if there is one."""
        load, _ = self._loads[key]
        seconds = 0.0
        try:
            for piece in load.chunks[rank][chunk]:
                seconds += self._device.pull(rank, piece.layout, piece.blocks)
        except CopyError as error:
            self._give_up(f"the KV cache of rank {rank}: {error}")
            return str(error)
        number = sum(map(bool, load.chunks[rank]))
        self._note("pulled", load.bytes[rank] / number, seconds)
        self._counts.add("pulled_bytes", load.bytes[rank] // number)
        return ""

    def _fill(self, action: Fill) -> None:
        load, _ = self._loads[action.key]
        self._counts.add("chunks_not_pulled", len(action.chunks))
        pieces = [piece for chunk in action.chunks for piece in load.chunks[action.peer][chunk]]

        def filled(job: Job) -> None:
            self._put(lambda: self._exchange.filled(action.key, job.error))

        copy_pieces(self._device.load, load.region, load.runs, pieces, filled)

    def _end(self, action: End) -> None:
        load, begin = self._loads[action.key]
        done = Job(load.region, np.empty(0, np.int64), np.empty(0, np.int64), load.ended, load.runs)
        done.error, done.seconds = action.error, time.monotonic() - begin
        load.ended(done)
        with self._changed:
            del self._loads[action.key]
            self._changed.notify_all()

    def _note(self, what: str, size: float, seconds: float) -> None:
        """Share nothing any more if it turns out that other ranks are reached by the bus."""
        speed = self._speed[what]
        speed[0], speed[1] = speed[0] + size, speed[1] + seconds
        (pulled, pulling), (own, copying) = self._speed["pulled"], self._speed["own"]
        if what == "pulled" and pulled >= _RATE_BYTES and own and pulled * copying < _FASTER * own * pulling:
            self._give_up(f"other ranks' devices are read at {pulled / pulling / 1e9:.0f} GB/s")

    # The others.

    def _open_meeting(self) -> None:
        try:
            self._meeting.open()
        except OSError as error:
            self._give_up(f"its socket: {error}")

    def _heard(self, rank: int, message: Message | None) -> None:
        if isinstance(message, Hello):
            self._shared[rank] = message.shared
            self._connect()
        elif isinstance(message, Ready):
            self._ready.add(rank)
        elif isinstance(message, There):
            self._act(self._exchange.told(rank, message.key, message.chunk, time.monotonic()))
        else:
            self._give_up(f"rank {rank} is gone")
            self._events.append(lambda: self._exchange.gone(rank))

    def _connect(self) -> None:
        """Open all caches, once all are known."""
        if self._shared.keys() != set(self._others) or self._failed:
            return
        try:
            self._device.connect(self._shared)
        except (CopyError, ValueError, msgspec.DecodeError) as error:
            self._give_up(str(error))
            return
        self._ready.add(self._rank)
        self._meeting.tell(Ready())
        logger.info("rank %d shares loads with ranks %s", self._rank, ", ".join(map(str, self._others)))

    def _give_up(self, reason: str) -> None:
        """Share no loads that begin from now on."""
        if not self._failed:
            self._failed = reason
            logger.info("rank %d shares no loads from now on: %s", self._rank, reason)
