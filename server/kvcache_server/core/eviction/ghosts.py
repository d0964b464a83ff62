"""The hashes of blocks that were evicted lately: a miss on one is a hit that its account would have had. Pure.

Without them a share that falls below an engine's working set could never grow again: LRU over a set that it cannot hold
hits nothing, and what hits nothing earns nothing. Large pools remember one hash in 32, so that a million blocks cost
4 MiB here, and count each for 32.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvcache_server.core.effects import NO_LOT
from kvcache_server.core.index import Account
from kvcache_server.core.sampling import LARGE_POOL_EVERY, Draw, sampled_every

_LOOKS = 128  # misses of one lookup that are looked at


class Ghosts:
    """Evicted blocks of one group: as many as the pool has slots, the oldest forgotten first."""

    __slots__ = ("_accounts", "_draw", "_every", "_room")

    def __init__(self, slots: int, draw: Draw) -> None:
        self._accounts: OrderedDict[bytes, Account] = OrderedDict()  # a dict looks at all holes for its first key
        self._draw = draw
        self._every = sampled_every(slots)
        self._room = max(slots // self._every, 1)

    def add(self, block_hash: bytes, account: Account) -> int:
        """Note an eviction. Return the lot of a block that is in the sample, for further sampling; NO_LOT otherwise."""
        others, lot = divmod(self._draw(block_hash), LARGE_POOL_EVERY)
        if lot % self._every:
            return NO_LOT
        self._accounts[block_hash] = account
        if len(self._accounts) > self._room:
            self._accounts.popitem(last=False)
        return others

    def missed(self, hashes: Sequence[bytes]) -> None:
        """Credit each account with the blocks that a lookup asked for and that it had until lately."""
        if self._accounts:
            for block_hash in self._accounts.keys() & islice(hashes, _LOOKS):
                account = self._accounts.pop(block_hash)
                account.hit_bytes += account.group.slot_bytes * self._every
