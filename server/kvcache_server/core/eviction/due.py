"""Blocks that requests in engines' queues will need: they are evicted after all others. Pure.

A request is due from an announcement, which is a lookup without a lease, until its engine looks it up with one. The
requests of an engine are bounded: in number, and the distinct blocks of their prompts by half of an even split of the
pool, so that no engine holds the memory of others by queueing. Those announced first come first, and later ones are
refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcache_server.core.eviction.fair_share import FairShare
from kvcache_server.core.index import Block, Group
from kvcache_server.core.sessions import Session

DUE = 1 << 80  # above the worth of any block that is not due
SECONDS = 60.0  # for which a request is due after its last announcement
MOST = 256  # requests of an engine


@dataclass(eq=False, slots=True)
class Waiting:
    """A request. `blocks` are the last cached block of its prompt, the `depth`th, or the root, and those of suffix
    groups."""

    session: Session
    group: Group
    hashes: Sequence[bytes]
    blocks: list[Block]
    depth: int
    until: float
    number: int = 0  # in the order of the first announcement
    shared: int = 0  # the first hashes, which count for `other`: the request of this engine that has most of them, too
    other: Waiting | None = None

    def share(self, other: Waiting) -> None:
        """Share what is common with another request, if that is more than with those before."""
        mine, its, begin = self.hashes, other.hashes, self.shared
        end = min(len(mine), len(its))
        if begin < end and mine[begin] == its[begin] and other.group is self.group:
            # Equal hashes have equal ones before them.
            self.shared = bisect_left(range(end), True, begin, key=lambda at: mine[at] != its[at])
            self.other = other

    @property
    def bytes(self) -> int:
        """The bytes of its blocks that no other request of the engine counts."""
        beside = sum([block.account.group.allocated_bytes for block in self.blocks[1:]])
        return (len(self.hashes) - self.shared) * self.group.allocated_bytes + beside


class Due:
    """Attributes: `waiting` has the requests that a block is due for, by the block's id(). It is empty if none is."""

    def __init__(self, capacity: int, fair_share: FairShare) -> None:
        self.waiting: dict[int, dict[Waiting, None]] = {}
        self._capacity, self._fair_share = capacity, fair_share
        self._requests: dict[str, dict[str, Waiting]] = {}  # by engine and name
        self._last = 0

    def announce(self, request: str, each: Waiting) -> bool:
        """Note a request that waits. Return False if it is beyond the bounds, and not due."""
        engine = each.session.engine.name
        former = self.end(engine, request)
        others = self._requests.get(engine, {}).values()
        for other in others:
            each.share(other)
        engines = len({share.engine for share in self._fair_share.shares if share.live})
        size = each.bytes + sum([other.bytes for other in others])
        if len(others) >= MOST or size * 2 * engines > self._capacity:
            return False
        self._last += 1
        each.number = former.number if former else self._last
        self._requests.setdefault(engine, {})[request] = each
        for block in each.blocks:
            self.waiting.setdefault(id(block), {})[each] = None
        return True

    def end(self, engine: str, request: str) -> Waiting | None:
        """Note that a request does not wait any more; return it if it was due."""
        requests = self._requests.get(engine, {})
        each = requests.pop(request, None)
        if each is not None:
            if not requests:
                del self._requests[engine]
            for block in each.blocks:
                self._leave(each, block)
            sharing = [other for other in requests.values() if other.other is each]
            heir = max(sharing, key=lambda other: other.shared, default=None)  # counts what the others share
            for other in sharing:
                other.other = heir
            if heir is not None:
                heir.other, heir.shared = each.other, min(heir.shared, each.shared)
        return each

    def end_if(self, over: Callable[[Waiting], bool]) -> None:
        found = [(engine, name) for engine, each in self._requests.items() for name in each if over(each[name])]
        for engine, request in found:
            self.end(engine, request)

    def worth(self, block: Block) -> float:
        """Return the worth of a block that is due: the one that is due last is worth least."""
        return DUE - next(iter(self.waiting[id(block)])).number

    def shown(self, block: Block) -> None:
        """Note that lookups find a block from now on: it may be the next one of a prompt."""
        for each in list(self.waiting.get(id(block.parent), ())):
            if each.blocks[0] is block.parent and each.hashes[each.depth : each.depth + 1] == [block.hash]:
                self._move(each, block, each.depth + 1)

    def gone(self, block: Block, parent: Block) -> None:
        """Note that a block is removed: the part of the prompt above it is still due."""
        for each in list(self.waiting.get(id(block), ())):
            if each.blocks[0] is block:
                self._move(each, parent, each.depth - 1)

    def _move(self, each: Waiting, to: Block, depth: int) -> None:
        self._leave(each, each.blocks[0])
        each.blocks[0], each.depth = to, depth
        self.waiting.setdefault(id(to), {})[each] = None

    def _leave(self, each: Waiting, block: Block) -> None:
        del self.waiting[id(block)][each]
        if not self.waiting[id(block)]:
            del self.waiting[id(block)]

    def check(self) -> None:
        """Raise AssertionError unless `waiting` is what the requests say."""
        named = {(id(block), each) for each in self._all() for block in each.blocks}
        assert named == {(block, each) for block, waiting in self.waiting.items() for each in waiting}, "a stale mark"

    @property
    def bytes(self) -> int:
        """Bytes of cached blocks that are due, once per engine."""
        return sum(max(each.depth - each.shared, 0) * each.group.allocated_bytes for each in self._all())

    def _all(self) -> Iterator[Waiting]:
        return (each for requests in self._requests.values() for each in requests.values())
