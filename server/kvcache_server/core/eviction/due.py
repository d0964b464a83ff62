"""Blocks that requests in engines' queues will need: they are evicted after all others. Pure.

A request is due from an announcement, which is a lookup without a lease, until its engine looks it up with one. What is
due of one engine is bounded: in number, and in bytes by half of an even split of the pool, so that no engine holds the
memory of others by queueing. Requests beyond that are not due, because those announced first come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache_server.core.eviction.fair_share import FairShare
from kvcache_server.core.index import Block, Group
from kvcache_server.core.sessions import Session

DUE = 1 << 80  # above the worth of any block that is not due
SECONDS = 60.0  # for which a request is due after its last announcement
MOST, DIVISOR = 256, 8  # requests of an engine; their prompts have at most capacity // DIVISOR bytes


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
    bytes: int = 0  # of the whole prompt
    number: int = 0  # in the order of the first announcement


class Due:
    """Attributes: `waiting` has the requests that a block is due for, by the block's id(). It is empty if none is."""

    def __init__(self, capacity: int, fair_share: FairShare) -> None:
        self.waiting: dict[int, dict[Waiting, None]] = {}
        self._capacity, self._fair_share = capacity, fair_share
        self._requests: dict[tuple[str, str], Waiting] = {}  # by engine and name
        self._last = 0

    def announce(self, request: str, each: Waiting) -> bool:
        """Note a request that waits. Return False if it is beyond the bounds, and not due."""
        engine = each.session.engine.name
        former = self.end(engine, request)
        each.bytes = len(each.hashes) * each.group.allocated_bytes
        each.bytes += sum([block.account.group.allocated_bytes for block in each.blocks[1:]])
        sizes = [each.bytes, *(other.bytes for (name, _), other in self._requests.items() if name == engine)]
        engines = len({share.engine for share in self._fair_share.shares if share.live})
        if len(sizes) > MOST or sum(sizes) > self._capacity // max(DIVISOR, 2 * engines):
            return False
        self._last += 1
        each.number = former.number if former else self._last
        self._requests[engine, request] = each
        for block in each.blocks:
            self.waiting.setdefault(id(block), {})[each] = None
        return True

    def end(self, engine: str, request: str) -> Waiting | None:
        """Note that a request does not wait any more; return it if it was due."""
        each = self._requests.pop((engine, request), None)
        if each is not None:
            for block in each.blocks:
                self._leave(each, block)
        return each

    def end_if(self, over: Callable[[Waiting], bool]) -> None:
        for engine, request in [key for key, each in self._requests.items() if over(each)]:
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
        named = {(id(block), each) for each in self._requests.values() for block in each.blocks}
        assert named == {(block, each) for block, waiting in self.waiting.items() for each in waiting}, "a stale mark"

    @property
    def bytes(self) -> int:
        """Bytes of cached blocks that are due, once per request."""
        return sum(each.depth * each.group.allocated_bytes for each in self._requests.values())
