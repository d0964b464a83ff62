"""Making room: which block, or which whole extent, gives way to a new block. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
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

# Why a block was evicted: for another one; the engine's ceiling; its namespace's; slots of another size; a resize.
EVICTED_FOR = ("room", "own_ceiling", "namespace_ceiling", "recut", "resize")
ROOM, OWN_CEILING, NAMESPACE_CEILING, RECUT, RESIZE = EVICTED_FOR

_LOOKS = 8  # of the coldest extents and of the latest: each costs a walk of all below its blocks,
_LOOK_BLOCKS = 4096  # or of so many: a look at 16 extents takes some 10 ms at most


@final
class Reassign(msgspec.Struct, frozen=True):
    """An extent with slots of that size has to be emptied first, for slots of another size."""

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
        self.evicted_unread = 0  # of them, those that no lookup had found
        self.frozen = False  # nothing is evicted while leases of an earlier life may not be restated yet
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        capacity, ceiling = self._pool.capacity, limits.namespace_ceiling
        self.fair_share.set_limits(capacity, limits.namespace_floor)
        self._namespace_ceiling = int(ceiling * capacity) if ceiling < 1 else 0

    def make_room(self, account: Account, fixed: Container[int]) -> tuple[Extent[Block], int] | Refusal | Reassign:
        """Return a vacant slot, or QUOTA or NO_SPACE, or the Reassign that would give one.

        `fixed` are slot sizes of which no extent can be had.
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
                if worth and not self.frozen and victim.group.slot_bytes not in fixed:
                    return Reassign(victim.group.slot_bytes)
                freed = False
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

    def clear(self, accounts: Sequence[Account]) -> Steps[int]:
        """Forget all blocks of `accounts` that may go and return how many; what is above a block that stays, stays.

        So does what is stored meanwhile.
        """
        newest = self._pool.generation
        cleared = looks = 0
        before = -1
        while cleared > before:  # what others make a leaf by evictions is found the next time
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
        """Forget a leaf; return whether anybody could have found it, and its parent, where that is a leaf now.

        The parent does not stand in the order yet: it would be found there in a moment.
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
        """Note that the group is no more: its ghosts refer to accounts, and these to it."""
        self._ghosts.pop(group.tag, None)

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

    def idle(self) -> Steps[int | None]:
        """Return an extent in which nothing is, the coldest one, emptied, where all are in use; None where each one is
        read or written."""
        index = self._pool.idle()
        if index is None and not self.frozen and (yield from self._empty_one(self._pool.extents.values(), RESIZE)):
            index = self._pool.idle()
        return index

    def reassign(self, wanted: Reassign) -> Steps[bool]:
        """Empty the coldest extent of that slot size that nobody reads from or writes to; False where there is none."""
        mine = [extent for extent in self._pool.extents.values() if extent.slot_bytes == wanted.slot_bytes]
        done = yield from self._empty_one(mine, RECUT)
        self._counters["extents_recut"] += done
        return done

    def _empty_one(self, extents: Iterable[Extent[Block]], cause: str) -> Steps[bool]:
        candidates = sorted((each for each in extents if _may_go(each)), key=lambda extent: extent.newest)
        # The coldest, and the latest cut: of a chain in many extents, the first one takes all others along.
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
        """Evict what lives in the extent, and all below; False where somebody reads or writes some of it."""
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
                                return False  # since it was looked at
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
        """Whether nobody reads or writes what lives in the extent, or below that."""
        seen = bytearray(extent.slots)  # by slot; what lives elsewhere is met once, after its parent
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
    """Whether nothing is written in the extent, and nobody empties it already."""
    return not extent.busy and not extent.closed


def _loss(extent: Extent[Block]) -> tuple[float, float] | None:
    """Return the latest tick of the extent's blocks and all below them, and how many these are; None where one is read
    or written.

    Past a bound, nobody looks on: such an extent goes last.
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
