"""Each account's share of the region, which decides from which account blocks are evicted. Pure.

A share follows the account's hits: the bytes that lookups found in it, or would have found without evictions
(ghosts.py), halved with each turnover of the pool. So an engine that streams prompts which nobody requests again is
limited to its floor and does not cost the others their hits. Every live account has a floor, so that it can gain hits
in the first place.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache_server.core.index import Account

_FLOOR = 1 / 16  # of an even split
_PRIOR = 0.02  # of the capacity: the weight of a live account before its first hit
_REFRESH = 1 / 256  # of the capacity: bytes evicted between two computations of the shares, which cost O(accounts)


class FairShare:
    def __init__(self, capacity: int, namespace_floor: float) -> None:
        self._accounts: list[Account] = []
        self._over: list[tuple[float, Account]] = []
        self._turned_over = 0
        self._since_look = 0
        self.set_limits(capacity, namespace_floor)

    def set_limits(self, capacity: int, namespace_floor: float) -> None:
        self._capacity, self._namespace_floor = capacity, namespace_floor
        self._stale = True

    @property
    def accounts(self) -> Sequence[Account]:
        return self._accounts

    @property
    def used(self) -> int:
        """Bytes of the pool that all accounts have together."""
        return sum(account.bytes for account in self._accounts)

    def join(self, account: Account) -> None:
        self._accounts.append(account)
        self._stale = True

    def prune(self) -> list[Account]:
        """Remove and return the accounts of engines that are gone and have left no blocks."""
        gone = [account for account in self._accounts if not account.live and not account.bytes]
        self._accounts = [account for account in self._accounts if account.live or account.bytes]
        self._stale = True
        for account in gone:
            account.clear()  # entries of removed blocks, each of which refers back to the account
        return gone

    def evicted(self, size: int) -> None:
        """Count `size` bytes of turnover; with each full turnover of the pool, hits are halved."""
        self._turned_over += size
        self._since_look += size
        if self._turned_over >= self._capacity:
            self._turned_over = 0
            for account in self._accounts:
                account.hit_bytes /= 2

    def by_excess(self) -> list[tuple[float, Account]]:
        """Return pairs (bytes above the share, account), the greatest excess first."""
        if self._stale or self._since_look >= _REFRESH * self._capacity:
            self._stale = False
            self._since_look = 0
            shares = self._shares()
            self._over = sorted(
                ((account.bytes - share, account) for account, share in zip(self._accounts, shares, strict=True)),
                key=lambda pair: -pair[0],
            )
        return self._over

    def _shares(self) -> list[float]:
        live = sum(account.live for account in self._accounts) or 1
        in_namespace: dict[int, int] = {}
        for account in self._accounts:
            in_namespace[account.group.namespace] = in_namespace.get(account.group.namespace, 0) + account.live
        floors = [
            max(_FLOOR / live, self._namespace_floor / max(in_namespace[account.group.namespace], 1))
            if account.live
            else 0.0
            for account in self._accounts
        ]
        scale = min(1.0, 1 / sum(floors)) if sum(floors) else 1.0
        for account, floor in zip(self._accounts, floors, strict=True):
            account.floor = scale * floor * self._capacity
        weights = [account.hit_bytes + account.live * _PRIOR * self._capacity for account in self._accounts]
        spare = max(0.0, 1 - scale * sum(floors)) * self._capacity
        total = sum(weights) or 1.0
        return [
            scale * floor * self._capacity + spare * weight / total
            for floor, weight in zip(floors, weights, strict=True)
        ]
