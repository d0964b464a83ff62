"""What no cache can beat: unlimited memory, and the best that any choice of evictions gives. Pure.

The optimum is Belady's: keep what is asked for again soonest. A block may only be kept with all before it, which that
rule never breaks: every request for a block asks for those before it, too, so they are never asked for later than it;
where they are asked for together, the deepest goes first. So the optimum of single blocks is one of prefixes as well,
and an upper bound for any cache of as many blocks that does not know the future, pins nothing and divides by nobody.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache_server.replay.trace import TraceRequest

NEVER = 1 << 62


def distinct(requests: Sequence[TraceRequest]) -> int:
    """Return how many blocks there are: what misses with unlimited memory, once each."""
    return len({block for request in requests for block in request.blocks})


def optimum(requests: Sequence[TraceRequest], blocks: int) -> int:
    """Return the most hits that a cache of `blocks` blocks can have, with the whole trace known beforehand."""
    following: dict[int | str, int] = {}
    uses: list[list[int]] = []  # of each block of each request: the request that asks for it next
    for number in range(len(requests) - 1, -1, -1):
        asked = requests[number].blocks
        uses.append([following.get(block, NEVER) for block in asked])
        following.update(dict.fromkeys(asked, number))
    uses.reverse()
    kept: dict[int | str, int] = {}
    last: list[tuple[int, int, int | str]] = []  # a heap: the latest next use first, the deepest of equals
    hits = 0
    for request, next_uses in zip(requests, uses, strict=True):
        for depth, (block, use) in enumerate(zip(request.blocks, next_uses, strict=True)):
            hits += kept.pop(block, None) is not None
            if use != NEVER:
                kept[block] = use
                heapq.heappush(last, (-use, -depth, block))
        while len(kept) > blocks:
            use, _, block = heapq.heappop(last)
            if kept.get(block) == -use:
                del kept[block]
    return hits
