"""Who follows KV events: connections to the socket that publishes them, and to the one that tells them again.

They need no token, so there are few of them, accepted at a bounded rate. Of whoever has most of them, one that has
asked for nothing gives way first.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence

from kvcache_proto.endpoint import SCHEME, socket_path
from kvcache_proto.errors import BadFrame, NotPermitted
from kvcache_server.rates import Rate
from kvcache_server.transport.connections import ZmtpConnection, ZmtpServer
from kvcache_server.transport.sockets import BACKLOG, Acceptor, Listener, Peer, who_gives_way
from kvcache_server.transport.zmtp import ROUTER, CutOff, Role

OPEN = 64  # connections to both sockets together
A_SECOND, AT_ONCE = 200, 32  # connections that are accepted; one costs the loop some 0.2 ms
REQUEST_BYTES = 4096
TELLS_AGAIN = Role(b"ROUTER", ROUTER.peers, limit=REQUEST_BYTES, skipped=0, parts=3)


def publishes(topic_bytes: int) -> Role:
    """Return the role of a socket whose subscribers name topics of at most so many bytes."""
    return Role(b"XPUB", frozenset((b"SUB", b"XSUB")), limit=1 + topic_bytes, skipped=0, parts=1)


class Guest(ZmtpConnection):
    """One connection. `whose` is its uid on a Unix socket, its address otherwise."""

    UNREAD = 256 << 10

    __slots__ = ("audience", "used", "whose")

    def __init__(self, audience: Audience, role: Role, whose: Hashable) -> None:
        super().__init__(audience, role)
        self.audience = audience
        self.whose = whose
        self.used = False  # whether it has asked for something


class Subscriber(Guest):
    """One that is published to. What it leaves unread waits here, until it is `forgotten` or `sent_on`."""

    __slots__ = ("waiting_for_it",)

    def __init__(self, audience: Audience, role: Role, whose: Hashable) -> None:
        super().__init__(audience, role, whose)
        self.waiting_for_it: deque[tuple[int, Sequence[bytes]]] = deque()

    def tell(self, sequence: int, parts: Sequence[bytes]) -> bool:
        """Send a message, or let it wait. Returns whether it waits."""
        if self.paused or self.waiting_for_it:
            self.waiting_for_it.append((sequence, parts))
            return True
        self.send_parts(parts)
        return False

    def send_on(self, most: int) -> bool:
        """Send up to `most` messages that wait. Returns whether some still do."""
        while self.waiting_for_it and most and not self.paused:
            self.send_parts(self.waiting_for_it.popleft()[1])
            most -= 1
        return bool(self.waiting_for_it)

    def forget(self, sequence: int) -> int:
        """Drop what waits from before `sequence`. Returns how many messages that were."""
        count = 0
        while self.waiting_for_it and self.waiting_for_it[0][0] < sequence:
            self.waiting_for_it.popleft()
            count += 1
        return count

    def resume_writing(self) -> None:
        super().resume_writing()
        self.audience.readable(self)


class Reader(Guest):
    """One that asks for replays."""

    __slots__ = ()


class Audience(ZmtpServer[Guest]):
    """All guests of both sockets.

    `hear(guest, parts)` takes a message; one that the socket does not take has no parts. `gone(guest)` is called once
    for each, `readable(subscriber)` where one has read what it was sent.
    """

    SECONDS = 0.002

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hear: Callable[[Guest, list[bytes]], None],
        gone: Callable[[Guest], None],
        readable: Callable[[Subscriber], None],
    ) -> None:
        super().__init__(loop)
        self.readable = readable
        self._hear, self._gone = hear, gone
        self._open: dict[Guest, None] = {}  # the one that came first is first
        self._cuts: Counter[str] = Counter()  # connections that were refused or ended, by reason
        self._rate = Rate(A_SECOND, AT_ONCE)
        self._unix: list[Listener] = []
        self._tcp: list[Acceptor] = []

    def bind(self, endpoint: str, role: Role, guest: type[Guest]) -> str:
        """Accept guests at `endpoint` from now on. Returns it as it was bound.

        Raises NotPermitted where it cannot be bound, EndpointTaken and ConfigError as `Listener` does.
        """
        try:
            if endpoint.startswith(SCHEME):
                return self._bind_unix(endpoint, role, guest)
            return self._bind_tcp(endpoint, role, guest)
        except OSError as error:
            raise NotPermitted(f"events endpoint {endpoint}: cannot be bound: {error.strerror}") from None

    def _bind_unix(self, endpoint: str, role: Role, guest: type[Guest]) -> str:
        def enter(sock: socket.socket, peer: Peer) -> bool:
            if listener.admits(peer):
                listener.connect(sock, lambda: guest(self, role, peer.uid))
                return True
            self._count("not_permitted")
            sock.close()
            return False

        listener = Listener(self.loop, socket_path(endpoint), endpoint, enter, self._count, self._rate)
        self._unix.append(listener)
        return endpoint

    def _bind_tcp(self, endpoint: str, role: Role, guest: type[Guest]) -> str:
        def enter(sock: socket.socket, address: tuple[str, int]) -> bool:
            acceptor.connect(sock, lambda: guest(self, role, address[0]))
            return True

        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        host = "0.0.0.0" if host == "*" else host.strip("[]")
        listener = socket.create_server(
            (host, 0 if port == "*" else int(port)),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
        acceptor = Acceptor(self.loop, listener, endpoint, enter, self._count, self._rate)
        self._tcp.append(acceptor)
        host, port = listener.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def let_in(self, uids: tuple[int, ...], gids: tuple[int, ...]) -> None:
        """Let these users and groups connect to Unix sockets, and nobody else. Who is connected stays."""
        for listener in self._unix:
            if listener.socket_file.is_ours():
                listener.let_in(uids, gids)

    def close(self) -> None:
        """Take no more, and end those that there are. Not while the loop runs."""
        for listener in self._unix:
            listener.close()
        for acceptor in self._tcp:
            acceptor.close()
        for guest in list(self._open):
            guest.cut = True
            guest.close()
        self.loop.run_until_complete(asyncio.sleep(0))  # what is unsent leaves, and descriptors are closed

    def figures(self) -> dict[str, int | dict[str, int]]:
        """Return how many connections there are, and how many were cut, by reason."""
        return {"open": len(self._open), "cut": dict(self._cuts)}

    def _count(self, reason: str) -> None:
        self._cuts[reason] += 1

    def entered(self, guest: Guest) -> None:
        self._open[guest] = None
        if len(self._open) > OPEN:
            idle_first = sorted(self._open, key=lambda each: each.used or each is guest)
            self.cut(who_gives_way(idle_first, lambda each: each.whose), "crowded_out")

    def left(self, guest: Guest) -> None:
        if guest in self._open:
            del self._open[guest]
            self._gone(guest)

    def cut(self, guest: Guest, reason: str) -> None:
        """End a connection, and listen to it no more."""
        self._count(reason)
        guest.cut = True
        self.left(guest)  # now: its end comes with a later turn
        guest.close()

    def _take(self, guest: Guest, until: float) -> bool:
        while not guest.cut:
            parts: list[bytes] | None = []
            try:
                with contextlib.suppress(BadFrame):
                    parts = guest.receiver.take_parts()
            except CutOff:
                self.cut(guest, "bad_protocol")
                return False
            if guest.receiver.answers:
                guest.send_answers()
            if parts is None:
                return False
            self._hear(guest, parts)
            if guest.paused or time.monotonic() > until:
                return True
        return False
