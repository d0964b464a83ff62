"""Which block is worth least: the orders of all accounts, ranked by the worth of their coldest leaves. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable

from kvcache_server.core.eviction.fair_share import FairShare
from kvcache_server.core.eviction.learner import Learner
from kvcache_server.core.eviction.worth import BIN_BEGINS, BINS, bin_of, one_off
from kvcache_server.core.index import (
    CLASS_MASK,
    CLASSES,
    EVICT_FIRST,
    NO_LEAF,
    NOT_RANKED,
    TICKS_PER_SECOND,
    Account,
    Block,
    Order,
)
from kvcache_server.core.pool import Pool

_RANKED, _RANKED_FOR = 64, TICKS_PER_SECOND // 4  # evictions and time until all orders are ranked again

# The worth of the coldest leaf of an order, its tick, a number, the order and its account, and the latest tick for
# which the worth is the same.
Entry = tuple[float, int, int, Order, Account, int]


class Ranking:
    """Attributes: `by_age` is whether blocks are evicted by age; see `one_off` for exceptions."""

    def __init__(self, pool: Pool, fair_share: FairShare, learner: Learner) -> None:
        self.by_age = learner.guard.by_age
        self._pool, self._fair_share, self._worths, self._guard = pool, fair_share, learner.worths, learner.guard
        self._heap: list[Entry] = []
        self._numbers = itertools.count()
        self._left = 0  # evictions until all orders are ranked again
        self._until = 0  # the tick at which they are in any case

    def expire(self) -> None:
        """Let all orders be ranked again."""
        self._left = 0

    def least(self) -> Entry | None:
        """Return the entry of the order whose coldest leaf is worth least, among those of accounts above their floors;
        None if there is none. The leaf is the head of the order, and may be evicted."""
        self._rank_if_due()
        news = self._fair_share.news
        while news:
            self._enter(*news.pop())
        heap = self._heap
        while heap:
            entry = heap[0]
            _, tick, _, order, account, _ = entry
            if order.entry is entry:
                head = order.head()
                if head is None or account.share.bytes <= account.share.floor:
                    order.entry, order.coldest = None, NO_LEAF if head is None else NOT_RANKED
                elif head.tick == tick:
                    return entry
                else:
                    heapq.heapreplace(heap, self._entry(account, order, head.tick))
                    continue
            heapq.heappop(heap)
        return None

    def least_of(self, accounts: Iterable[Account]) -> Entry | None:
        """Like `least`, but of these accounts, whether they are above their floors or not."""
        self._rank_if_due()
        found: Entry | None = None
        for account in accounts:
            for order in account.orders:
                entry = self._enter(account, order)
                if entry is not None and (found is None or entry < found):
                    found = entry
        return found

    def worth_of_new(self, account: Account, cls: int) -> float:
        """Return the worth of a block of class `cls` that `account` is about to store."""
        if self.by_age:
            return _by_age(account, cls)
        worth = self._worths.table[cls * BINS]
        return worth if cls else worth * account.share.factor

    def pop(self, entry: Entry) -> Block:
        """Remove and return the leaf of an entry that was just returned. It must be evicted then."""
        self._left -= 1
        return entry[3].pop()

    def forget(self) -> None:
        """Drop all references to accounts."""
        self._left, self._heap = 0, []
        self._fair_share.news.clear()

    def _rank_if_due(self) -> None:
        """Rank all orders again from time to time, because their worth changes with it."""
        if self._left > 0 and self._pool.tick <= self._until and self.by_age is self._guard.by_age:
            return
        self.by_age = self._guard.by_age
        self.forget()
        self._fair_share.set_floors()
        accounts = self._fair_share.accounts
        for account in accounts:
            for order in account.orders:
                order.entry = None
                self._enter(account, order)
        self._until = self._pool.tick + _RANKED_FOR
        self._left = max(_RANKED, CLASSES * len(accounts))

    def _enter(self, account: Account, order: Order) -> Entry | None:
        """Rank an order whose coldest leaf may have changed; return its entry, None if it has no leaf."""
        head = order.head()
        if head is None:
            order.entry, order.coldest = None, NO_LEAF
            return None
        entry = order.entry
        if entry is None or entry[1] != head.tick:
            entry = self._entry(account, order, head.tick)
            heapq.heappush(self._heap, entry)
        order.coldest = head.tick  # a colder leaf that has become busy since it was announced may have changed it
        return entry

    def _entry(self, account: Account, order: Order, tick: int) -> Entry:
        before = order.entry
        if tick == EVICT_FIRST:
            worth, until = -math.inf, tick
        elif before is not None and before[1] <= tick <= before[5]:
            worth, until = before[0], before[5]
        elif self.by_age:
            worth, until = _by_age(account, tick & CLASS_MASK), NO_LEAF
        else:
            at, now = tick & CLASS_MASK, self._pool.tick
            bin_ = bin_of(now - tick)
            worth, until = self._worths.table[at * BINS + bin_], now - BIN_BEGINS[bin_] if bin_ else NO_LEAF
            if not at:
                worth *= account.share.factor
        order.coldest = tick
        order.entry = entry = (worth, tick, next(self._numbers), order, account, until)
        return entry


def _by_age(account: Account, cls: int) -> float:
    """Return the worth by age: the same for all but one-off blocks."""
    return -1.0 if one_off(account.share, cls) else 0.0
