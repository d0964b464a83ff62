"""What more memory would buy: blocks that lookups missed because they had been evicted. Pure.

A missed block that was stored once would be a hit if nothing had ever been evicted. So the hits and these misses
together are the hits of a pool without end. Blocks that were merely asked for before do not count: a request that
waits is asked for again and again, and nobody has computed its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

_ROOM = 1 << 14
_LEAST_LOOK = 64


class Lost:
    """Remembers blocks that were evicted: all that it is told, and beyond 16,384 of them every second, fourth, ...

    Which are remembered is decided by their hashes, so that each remembered one stands for as many that are not.
    """

    __slots__ = ("_hashes", "_look", "_mask", "_worth", "missed_blocks")

    def __init__(self, worth: int) -> None:
        """It is told of one eviction in `worth`, chosen by the hash."""
        self.missed_blocks = 0  # exact as long as every eviction is remembered, else an estimate
        self._hashes: set[bytes] = set()
        self._mask = 0
        self._set_worth(worth)

    def _set_worth(self, worth: int) -> None:
        self._worth, self._look = worth, max(4 * worth, _LEAST_LOOK)

    def add(self, block_hash: bytes) -> None:
        """Note an eviction."""
        if not self._stays(block_hash):
            return
        self._hashes.add(block_hash)
        if len(self._hashes) > _ROOM:
            self._mask = 2 * self._mask + 1
            self._set_worth(2 * self._worth)
            self._hashes = set(filter(self._stays, self._hashes))

    def missed(self, hashes: Sequence[bytes]) -> None:
        """Count those of `hashes`, the blocks of one chain that a lookup missed, that were evicted.

        A block is stored below its parent alone, so these are the first ones: their end is searched for, and most
        hashes are never looked at. One time in 50, by the luck of the draw, the search stops too early.
        """
        if not self._hashes or not self._some(hashes, 0):
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
        self.missed_blocks += known + len(self._hashes.intersection(last)) * self._worth

    def _some(self, hashes: Sequence[bytes], at: int) -> bool:
        """Whether some of those from `at` on, as many as it looks at together, was evicted."""
        return not self._hashes.isdisjoint(hashes[at : at + self._look])

    def _stays(self, block_hash: bytes) -> bool:
        return not int.from_bytes(block_hash[:8], "little") & self._mask
