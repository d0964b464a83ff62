"""The handshake socket identifies each peer, hands over the region, and detects the end of a session at once.

The kernel reports the peer's uid, groups and pid. The connection stays open as long as the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvcache_proto import __version__, handshake
from kvcache_proto.codec import MAX_HANDSHAKE_FRAME, decode_handshake
from kvcache_proto.endpoint import handshake_path
from kvcache_proto.errors import BadArgument, BadFrame, KVCacheError, NotPermitted, Unavailable, VersionMismatch
from kvcache_proto.messages import OLDEST_VERSION, PROTOCOL_VERSION, SPOKEN, Error, Hello, Welcome
from kvcache_proto.types import MAX_NAME, PoolGeometry
from kvcache_server.rates import Rate
from kvcache_server.transport.sockets import Listener, Peer

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0  # a client on a busy host may not run for seconds after it has connected
LEAVE_SECONDS = 0.1  # in which an exiting process closes its handshake connection after its request connection
MAX_HANDSHAKES = 128  # at the same time
LINES_A_MINUTE = 20  # log lines about refusals of one user; every refusal is counted


class Admission(NamedTuple):
    """The number and token of an admitted session, and a descriptor of its session file, which the server closes."""

    session: int
    token: bytes
    file: int
    resumed: bool


class HandshakeConnection:
    """One connection: a handshake until `deadline` or until `session` is set, then a session."""

    __slots__ = ("deadline", "heard", "peer", "session", "sock")

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        loop: asyncio.AbstractEventLoop,
        time_out: Callable[[HandshakeConnection], None],
    ) -> None:
        self.sock = sock
        self.peer = peer
        self.heard = bytearray()
        self.session = 0
        self.deadline = loop.call_later(HANDSHAKE_SECONDS, time_out, self)


class HandshakeServer:
    """Listens beside the endpoint's socket.

    `open_session(hello, peer)` returns an Admission, or raises a KVCacheError, which is sent to the client.
    `leave(session)` is called once per session, when its connection has closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: str,
        region_fd: int,
        geometry: PoolGeometry,
        open_session: Callable[[Hello, Peer], Admission],
        leave: Callable[[int], None],
    ) -> None:
        """Bind the socket, and replace a stale one. Raises EndpointTaken, ConfigError, NotPermitted."""
        self._loop = loop
        self._region_fd = region_fd
        self._geometry = geometry
        self._open_session = open_session
        self._left = leave
        self._handshaking: dict[HandshakeConnection, None] = {}  # oldest first
        self._attached: dict[int, HandshakeConnection] = {}  # by session
        self.refused: Counter[str] = Counter()  # and connections that failed, by reason
        self._lines = Rate(LINES_A_MINUTE / 60, LINES_A_MINUTE)
        self.listener = Listener(loop, handshake_path(endpoint), endpoint, self._enter, self._count)
        self.allow_users((), (), None)

    def allow_users(self, uids: tuple[int, ...], gids: tuple[int, ...], rate: Rate | None) -> None:
        """Allow only these users and groups to attach from now on, and root and the daemon's own user. Open sessions
        stay. `rate` limits the handshakes of each uid. Raises OSError."""
        self.listener.allow_users(uids, gids)
        self._rate = rate

    # Handshakes.

    def _enter(self, sock: socket.socket, peer: Peer) -> bool:
        connection = HandshakeConnection(sock, peer, self._loop, self._time_out)
        if not self._make_room(connection):
            return False
        self._handshaking[connection] = None
        self._loop.add_reader(sock, self._receive, connection)
        return self.listener.allows(peer)

    def _make_room(self, newcomer: HandshakeConnection) -> bool:
        """Return True if `newcomer` may shake hands; if there are too many, the user with the most loses one."""
        if len(self._handshaking) < MAX_HANDSHAKES:
            return True
        counts = Counter(connection.peer.uid for connection in self._handshaking)
        uid, most = counts.most_common(1)[0]
        crowded = counts[newcomer.peer.uid] < most
        victim = next(each for each in self._handshaking if each.peer.uid == uid) if crowded else newcomer
        self._refuse(victim, Unavailable(f"{MAX_HANDSHAKES} handshakes are in progress: try again"))
        return crowded

    def _check_peer(self, peer: Peer) -> None:
        if not self.listener.allows(peer):
            raise NotPermitted(
                f"uid {peer.uid} with groups {sorted(peer.groups)} may not attach: add it to the daemon's allow_uids "
                "or allow_gids"
            )

    def _time_out(self, connection: HandshakeConnection) -> None:
        self._refuse(connection, Unavailable(f"no complete hello within {HANDSHAKE_SECONDS:g} s: try again"))

    def _receive(self, connection: HandshakeConnection) -> None:
        try:
            data = connection.sock.recv(handshake.LENGTH.size + MAX_HANDSHAKE_FRAME)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # a reset ends the connection like a close
        if not data:
            if not connection.session:
                self._count("left_before_hello")
            self._leave(connection)
            return
        if connection.session:
            # A session sends nothing here: this client has lost track of its frames.
            self._refuse(connection, BadFrame(f"{len(data)} bytes after the welcome"))
            return
        first = not connection.heard
        connection.heard += data
        try:
            # Not before data has arrived: a client that is refused before its hello may fail to write it, and would
            # never read the reason.
            self._check_peer(connection.peer)
            if first and self._rate is not None and not self._rate.allow(connection.peer.uid, self._loop.time()):
                why = (
                    f"uid {connection.peer.uid} shakes hands more often than attach_rate allows: try again in a second"
                )
                self._refuse(connection, Unavailable(why), "attach_rate")
                return
            frame = _whole_frame(connection.heard)
            if frame is not None:
                self._welcome(connection, _hello(frame))
        except KVCacheError as error:
            self._refuse(connection, error)

    def _welcome(self, connection: HandshakeConnection, hello: Hello) -> None:
        session, token, file, resumed = self._open_session(hello, connection.peer)
        connection.session = session
        self._attached[session] = connection
        del self._handshaking[connection]
        connection.deadline.cancel()
        connection.heard.clear()
        spoken = min(hello.version, PROTOCOL_VERSION)
        welcome = Welcome(spoken, session, token, self._geometry, __version__, resumed)
        try:
            try:
                socket.send_fds(connection.sock, [handshake.frame(welcome)], [self._region_fd, file])
            finally:
                os.close(file)
        except OSError as error:
            log.warning("session %d: the welcome cannot be sent: %s", session, error)
            self._count("welcome_failed")
            self._leave(connection)

    def _refuse(self, connection: HandshakeConnection, error: KVCacheError, reason: str = "") -> None:
        self._count(reason or error.code)
        if self._lines.allow(connection.peer.uid, self._loop.time()):  # otherwise any local user could fill the disk
            level = logging.WARNING if isinstance(error, NotPermitted) else logging.INFO
            log.log(level, "handshake: refused pid %d uid %d: %s", connection.peer.pid, connection.peer.uid, error)
        with contextlib.suppress(OSError):  # the peer may have gone, or may not read; it is disconnected in any case
            connection.sock.send(handshake.frame(Error(0, error.code, str(error))))
        self._leave(connection)

    def _leave(self, connection: HandshakeConnection) -> None:
        """Close a connection, and end its session. Calling it again does nothing."""
        if connection.sock.fileno() < 0:
            return
        connection.deadline.cancel()
        self._handshaking.pop(connection, None)
        self._loop.remove_reader(connection.sock)
        connection.sock.close()
        if connection.session:
            del self._attached[connection.session]
            self._left(connection.session)

    def disconnect(self, session: int) -> None:
        """Close the handshake connection of a session."""
        if connection := self._attached.get(session):
            self._leave(connection)

    def disconnect_soon(self, session: int) -> None:
        """Close the connection of a session whose request connection has ended, unless the client closes it first.

        The kernel closes that of a killed process. Its session file, closed next, shows that it no longer writes.
        """
        if connection := self._attached.get(session):
            self._loop.call_later(LEAVE_SECONDS, self._leave, connection)

    def _count(self, reason: str) -> None:
        self.refused[reason] += 1

    def close(self) -> None:
        """Close all connections without calling `leave`: the sessions outlive this daemon."""
        self._left = lambda session: None
        self.listener.close()
        for connection in [*self._handshaking, *self._attached.values()]:
            self._leave(connection)


def _whole_frame(heard: bytearray) -> bytes | None:
    """Return the frame, or None while it is incomplete. Raises BadFrame if bytes follow it."""
    left = handshake.missing(heard)
    if left < 0:
        raise BadFrame(f"{-left} bytes after the hello")
    return bytes(heard[handshake.LENGTH.size :]) if not left else None


def _hello(frame: bytes) -> Hello:
    hello = decode_handshake(frame)
    if not isinstance(hello, Hello):
        raise BadFrame(f"expected a hello, got a {type(hello).__name__.lower()}")
    # A client that is one version ahead still speaks our version.
    if not OLDEST_VERSION <= hello.version <= PROTOCOL_VERSION + 1:
        raise VersionMismatch(
            f"the client ({hello.client[:MAX_NAME]}) speaks protocol {hello.version}, this daemon "
            f"(kvcache-server {__version__}) {SPOKEN}: "
            "upgrade the older of the two"
        )
    if not 1 <= len(hello.engine) <= MAX_NAME:
        raise BadArgument(f"engine id of {len(hello.engine)} characters: must have 1 to {MAX_NAME}")
    for name in ("label", "client"):
        if len(getattr(hello, name)) > MAX_NAME:
            raise BadArgument(f"{name} of {len(getattr(hello, name))} characters: at most {MAX_NAME}")
    return hello
