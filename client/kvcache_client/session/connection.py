"""One session at the daemon: from its first welcome at the door on, under the next daemon, too, if that knows it.

If it does not, the session has another link, and what was given under the old one is void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvcache_client.session import forks
from kvcache_client.session.channel import Channel
from kvcache_client.session.handshake import Door
from kvcache_client.session.region import Region
from kvcache_proto.messages import Reply, Settle

if TYPE_CHECKING:
    from kvcache_client.session.namespace import Namespace


class Debt(NamedTuple):
    """A settlement that the daemon has not answered, and who hears the answer."""

    settle: Settle
    answer: Callable[[Reply | None], object]


class Link:
    """What a welcome gave: an open door, a channel, a region, and the daemon's numbers; and what was given since.

    Attributes:
        leases: the reference of the last block of each lease that is held, by the lease's number.
        heard: the highest reservation that answers of daemons which are gone named.
        owed: settlements that a daemon which is gone may not have seen; the next one gets them.
    """

    def __init__(self, door: Door, channel: Channel, region: Region) -> None:
        self.door = door
        self.channel = channel
        self.region = region
        self.namespaces: dict[Namespace, int] = {}
        self.leases: dict[int, bytes] = {}
        self.heard = 0
        self.owed: deque[Debt] = deque()

    def go_on(self, door: Door, channel: Channel) -> None:
        """Be the same session behind another door."""
        self.heard = max(self.heard, self.channel.heard)
        old, self.door, self.channel = self.door, door, channel
        self.namespaces.clear()
        forks.close(old.lock)  # the new one says that we live

    def close(self) -> None:
        """Leave. The lock stays until `unlock`: copies may be under way, and it says that we live."""
        self.channel.close()
        forks.close(self.door.connection)

    def unlock(self) -> None:
        forks.close(self.door.lock)
