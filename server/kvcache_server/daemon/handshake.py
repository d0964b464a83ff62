"""The door: a Unix socket that says who is there, hands the region over, and notices the end of a session at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvcache_proto import __version__, door
from kvcache_proto.codec import MAX_DOOR_FRAME, decode_door
from kvcache_proto.endpoint import door_path
from kvcache_proto.errors import (
    BadArgument,
    BadFrame,
    KVCacheError,
    NotPermitted,
    Unavailable,
    VersionMismatch,
)
from kvcache_proto.messages import OLDEST_VERSION, PROTOCOL_VERSION, Error, Hello, Welcome
from kvcache_proto.types import MAX_NAME, PoolGeometry
from kvcache_server.rates import Rate
from kvcache_server.transport.sockets import Listener, Peer, SocketFile

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 2.0
LEAVE_SECONDS = 0.1  # a process that ends has closed its door by then, if it closed its connection first
MAX_VISITORS = 128  # handshakes at one time
LINES_A_MINUTE = 20  # about refusals of one user; all are counted


class Admission(NamedTuple):
    """What a session is let in with: its number and token, and the descriptor of its session file, to be closed."""

    session: int
    token: bytes
    file: int
    resumed: bool


class Visitor:
    """One connection: at first a handshake with a deadline, then, once `session` is set, a session."""

    __slots__ = ("deadline", "heard", "peer", "session", "sock")

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self.sock = sock
        self.peer = peer
        self.heard = bytearray()
        self.session = 0
        self.deadline: asyncio.TimerHandle | None = None


class Door:
    """Listens beside the endpoint's socket.

    `open_session(hello, peer)` returns a Admission or raises a KVCacheError, which the visitor is told;
    `leave(session)` is called once for each, when the visitor has gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: str,
        region_fd: int,
        geometry: PoolGeometry,
        open_session: Callable[[Hello, Peer], Admission],
        leave: Callable[[int], None],
        *,
        allow_uids: tuple[int, ...] = (),
        allow_gids: tuple[int, ...] = (),
        rate: Rate | None = None,
    ) -> None:
        """Bind the door, replacing a stale one; `rate` bounds the handshakes of a uid.

        Raises EndpointTaken, ConfigError, NotPermitted.
        """
        self._loop = loop
        self._region_fd = region_fd
        self._geometry = geometry
        self._open_session = open_session
        self._left = leave
        self._visitors: set[Visitor] = set()
        self._knocking: dict[Visitor, None] = {}  # those of them whose handshake is under way, the oldest first
        self.refused: dict[str, int] = {}
        self._lines = Rate(LINES_A_MINUTE / 60, LINES_A_MINUTE)
        self._listener = Listener(loop, door_path(endpoint), endpoint, self._enter, self._count)
        self.let_in(allow_uids, allow_gids, rate)

    @property
    def socket_file(self) -> SocketFile:
        return self._listener.socket_file

    def let_in(self, uids: tuple[int, ...], gids: tuple[int, ...], rate: Rate | None) -> None:
        """Let these attach from now on, and nobody else; who is attached stays. Raises OSError."""
        self._listener.let_in(uids, gids)
        self._rate = rate

    # New visitors.

    def _enter(self, sock: socket.socket, peer: Peer) -> bool:
        visitor = Visitor(sock, peer)
        if not self._make_room(visitor):
            return False
        self._visitors.add(visitor)
        self._knocking[visitor] = None
        visitor.deadline = self._loop.call_later(HANDSHAKE_SECONDS, self._too_late, visitor)
        self._loop.add_reader(sock, self._hear, visitor)
        return self._listener.admits(peer)

    def _make_room(self, newcomer: Visitor) -> bool:
        """Return whether there is room for one more handshake: the user with most under way waits for the others."""
        if len(self._knocking) < MAX_VISITORS:
            return True
        counts = Counter(visitor.peer.uid for visitor in self._knocking)
        uid, most = counts.most_common(1)[0]
        crowded = counts[newcomer.peer.uid] < most
        leaves = next(visitor for visitor in self._knocking if visitor.peer.uid == uid) if crowded else newcomer
        self._refuse(leaves, Unavailable(f"{MAX_VISITORS} handshakes are under way: try again"))
        return crowded

    def _check_peer(self, peer: Peer) -> None:
        if not self._listener.admits(peer):
            raise NotPermitted(
                f"uid {peer.uid} with groups {sorted(peer.groups)} may not attach: add it to the daemon's allow_uids "
                "or allow_gids"
            )

    def _too_late(self, visitor: Visitor) -> None:
        self._refuse(visitor, BadFrame(f"no whole hello within {HANDSHAKE_SECONDS} s"))

    # What they say.

    def _hear(self, visitor: Visitor) -> None:
        try:
            data = visitor.sock.recv(door.LENGTH.size + MAX_DOOR_FRAME)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # reset: an end like any other
        if not data:
            if not visitor.session:
                self._count("left_before_hello")
            self._leave(visitor)
            return
        if visitor.session:
            # A session is silent here; who talks has lost count of its frames.
            self._refuse(visitor, BadFrame(f"{len(data)} bytes after the welcome"))
            return
        first = not visitor.heard
        visitor.heard += data
        try:
            # Only now, not at once: who is refused before it has said hello may fail to write it, and never read why.
            self._check_peer(visitor.peer)
            if first and self._rate is not None and not self._rate.allow(visitor.peer.uid, self._loop.time()):
                why = f"uid {visitor.peer.uid} shakes hands more often than attach_rate allows: try again in a second"
                self._refuse(visitor, Unavailable(why), "attach_rate")
                return
            frame = _whole_frame(visitor.heard)
            if frame is not None:
                self._welcome(visitor, _hello(frame))
        except KVCacheError as error:
            self._refuse(visitor, error)

    def _welcome(self, visitor: Visitor, hello: Hello) -> None:
        session, token, file, resumed = self._open_session(hello, visitor.peer)
        visitor.session = session
        del self._knocking[visitor]
        if visitor.deadline is not None:
            visitor.deadline.cancel()
        visitor.heard.clear()
        spoken = min(hello.version, PROTOCOL_VERSION)
        welcome = Welcome(spoken, session, token, self._geometry, __version__, resumed)
        try:
            try:
                socket.send_fds(visitor.sock, [door.frame(welcome)], [self._region_fd, file])
            finally:
                os.close(file)
        except OSError as error:
            log.warning("session %d: the welcome cannot be sent: %s", session, error)
            self._count("welcome_failed")
            self._leave(visitor)

    def _refuse(self, visitor: Visitor, error: KVCacheError, reason: str = "") -> None:
        self._count(reason or error.code)
        if self._lines.allow(visitor.peer.uid, self._loop.time()):  # whoever may knock could fill the disk otherwise
            level = logging.WARNING if isinstance(error, NotPermitted) else logging.INFO
            log.log(level, "door: refused pid %d uid %d: %s", visitor.peer.pid, visitor.peer.uid, error)
        with contextlib.suppress(OSError):  # it may have gone, or not read; it is shown out either way
            visitor.sock.send(door.frame(Error(0, error.code, str(error))))
        self._leave(visitor)

    def _leave(self, visitor: Visitor) -> None:
        if visitor.deadline is not None:
            visitor.deadline.cancel()
            visitor.deadline = None
        self._visitors.discard(visitor)
        self._knocking.pop(visitor, None)
        self._loop.remove_reader(visitor.sock)
        visitor.sock.close()
        if visitor.session:
            self._left(visitor.session)

    def show_out(self, session: int) -> None:
        """Close the door behind a session."""
        for visitor in self._visitors_of(session):
            self._leave(visitor)

    def show_out_soon(self, session: int) -> None:
        """Close the door behind a session that has left by the other way, if it does not do so by itself.

        Where its process was killed it does, and what the kernel closes next tells us that nobody writes any more.
        """
        for visitor in self._visitors_of(session):
            self._loop.call_later(LEAVE_SECONDS, self._leave_at_last, visitor)

    def _visitors_of(self, session: int) -> list[Visitor]:
        return [visitor for visitor in self._visitors if visitor.session == session]

    def _leave_at_last(self, visitor: Visitor) -> None:
        if visitor in self._visitors:
            self._leave(visitor)

    def _count(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    # The end.

    def close(self) -> None:
        """Show everybody out, without a word to `leave`: the sessions outlive this daemon."""
        self._left = lambda session: None
        self._listener.close()
        for visitor in list(self._visitors):
            self._leave(visitor)


def _whole_frame(heard: bytearray) -> bytes | None:
    """Return the frame once it is whole. Raises BadFrame where it cannot become one."""
    left = door.missing(heard)
    if left < 0:
        raise BadFrame(f"{-left} bytes after the hello")
    return bytes(heard[door.LENGTH.size :]) if not left else None


def _hello(frame: bytes) -> Hello:
    hello = decode_door(frame)
    if not isinstance(hello, Hello):
        raise BadFrame(f"a {type(hello).__name__.lower()} where the hello goes")
    # A client one version ahead still speaks ours.
    if not OLDEST_VERSION <= hello.version <= PROTOCOL_VERSION + 1:
        raise VersionMismatch(
            f"the client ({hello.client[:MAX_NAME]}) speaks protocol {hello.version}, this daemon "
            f"(kvcache-server {__version__}) {OLDEST_VERSION} to {PROTOCOL_VERSION}: "
            "bring the older of the two up to date"
        )
    if not 1 <= len(hello.engine) <= MAX_NAME:
        raise BadArgument(f"engine id of {len(hello.engine)} characters: 1 to {MAX_NAME}")
    for name in ("label", "client"):
        if len(getattr(hello, name)) > MAX_NAME:
            raise BadArgument(f"{name} of {len(getattr(hello, name))} characters: at most {MAX_NAME}")
    return hello
