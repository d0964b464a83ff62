"""Making room for new blocks: which block, or which whole extent, is evicted. Pure."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import islice
from typing import Any, final

import msgspec

from kvcache_proto.region import slots_per_extent
from kvcache_proto.types import MAX_GROUPS, Refusal
from kvcache_server.core.effects import Effects
from kvcache_server.core.eviction.fair_share import FairShare
from kvcache_server.core.eviction.learner import Learner
from kvcache_server.core.eviction.ranking import Entry, Ranking
from kvcache_server.core.extent import Extent
from kvcache_server.core.index import (
    CLASS_MASK,
    CLASSES,
    GOES_FIRST,
    GONE,
    Account,
    Block,
    Group,
    Share,
)
from kvcache_server.core.limits import Limits
from kvcache_server.core.pool import Pool
from kvcache_server.core.sampling import Draw, Lots
from kvcache_server.core.slices import LOOK, STEP, Chores, Steps

# Why a block was evicted: for another block; the engine's or its namespace's ceiling; slots of another size; for
# another block, after an engine had said that nobody needs it again.
EVICTED_FOR = ("room", "own_ceiling", "namespace_ceiling", "recut", "dropped")
ROOM, OWN_CEILING, NAMESPACE_CEILING, RECUT, DROPPED = EVICTED_FOR
_MOST_DROPPED = 16_384  # chains that are remembered as dropped; older ones are evicted in their turn

_MUCH_LESS = 2
_MANY_VACANT = 16  # one in so many slots of the pool
_FEW_TAILS = 16  # blocks of tails that are evicted for one block of the full group
POLICIES = WORTH, LRU = "worth", "lru"

_LOOKS = 8  # of the coldest and of the latest extents: each costs a walk of all descendants of its blocks,
_LOOK_BLOCKS = 4096  # or of this many: 16 extents take 10 ms at most


@final
class Reassign(msgspec.Struct, frozen=True):
    """An extent with slots of this size must be emptied first, for slots of another size."""

    slot_bytes: int


class Eviction:
    """Evicts what is worth least, of all accounts above their floors; see worth.py.

    A hit counts by its bytes, so what a block is worth per byte does not depend on its size.

    Attributes: `evictions` are evicted blocks by cause, `evicted_unread` those that no lookup had found;
    `evicted_by_class` those that were asked for once, twice, more often; `declined` counts blocks that were not stored
    because they were worth less than each block in the pool.
    """

    def __init__(
        self,
        pool: Pool,
        limits: Limits,
        counters: Counter[str],
        effects: Effects,
        chores: Chores,
        draw: Draw,
        lots: Lots,
        policy: str = WORTH,
    ) -> None:
        """`draw` and `lots` decide which blocks are sampled. `policy` is WORTH, or LRU to evict by age only."""
        self._pool = pool
        self._counters = counters
        self._effects = effects
        self._chores = chores
        self.learner = Learner(pool, draw, lots, policy != LRU)
        self.guard = self.learner.guard
        self.fair_share = FairShare(pool.capacity, limits.namespace_floor)
        self.ranking = Ranking(pool, self.fair_share, self.learner)
        self.evictions: Counter[str] = Counter()  # blocks by cause
        self.evicted_unread = 0  # evicted blocks that no lookup had found
        self.evicted_by_class = [0] * CLASSES
        self.declined = 0
        self._dropped: dict[int, OrderedDict[int, Block]] = {}  # leaves that go first, by slot size and id()
        # Whether a tier gets a block of this class that an account stores: then it is not declined, however little
        # it is worth here.
        self.stored_below: Callable[[Account, int], bool] | None = None
        self.frozen = False  # nothing is evicted while leases of an earlier epoch may not be restated yet
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        ceiling = limits.namespace_ceiling
        self.fair_share.set_limits(limits.namespace_floor)
        self._namespace_ceiling = int(ceiling * self._pool.capacity) if ceiling < 1 else 0
        self.ranking.expire()

    def refreshing(self) -> Steps[None]:
        """Make the worths follow the evidence."""
        yield from self.learner.refreshing(self.fair_share.accounts)
        self.ranking.expire()

    def figures(self) -> dict[str, Any]:
        """Return how it decides, and what it found and gave up by class."""
        self.learner.learn()
        names = ("once", "twice", "more")
        return {
            "by_age": self.guard.by_age,
            "switches": self.guard.switches,
            "declined_blocks": self.declined,
            "hit_blocks_by_class": dict(zip(names, self.learner.hits_by_class, strict=True)),
            "evicted_blocks_by_class": dict(zip(names, self.evicted_by_class, strict=True)),
        }

    def make_room(
        self, account: Account, fixed: Container[int], cls: int = 0
    ) -> tuple[Extent[Block], int] | Refusal | Reassign:
        """Return a vacant slot for a block of class `cls`, or QUOTA or NO_SPACE, or the Reassign that would free one.

        CLASSES is the class of a block that is stored regardless of its worth.

        `fixed` are slot sizes whose extents cannot be reassigned. NO_SPACE also means that the block is worth less than
        each block that could be evicted for it; then `declined` has increased.
        """
        size, share, ranking = account.group.slot_bytes, account.share, self.ranking
        if share.ceiling and not self._below_ceiling([share], size, share.ceiling, OWN_CEILING):
            return Refusal.QUOTA
        if self._namespace_ceiling:
            shares = [each for each in self.fair_share.shares if each.namespace == share.namespace]
            if not self._below_ceiling(shares, size, self._namespace_ceiling, NAMESPACE_CEILING):
                return Refusal.QUOTA
        place = self._pool.take(size)
        if place is None and self._dropped:
            place = self._take_dropped(size)
        if place is not None or self.frozen:
            return place or Refusal.NO_SPACE
        found = ranking.least(size)
        of_use = cls == CLASSES or share.bytes < share.floor
        for _ in range(_FEW_TAILS if account.group.tails else 0):
            # Blocks of this size are freed with those that hang on them, of another size.
            tail = self._least_tail(account.group, found)
            if tail is None:
                break
            if not of_use and self._declines(account, cls, tail[0]):
                return Refusal.NO_SPACE
            self._pool.give_back(*self._evicted(ranking.pop(tail), ROOM))
            place = self._pool.take(size)
            if place is not None:
                return place
            found = ranking.least(size)
        others = len(ranking.sizes) > (size in ranking.sizes)
        other = self._to_reassign(account, found, fixed) if others else None
        least = other or found
        if least is not None and not of_use and self._declines(account, cls, least[0]):
            return Refusal.NO_SPACE
        if other is not None:
            return Reassign(other[4].group.slot_bytes)
        if found is not None:
            extent, slot = self._evicted(ranking.pop(found), ROOM)
            if not extent.closed:
                return extent, slot  # without a way through the list of vacant slots
            self._pool.give_back(extent, slot)
            return self._pool.take(size) or Refusal.NO_SPACE
        return (self._pool.take(size) if self._evict_from([account], ROOM) else None) or Refusal.NO_SPACE

    def _declines(self, account: Account, cls: int, least: float) -> bool:
        """Return whether a block is worth less than what would be evicted for it, and of no use to a tier; count it."""
        if self.ranking.worth_of_new(account, cls) >= least or (self.stored_below and self.stored_below(account, cls)):
            return False
        self.declined += 1
        return True

    def _least_tail(self, group: Group, found: Entry | None) -> Entry | None:
        """Return the entry of a tail of the same namespace that is worth less than `found`, of another slot size."""
        least = found
        for size in {tail.slot_bytes for tail in group.tails if tail.is_tail} - {group.slot_bytes}:
            entry = self.ranking.least(size)
            if entry is not None and entry[4].group.namespace == group.namespace and (least is None or entry < least):
                least = entry
        return None if least is found else least

    def _to_reassign(self, account: Account, found: Entry | None, fixed: Container[int]) -> Entry | None:
        """Return the entry of another slot size that is worth less than `found`, if its extents may be reassigned."""
        least, best = found, None
        for size in list(self.ranking.sizes):
            if size != account.group.slot_bytes and size not in fixed:
                other = self.ranking.least(size)
                if other is not None and self._has_room(account, other):
                    return other
                if other is not None and (least is None or self._is_much_less(other, least)):
                    # A whole extent is reassigned only for more than a few slots, unless the group has none.
                    excess = other[4].share.bytes - other[4].share.floor
                    none = not account.share.bytes or not (account.group.visible or account.group.pending)
                    if excess > 0 and (none or self._has_excess(size)):
                        least = best = other
        return best

    def _has_excess(self, size: int) -> bool:
        """Whether an extent of this slot size holds no more than its shares have above their floors. O(accounts)."""
        shares = {account.share for account in self.fair_share.accounts if account.group.slot_bytes == size}
        excess = sum(max(0.0, share.bytes - share.floor) for share in shares)
        return excess >= slots_per_extent(self._pool.extent_bytes, size) * size

    def _has_room(self, account: Account, other: Entry) -> bool:
        """Whether many slots of another size, of the same namespace as `account`, are vacant.

        Fewer will be taken soon: a long prompt that goes leaves some extents' worth of them.
        """
        if other[4].group.namespace != account.group.namespace:
            return False
        return self._pool.has_vacant(other[4].group.slot_bytes, _MANY_VACANT)

    def _is_much_less(self, other: Entry, entry: Entry) -> bool:
        """Whether the leaf of `other`, of another slot size, is worth so much less that its whole extent should go.

        In one namespace, it must be half as much, or twice as old: groups of one model are stored together, and each
        change of sizes evicts a whole extent.
        """
        if other[4].group.namespace != entry[4].group.namespace:
            return other < entry
        if other[0] != entry[0]:
            return -math.inf < other[0] < entry[0] / _MUCH_LESS
        now = self._pool.tick
        return now - other[1] > _MUCH_LESS * (now - entry[1])

    def forget_accounts(self, accounts: Collection[Account]) -> None:
        """Drop what refers to accounts that are gone."""
        self.ranking.forget()
        self.learner.forget_shares({account.share for account in accounts})

    def _evict_from(self, accounts: Sequence[Account], cause: str) -> bool:
        """Evict the block of `accounts` that is worth least; return False if none may be evicted."""
        if self.frozen:
            return False
        least = self.ranking.least_of(accounts)
        if least is not None:
            self._pool.give_back(*self._evicted(self.ranking.pop(least), cause))
            return True
        for account in accounts:
            if (block := account.pop_clearing()) is not None:
                self._pool.give_back(*self._evicted(block, cause))
                return True
        return False

    def drop(self, leaf: Block) -> None:
        """Evict `leaf`, whose tick is GOES_FIRST, before all others, and then such blocks above it."""
        leaves = self._dropped.setdefault(leaf.account.group.slot_bytes, OrderedDict())
        leaves.pop(id(leaf), None)
        leaves[id(leaf)] = leaf
        if len(leaves) > _MOST_DROPPED:
            leaves.popitem(last=False)

    def _take_dropped(self, size: int) -> tuple[Extent[Block], int] | None:
        """Evict a dropped block, if there is one that nobody has used since, and return its slot."""
        leaves = self._dropped.get(size) or OrderedDict()
        while leaves and not self.frozen:
            _, block = leaves.popitem()
            account = block.account
            if block.tick == GOES_FIRST and account.share.bytes > account.share.floor and account.group.may_go(block):
                parent = block.parent
                self._pool.give_back(*self._evicted(block, DROPPED))
                if parent is not None and parent.tick == GOES_FIRST:
                    self.drop(parent)
                return self._pool.take(size)
        if not leaves:
            self._dropped.pop(size, None)
        return None

    def clear(self, accounts: Sequence[Account]) -> Steps[int]:
        """Forget the blocks of `accounts` and return how many.

        Blocks in use stay, with all blocks above them, and so do blocks that are stored in the meantime.
        """
        newest = self._pool.generation
        cleared = looks = 0
        before = -1
        while cleared > before:  # blocks that become leaves by evictions in between are found next time
            before = cleared
            for account in accounts:
                account.begin_to_clear()
                while (leaf := account.pop_clearing()) is not None:
                    block: Block | None = leaf
                    looks += 1
                    while block is not None and block.generation <= newest:
                        if looks >= STEP:
                            looks = 0
                            block.account.enter(block)
                            yield
                            if not block.account.group.may_go(block):
                                block = None
                                break
                        found, block = self._clear(block)
                        looks += 1
                        cleared += found
                    if block is not None:
                        block.account.enter(block)
        return cleared

    def _clear(self, block: Block) -> tuple[bool, Block | None]:
        """Forget a leaf; return whether lookups could find it, and its parent if that has become a leaf.

        The parent does not enter the order yet, because it is cleared next.
        """
        parent = block.parent
        assert parent is not None
        parent.pins += 1
        found, _, extent, slot = self._forget(block)
        self._pool.give_back(extent, slot)
        if found:
            self._effects.gone(block, "cleared")
            self._counters["blocks_cleared"] += 1
        parent.pins -= 1
        if parent.account.group.may_go(parent):
            return found, parent
        parent.account.enter(parent)
        return found, None

    def _evicted(self, block: Block, cause: str) -> tuple[Extent[Block], int]:
        """Evict a block, and what is of no use without it; return its slot, which is not in the list of vacant slots
        yet."""
        above, group = block.parent, block.account.group
        place = self._evict(block, cause)
        if above is not None and group.above.leaf_is_useless and not self.frozen:
            last = self._evict_rest(group, above, cause) if group.is_tail else above
            for at in (last, above) if last is not above else (above,):
                left = self._evict_useless(at, cause)
                if left is not None:
                    work = self._evicting_useless(left, cause)
                    self._chores.do(self._effects.on_behalf(self._effects.actor, work))
        return place

    def _evict_rest(self, tail: Group, above: Block, cause: str) -> Block:
        """Evict the rest of a window of which the block at `above` has gone, unless it is part of a later one.

        Return the last block on which the window hung.
        """
        rest = [above]
        for _ in range(min(tail.spec.reach, STEP)):
            below = [child for child in islice(rest[-1].children(), MAX_GROUPS + 1) if not child.account.group.is_tail]
            if len(below) != 1 or tail.visible.get(below[0].hash) is None:
                break
            rest.append(below[0])
        else:
            return above
        for each in rest[1:]:
            self.evict_tails(each, cause)
        return rest[-1]

    def _evicting_useless(self, block: Block, cause: str) -> Steps[None]:
        """Continue what `_evict_useless` has left."""
        left: Block | None = block
        while left is not None:
            yield
            left = None if self.frozen else self._evict_useless(left, cause)

    def _evict_useless(self, block: Block, cause: str) -> Block | None:
        """Evict what hangs on a block, and the block and those above it, as far as no engine can use them any more.

        At most STEP blocks upwards: return the block to continue with, None if it is done.
        """
        for _ in range(STEP):
            above, group = block.parent, block.account.group
            if above is None:
                return None
            inner = any(not child.account.group.is_tail for child in islice(block.children(), MAX_GROUPS + 1))
            if not group.can_continue(block) or (group.spec.followed and not inner):
                self.evict_tails(block, cause, inner)
            if not group.may_go(block) or group.is_proof(block):
                return None
            self._pool.give_back(*self._evict(block, cause))
            block = above
        return block

    def evict_tails(self, above: Block, cause: str, inner: bool = False) -> None:
        """Evict the blocks of tails that hang on a block. If it is an `inner` one, windows may still be part of later
        ones, and stay."""
        for tail in above.account.group.tails:
            block = tail.visible.get(above.hash)
            if block is not None and tail.may_go(block) and not self.frozen and not (inner and tail.spec.reach > 1):
                self._pool.give_back(*self._evict(block, cause))

    def _evict(self, block: Block, cause: str) -> tuple[Extent[Block], int]:
        found, read, extent, slot = self._forget(block)
        if found:
            self.learner.evicted(block)
            self._effects.gone(block, cause)
            self.evictions[cause] += 1
            self.evicted_by_class[block.tick & CLASS_MASK] += 1
            if not read:
                self.evicted_unread += 1
        return extent, slot

    def forget(self, group: Group) -> None:
        """Drop what refers to a removed group, whose accounts are gone already."""
        for size, leaves in list(self._dropped.items()):
            left = ((key, each) for key, each in leaves.items() if each.account.group is not group)
            self._dropped[size] = OrderedDict(left)
            if not self._dropped[size]:
                del self._dropped[size]

    def _forget(self, block: Block) -> tuple[bool, int, Extent[Block], int]:
        """Forget a block; return whether lookups could find it, whether one has, and its slot."""
        extent, slot = self._pool.locate(block)
        parent, read = block.parent, extent.read[slot]
        before = parent.tick if parent is not None else 0
        visible = block.account.group.remove(block)
        if parent is not None and parent.ref and (read or parent.tick != before):
            self._pool.inherit(parent, read)
        block.account.share.bytes -= extent.slot_bytes
        self._pool.vacate(extent, slot)
        return visible, read, extent, slot

    def _below_ceiling(self, shares: Sequence[Share], size: int, ceiling: int, cause: str) -> bool:
        """Evict blocks of `shares` until they have room for `size` more bytes below their `ceiling`.

        If it has been lowered, what exceeds it stays, but does not grow.
        """
        ceiling = max(ceiling, sum(share.bytes for share in shares))
        while sum(share.bytes for share in shares) + size > ceiling:
            mine = [account for account in self.fair_share.accounts if account.share in shares]
            if not self._evict_from(mine, cause):
                return False
        return True

    def reassign(self, wanted: Reassign) -> Steps[bool]:
        """Empty the coldest extent of that slot size that is not being read or written; return False if there is
        none."""
        mine = [extent for extent in self._pool.extents.values() if extent.slot_bytes == wanted.slot_bytes]
        done = yield from self._empty_one(mine)
        self._counters["extents_recut"] += done
        return done

    def _empty_one(self, extents: Iterable[Extent[Block]]) -> Steps[bool]:
        candidates = sorted((each for each in extents if _may_go(each)), key=lambda extent: extent.newest)
        # The coldest, and the latest: with a chain in many extents, emptying the first one empties all others.
        middle = max(_LOOKS, len(candidates) - _LOOKS)
        looks = []
        for extent in candidates[middle:][::-1] + candidates[:_LOOKS][::-1]:
            loss = _loss(extent)
            if loss is not None:
                looks.append((loss, extent))
            yield
        looks.sort(key=lambda look: look[0])
        for extent in [extent for _, extent in looks] + candidates[_LOOKS:middle][: 2 * _LOOKS]:
            if _may_go(extent) and (yield from self._empty(extent)):
                return True
        return False

    def _empty(self, extent: Extent[Block]) -> Steps[bool]:
        """Evict the blocks of the extent and all below them; return False if one is being read or written."""
        if not (yield from self._unused(extent)) or extent.closed:  # others may have begun to empty it meanwhile
            return False
        self._pool.close(extent)
        try:
            done = 0
            for slot in range(len(extent.blocks)):
                if slot and slot % LOOK == 0:
                    yield
                while (block := extent.blocks[slot]) is not None:
                    for each in block.upwards():
                        if each is not None:
                            if each.pins or not each.visible or extent.busy:
                                return False  # since it was checked
                            self._pool.give_back(*self._evicted(each, RECUT))
                            done += 1
                        if each is None or done % STEP == 0:
                            yield
            if self._pool.extents.get(extent.index) is extent:
                self._pool.uncut_extent(extent)
            return True
        finally:
            self._pool.open(extent)

    def _unused(self, extent: Extent[Block]) -> Steps[bool]:
        """Whether no block of the extent, or below one, is being read or written."""
        seen = bytearray(extent.slots)  # by slot; a block in another extent is visited once, after its parent
        looks = 0
        for slot in range(len(extent.blocks)):
            first = None if seen[slot] else extent.blocks[slot]
            waiting = [first]
            while waiting:
                looks += 1
                if looks % LOOK == 0:
                    yield
                block = waiting.pop()
                if block is None or block.pins == GONE:
                    continue
                if block is not first:
                    waiting.append(block.next)
                if block.pins > 0 or not block.visible or extent.busy:
                    return False
                home, at = self._pool.locate(block)
                if home is extent:
                    if seen[at]:
                        continue
                    seen[at] = 1
                waiting.append(block.child)
        return not extent.busy  # a slot may have been granted meanwhile, and its block doomed


def _may_go(extent: Extent[Block]) -> bool:
    """Whether no slot of the extent is being written, and the extent is not being emptied already."""
    return not extent.busy and not extent.closed


def _loss(extent: Extent[Block]) -> tuple[float, float] | None:
    """Return the latest tick of the extent's blocks and all below them, and their number; None if one is in use.

    Beyond a bound, the search stops, and the extent comes last.
    """
    if extent.used > _LOOK_BLOCKS:
        return math.inf, math.inf
    waiting = [block for block in extent.blocks if block is not None]
    seen = set(map(id, waiting))
    latest = 0
    for block in waiting:
        if block.pins > 0 or not block.visible:
            return None
        if block.tick > latest:
            latest = block.tick
        for child in block.children():
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
            if len(waiting) > _LOOK_BLOCKS:
                return math.inf, math.inf
    return latest, len(waiting)
