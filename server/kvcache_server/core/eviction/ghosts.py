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

from kvcache_server.core.sampling import Draw
from kvcache_server.insight.infinite_cache import Lost

if TYPE_CHECKING:
    from kvcache_server.core.index import Account

_ALL_BELOW = 1 << 15  # blocks in the pool
_LARGE_WORTH = 32  # beyond, so many are counted for each that is remembered
_LOOKS = 128  # misses of one lookup that are looked at


class Ghosts:
    """Remembers as many blocks as the pool has slots, the oldest forgotten first.

    Attributes: `lost`, which forgets none, and so knows what more memory would buy.
    """

    __slots__ = ("_accounts", "_draw", "_room", "lost", "worth")

    def __init__(self, slots: int, draw: Draw) -> None:
        self._accounts: OrderedDict[bytes, Account] = OrderedDict()  # a dict looks at all holes for its first key
        self._draw = draw
        self.worth = 1 if slots <= _ALL_BELOW else _LARGE_WORTH
        self._room = max(slots // self.worth, 1)
        self.lost = Lost(self.worth)

    def add(self, block_hash: bytes, account: Account) -> None:
        others, lot = divmod(self._draw(block_hash), _LARGE_WORTH)
        if not lot % self.worth:
            self._accounts[block_hash] = account
            if len(self._accounts) > self._room:
                self._accounts.popitem(last=False)
            self.lost.add(block_hash, others)

    def forget(self) -> None:
        """Let go of the accounts, which refer back to their groups."""
        self._accounts.clear()

    def missed(self, hashes: Sequence[bytes]) -> None:
        """Credit each account with the blocks that a lookup asked for and that it had until lately."""
        self.lost.missed(hashes)
        if self._accounts:
            for block_hash in self._accounts.keys() & islice(hashes, _LOOKS):
                account = self._accounts.pop(block_hash)
                account.hit_bytes += account.group.slot_bytes * self.worth
