"""The hashes of blocks that were evicted lately: a miss on one is a hit that its account would have had. Pure.

Without them a share that falls below an engine's working set could never grow again: LRU over a set that it cannot hold
hits nothing, and what hits nothing earns nothing. Large pools remember one hash in 32, so that a million blocks cost
4 MiB here, and count each for 32.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvcache_server.lost import Lost

if TYPE_CHECKING:
    from kvcache_server.index import Account

_ALL_BELOW = 1 << 15  # blocks in the pool
_LOOKS = 128  # misses of one lookup that are looked at


class Ghosts:
    """Remembers as many blocks as the pool has slots, the oldest forgotten first.

    Attributes: `lost`, which forgets none, and so knows what more memory would buy.
    """

    __slots__ = ("_accounts", "_room", "_sampled", "lost", "worth")

    def __init__(self, slots: int) -> None:
        self._accounts: OrderedDict[bytes, Account] = OrderedDict()  # a dict looks at all holes for its first key
        self._sampled = 256 if slots <= _ALL_BELOW else 8  # of the 256 values of a hash's last byte
        self.worth = 256 // self._sampled
        self._room = max(slots // self.worth, 1)
        self.lost = Lost(self.worth)

    def add(self, block_hash: bytes, account: Account) -> None:
        if block_hash[-1] < self._sampled:
            self._accounts[block_hash] = account
            if len(self._accounts) > self._room:
                self._accounts.popitem(last=False)
            self.lost.add(block_hash)

    def missed(self, hashes: Sequence[bytes]) -> None:
        """Credit each account with the blocks that a lookup asked for and that it had until lately."""
        self.lost.missed(hashes)
        if self._accounts:
            for block_hash in self._accounts.keys() & islice(hashes, _LOOKS):
                account = self._accounts.pop(block_hash)
                account.hit_bytes += account.group.slot_bytes * self.worth
