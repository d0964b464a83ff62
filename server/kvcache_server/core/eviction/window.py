"""The latest blocks of the sample that were asked for: how many the pool found, and how many other caches would have
found. Pure."""

from __future__ import annotations

from array import array

import msgspec

from kvcache_server.core.eviction.optimum import most_hits
from kvcache_server.core.slices import Steps

KEPT = 1 << 14  # blocks asked for; eight bytes each
EVERY = 10.0  # seconds between two comparisons of more than FEW blocks: one takes some 30 ms
FEW = 1024
_POOL, _AGE, _WORTH = 1, 2, 4
_NAME = -8  # the bits of a hash that are kept


class Comparison(msgspec.Struct, frozen=True):
    """Of the latest `blocks` of the sample that were asked for: how many the pool found; how many were found by the
    guard's small caches, which evict by age and by worth; and how many the best possible one of their size would have
    found (an estimate, but not less than any of these). A block in the sample stands for `one_in` blocks.
    """

    blocks: int = 0
    one_in: int = 1
    pool: int = 0
    age: int = 0
    worth: int = 0
    optimum: int = 0


class Window:
    """A ring buffer. The older half of it is not compared: the caches had blocks from before, and the best possible one
    can only have those that are in the ring."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all, because the sample is another one now."""
        self._ring = array("q")
        self._next = 0
        self._latest: Comparison | None = None
        self._at = 0.0  # seconds
        self._comparing = False

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, name: bytes, in_pool: bool, by_age: bool, by_worth: bool) -> None:
        """Note that a block was asked for, and who found it."""
        entry = hash(name) & _NAME | in_pool * _POOL | by_age * _AGE | by_worth * _WORTH
        if len(self._ring) < KEPT:
            self._ring.append(entry)
        else:
            self._ring[self._next] = entry
            self._next = (self._next + 1) % KEPT

    def compare(self, slots: int, one_in: int, now: float) -> Steps[Comparison]:
        """Return the comparison with the best possible cache of `slots` slots; of many blocks, one that is up to EVERY
        seconds old suffices."""
        ring, latest = self._ring, self._latest
        if latest is not None and len(ring) > FEW and (self._comparing or now - self._at < EVERY):
            return latest
        entries = (ring[self._next :] + ring[: self._next]).tolist()
        older = len(entries) // 2
        pool, age, worth = (sum(entry & bit > 0 for entry in entries[older:]) for bit in (_POOL, _AGE, _WORTH))
        self._comparing, self._at = True, now
        try:
            yield
            best = yield from most_hits([(entry & _NAME,) for entry in entries], slots, older)
        finally:
            self._comparing = False
        found = Comparison(len(entries) - older, one_in, pool, age, worth, max(best, pool, age, worth))
        if ring is self._ring:
            self._latest = found
        return found
