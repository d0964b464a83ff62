"""The shares of the region, and the floor of each: the part of it that is never lost to other shares. Pure.

Every live share has one, so that its blocks stay cached for long enough to show whether they are requested again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from kvcache_server.core.index import Account, Share

_FLOOR = 1 / 32  # of an even split


class FairShare:
    def __init__(self, capacity: int, namespace_floor: float) -> None:
        self._capacity = capacity
        self._accounts: list[Account] = []
        self.set_limits(namespace_floor)

    def set_limits(self, namespace_floor: float) -> None:
        self._namespace_floor = namespace_floor

    @property
    def accounts(self) -> Sequence[Account]:
        return self._accounts

    @property
    def used(self) -> int:
        """Bytes of the pool that are in use."""
        return sum(share.bytes for share in self.shares)

    @property
    def shares(self) -> Collection[Share]:
        return {account.share: None for account in self._accounts}.keys()

    def join(self, account: Account) -> None:
        self._accounts.append(account)
        self.set_floors()

    def prune(self) -> list[Account]:
        """Remove and return the accounts of engines that are gone and have left no blocks."""
        gone = [account for account in self._accounts if not account.share.live and not account.share.bytes]
        self._accounts = [account for account in self._accounts if account.share.live or account.share.bytes]
        return gone

    def set_floors(self) -> None:
        """Set the floor of each share: a part of the whole pool, or its part of its namespace's floor if that is more.

        O(accounts)."""
        shares = self.shares
        live = sum(share.live for share in shares) or 1
        in_namespace = Counter(share.namespace for share in shares if share.live)
        floors = [
            max(_FLOOR / live, self._namespace_floor / in_namespace[share.namespace]) if share.live else 0.0
            for share in shares
        ]
        scale = self._capacity * min(1.0, 1 / (sum(floors) or 1.0))
        for share, floor in zip(shares, floors, strict=True):
            share.floor = scale * floor
