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
        """Count those of `hashes`, the blocks of one chain that a lookup missed, that were evicted. In C."""
        for at in range(0, len(hashes), self._look) if self._hashes else ():
            found = len(self._hashes.intersection(hashes[at : at + self._look]))
            if not found:
                return  # none of those below was ever stored; or one in 50 times, by the luck of the draw
            self.missed_blocks += found * self._worth

    def _stays(self, block_hash: bytes) -> bool:
        return not int.from_bytes(block_hash[:8], "little") & self._mask
