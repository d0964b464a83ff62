"""Upper bounds for any cache: unlimited memory, and an optimal eviction policy. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_tools.replay.trace import TraceRequest

_NEVER = 1 << 62


def distinct(requests: Sequence[TraceRequest]) -> int:
    """Return the number of distinct blocks: with unlimited memory, each misses once."""
    return len({block for request in requests for block in request.blocks})


def optimum(requests: Sequence[TraceRequest], blocks: int) -> int:
    """Return the maximum number of hits of a cache of `blocks` blocks if the whole trace is known beforehand.

    The optimum is Belady's: keep the blocks that are requested again soonest. A block is only useful together with
    those before it, which that rule respects: every request for a block also requests those before it, so their next
    use is never later; of blocks with the same next use, the deepest is evicted first. Hence the optimum for single
    blocks is also one for prefixes, and an upper bound for any cache of the same size that does not know the future.
    """
    following: dict[int | str, int] = {}
    uses: list[list[int]] = []  # for each block of each request: the next request with it
    for number in range(len(requests) - 1, -1, -1):
        asked = requests[number].blocks
        uses.append([following.get(block, _NEVER) for block in asked])
        following.update(dict.fromkeys(asked, number))
    uses.reverse()
    kept: dict[int | str, int] = {}
    # A heap: latest next use first, then deepest; no blocks are compared.
    last: list[tuple[int, int, int, int | str]] = []
    hits = 0
    for number, (request, next_uses) in enumerate(zip(requests, uses, strict=True)):
        for depth, (block, use) in enumerate(zip(request.blocks, next_uses, strict=True)):
            hits += kept.pop(block, None) is not None
            if use != _NEVER:
                kept[block] = use
                heapq.heappush(last, (-use, -depth, number, block))
        while len(kept) > blocks:
            use, _, _, block = heapq.heappop(last)
            if kept.get(block) == -use:
                del kept[block]
    return hits
