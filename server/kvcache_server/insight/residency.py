"""How long blocks were cached. Pure; time is an argument.

A block has no time of its own: there may be millions. Generations of slots grow with time, so that a few pairs of both
tell when a slot was given.
"""

from __future__ import annotations

from bisect import bisect_left

from kvcache_server.core.index import Block
from kvcache_server.insight.histogram import Histogram

_BOUNDS = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 7 * 86400)
_SAMPLES = 4096
_LOW = 8  # where in a block's reference the lowest byte of its generation is
_EVERY = 8  # evictions, of which one is looked at: a look costs a fiftieth of what storing a block does


class Residency:
    """Attributes: `residence`, of blocks that were evicted, in seconds; it has one in 8 of them."""

    def __init__(self) -> None:
        self.residence = Histogram(_BOUNDS)
        self._generations: list[int] = []
        self._times: list[float] = []
        self._now = 0.0

    def tick(self, generation: int, now: float) -> None:
        """Note that `generation` is the last one given by `now`. Call it a few times a second.

        Of blocks before the first call, those of an earlier life among them, nothing is known.
        """
        self._now = now
        if self._generations and generation == self._generations[-1]:
            return
        self._generations.append(generation)
        self._times.append(now)
        if len(self._times) > _SAMPLES:  # the older, the fewer: what is old need not be known to the second
            del self._generations[1 : _SAMPLES // 2 : 2], self._times[1 : _SAMPLES // 2 : 2]

    def evicted(self, block: Block) -> None:
        """Count the block, if it is one of those looked at and of this life."""
        if block.ref[_LOW] % _EVERY:
            return
        generation = block.generation
        if not self._generations or generation <= self._generations[0]:
            return
        at = bisect_left(self._generations, generation)
        given = self._times[at] if at < len(self._times) else self._now
        self.residence.add(max(0.0, self._now - given))
