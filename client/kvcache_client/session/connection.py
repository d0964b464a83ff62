"""One session at the daemon, from its first welcome on, and how it comes about: a handshake, a region, a channel.

A next daemon that knows the session resumes it, and all grants over the connection stay valid. If it does not know the
session, another connection replaces this one, and the grants over this one are void.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import zmq

from kvcache_client.session import forks
from kvcache_client.session.channel import Channel, Handler
from kvcache_client.session.counters import Counters
from kvcache_client.session.handshake import Handshake, shake_hands
from kvcache_client.session.region import Region
from kvcache_client.session.waker import Waker
from kvcache_proto.endpoint import socket_path
from kvcache_proto.messages import Settle


class Connection:
    """A completed handshake, a channel and a region; and the grants since the welcome."""

    def __init__(self, handshake: Handshake, channel: Channel, region: Region) -> None:
        self.handshake, self.channel, self.region = handshake, channel, region
        # By number of each held lease, the references that a next daemon restores it from: that of the last block, then
        # those of the suffix groups' blocks.
        self.leases: dict[int, bytes] = {}
        self.newest_reservation = 0  # the highest one in answers of daemons that are gone
        # What a gone daemon may not have seen, and the handlers of the answers: the next one gets it.
        self.owed: deque[tuple[Settle, Handler]] = deque()

    def resume(self, handshake: Handshake, channel: Channel) -> None:
        """Continue as the same session after another handshake."""
        self.newest_reservation = max(self.newest_reservation, self.channel.newest_reservation)
        old, self.handshake, self.channel = self.handshake, handshake, channel
        forks.close(old.lock)  # the new lock shows that we live

    def close(self) -> None:
        """Leave. The lock stays until `unlock`: copies may be running, and it shows that we live."""
        self.channel.close()
        forks.close(self.handshake.descriptor)

    def unlock(self) -> None:
        """Signal to the daemon that no copy of this session runs any more."""
        forks.close(self.handshake.lock)


class Dialer:
    """Dials one endpoint for one engine's process. `waker` wakes the supervisor, and cancels a handshake."""

    def __init__(
        self, endpoint: str, engine: str, label: str, servers: frozenset[int], counters: Counters, waker: Waker
    ) -> None:
        self.endpoint, self.engine, self.label = endpoint, engine, label
        self._servers, self._counters, self._waker = servers, counters, waker
        forks.adopt_peer(socket_path(endpoint))
        self._context: zmq.Context[Any] = zmq.Context(1)

    def dial(
        self, timeout: float, suspended: Connection | None, region: Region | None, interruptible: bool
    ) -> Connection:
        """Return a connection that is not in use yet: `suspended` itself if the daemon knows it and resumes it.

        Args:
            timeout: seconds for the handshake.
            region: the mapping that this session has; it is kept if the daemon has the same region.
            interruptible: whether the waker cancels the handshake.
        Raises the errors of `handshake.shake_hands`, and RegionError; then nothing has changed.
        """
        last = suspended.handshake.welcome if suspended is not None else None
        interrupt = self._waker.descriptor if interruptible else None
        handshake = shake_hands(self.endpoint, self.engine, self.label, timeout, interrupt, last, self._servers)
        geometry, token = handshake.welcome.geometry, handshake.welcome.token
        try:
            if region is None or region.geometry != geometry:
                region = Region(handshake.region, geometry)
            channel = Channel(self._context, self.endpoint, token, self._counters, self._waker.wake)
        except BaseException:
            forks.close(handshake.descriptor)
            forks.close(handshake.lock)
            raise
        finally:
            forks.close(handshake.region)
        if handshake.welcome.resumed and suspended is not None and suspended.region is region:
            suspended.resume(handshake, channel)
            return suspended
        return Connection(handshake, channel, region)

    def close(self) -> None:
        self._context.term()
