"""Blocks that were evicted for others and requested again soon. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_server.core.eviction.policy import NAMESPACE_CEILING, OWN_CEILING, ROOM
from kvcache_server.core.limits import LOOK
from kvcache_server.insight.miss_log import MissLog

SOON = 60.0  # seconds
CHOSEN = {ROOM, OWN_CEILING, NAMESPACE_CEILING}  # causes of evictions for which one of many blocks is chosen
_MOST = 1 << 14  # blocks that are known to be counted


class EarlyEvictions:
    """`count` is the number of evictions, as far as `misses` remembers them, after which a lookup missed the block
    within SOON seconds."""

    def __init__(self, misses: MissLog) -> None:
        self.count = 0
        self._misses = misses
        self._counted: dict[bytes, float] = {}  # the time of the last eviction that was counted

    def missed(self, hashes: Sequence[bytes], begin: int, tag: bytes, now: float) -> None:
        """Count the evictions of `hashes` from number `begin` on, which a lookup missed in the group with this tag.

        The end of a chain is evicted first. So those that were evicted lately are the first ones; of these, up to LOOK
        are counted.
        """
        for at in range(begin, min(begin + LOOK, len(hashes))):
            name = hashes[at] + tag
            occasion = self._misses.find(name, now)
            if occasion is None or now - occasion.at > SOON:
                break
            if occasion.cause in CHOSEN and self._counted.get(name) != occasion.at:
                if len(self._counted) >= _MOST:
                    self._counted.clear()
                self._counted[name] = occasion.at
                self.count += 1
