"""The bytes that one engine's leases pin, for its quota. Pure.

A lease counts with all blocks of its chain. A prefix shared by several leases counts once per lease: an upper bound
that costs one addition. Shared blocks are only deduplicated when this bound exceeds the quota. Then chains are covered:
a covered block has a Cover and counts once, regardless of how many leases are on it or below it, and a lease counts
only with the uncovered blocks of its chain. The covered blocks of a chain are always its first ones, so a new lease
finds by bisection how much it adds.

Covering a chain, and uncovering blocks that no lease still holds, takes time per block. It is done in slices: `fit` and
`uncover` take a bounded number of steps and continue where the last call ended. Until then `bytes` is too large, never
too small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvcache_server.core.index import Block

STEPS = 4096  # per request or tick: one or two milliseconds


class Cover(msgspec.Struct, gc=False):
    """A covered block. There may be one per pinned block: no GC header, and parents are referred to by key.

    `count` is the number of its holders: leases whose last covered block it is, its covered children, and those former
    leases and children whose hold has not been released yet.
    """

    block: Block  # while it is referenced here, no other block has its id()
    parent: int  # the key of the covered block above it, 0 for none
    count: int = 1


class Lease(msgspec.Struct, gc=False):
    """Pins `block`, and with it the chain above it: an ancestor is not a leaf, and only leaves are evicted.

    `cover` is the key of the chain's last covered block, 0 for none; `bytes` is the size of the blocks below that.
    It also pins the blocks of `suffixes`, of `beside` bytes. Without a full group, it has no `block`, and no other
    bytes.
    """

    block: Block | None
    bytes: int
    cover: int = 0
    suffixes: Sequence[Block] = ()
    beside: int = 0

    @property
    def blocks(self) -> list[Block]:
        """The blocks that it pins directly."""
        return [*self.suffixes] if self.block is None else [self.block, *self.suffixes]


class Pins:
    """Attributes: `bytes`, an upper bound of the bytes that the engine's leases pin together; exact if all chains are
    covered."""

    __slots__ = ("_climb", "_covers", "_loose", "_over", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._covers: dict[int, Cover] = {}  # the key is the id() of the block
        self._loose: dict[int, Lease] = {}  # the leases with uncovered blocks; the key is the id() of the lease
        self._climb: tuple[Lease | None, list[Block]] = (None, [])  # that being covered; its uncovered blocks, upwards
        self._over: list[int] = []  # keys of covers that each lose one holder

    @property
    def settled(self) -> bool:
        return not self._over

    @property
    def exact(self) -> bool:
        """Whether `bytes` is exact: all chains are covered, and nothing remains to be uncovered."""
        return not self._loose and not self._over

    def tighten(self, steps: int = STEPS) -> None:
        """Take at most `steps` steps towards exact `bytes`."""
        steps = self.uncover(steps)
        while steps and self._loose:
            steps = self._cover(steps)

    def hold(self, block: Block | None, size: int, cover: int = 0, suffixes: Sequence[Block] = ()) -> Lease:
        """Return a new lease, which pins the given blocks; see Lease. A cover was returned by `fit` just now."""
        lease = Lease(block, size, cover, suffixes, sum([each.account.group.allocated_bytes for each in suffixes]))
        if block is not None:
            block.pins += 1
        for each in suffixes:
            each.pins += 1
        self.bytes += size + lease.beside
        if lease.bytes:
            self._loose[id(lease)] = lease
        if lease.cover:
            self._covers[lease.cover].count += 1
        return lease

    def release(self, lease: Lease) -> None:
        """End a lease. O(its blocks): those that it covered count until `uncover` gets to them."""
        self.bytes -= lease.bytes + lease.beside
        self._loose.pop(id(lease), None)
        if lease.cover:
            self._over.append(lease.cover)
        for block in lease.blocks:
            block.pins -= 1
            block.account.enter(block)

    def fit(self, found: Sequence[Block], quota: int) -> tuple[int, int, int]:
        """Return the number of blocks of `found`, a chain from its root on, that may be pinned within `quota` bytes.

        Also returns the bytes and the cover of a lease on the last of them. Takes at most STEPS steps. If they do not
        suffice, the count may be too small, and the next call continues.
        """
        covers, size = self._covers, found[0].account.group.allocated_bytes
        steps = self.uncover(STEPS)
        while True:
            covered = bisect_left(found, True, key=lambda block: id(block) not in covers)
            count = min(covered + max(0, quota - self.bytes) // size, len(found))
            if count == len(found) or not steps or not self._loose:
                break
            steps = self._cover(steps)
        return count, (count - covered) * size, id(found[covered - 1]) if covered else 0

    def uncover(self, steps: int) -> int:
        """Uncover blocks that no lease still holds, one per step, and return the number of `steps` left."""
        over = self._over
        while over and steps:
            steps -= 1
            key = over.pop()
            cover = self._covers[key]
            cover.count -= 1
            if not cover.count:
                del self._covers[key]
                self.bytes -= cover.block.account.group.allocated_bytes
                if cover.parent:
                    over.append(cover.parent)
        return steps

    def _cover(self, steps: int) -> int:
        """Cover the chain of a lease, or continue with one; return the number of `steps` left.

        Each block takes two steps: one on the way up to the covered part, and one to cover it on the way down.
        """
        covers, (lease, path) = self._covers, self._climb
        if lease is None or id(lease) not in self._loose:
            key, lease = self._loose.popitem()  # the latest: finding a dict's first entry scans deleted ones
            self._loose[key] = lease
            path = []
            self._climb = lease, path
        above = path[-1].parent if path else lease.block
        assert lease.block is not None, "only chains are loose"
        while steps and above is not None and above.parent is not None and id(above) not in covers:
            path.append(above)
            above = above.parent
            steps -= 1
        if not steps:
            return 0
        key, size = id(above) if id(above) in covers else 0, lease.block.account.group.allocated_bytes
        if key != lease.cover:  # another lease has covered more of the chain
            if key:
                covers[key].count += 1
            if lease.cover:
                self._over.append(lease.cover)
        self.bytes += len(path) * size - lease.bytes
        while path and steps:
            # The cover takes over the lease's hold on the block above.
            block = path.pop()
            covers[id(block)] = Cover(block, key)
            key = id(block)
            steps -= 1
        lease.cover, lease.bytes = key, len(path) * size
        if not path:
            del self._loose[id(lease)]
            self._climb = None, []
        return max(steps - 1, 0)

    def check(self, leases: Sequence[Lease]) -> None:
        """Raise AssertionError if the counts do not match the engine's leases."""
        covers = self._covers
        held = Counter([*(each.cover for each in leases), *(each.parent for each in covers.values()), *self._over])
        for key, cover in covers.items():
            assert key == id(cover.block) and (cover.parent in covers or not cover.parent), "a gap in what is covered"
            assert cover.count == held[key] > 0, f"a cover is held {cover.count} times, not {held[key]}"
        total = sum(each.bytes + each.beside for each in leases)
        total += sum(each.block.account.group.allocated_bytes for each in covers.values())
        assert self.bytes == total, f"{self.bytes} bytes are pinned, {total} by leases and covers"
        assert {id(each) for each in leases if each.bytes} == set(map(id, self._loose.values())), "a lease is not loose"


def uncover_all(pins: Iterable[Pins]) -> None:
    """Uncover blocks that no lease still holds, for several engines, in at most STEPS steps together."""
    steps = STEPS
    for each in pins:
        steps = each.uncover(steps)
