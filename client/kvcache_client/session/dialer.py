"""Makes a connection: knocks at the door, maps the region, opens the channel."""

from __future__ import annotations

from typing import Any

import zmq

from kvcache_client.session import forks
from kvcache_client.session.bell import Bell
from kvcache_client.session.channel import Channel
from kvcache_client.session.connection import Connection
from kvcache_client.session.counters import Counters
from kvcache_client.session.handshake import knock
from kvcache_client.session.region import Region
from kvcache_proto.endpoint import socket_path


class Dialer:
    """Dials one endpoint for one engine's process. `bell` wakes the supervisor, and cancels a knock."""

    def __init__(
        self,
        endpoint: str,
        engine: str,
        label: str,
        servers: frozenset[int],
        counters: Counters,
        bell: Bell,
    ) -> None:
        self.endpoint, self.engine, self.label = endpoint, engine, label
        self._servers = servers
        self._counters, self._bell = counters, bell
        forks.adopt_peer(socket_path(endpoint))
        self._context: zmq.Context[Any] = zmq.Context(1)

    def dial(
        self, timeout: float, suspended: Connection | None, region: Region | None, interruptible: bool
    ) -> Connection:
        """Return a connection that is not in use yet: `suspended` itself if the daemon knows it and resumes it.

        Args:
            timeout: seconds for the knock.
            region: the mapping that this session has; it is kept if the daemon has the same region.
            interruptible: whether the bell cancels the knock.
        Raises the errors of `handshake.knock`, and RegionError; then nothing has changed.
        """
        last = suspended.door.welcome if suspended is not None else None
        interrupt = self._bell.descriptor if interruptible else None
        door = knock(self.endpoint, self.engine, self.label, timeout, interrupt, last, self._servers)
        geometry, token = door.welcome.geometry, door.welcome.token
        try:
            if region is None or region.geometry != geometry:
                region = Region(door.region, geometry)
            channel = Channel(self._context, self.endpoint, token, self._counters, self._bell.ring)
        except BaseException:
            forks.close(door.connection)
            forks.close(door.lock)
            raise
        finally:
            forks.close(door.region)
        if door.welcome.resumed and suspended is not None and suspended.region is region:
            suspended.resume(door, channel)
            return suspended
        return Connection(door, channel, region)

    def close(self) -> None:
        self._context.term()
