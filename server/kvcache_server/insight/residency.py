"""How long blocks were cached. Pure; time is an argument.

Blocks have no timestamps, because there may be millions. Generations of slots increase with time, so a few pairs of
(generation, time) show when a slot was granted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import inf

from kvcache_server.core.index import Block
from kvcache_server.status import Histogram

_BOUNDS = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400)
_SAMPLES = 4096
_LOW = 8  # position of the lowest byte of the generation in a block's reference
_EVERY = 8  # one eviction in this many is measured: this costs a fiftieth of storing a block


class Residency:
    """Attributes: `residence` is a histogram of the time in seconds that evicted blocks were cached, of one in 8."""

    def __init__(self) -> None:
        self.residence = Histogram.of(_BOUNDS)
        self._generations: list[int] = []
        self._times: list[float] = []
        self._now = 0.0

    def tick(self, generation: int, now: float) -> None:
        """Record that `generation` is the last one used by `now`. Call it a few times per second.

        The age of blocks from before the first call, such as those of an earlier daemon, is unknown.
        """
        self._now = now
        if self._generations and generation == self._generations[-1]:
            return
        self._generations.append(generation)
        self._times.append(now)
        if len(self._times) > _SAMPLES:  # drop every second old sample: old times need not be exact
            del self._generations[1 : _SAMPLES // 2 : 2], self._times[1 : _SAMPLES // 2 : 2]

    def evicted(self, blocks: Iterable[Block]) -> None:
        """Count the blocks that are in the sample and were stored by this daemon."""
        first = self._generations[0] if self._generations else inf
        for generation in [block.generation for block in blocks if not block.ref[_LOW] % _EVERY]:
            if generation > first:
                at = bisect_left(self._generations, generation)
                given = self._times[at] if at < len(self._times) else self._now
                self.residence.add(max(0.0, self._now - given))
