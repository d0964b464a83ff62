"""The hashes of recently evicted blocks: a miss on one would have been a hit for its account. Pure.

Without them, a share that falls below an engine's working set could never grow again: LRU on a set that does not fit
has no hits, and an account without hits gains no share. Large pools remember one hash in 32, so that a million blocks
cost 4 MiB here, and count each 32 times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvcache_server.core.effects import NO_LOT
from kvcache_server.core.index import Account
from kvcache_server.core.sampling import LARGE_POOL_EVERY, Draw, sampled_every

_LOOKS = 128  # misses examined per lookup


class Ghosts:
    """Evicted blocks of one group: as many as the pool has slots; the oldest are forgotten first."""

    __slots__ = ("_accounts", "_draw", "_every", "_room")

    def __init__(self, slots: int, draw: Draw) -> None:
        self._accounts: OrderedDict[bytes, Account] = (
            OrderedDict()
        )  # finding a plain dict's first key scans deleted ones
        self._draw = draw
        self._every = sampled_every(slots)
        self._room = max(slots // self._every, 1)

    def add(self, block_hash: bytes, account: Account) -> int:
        """Record an eviction. Return the block's lot for further sampling, NO_LOT if it is not in the sample."""
        others, lot = divmod(self._draw(block_hash), LARGE_POOL_EVERY)
        if lot % self._every:
            return NO_LOT
        self._accounts[block_hash] = account
        if len(self._accounts) > self._room:
            self._accounts.popitem(last=False)
        return others

    def missed(self, hashes: Sequence[bytes]) -> None:
        """Credit accounts with the blocks that a lookup asked for and that they recently lost."""
        if self._accounts:
            for block_hash in self._accounts.keys() & islice(hashes, _LOOKS):
                account = self._accounts.pop(block_hash)
                account.hit_bytes += account.group.slot_bytes * self._every
