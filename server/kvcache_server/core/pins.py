"""What one engine's leases pin, against its quota. Pure.

A lease counts with all blocks of its chain, so that a prefix that many leases share counts once per lease: an upper
bound, which costs an addition. Only where it exceeds the quota are shared blocks told apart. Then chains are covered: a
covered block has a Cover and counts once, however many leases are on it or below it, and a lease counts with what of
its chain is not covered. The covered blocks of a chain are always its first ones, so that a new lease finds by
bisection what it adds.

To cover a chain, and to uncover what nobody holds any more, takes time for each block. It is done in slices: `fit` and
`uncover` take so many steps and go on where the last call ended. Until then `bytes` is too large, never too small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvcache_server.core.index import Block

STEPS = 4096  # of one request or tick: a millisecond or two


class Cover(msgspec.Struct, gc=False):
    """A covered block. There may be as many as blocks are pinned: no GC header, and parents are named by key.

    `count` says who holds it: the leases that it is the last covered block of, its covered children, and those of both
    that have not let go of it yet.
    """

    block: Block  # as long as it is held here, no other block has its id()
    parent: int  # the key of the covered block above it, 0 for none
    count: int = 1


class Lease(msgspec.Struct, gc=False):
    """Pins `block` and with it the whole chain above it: an ancestor is no leaf, and only leaves are evicted.

    `cover` is the key of the last covered block of the chain, 0 for none; `bytes` are those of the blocks below it.
    """

    block: Block
    bytes: int
    cover: int = 0


class Pins:
    """Attributes: `bytes`, at least as many as the engine's leases pin together; exact where all chains are covered."""

    __slots__ = ("_climb", "_covers", "_loose", "_over", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._covers: dict[int, Cover] = {}  # the key is the id() of the block
        self._loose: dict[int, Lease] = {}  # by number: the leases that have uncovered blocks
        self._climb: tuple[int, list[Block]] = (0, [])  # the lease that is being covered: its uncovered blocks, upwards
        self._over: list[int] = []  # keys of covers, each to be held once less

    @property
    def settled(self) -> bool:
        """Whether `uncover` has nothing to do."""
        return not self._over

    def add(self, number: int, lease: Lease) -> None:
        """Count a new lease. If it has a cover, `fit` has just found it."""
        self.bytes += lease.bytes
        if lease.bytes:
            self._loose[number] = lease
        if lease.cover:
            self._covers[lease.cover].count += 1

    def drop(self, number: int, lease: Lease) -> None:
        """Count a lease no more. O(1): what it covered counts until it is uncovered by `uncover`."""
        self.bytes -= lease.bytes
        self._loose.pop(number, None)
        if lease.cover:
            self._over.append(lease.cover)

    def fit(self, found: Sequence[Block], quota: int) -> tuple[int, int, int]:
        """Return how many blocks of `found`, a chain from its root on, may be pinned without exceeding `quota`.

        With it, what a lease on the last of them is made of: its bytes and its cover. Takes STEPS steps at most. Where
        they do not suffice, the answer may be too small, and the next call goes on.
        """
        covers, size = self._covers, found[0].account.group.slot_bytes
        steps = self.uncover(STEPS)
        while True:
            covered = bisect_left(found, True, key=lambda block: id(block) not in covers)
            count = min(covered + max(0, quota - self.bytes) // size, len(found))
            if count == len(found) or not steps or not self._loose:
                break
            steps = self._cover(steps)
        return count, (count - covered) * size, id(found[covered - 1]) if covered else 0

    def uncover(self, steps: int) -> int:
        """Uncover what no lease holds any more, one block a step, and return how many of the `steps` are left."""
        over = self._over
        while over and steps:
            steps -= 1
            key = over.pop()
            cover = self._covers[key]
            cover.count -= 1
            if not cover.count:
                del self._covers[key]
                self.bytes -= cover.block.account.group.slot_bytes
                if cover.parent:
                    over.append(cover.parent)
        return steps

    def _cover(self, steps: int) -> int:
        """Cover the chain of a lease, or go on with one; return how many of the `steps` are left.

        A block takes two: one on the way up to what is covered, and one to cover it on the way down again.
        """
        covers, (number, path) = self._covers, self._climb
        lease = self._loose.get(number)
        if lease is None:
            number, lease = self._loose.popitem()  # the latest: a dict looks for its first one among all that are gone
            self._loose[number] = lease
            path = []
            self._climb = number, path
        above = path[-1].parent if path else lease.block
        while steps and above is not None and above.parent is not None and id(above) not in covers:
            path.append(above)
            above = above.parent
            steps -= 1
        if not steps:
            return 0
        key, size = id(above) if id(above) in covers else 0, lease.block.account.group.slot_bytes
        if key != lease.cover:  # another lease has covered more of the chain
            if key:
                covers[key].count += 1
            if lease.cover:
                self._over.append(lease.cover)
        self.bytes += len(path) * size - lease.bytes
        while path and steps:
            # It takes over the hold that the lease has on the block above it.
            block = path.pop()
            covers[id(block)] = Cover(block, key)
            key = id(block)
            steps -= 1
        lease.cover, lease.bytes = key, len(path) * size
        if not path:
            del self._loose[number]
            self._climb = 0, []
        return max(steps - 1, 0)

    def check(self, leases: Sequence[Lease]) -> None:
        """Raise AssertionError unless all adds up, given the engine's leases."""
        covers = self._covers
        held = Counter([*(each.cover for each in leases), *(each.parent for each in covers.values()), *self._over])
        for key, cover in covers.items():
            assert key == id(cover.block) and (cover.parent in covers or not cover.parent), "a gap in what is covered"
            assert cover.count == held[key] > 0, f"a cover is held {cover.count} times, not {held[key]}"
        total = sum(each.bytes for each in leases)
        total += sum(each.block.account.group.slot_bytes for each in covers.values())
        assert self.bytes == total, f"{self.bytes} bytes are pinned, {total} by leases and covers"
        assert {id(each) for each in leases if each.bytes} == set(map(id, self._loose.values())), "a lease is not loose"


def uncover_all(pins: Iterable[Pins]) -> None:
    """Uncover what no lease of several engines holds any more, in at most STEPS steps together."""
    steps = STEPS
    for each in pins:
        steps = each.uncover(steps)
