"""The most hits that any cache of a size could have had. Pure.

The optimum is Belady's: keep the blocks that are requested again soonest. A block is only useful together with those
before it, which that rule respects: every request for a block also requests those before it, so their next use is never
later; of blocks with the same next use, the deepest is evicted first. Hence the optimum for single blocks is also one
for prefixes, and an upper bound for any cache of the same size that does not know the future.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import TypeVar

from kvcache_server.core.slices import Steps

_NEVER = 1 << 62
_SLICE = 1024  # blocks: a few milliseconds
Name = TypeVar("Name", bound=Hashable)


def most_hits(prompts: Sequence[Sequence[Name]], blocks: int, counted: int = 0) -> Steps[int]:
    """Return the most hits that a cache of `blocks` blocks can have if all prompts are known beforehand.

    Only those from position `counted` on are counted; the ones before fill the cache.
    """
    following: dict[Name, int] = {}
    uses: list[list[int]] = []  # for each block of each prompt: the next prompt with it
    work = 0
    for number in range(len(prompts) - 1, -1, -1):
        asked = prompts[number]
        uses.append([following.get(block, _NEVER) for block in asked])
        following.update(dict.fromkeys(asked, number))
        work += len(asked)
        if work >= _SLICE:
            work = 0
            yield
    uses.reverse()
    kept: dict[Name, int] = {}
    last: list[tuple[int, int, int, Name]] = []  # a heap: latest next use first, then deepest; no names are compared
    hits = 0
    for number, (prompt, next_uses) in enumerate(zip(prompts, uses, strict=True)):
        for depth, (block, use) in enumerate(zip(prompt, next_uses, strict=True)):
            hits += kept.pop(block, None) is not None and number >= counted
            if use != _NEVER:
                kept[block] = use
                heapq.heappush(last, (-use, -depth, number, block))
        while len(kept) > blocks:
            use, _, _, block = heapq.heappop(last)
            if kept.get(block) == -use:
                del kept[block]
        work += len(prompt)
        if work >= _SLICE:
            work = 0
            yield
    return hits
