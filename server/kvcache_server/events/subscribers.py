"""Connections of KV event subscribers: to the socket that publishes events, and to the one that replays them.

They need no token, so their number and their rate are limited. At the limit, the owner with the most connections loses
one, an unused one first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence

from kvcache_proto.endpoint import SCHEME, socket_path
from kvcache_proto.errors import BadFrame, NotPermitted
from kvcache_server.events.batches import Batch
from kvcache_server.rates import Rate
from kvcache_server.status import Connections
from kvcache_server.transport.connections import ZmtpConnection, ZmtpServer
from kvcache_server.transport.sockets import BACKLOG, Acceptor, Listener, Peer, choose_victim
from kvcache_server.transport.zmtp import ROUTER, CutOff, Role

OPEN = 64  # most connections to both sockets together
PER_SECOND, BURST = 200, 32  # accepted connections; each costs the loop about 0.2 ms
REQUEST_BYTES = 4096  # of a replay request
REPLAY_ROLE = Role(b"ROUTER", ROUTER.peers, limit=REQUEST_BYTES, skipped=0, parts=3)


def publisher_role(topic_bytes: int) -> Role:
    """Return the role of a publishing socket whose subscribers name topics of at most `topic_bytes`."""
    return Role(b"XPUB", frozenset((b"SUB", b"XSUB")), limit=1 + topic_bytes, skipped=0, parts=1)


class EventConnection(ZmtpConnection):
    """One connection. `owner` is the peer's uid on a Unix socket, its address otherwise."""

    UNREAD = 256 << 10

    def __init__(self, server: SubscriberServer, role: Role, owner: Hashable) -> None:
        super().__init__(server, role)
        self.owner = owner
        self.used = False  # whether it has subscribed, or requested a replay


class Subscriber(EventConnection):
    """A connection to the publishing socket. `backlog` has the messages that it has not read yet."""

    def __init__(self, server: SubscriberServer, role: Role, owner: Hashable) -> None:
        super().__init__(server, role, owner)
        self.backlog: deque[tuple[int, Sequence[bytes]]] = deque()

    def publish(self, sequence: int, parts: Sequence[bytes]) -> bool:
        """Send a message, or add it to the backlog. Return True if it was added."""
        if self.paused or self.backlog:
            self.backlog.append((sequence, parts))
            return True
        self.send_parts(parts)
        return False

    def send_on(self, most: int) -> bool:
        """Send up to `most` messages of the backlog. Return True if some are left."""
        while self.backlog and most and not self.paused:
            self.send_parts(self.backlog.popleft()[1])
            most -= 1
        return bool(self.backlog)

    def forget(self, sequence: int) -> int:
        """Drop the messages of the backlog before `sequence`. Return their number."""
        count = 0
        while self.backlog and self.backlog[0][0] < sequence:
            self.backlog.popleft()
            count += 1
        return count


class ReplayClient(EventConnection):
    """A connection to the replay socket. `replayed_at` is the time of the last progress of `replay`, in seconds."""

    def __init__(self, server: SubscriberServer, role: Role, owner: Hashable) -> None:
        super().__init__(server, role, owner)
        self.replay: Iterator[Batch | None] = iter(())
        self.replayed_at = 0.0


class SubscriberServer(ZmtpServer[EventConnection]):
    """The connections to both sockets.

    `receive(connection, parts)` is called with each message; `parts` is empty for an invalid one.
    `gone(connection)` is called once per connection, `readable()` when a peer has read its messages.
    """

    SECONDS = 0.002

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[EventConnection, list[bytes]], None],
        gone: Callable[[EventConnection], None],
        readable: Callable[[], None],
    ) -> None:
        super().__init__(loop)
        self._receive, self._gone, self._readable = receive, gone, readable
        self._open: dict[EventConnection, None] = {}  # oldest first
        self._rate = Rate(PER_SECOND, BURST)
        self._acceptors: list[Acceptor] = []

    def bind(self, endpoint: str, role: Role, connection_type: type[EventConnection]) -> str:
        """Start to accept connections at `endpoint`, and return the bound endpoint.

        Raises NotPermitted if it cannot be bound, and the errors of `Listener`: EndpointTaken, ConfigError.
        """

        def accept(sock: socket.socket, peer: Peer) -> bool:
            return listener.admit(sock, peer, lambda: connection_type(self, role, peer.uid))

        def accept_tcp(sock: socket.socket, address: tuple[str, int]) -> bool:
            acceptor.connect(sock, lambda: connection_type(self, role, address[0]))
            return True

        try:
            if endpoint.startswith(SCHEME):
                listener = Listener(self.loop, socket_path(endpoint), endpoint, accept, self.count, self._rate)
                self._acceptors.append(listener)
                return endpoint
            bound = _listen_tcp(endpoint)
        except OSError as error:
            raise NotPermitted(f"events endpoint {endpoint}: cannot be bound: {error.strerror}") from None
        acceptor = Acceptor(self.loop, bound, endpoint, accept_tcp, self.count, self._rate)
        self._acceptors.append(acceptor)
        host, port = bound.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def allow_users(self, uids: tuple[int, ...], gids: tuple[int, ...]) -> None:
        """Allow only these users and groups to connect to Unix sockets. Open connections stay."""
        for each in self._acceptors:
            if isinstance(each, Listener) and each.is_ours():
                each.allow_users(uids, gids)

    def close(self) -> None:
        """Stop accepting, and close all connections. The loop must not be running."""
        for acceptor in self._acceptors:
            acceptor.close()
        self.close_all(self._open)

    def figures(self) -> Connections:
        return Connections(len(self._open), 0, dict(self.cuts))

    def resume(self, connection: EventConnection) -> None:
        super().resume(connection)
        self._readable()

    def connected(self, connection: EventConnection) -> None:
        self._open[connection] = None
        if len(self._open) > OPEN:
            idle_first = sorted(self._open, key=lambda each: each.used or each is connection)
            self.cut(choose_victim(idle_first, lambda each: each.owner), "crowded_out")

    def disconnected(self, connection: EventConnection) -> None:
        if connection in self._open:
            del self._open[connection]
            self._gone(connection)

    def cut(self, connection: EventConnection, reason: str) -> None:
        """Close a connection, and ignore further messages from it."""
        self.count(reason)
        connection.cut = True
        self.disconnected(connection)  # now: asyncio reports the end in a later turn of the loop
        connection.close()

    def _take(self, connection: EventConnection, until: float) -> bool:
        while not connection.cut:
            parts: list[bytes] | None = []
            try:
                with contextlib.suppress(BadFrame):
                    parts = connection.receiver.next_parts()
            except CutOff:
                self.cut(connection, "bad_protocol")
                return False
            if connection.receiver.answers:
                connection.send_answers()
            if parts is None:
                return False
            self._receive(connection, parts)
            if connection.paused or time.monotonic() > until:
                return True
        return False


def _listen_tcp(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    return socket.create_server(
        (host, 0 if port == "*" else int(port)),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
