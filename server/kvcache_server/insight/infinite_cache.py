"""What more memory would buy: blocks that lookups missed because they had been evicted. Pure.

A missed block that was stored before would be a hit if nothing had ever been evicted. So the hits and these misses
together are the hits of an infinite pool. Blocks that were only requested before do not count: a waiting request is
looked up again and again, and its blocks have not been computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvcache_proto.counts import MAX_COUNT

_ROOM = 1 << 14
_LEAST_LOOK = 64


class InfiniteCache:
    """Remembers evicted blocks: all that it is given, and beyond 16,384 only every second, fourth, and so on.

    Their lots (sampling.py) decide which ones are remembered, so that each stands for the same number of blocks.
    """

    __slots__ = ("_every", "_look", "_lots", "_mask", "missed_blocks")

    def __init__(self, every: int) -> None:
        """`add` is called for one in `every` evictions."""
        self.missed_blocks = 0  # exact as long as every eviction is remembered, otherwise an estimate
        self._lots: dict[bytes, int] = {}  # by hash: to halve the sample, no lot is drawn again
        self._mask = 0
        self._sample(every)

    def _sample(self, every: int) -> None:
        self._every, self._look = every, max(4 * every, _LEAST_LOOK)

    def __len__(self) -> int:
        return len(self._lots)

    def add(self, block_hash: bytes, lot: int) -> None:
        """Record the eviction of the block with that `lot`."""
        if lot & self._mask:
            return
        self._lots[block_hash] = lot
        if len(self._lots) > _ROOM:
            self._mask = mask = 2 * self._mask + 1
            self._sample(2 * self._every)
            half = ((name, lot) for name, lot in self._lots.items() if not lot & mask)
            self._lots = dict(islice(half, _ROOM * 3 // 4))  # about half; few enough that it is not halved again soon

    def missed(self, hashes: Sequence[bytes]) -> None:
        """Count how many of `hashes`, the blocks of one chain that a lookup missed, were evicted.

        A block is only stored below its parent, so these are the first ones. Their end is found by a search that skips
        most hashes. In one of 50 cases, by chance, the search stops too early.
        """
        if not self._lots or not self._some(hashes, 0):
            return
        look, known, unknown = self._look, 0, self._look
        while unknown < len(hashes) and self._some(hashes, unknown):
            known, unknown = unknown, 2 * unknown
        while unknown - known > look:
            middle = (known + unknown) // 2 // look * look
            if middle < len(hashes) and self._some(hashes, middle):
                known = middle
            else:
                unknown = middle
        last = hashes[known : known + look]
        missed = known + len(self._lots.keys() & last) * self._every
        self.missed_blocks = min(self.missed_blocks + missed, MAX_COUNT)

    def _some(self, hashes: Sequence[bytes], at: int) -> bool:
        """Whether one of the next `_look` hashes from `at` on was evicted."""
        return not self._lots.keys().isdisjoint(hashes[at : at + self._look])
