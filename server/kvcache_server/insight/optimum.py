"""The hits of an optimal policy, which knows all requests beforehand: a bound for any other. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from math import inf

from kvcache_server.core.cache import Cache
from kvcache_server.core.index import FIRST_TICK, TICKS_PER_SECOND
from kvcache_server.slices import Steps
from kvcache_server.status import Hindsight

SPAN = 3600.0  # seconds of requests that are compared
_KEPT = 10.0  # seconds for which a comparison is kept: it takes some 50 ms of the daemon's time
_SLICE = 1024  # blocks: a few milliseconds
_NEVER = 1 << 62


def best_hits(prompts: Sequence[Sequence[Hashable]], blocks: int) -> Steps[int]:
    """Return the maximum number of hits of a cache of `blocks` blocks if all prompts are known beforehand.

    The optimum is Belady's: keep the blocks that are requested again soonest. A block is only useful together with
    those before it, which that rule respects: every request for a block also requests those before it, so their next
    use is never later; of blocks with the same next use, the deepest is evicted first. Hence the optimum for single
    blocks is also one for prefixes, and an upper bound for any cache of the same size that does not know the future.
    """
    following: dict[Hashable, int] = {}
    uses: list[list[int]] = []  # for each block of each prompt: the next prompt with it
    looks = 0
    for number in range(len(prompts) - 1, -1, -1):
        asked = prompts[number]
        uses.append([following.get(block, _NEVER) for block in asked])
        following.update(dict.fromkeys(asked, number))
        looks += len(asked)
        if looks >= _SLICE:
            looks = 0
            yield
    uses.reverse()
    kept: dict[Hashable, int] = {}
    # A heap: latest next use first, then deepest; no blocks are compared.
    last: list[tuple[int, int, int, Hashable]] = []
    hits = 0
    for number, (prompt, next_uses) in enumerate(zip(prompts, uses, strict=True)):
        for depth, (block, use) in enumerate(zip(prompt, next_uses, strict=True)):
            hits += kept.pop(block, None) is not None
            if use != _NEVER:
                kept[block] = use
                heapq.heappush(last, (-use, -depth, number, block))
        while len(kept) > blocks:
            use, _, _, block = heapq.heappop(last)
            if kept.get(block) == -use:
                del kept[block]
        looks += len(prompt)
        if looks >= _SLICE:
            looks = 0
            yield
    return hits


class Comparison:
    """Compares the hits of `cache` with the optimum for the same requests."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._found, self._at = Hindsight(), -inf

    def figures(self, now: float) -> Steps[Hindsight]:
        """Return the figures of the sampled requests of the last SPAN seconds; the same ones for _KEPT seconds.

        The optimum starts with the blocks that were cached when they were first requested, and stores others when they
        are requested. What is requested again at the same time, before an engine could store it, is left out.
        """
        if now - self._at < _KEPT:
            return self._found
        requests, slots = self._cache.sampled_requests()
        cached: list[list[bytes]] = []
        asked: list[list[bytes]] = []
        last: dict[bytes, tuple[int, bool]] = {}
        hits, since = 0, FIRST_TICK + int((now - SPAN) * TICKS_PER_SECOND)
        for number, (tick, name, hit) in enumerate(requests, 1):
            if tick >= since and (hit or last.get(name) != (tick, False)):
                if hit and name not in last:
                    cached.append([name])
                last[name] = tick, hit
                asked.append([name])
                hits += hit
            if number % _SLICE == 0:
                yield
        if not asked:
            return Hindsight()
        best = yield from best_hits(cached + asked, slots)
        begin = next(tick for tick, *_ in requests if tick >= since)
        seconds = max(now - (begin - FIRST_TICK) / TICKS_PER_SECOND, 0.0)
        # Of the sampled blocks, the pool may have had more than `slots` at times.
        self._found, self._at = Hindsight(round(seconds, 1), len(asked), hits, max(best, hits)), now
        return self._found
