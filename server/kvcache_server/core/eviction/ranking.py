"""Which block is worth least, among a sample of the leaves. Pure."""

from __future__ import annotations

import heapq
import itertools
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from kvcache_server.core.eviction.due import Due
from kvcache_server.core.eviction.fair_share import FairShare
from kvcache_server.core.eviction.holders import Holders
from kvcache_server.core.eviction.learner import Learner
from kvcache_server.core.eviction.worth import one_off
from kvcache_server.core.index import CLASS_MASK, EVICT_FIRST, UNQUEUED, Account, Block, Share
from kvcache_server.core.pool import Pool

HALF = 1 / 2  # below that probability of being of use, a block is evicted first even by age
SAMPLE, KEPT = 32, 16  # leaves that are looked at together, and those kept of the sample before

Entry = tuple[float, int, Block]  # what a leaf was worth when looked at, a number, and the leaf


class Ranking:
    """Attributes: `by_age` is whether blocks are evicted by age; see `one_off` for exceptions."""

    def __init__(self, pool: Pool, fair_share: FairShare, learner: Learner, holders: Holders, due: Due) -> None:
        self.by_age, self._holders, self._due = learner.guard.by_age, holders, due
        self._pool, self._fair_share, self._worths, self._guard = pool, fair_share, learner.worths, learner.guard
        self._random = random.Random(1)
        self._heap: list[Entry] = []
        self._numbers = itertools.count()
        self._above: Block | None = None  # the parent of the last victim: it has its last use
        self._new = True  # whether another sample is due

    def expire(self) -> None:
        self._new, self._above = True, None

    def least(self) -> Entry | None:
        """Return the leaf that is worth least, of a sample of those of accounts above their floors."""
        above, self._above = self._above, None
        if above is not None and above.queued > UNQUEUED:
            self._push(above)
            self._new = False
        if self._new:
            self._take_sample()
        while True:
            heap = self._heap
            while heap:
                worth, _, block = heap[0]
                account = block.account
                if not usable(block) or account.share.bytes <= account.share.floor:
                    heapq.heappop(heap)
                    continue
                now = self._worth(block)
                if now > worth:
                    heapq.heapreplace(heap, (now, next(self._numbers), block))
                    continue
                return heap[0]
            if not self._take_sample():
                return None

    def least_of(self, accounts: Iterable[Account]) -> Entry | None:
        """Like `least`, but of these accounts, whether they are above their floors or not."""
        self.by_age = self._guard.by_age
        leaves = self._sample([account for account in accounts if account.leaves])
        return min(((self._worth(leaf), next(self._numbers), leaf) for leaf in leaves), default=None)

    def _take_sample(self) -> bool:
        """Look at other leaves; return False if there are none."""
        self.by_age = self._guard.by_age
        self._fair_share.set_floors()
        kept = heapq.nsmallest(KEPT, self._heap)
        self._heap = []
        for _, _, block in kept:
            if usable(block):
                self._push(block)
        accounts = [each for each in self._fair_share.accounts if each.leaves and each.share.bytes > each.share.floor]
        leaves = self._sample(accounts)
        numbers, worth = self._numbers, self._worth
        self._heap += [(worth(leaf), next(numbers), leaf) for leaf in leaves]
        heapq.heapify(self._heap)
        self._new = False
        return bool(leaves)

    def _sample(self, accounts: Sequence[Account]) -> list[Block]:
        """Return about SAMPLE leaves of the accounts, in proportion; none only if there are none."""
        while True:
            ends = list(itertools.accumulate(len(account.leaves) for account in accounts))
            total = ends[-1] if ends else 0
            if not total:
                return []
            if total <= SAMPLE:
                found = [leaf for account in accounts for leaf in account.leaves]
            else:
                draw, found = self._random.random, []
                for _ in range(SAMPLE):
                    at = int(draw() * total)
                    which = bisect_right(ends, at)
                    found.append(accounts[which].leaves[at - ends[which]])  # a negative index, from its end
            fit = []
            for leaf in found:
                if usable(leaf):
                    fit.append(leaf)
                elif leaf.queued > UNQUEUED:
                    leaf.account.take(leaf)
            if fit:
                return fit

    def _push(self, block: Block) -> None:
        heapq.heappush(self._heap, (self._worth(block), next(self._numbers), block))

    def _worth(self, block: Block) -> float:
        if self._due.waiting and id(block) in self._due.waiting:
            return self._due.worth(block)
        tick = block.tick
        if tick == EVICT_FIRST:
            return -float("inf")
        return self._worth_of(tick, block.account.share, block.held)

    def _worth_of(self, tick: int, share: Share, held: int) -> float:
        elsewhere = self._holders.elsewhere(held, share.namespace) if held else 1.0
        if self.by_age:
            return tick - (1 << 62) if elsewhere < HALF or one_off(share, tick & CLASS_MASK) else tick
        return self._worths.worth(tick, self._pool.tick, share) * elsewhere

    def worth_of_new(self, account: Account, cls: int, used: int = 0) -> float:
        """Return the worth of a block of class `cls` that `account` is about to store; see Eviction.make_room."""
        share = account.share
        return self._worth_of((used or self._pool.tick) | cls, share, 0)

    def pop(self, entry: Entry) -> Block:
        """Remove and return the leaf of an entry that was just returned. It must be evicted then."""
        block = entry[2]
        if self._heap and self._heap[0] is entry:
            heapq.heappop(self._heap)
        self._above, self._new = block.parent, True
        return block

    def forget(self) -> None:
        """Drop all references to accounts."""
        self._new, self._heap, self._above = True, [], None


def usable(block: Block) -> bool:
    return block.queued > UNQUEUED and not block.pins and block.child is None
