"""Making room: which block, or which whole extent, gives way to a new block. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvcache_proto.types import Refusal
from kvcache_server.ages import Ages
from kvcache_server.index import Account, Block
from kvcache_server.misses import Misses
from kvcache_server.pool import Extent, Pool
from kvcache_server.shares import Shares

# Why a block was evicted: for another one; the engine's ceiling; its namespace's; slots of another size; a resize.
EVICTED_FOR = ("room", "own_ceiling", "namespace_ceiling", "recut", "resize")
ROOM, OWN_CEILING, NAMESPACE_CEILING, RECUT, RESIZE = EVICTED_FOR

_LOOKS = 8  # of the coldest extents and of the latest: each costs a walk of all below its blocks,
_LOOK_BLOCKS = 4096  # or of so many: a look at 16 extents takes some 10 ms at most


class Room:
    """Evicts from who is most above its share; `namespace_ceiling` is a part of the pool."""

    def __init__(
        self, pool: Pool, shares: Shares, namespace_ceiling: float, counters: Counter[str], misses: Misses
    ) -> None:
        self._pool = pool
        self._shares = shares
        self._counters = counters
        self._misses = misses
        self.evictions: Counter[str] = Counter()  # blocks by cause
        self.evicted_unread = 0  # of them, those that no lookup had found
        self.ages = Ages()
        self.frozen = False  # nothing is evicted while leases of an earlier life may not be restated yet
        self.bound(namespace_ceiling)

    def bound(self, namespace_ceiling: float) -> None:
        self._namespace_ceiling = int(namespace_ceiling * self._pool.capacity) if namespace_ceiling < 1 else 0

    def make(
        self, account: Account, parent: Block, held: Callable[[], Iterable[Block]]
    ) -> tuple[Extent, int] | Refusal:
        """Return a vacant slot for a child of `parent`, or QUOTA or NO_SPACE.

        `held()` yields the blocks that are read or written now; they and what is above them stay where they are.
        """
        size = account.group.slot_bytes
        if account.ceiling and account.bytes + size > account.ceiling and not self.evict(account, OWN_CEILING):
            return Refusal.QUOTA
        if self._namespace_ceiling and not self._below_ceiling(account):
            return Refusal.QUOTA
        place = self._pool.take(size)
        if place is not None:
            return place
        for excess, victim in self._shares.by_excess():
            if victim.group.slot_bytes == size:
                freed = self.evict(victim, ROOM)
            else:
                # A whole extent changes hands: not for the sake of a few slots, unless there is nothing to begin with.
                worth = excess >= self._pool.extent_bytes or (excess > 0 and not account.bytes)
                freed = worth and not self.frozen and self._recut(victim.group.slot_bytes, [parent, *held()])
            if freed:
                place = self._pool.take(size)
                if place is not None:
                    return place
        return Refusal.NO_SPACE

    def evict(self, account: Account, cause: str) -> bool:
        """Forget the coldest leaf of `account`; False where it has none that may go."""
        block = None if self.frozen else account.pop_coldest()
        if block is None:
            return False
        self._evicted(block, cause)
        return True

    def clear(self, accounts: Sequence[Account]) -> int:
        """Forget all blocks of `accounts` that may go and return how many; what is above a block that stays, stays."""
        cleared, before = 0, -1
        while cleared > before:  # a block is a leaf only after those of other accounts below it have gone
            before = cleared
            for account in accounts:
                while (block := account.pop_coldest()) is not None:
                    if self._forget(block)[0]:
                        self._misses.left(block.hash + block.account.group.tag, "cleared")
                        cleared += 1
        self._counters["blocks_cleared"] += cleared
        return cleared

    def _evicted(self, block: Block, cause: str) -> None:
        group = block.account.group
        found, read = self._forget(block)
        if found:
            group.ghosts.add(block.hash, block.account)
            self._misses.left(block.hash + group.tag, cause)
            self.ages.evicted(block)
            self.evictions[cause] += 1
            if not read:
                self.evicted_unread += 1
            self._shares.evicted(group.slot_bytes)

    def _forget(self, block: Block) -> tuple[bool, int]:
        """Return whether anybody could have found it, and whether a lookup had."""
        extent, slot = self._pool.locate(block)
        parent, read = block.parent, extent.read[slot]
        visible = block.account.group.remove(block)
        if parent is not None and parent.ref and (read or parent.tick == block.tick):
            self._pool.inherit(parent, read)
        block.account.bytes -= extent.slot_bytes
        self._pool.give_back(extent, slot)
        return visible, read

    def _below_ceiling(self, account: Account) -> bool:
        mine = [each for _, each in self._shares.by_excess() if each.group.namespace == account.group.namespace]
        if sum(each.bytes for each in mine) + account.group.slot_bytes <= self._namespace_ceiling:
            return True
        return any(self.evict(each, NAMESPACE_CEILING) for each in mine)

    def idle(self, held: Iterable[Block]) -> int | None:
        """Return an extent in which nothing is, the coldest one, emptied, where all are in use; None where each one is
        read or written."""
        index = self._pool.idle()
        if index is not None or self.frozen or not self._empty(self._pool.extents.values(), held, RESIZE):
            return index
        return self._pool.idle()

    def _recut(self, slot_bytes: int, held: Iterable[Block]) -> bool:
        """Empty the coldest extent of that slot size that nobody reads from or writes to; False where there is none."""
        mine = [extent for extent in self._pool.extents.values() if extent.slot_bytes == slot_bytes]
        done = self._empty(mine, held, RECUT)
        self._counters["extents_recut"] += done
        return done

    def _empty(self, extents: Iterable[Extent], held: Iterable[Block], cause: str) -> bool:
        kept = self._extents_above(held)
        candidates = [extent for extent in extents if not extent.busy and extent.index not in kept]
        if not candidates:
            return False
        # The coldest, and the latest cut: of a chain in many extents, the first one takes all others along.
        candidates.sort(key=lambda extent: extent.newest)
        looks = candidates if len(candidates) <= 2 * _LOOKS else candidates[:_LOOKS] + candidates[-_LOOKS:]
        extent = min(looks[::-1], key=_loss)
        for block in extent.blocks:
            if block is not None:
                for each in block.subtree()[::-1]:
                    self._evicted(each, cause)
        self._pool.uncut_extent(extent)
        return True

    def _extents_above(self, held: Iterable[Block]) -> set[int]:
        """Return the extents of the held blocks and of all above them."""
        found: set[int] = set()
        seen: set[int] = set()
        for end in held:
            for block in end.ancestors():
                if id(block) in seen:
                    break
                seen.add(id(block))
                found.add(self._pool.locate(block)[0].index)
        return found


def _loss(extent: Extent) -> tuple[float, int]:
    """Return the latest tick of the extent's blocks and all below them, and how many these are.

    Past a bound, nobody looks on: such an extent goes last.
    """
    waiting = [block for block in extent.blocks if block is not None]
    seen = set(map(id, waiting))
    latest = 0
    for block in waiting:
        if block.tick > latest:
            latest = block.tick
        for child in block.children():
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
        if len(waiting) > _LOOK_BLOCKS:
            return math.inf, 0
    return latest, len(waiting)
