"""One session at the daemon, from its first welcome on.

A next daemon that knows the session resumes it, and all grants over the connection stay valid. If it does not know the
session, another connection replaces this one, and the grants over this one are void.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kvcache_client.session import forks
from kvcache_client.session.channel import Channel, Handler
from kvcache_client.session.handshake import Door
from kvcache_client.session.region import Region
from kvcache_proto.messages import Settle


class OwedSettlement(NamedTuple):
    """A settlement that the daemon has not answered, and the handler of the answer."""

    settle: Settle
    answer: Handler


class Connection:
    """The results of a welcome: an open door, a channel and a region; and the grants since then.

    Attributes:
        leases: by number of each held lease, the references that a next daemon restores it from: that of the last
            block, then those of the tails' blocks.
        newest_reservation: the highest reservation in answers of daemons that are gone.
        owed: settlements that a gone daemon may not have seen; the next one gets them.
    """

    def __init__(self, door: Door, channel: Channel, region: Region) -> None:
        self.door = door
        self.channel = channel
        self.region = region
        self.leases: dict[int, bytes] = {}
        self.newest_reservation = 0
        self.owed: deque[OwedSettlement] = deque()

    def resume(self, door: Door, channel: Channel) -> None:
        """Continue as the same session behind another door."""
        self.newest_reservation = max(self.newest_reservation, self.channel.newest_reservation)
        old, self.door, self.channel = self.door, door, channel
        forks.close(old.lock)  # the new lock shows that we live

    def close(self) -> None:
        """Leave. The lock stays until `unlock`: copies may be running, and it shows that we live."""
        self.channel.close()
        forks.close(self.door.connection)

    def unlock(self) -> None:
        """Signal to the daemon that no copy of this session runs any more."""
        forks.close(self.door.lock)
