"""The gain from more memory: blocks that lookups missed because they had been evicted, or had not been stored for lack
of room. Pure.

A missed block that was computed before would be a hit if there had always been room. So the hits plus these misses are
the hits of an infinite pool. Blocks that were only requested before do not count: a waiting request is looked up again
and again, and its blocks have not been computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from kvcache_proto.counts import MAX_COUNT
from kvcache_server.core.limits import LOOK
from kvcache_server.core.sampling import LARGE_POOL, LARGE_POOL_EVERY, KeyedHasher

_ROOM = 1 << 14
_LEAST_LOOK = 64
_TOGETHER = 512  # hashes that are keyed at once, which takes little longer than keying one


class InfiniteCache:
    """Remembers evicted blocks, and those refused for lack of room: all of a small pool, one in 32 of a large one;
    beyond 16,384, every second of these, then every fourth, and so on.

    Keyed hashes of them (sampling.py) decide which ones are remembered, so that each stands for the same number of
    blocks.
    """

    def __init__(self, slots: int, hasher: KeyedHasher) -> None:
        """The pool has `slots` slots; `hasher` keys hashes."""
        self._hasher = hasher
        self.missed_blocks = 0  # exact as long as every eviction is remembered, otherwise an estimate
        self._keyed: dict[bytes, int] = {}  # by hash: the sample is halved without keying again
        self._new: list[bytes] = []  # hashes that are not keyed yet
        self._every = 1 if slots <= LARGE_POOL else LARGE_POOL_EVERY  # a power of two

    @property
    def _look(self) -> int:
        return max(4 * self._every, _LEAST_LOOK)

    def __len__(self) -> int:
        self._key_new()
        return len(self._keyed)

    def add(self, hashes: Iterable[bytes]) -> None:
        """Record that blocks were evicted or refused."""
        self._new += hashes
        if len(self._new) >= _TOGETHER:
            self._key_new()

    def _key_new(self) -> None:
        """Key the hashes that were added since the last time."""
        new, self._new = self._new, []
        for at in range(0, len(new), LOOK):
            piece = new[at : at + LOOK]
            keyed: list[int] = self._hasher.of(b"".join(piece), len(piece[0])).tolist()
            self._keyed.update((name, key) for name, key in zip(piece, keyed, strict=True) if key % self._every == 0)
            self._thin()

    def _thin(self) -> None:
        if len(self._keyed) > _ROOM:
            self._every *= 2
            half = ((name, key) for name, key in self._keyed.items() if key % self._every == 0)
            self._keyed = dict(islice(half, _ROOM * 3 // 4))  # about half; few enough that it is not halved again soon

    def missed(self, hashes: Sequence[bytes]) -> None:
        """Count those of `hashes`, the blocks of one chain that a lookup missed, that were evicted.

        A block is only stored below its parent, so these are the first ones. Their end is found by a search that skips
        most hashes. In one of 50 cases, by chance, the search stops too early.
        """
        self._key_new()
        if not self._keyed or not self._some(hashes, 0):
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
        missed = known + len(self._keyed.keys() & last) * self._every
        self.missed_blocks = min(self.missed_blocks + missed, MAX_COUNT)

    def _some(self, hashes: Sequence[bytes], at: int) -> bool:
        """Whether one of the next `_look` hashes from `at` on was evicted."""
        return not self._keyed.keys().isdisjoint(hashes[at : at + self._look])
