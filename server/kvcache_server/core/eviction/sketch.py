"""How often blocks that are not cached were requested. Pure.

A lookup's misses are counted together, by numpy: some 0.05 us per block, and 20 us per lookup.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache_server.core.index import CLASS_MASK, OFTEN, PACE_BEGINS, PACE_SHIFT, TICKS_PER_SECOND
from kvcache_server.core.sampling import HashArray

MOST = 3  # requests that are counted
_MARK_BITS, _TIME_BITS, _COUNT_BITS = 12, 18, 2  # of a cell
_MARK_SHIFT = _TIME_BITS + _COUNT_BITS
_MARK, _TIME = np.uint64((1 << _MARK_BITS) - 1), (1 << _TIME_BITS) - 1
_TIME_SHIFT = TICKS_PER_SECOND.bit_length() - 4  # from ticks to eighths of a second, which wrap after nine hours
_HALF, _SAMPLED_SHIFT = np.uint64(32), np.uint64(14)
_PACE_BEGINS = -(-np.array(PACE_BEGINS) >> _TIME_SHIFT)


class Sketch:
    """The counts, 0 to MOST, in a table with four bytes per cell.

    It is direct-mapped and overwritten. With each count it stores the time of the last request, and some bits of the
    block's keyed hash, so wrong answers are rare.
    """

    __slots__ = ("_cells", "_size")

    def __init__(self, cells: int) -> None:
        self._size = np.uint64(max(cells, 1))
        self._cells = np.zeros(int(self._size), np.uint32)

    def __len__(self) -> int:
        return int(self._size)

    def ask(self, keyed: HashArray, begins: Sequence[int], now: int) -> list[int]:
        """Count requests at tick `now` for prompts, which begin at the positions `begins`. Return the class and pace
        of each block, as in a tick: how often it was requested before, up to OFTEN, and how long ago.

        A request for a block includes those above it, so each was requested at least as often as those below it.
        """
        cells, at, marks, time = self._cells, self._at(keyed), self._marks(keyed), now >> _TIME_SHIFT & _TIME
        found, asked = cells[at], marks << _MARK_SHIFT | time << _COUNT_BITS
        known = found >> _MARK_SHIFT == marks
        if not np.count_nonzero(known):
            cells[at] = asked | 1
            return [0] * len(keyed)
        counts = np.where(known, found & MOST, 0)
        paces = np.searchsorted(_PACE_BEGINS, time - (found >> _COUNT_BITS) & _TIME, "right") << PACE_SHIFT
        paces = np.where(counts > 0, paces, 0)
        if len(begins) == 1:
            counts = np.maximum.accumulate(counts[::-1])[::-1]
        else:
            lengths = np.diff([*begins, len(keyed)])
            others = np.repeat(np.arange(len(begins), 0, -1) * (MOST + 1), lengths)  # more for each earlier prompt
            counts = np.maximum.accumulate((counts + others)[::-1])[::-1] - others
        cells[at] = asked | np.minimum(counts + 1, MOST).astype(np.uint32)
        classes: list[int] = (np.minimum(counts, OFTEN) | paces).tolist()
        return classes

    def recall(self, keyed: HashArray) -> list[int]:
        """Return the class of each block: how often it was requested before the last time, up to OFTEN."""
        found = self._cells[self._at(keyed)]
        counts = np.where(found >> _MARK_SHIFT == self._marks(keyed), found & MOST, 0).astype(np.int64)
        classes: list[int] = np.clip(counts - 1, 0, OFTEN).tolist()
        return classes

    def put(self, keyed: HashArray, ticks: Sequence[int]) -> None:
        """Store that blocks were requested, as often and when their ticks say."""
        each = np.array(ticks, np.int64)
        counts = ((each & CLASS_MASK) + 1 | (each >> _TIME_SHIFT & _TIME) << _COUNT_BITS).astype(np.uint32)
        self._cells[self._at(keyed)] = self._marks(keyed) << _MARK_SHIFT | counts

    def _at(self, keyed: HashArray) -> NDArray[np.uint64]:
        return (keyed >> _HALF) * self._size >> _HALF

    @staticmethod
    def _marks(keyed: HashArray) -> NDArray[np.uint32]:
        return (keyed & _MARK).astype(np.uint32)


def sampled(keyed: HashArray, every: int) -> list[int]:
    """Return the positions of the keyed hashes that are in a sample of one in `every`, a power of two.

    It uses other bits than the marks of a sketch.
    """
    chosen: list[int] = (keyed >> _SAMPLED_SHIFT & np.uint64(every - 1) == 0).nonzero()[0].tolist()
    return chosen
