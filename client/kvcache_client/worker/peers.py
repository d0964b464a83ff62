"""Ranks of an engine that hold the same KV: they share loads, on a thread that talks to the others.

They meet at sockets of this host, and only processes of the same user are heard. What they say is in `Exchange`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import selectors
import socket
import struct
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
from kvcache_client.worker.places import Piece
from kvcache_client.worker.rank import copy_pieces

logger = logging.getLogger("vllm.kvcache.worker")

MEETING_SECONDS = 300.0  # for which a rank looks for the others: they may still read weights
_PAUSE = 0.2  # between two attempts to reach a rank
_MESSAGE_BYTES = 1 << 20
_RATE_BYTES = 256 << 20  # copied before rates are compared
_FASTER = 2.0  # than the region: peers below this share the bus, and nothing is gained


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first message of each side."""

    rank: int
    shared: list[bytes]  # see `Device.share`


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """This rank can read the caches of all others."""


class There(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A chunk of a load is on this rank's device."""

    key: Key
    chunk: int


_DECODER = msgspec.msgpack.Decoder(Hello | Ready | There)


class Shared(NamedTuple):
    """A load, divided among the ranks: the copies of each rank's chunks."""

    region: Memory
    runs: Runs | None
    chunks: Mapping[int, Sequence[Sequence[Piece]]]  # by rank
    bytes: Mapping[int, int]  # of a rank's chunks, in the region
    ended: Callable[[Job], None]


class Peers:
    """The others, by their ranks. The methods are called by the rank's own thread."""

    def __init__(self, engine: str, rank: int, others: Sequence[int], device: Device, counts: Counters) -> None:
        """Begin to look for the others, which have the same `engine`."""
        self._engine, self._rank, self._others = engine, rank, others
        self._device, self._counts = device, counts
        self._exchange = Exchange(others)
        self._loads: dict[Key, tuple[Shared, float]] = {}
        self._events: deque[Callable[[], list[Action]]] = deque()  # for the thread
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: self._woken.recv(4096))
        self._listener: socket.socket | None = None
        self._until = time.monotonic() + MEETING_SECONDS
        self._sockets: dict[int, socket.socket] = {}
        self._shared: dict[int, list[bytes]] = {}  # by rank, what it has said in its `Hello`
        self._ready: set[int] = set()  # ranks that can read all others
        self._changed = threading.Condition()
        self._open = True
        self._failed = ""  # the reason that no loads are shared from now on
        self._speed = {"pulled": [0.0, 0.0], "own": [0.0, 0.0]}  # bytes and seconds
        self._mine = device.share(len(others))
        self._thread = threading.Thread(target=self._run, name="kvcache-peers", daemon=True)
        if not self._mine:
            self._failed = "its cache cannot be read by others"
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether loads can be shared."""
        return not self._failed and len(self._ready) == len(self._others) + 1

    def begin(self, key: Key, load: Shared) -> None:
        """Start a load. `load.ended` is called once, on any thread. Keys ascend."""
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
            if not self._failed:
                self._listen()
            while self._open:
                self._step()
            self._failed = "the device was closed before the copy ended"
        except Exception as error:  # the engine waits for the loads
            logger.exception("rank %d shares no loads any more", self._rank)
            self._failed = f"{type(error).__name__}: {error}"
        for each in (*self._sockets.values(), self._listener):
            if each is not None:
                each.close()
        self._end_all()
        while self._open:  # a load may have begun meanwhile
            time.sleep(_PAUSE)
            self._end_all()

    def _step(self) -> None:
        """Wait for something to do, and do it."""
        now, due = time.monotonic(), self._exchange.deadline()
        if not self._failed and len(self._sockets) < len(self._others):
            due = now + _PAUSE if due is None else min(due, now + _PAUSE)
        due = now if self._events else due
        for key, _ in self._selector.select(None if due is None else max(0.0, due - now)):
            key.data()
        while self._events:
            self._act(self._events.popleft()())
        self._act(self._exchange.expire(time.monotonic()))
        if not self._failed:
            self._meet()

    def _act(self, actions: list[Action]) -> None:
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            if isinstance(action, Tell):
                self._tell(There(action.key, action.chunk))
            elif isinstance(action, Pull):
                waiting.extend(self._exchange.pulled(*action, self._pull(*action)))
            elif isinstance(action, Fill):
                self._fill(action)
            else:
                self._end(action)

    def _pull(self, key: Key, rank: int, chunk: int) -> str:
        """Return the error, if there is one."""
        begin, (load, _) = time.perf_counter(), self._loads[key]
        try:
            for piece in load.chunks[rank][chunk]:
                self._device.pull(rank, piece.layout, piece.blocks)
        except CopyError as error:
            logger.warning("rank %d cannot read the KV cache of rank %d: %s", self._rank, rank, error)
            self._failed = str(error)
            return str(error)
        number = sum(map(bool, load.chunks[rank]))
        self._note("pulled", load.bytes[rank] / number, time.perf_counter() - begin)
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

    def _end_all(self) -> None:
        """End all loads with an error, once none of their copies can be running."""
        for key in [*self._loads]:
            while not self._device.drain(_PAUSE):
                pass
            self._end(End(key, self._failed))

    def _note(self, what: str, size: float, seconds: float) -> None:
        """Share nothing any more if it turns out that other ranks are reached by the bus."""
        speed = self._speed[what]
        speed[0], speed[1] = speed[0] + size, speed[1] + seconds
        (pulled, pulling), (own, copying) = self._speed["pulled"], self._speed["own"]
        if what == "pulled" and pulled >= _RATE_BYTES and own and pulled * copying < _FASTER * own * pulling:
            self._failed = f"other ranks' devices are read at {pulled / pulling / 1e9:.0f} GB/s"
            logger.info("rank %d shares no loads any more: %s", self._rank, self._failed)

    # The others.

    def _address(self, rank: int) -> str:
        name = hashlib.blake2b(self._engine.encode(), digest_size=16).hexdigest()
        return f"\0kvcache-{name}-{rank}"  # in the abstract namespace: it goes with the process

    def _listen(self) -> None:
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(self._address(self._rank))
        except OSError as error:
            self._failed = f"its socket: {error}"
            return
        listener.listen()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        self._greet(self._listener.accept()[0])

    def _meet(self) -> None:
        """Try to reach the ranks before this one; those behind it come by themselves."""
        if time.monotonic() > self._until:
            if len(self._sockets) < len(self._others):
                self._failed = "not all ranks that hold the same KV are on this host"
                logger.info("rank %d shares no loads: %s", self._rank, self._failed)
            return
        for rank in self._others:
            if rank < self._rank and rank not in self._sockets:
                other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    other.connect(self._address(rank))
                except OSError:
                    other.close()
                    continue
                if self._greet(other):
                    self._sockets[rank] = other

    def _greet(self, other: socket.socket) -> bool:
        uid = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid != os.geteuid():
            logger.warning("rank %d: a process of user %d has its name, or wants to share its loads", self._rank, uid)
            other.close()
            return False
        other.setblocking(False)
        try:
            other.send(msgspec.msgpack.encode(Hello(self._rank, self._mine)))
        except OSError:
            other.close()
            return False
        self._selector.register(other, selectors.EVENT_READ, lambda: self._receive(other))
        return True

    def _receive(self, other: socket.socket) -> None:
        rank = next((rank for rank, each in self._sockets.items() if each is other), None)
        try:
            data = other.recv(_MESSAGE_BYTES)
            message = _DECODER.decode(data) if data else None
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("rank %d: from rank %s: %s", self._rank, rank, error)
            message = None
        if isinstance(message, Hello) and message.rank in self._others:
            self._sockets[message.rank] = other
            self._shared[message.rank] = message.shared
            self._connect()
        elif rank is None or message is None or isinstance(message, Hello):
            self._leave(other, rank)
        elif isinstance(message, Ready):
            self._ready.add(rank)
        else:
            self._act(self._exchange.told(rank, message.key, message.chunk, time.monotonic()))

    def _connect(self) -> None:
        """Open all caches, once all are known."""
        if self._shared.keys() != set(self._others) or self._failed:
            return
        if not all(self._shared.values()):
            self._failed = "the caches of others cannot be read"
            return
        try:
            self._device.connect(self._shared)
        except (CopyError, msgspec.DecodeError) as error:
            self._failed = str(error)
            logger.info("rank %d shares no loads: %s", self._rank, error)
            return
        self._ready.add(self._rank)
        self._tell(Ready())
        logger.info("rank %d shares loads with ranks %s", self._rank, ", ".join(map(str, self._others)))

    def _tell(self, message: Ready | There) -> None:
        data = msgspec.msgpack.encode(message)
        for rank, other in [*self._sockets.items()]:
            try:
                other.send(data)
            except BlockingIOError:  # it has been stopped for long, and will find out by itself
                self._counts.add("peer_messages_unsent")
            except OSError:
                self._leave(other, rank)

    def _leave(self, other: socket.socket, rank: int | None) -> None:
        self._selector.unregister(other)
        other.close()
        if rank is not None:
            del self._sockets[rank]
            self._failed = self._failed or f"rank {rank} is gone"
            self._events.append(lambda: self._exchange.gone(rank))
