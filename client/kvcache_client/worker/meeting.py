"""Where the ranks of an engine that hold the same KV find each other: sockets of this host, on which only processes of
the same user are heard.
"""

from __future__ import annotations

import hashlib
import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

import msgspec

from kvcache_client.worker.exchange import Key

logger = logging.getLogger("vllm.kvcache.worker")

MEETING_SECONDS = 300.0  # for which a rank looks for the others: they may still read weights
PAUSE = 0.2  # between two attempts to reach a rank
_MESSAGE_BYTES = 1 << 20


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


Message = Hello | Ready | There
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Meeting:
    """The connections of one rank. Called by one thread, also for what `selector` finds: its keys hold what to call."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        engine: str,
        hello: Hello,
        others: Sequence[int],
        heard: Callable[[int, Message | None], None],
    ) -> None:
        """`heard` gets each message of the others, and None once one is gone."""
        self._selector, self._engine, self._hello, self._others, self._heard = selector, engine, hello, others, heard
        self._until = time.monotonic() + MEETING_SECONDS
        self._listener: socket.socket | None = None
        self._sockets: dict[int, socket.socket] = {}

    @property
    def complete(self) -> bool:
        return len(self._sockets) == len(self._others)

    @property
    def is_over(self) -> bool:
        """Whether it is too late for the others to come."""
        return time.monotonic() > self._until

    def open(self) -> None:
        """Let others come. Raises OSError if another process has this rank's name."""
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._address(self._hello.rank))
        listener.listen()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._greet(listener.accept()[0]))

    def look(self) -> None:
        """Try to reach the ranks before this one; those behind it come by themselves."""
        for rank in self._others:
            if rank < self._hello.rank and rank not in self._sockets:
                other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    other.connect(self._address(rank))
                except OSError:
                    other.close()
                    continue
                if self._greet(other):
                    self._sockets[rank] = other

    def tell(self, message: Message) -> int:
        """Send a message to all others; return the number that did not take it."""
        data, unsent = msgspec.msgpack.encode(message), 0
        for rank, other in [*self._sockets.items()]:
            try:
                other.send(data)
            except BlockingIOError:  # it has been stopped for long
                unsent += 1
            except OSError:
                self.leave(rank)
        return unsent

    def leave(self, rank: int) -> None:
        """End the connection to a rank."""
        self._drop(self._sockets.pop(rank))
        self._heard(rank, None)

    def close(self) -> None:
        for each in (*self._sockets.values(), self._listener):
            if each is not None:
                self._drop(each)
        self._sockets.clear()
        self._listener = None

    def _drop(self, each: socket.socket) -> None:
        if each in self._selector.get_map():
            self._selector.unregister(each)
        each.close()

    def _address(self, rank: int) -> str:
        name = hashlib.blake2b(self._engine.encode(), digest_size=16).hexdigest()
        return f"\0kvcache-{name}-{rank}"  # in the abstract namespace: it goes with the process

    def _greet(self, other: socket.socket) -> bool:
        uid = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid != os.geteuid():
            logger.warning("rank %d: a process of user %d is none of its engine", self._hello.rank, uid)
            other.close()
            return False
        other.setblocking(False)
        try:
            other.send(msgspec.msgpack.encode(self._hello))
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
            logger.warning("rank %d: from rank %s: %s", self._hello.rank, rank, error)
            message = None
        if isinstance(message, Hello) and message.rank in self._others:
            rank = message.rank
            self._sockets[rank] = other
        if rank is None:
            self._drop(other)
        elif message is None:
            self.leave(rank)
        else:
            self._heard(rank, message)
