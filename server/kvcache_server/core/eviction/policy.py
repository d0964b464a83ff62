"""Making room for new blocks: which block, or which whole extent, is evicted. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import final

import msgspec

from kvcache_proto.types import Refusal
from kvcache_server.core.effects import Effects, Gone
from kvcache_server.core.eviction.fair_share import FairShare
from kvcache_server.core.eviction.ghosts import Ghosts
from kvcache_server.core.extent import Extent
from kvcache_server.core.index import GONE, Account, Block, Group
from kvcache_server.core.limits import Limits
from kvcache_server.core.pool import Pool
from kvcache_server.core.sampling import Draw
from kvcache_server.core.slices import LOOK, STEP, Steps

# Why a block was evicted: for another block; the engine's or its namespace's ceiling; slots of another size; a resize;
# for another block, after an engine had said that nobody needs it again.
EVICTED_FOR = ("room", "own_ceiling", "namespace_ceiling", "recut", "resize", "dropped")
ROOM, OWN_CEILING, NAMESPACE_CEILING, RECUT, RESIZE, DROPPED = EVICTED_FOR
UNWANTED = 1  # a tick before all others
_MOST_DROPPED = 16_384  # chains that are remembered as dropped; older ones are evicted in their turn

_LOOKS = 8  # of the coldest and of the latest extents: each costs a walk of all descendants of its blocks,
_LOOK_BLOCKS = 4096  # or of this many: 16 extents take 10 ms at most


@final
class Reassign(msgspec.Struct, frozen=True):
    """An extent with slots of this size must be emptied first, for slots of another size."""

    slot_bytes: int


class Eviction:
    """Evicts from the accounts that are furthest above their shares."""

    def __init__(self, pool: Pool, limits: Limits, counters: Counter[str], effects: Effects, draw: Draw) -> None:
        """`draw` decides which evicted blocks are remembered."""
        self._pool = pool
        self._counters = counters
        self._effects = effects
        self._draw = draw
        self._ghosts: dict[bytes, Ghosts] = {}  # by the group's tag
        self.fair_share = self._shares = FairShare(pool.capacity, limits.namespace_floor)
        self.evictions: Counter[str] = Counter()  # blocks by cause
        self.evicted_unread = 0  # evicted blocks that no lookup had found
        self._dropped: dict[int, dict[int, Block]] = {}  # unwanted leaves by slot size and id()
        self.retaining = False  # whether an engine retains blocks
        # Ends what an engine retains, before the account loses a block, or is refused one, below its floor.
        self.give_way: Callable[[Account, bool], bool] = lambda account, refused: False
        self.frozen = False  # nothing is evicted while leases of an earlier epoch may not be restated yet
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        capacity, ceiling = self._pool.capacity, limits.namespace_ceiling
        self.fair_share.set_limits(capacity, limits.namespace_floor)
        self._namespace_ceiling = int(ceiling * capacity) if ceiling < 1 else 0

    def make_room(self, account: Account, fixed: Container[int]) -> tuple[Extent[Block], int] | Refusal | Reassign:
        """Return a vacant slot, or QUOTA or NO_SPACE, or the Reassign that would free one.

        `fixed` are slot sizes whose extents cannot be reassigned.
        """
        size = account.group.slot_bytes
        if account.ceiling and account.bytes + size > account.ceiling and not self.evict(account, OWN_CEILING):
            return Refusal.QUOTA
        if self._namespace_ceiling and not self._below_ceiling(account):
            return Refusal.QUOTA
        place = self._pool.take(size)
        if place is None and self._dropped:
            place = self._take_dropped(size)
        if place is not None:
            return place
        for excess, victim in self._shares.by_excess():
            if victim.group.slot_bytes == size:
                if excess < 0 and self.retaining and victim.bytes and self.give_way(victim, False):
                    return self.make_room(account, fixed)
                freed = self.evict(victim, ROOM)
            else:
                # A whole extent is reassigned only for more than a few slots, unless the account has none.
                worth = excess >= self._pool.extent_bytes or (excess > 0 and not account.bytes)
                if worth and not self.frozen and victim.group.slot_bytes not in fixed:
                    return Reassign(victim.group.slot_bytes)
                freed = False
            if freed:
                place = self._pool.take(size)
                if place is not None:
                    return place
        return Refusal.NO_SPACE

    def evict(self, account: Account, cause: str) -> bool:
        """Evict the coldest leaf of `account`; return False if it has none that may be evicted."""
        block = None if self.frozen else account.pop_coldest()
        if block is None:
            return False
        self._evicted(block, cause)
        return True

    def drop(self, leaf: Block) -> None:
        """Evict `leaf`, whose tick is UNWANTED, before all others, and then the unwanted blocks above it."""
        leaves = self._dropped.setdefault(leaf.account.group.slot_bytes, {})
        leaves.pop(id(leaf), None)
        leaves[id(leaf)] = leaf
        if len(leaves) > _MOST_DROPPED:
            del leaves[next(iter(leaves))]

    def _take_dropped(self, size: int) -> tuple[Extent[Block], int] | None:
        """Evict a dropped block, if there is one that nobody has used since, and return its slot."""
        leaves = self._dropped.get(size, {})
        self._shares.by_excess()  # which notes the accounts' floors
        while leaves and not self.frozen:
            _, block = leaves.popitem()
            account = block.account
            if block.tick == UNWANTED and account.bytes > account.floor and account.group.may_go(block):
                parent = block.parent
                self._evicted(block, DROPPED)
                if parent is not None and parent.tick == UNWANTED:
                    leaves[id(parent)] = parent
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
        found, _ = self._forget(block)
        if found:
            self._effects.gone(block, "cleared")
            self._counters["blocks_cleared"] += 1
        parent.pins -= 1
        if parent.account.group.may_go(parent):
            return found, parent
        parent.account.enter(parent)
        return found, None

    def _evicted(self, block: Block, cause: str) -> None:
        group = block.account.group
        found, read = self._forget(block)
        if found:
            ghosts = self._ghosts.get(group.tag) or self._ghosts_of(group)
            lot = ghosts.add(block.hash, block.account)
            self._effects.changes.append(Gone(block, cause, self._effects.actor, True, lot))
            self.evictions[cause] += 1
            if not read:
                self.evicted_unread += 1
            self._shares.evicted(group.slot_bytes)

    def _ghosts_of(self, group: Group) -> Ghosts:
        geometry = self._pool.geometry
        slots = geometry.extents * geometry.extent_bytes // group.slot_bytes
        found = self._ghosts[group.tag] = Ghosts(slots, self._draw)
        return found

    def missed(self, group: Group, hashes: Sequence[bytes]) -> None:
        """Note that a lookup asked for `hashes` and found none of them."""
        ghosts = self._ghosts.get(group.tag)
        if ghosts is not None:
            ghosts.missed(hashes)

    def forget(self, group: Group) -> None:
        """Drop the ghosts and leaves of a removed group: they refer to accounts, which refer to the group."""
        self._ghosts.pop(group.tag, None)
        for size, leaves in list(self._dropped.items()):
            self._dropped[size] = {key: each for key, each in leaves.items() if each.account.group is not group}
            if not self._dropped[size]:
                del self._dropped[size]

    def _forget(self, block: Block) -> tuple[bool, int]:
        """Forget a block; return whether lookups could find it, and whether one has."""
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

    def idle(self) -> Steps[int | None]:
        """Return an empty extent. If all are in use, empty the coldest one first; None if each is being read or
        written."""
        index = self._pool.idle()
        if index is None and not self.frozen and (yield from self._empty_one(self._pool.extents.values(), RESIZE)):
            index = self._pool.idle()
        return index

    def reassign(self, wanted: Reassign) -> Steps[bool]:
        """Empty the coldest extent of that slot size that is not being read or written; return False if there is
        none."""
        mine = [extent for extent in self._pool.extents.values() if extent.slot_bytes == wanted.slot_bytes]
        done = yield from self._empty_one(mine, RECUT)
        self._counters["extents_recut"] += done
        return done

    def _empty_one(self, extents: Iterable[Extent[Block]], cause: str) -> Steps[bool]:
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
            if _may_go(extent) and (yield from self._empty(extent, cause)):
                return True
        return False

    def _empty(self, extent: Extent[Block], cause: str) -> Steps[bool]:
        """Evict the blocks of the extent and all below them; return False if one is being read or written."""
        if not (yield from self._unused(extent)):
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
                            self._evicted(each, cause)
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
        return True


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
