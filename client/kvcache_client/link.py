"""One life of a session: from a welcome at the door to the door's end.

After a restart of the daemon the session has another link; what was given under the old one is void.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_client import forks
from kvcache_client.channel import Channel
from kvcache_client.door import Door
from kvcache_client.region import Region

if TYPE_CHECKING:
    from kvcache_client.handles import Namespace


class Link:
    """What one welcome gave: an open door, a channel, a region, and the daemon's numbers of the namespaces."""

    def __init__(self, door: Door, channel: Channel, region: Region) -> None:
        self.door = door
        self.channel = channel
        self.region = region
        self.namespaces: dict[Namespace, int] = {}

    def close(self) -> None:
        """End the session. The lock stays until `unlock`: copies may be under way, and it says that we live."""
        self.channel.close()
        forks.close(self.door.connection)

    def unlock(self) -> None:
        forks.close(self.door.lock)
