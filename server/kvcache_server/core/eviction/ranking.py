"""Which block is worth least, in a sample of the leaves. Pure.

The worth of each block changes with time in its own way, so no order of the blocks stays right. Instead, from time to
time a few random leaves are compared with the best candidates of the former samples. Victims come from these
candidates, worth least first; the parent of a victim becomes a candidate, too, because it has its last use.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Collection, Iterable

from kvcache_server.core.eviction.due import Due
from kvcache_server.core.eviction.fair_share import FairShare
from kvcache_server.core.eviction.holders import Holders
from kvcache_server.core.eviction.learner import Learner
from kvcache_server.core.eviction.worth import one_off
from kvcache_server.core.index import CLASS_MASK, EVICT_FIRST, TICKS_PER_SECOND, UNQUEUED, Account, Block, Share
from kvcache_server.core.pool import Pool

SAMPLE, KEPT = 64, 32  # random leaves that are looked at together, and candidates kept of those before
_ENOUGH, _TICKS = 11 / 12, TICKS_PER_SECOND // 16  # of the candidates, and time, until another sample is due
_AHEAD = 16  # leaves looked at for each one that will be evicted next
_FIRST = 1 << 62  # more than each tick: by age, these blocks go before all others
_USEFUL = 1 / 2  # by age, a block that is of use with less than this probability is one of them

# What a leaf was worth when it was looked at, its tick then, a number, and the leaf.
Entry = tuple[float, int, int, Block]


class Ranking:
    """Attributes: `by_age` is whether blocks are evicted by age; see `one_off` for exceptions."""

    def __init__(self, pool: Pool, fair_share: FairShare, learner: Learner, holders: Holders, due: Due) -> None:
        self.by_age, self._holders, self._due = learner.guard.by_age, holders, due
        self._pool, self._fair_share, self._worths, self._guard = pool, fair_share, learner.worths, learner.guard
        self._random = random.Random(1)
        self._candidates: list[Entry] = []  # a heap
        self._numbers = itertools.count()
        self._checked = 0  # the number from which on entries are of this reservation
        self._new: dict[tuple[int, int, Share], float] = {}  # the worth of new blocks of this reservation
        self._enough = 0  # candidates; with fewer, another sample is due
        self._until = 0  # the tick at which it is due in any case
        self._all = False  # whether the last sample had all leaves; then each reservation takes one
        self._victim: tuple[Entry, Block | None] | None = None  # the last one of this reservation, and its parent

    def begin_reservation(self) -> None:
        """Look at all candidates again before they become victims."""
        if self.by_age is not self._guard.by_age:
            self.by_age = self._guard.by_age
            self.expire()
        parent, self._victim = self._next_above(), None
        if parent is not None:
            heapq.heappush(self._candidates, parent)
        self._checked = next(self._numbers)
        self._new.clear()
        if self._all:
            self._until = 0

    def expire(self) -> None:
        """Forget all candidates: blocks may be worth something else now."""
        self._candidates, self._victim = [], None

    def least(self) -> Entry | None:
        """Return the candidate that is worth least, of accounts above their floors; None if there is none."""
        candidates = self._candidates
        if (parent := self._next_above()) is not None:
            share = parent[3].account.share
            if candidates and parent < candidates[0] and share.bytes > share.floor:
                return parent
            heapq.heappush(candidates, parent)
        self._victim = None
        if len(candidates) <= self._enough or self._pool.tick > self._until:
            self._take_sample()
        while candidates or self._take_sample():
            entry = candidates[0]
            _, tick, number, leaf = entry
            share = leaf.account.share
            if leaf.queued <= UNQUEUED or leaf.pins or share.bytes <= share.floor:
                heapq.heappop(candidates)
            elif number >= self._checked and leaf.tick == tick:
                return entry
            else:
                heapq.heapreplace(candidates, self._entry(leaf))
        return None

    def _next_above(self) -> Entry | None:
        """Return the entry of the parent of the last victim, None if it may not be evicted. It has the victim's last
        use, and so mostly its worth."""
        if self._victim is None:
            return None
        (worth, tick, _, leaf), parent = self._victim
        if parent is None or parent.queued <= UNQUEUED or parent.pins:
            return None
        if parent.tick != tick or parent.account is not leaf.account or parent.held or self._due.waiting:
            worth = self._worth(parent)
        return worth, parent.tick, next(self._numbers), parent

    def least_of(self, accounts: Collection[Account]) -> Entry | None:
        """Return the entry that is worth least in a sample of the leaves of `accounts`, whether they are above their
        floors or not; None if they have no leaf."""
        entries = [self._entry(leaf) for leaf in self._sample(accounts)]
        if (parent := self._next_above()) is not None and parent[3].account in accounts:
            entries.append(parent)
        return min(entries, default=None)

    def next_evictable(self, most: int) -> list[Block]:
        """Return at most `most` leaves that will probably be evicted next, in this order. O(most)."""
        self._take_sample(_AHEAD * most)
        return [leaf for _, _, _, leaf in heapq.nsmallest(most, self._candidates) if leaf.queued > UNQUEUED]

    def _take_sample(self, most: int = SAMPLE) -> bool:
        """Look at some other leaves; return False if there are none. O(accounts + most)."""
        self._fair_share.set_floors()
        accounts = self._fair_share.accounts
        most = max(most, len(accounts))  # so that the time per victim is bounded
        leaves = self._sample([each for each in accounts if each.share.bytes > each.share.floor], most)
        candidates = self._candidates
        candidates.sort()
        candidates[KEPT:] = map(self._entry, leaves)
        heapq.heapify(candidates)
        self._until = self._pool.tick + _TICKS
        self._enough, self._all = int(_ENOUGH * len(candidates)), len(leaves) < most == SAMPLE
        return bool(leaves)

    def _sample(self, accounts: Iterable[Account], most: int = SAMPLE) -> list[Block]:
        """Return at most `most` leaves of the accounts, in proportion to their number; none only if there are none."""
        while True:
            accounts = [account for account in accounts if account.leaves]
            weights = [len(account.leaves) for account in accounts]
            if sum(weights) <= most:
                found = [leaf for account in accounts for leaf in account.leaves]
            elif len(accounts) == 1:
                found = self._random.choices(accounts[0].leaves, k=most)
            else:
                chosen, draw = self._random.choices(accounts, weights, k=most), self._random.random
                found = [account.leaves[int(draw() * len(account.leaves))] for account in chosen]
            free = [leaf for leaf in found if not leaf.pins]
            for leaf in found if len(free) < len(found) else ():
                if leaf.pins and leaf.queued > UNQUEUED:
                    leaf.account.take(leaf)
            if free or not found:
                return free

    def _entry(self, leaf: Block) -> Entry:
        return self._worth(leaf), leaf.tick, next(self._numbers), leaf

    def _worth(self, block: Block) -> float:
        if self._due.waiting and id(block) in self._due.waiting:
            return self._due.worth(block)
        tick, held = block.tick, block.held
        if tick == EVICT_FIRST:
            return -math.inf
        if not (held or self.by_age):
            return self._worths.worth(tick, self._pool.tick, block.account.share)
        return self._worth_of(tick, block.account.share, held)

    def _worth_of(self, tick: int, share: Share, held: int = 0) -> float:
        elsewhere = self._holders.elsewhere(held, share.namespace) if held else 1.0
        if self.by_age:
            return tick - _FIRST if elsewhere < _USEFUL or one_off(share, tick & CLASS_MASK) else tick
        return self._worths.worth(tick, self._pool.tick, share) * elsewhere

    def worth_of_new(self, account: Account, cls: int, used: int = 0) -> float:
        """Return the worth of a block that `account` is about to store; see Eviction.make_room."""
        key = cls, used, account.share
        worth = self._new.get(key)
        if worth is None:
            worth = self._new[key] = self._worth_of((used or self._pool.tick) | cls, account.share)
        return worth

    def pop(self, entry: Entry) -> Block:
        """Remove and return the leaf of an entry that was just returned. It must be evicted then."""
        leaf = entry[3]
        if self._candidates and self._candidates[0] is entry:
            heapq.heappop(self._candidates)
        self._victim = entry, leaf.parent
        return leaf
