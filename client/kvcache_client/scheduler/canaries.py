"""One hit in many is computed anyway, and compared with the cached blocks. Pure.

The scheduler's side: it answers "no hit" for the chosen request, waits until the engine has computed the blocks, and
has the ranks compare some of them in the next step, before anything of that step touches device memory. The slots are
not leased meanwhile: the lookup has just touched them, and if one is evicted anyway, its generation shows that after
the comparison, which then does not count. So nothing is left behind, whatever happens to the request or the engine.
"""

from __future__ import annotations

import random

from kvcache_client.scheduler.cache import CacheLease
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.requests import Canary, RequestState
from kvcache_client.step_plan import CheckJob, pick_refs

BLOCKS = 4  # of one request that are compared, at most
BYTES = 64 << 20  # compared at most, but always one block


class Canaries:
    """The canaries of one engine. `due` are the comparisons that no plan has yet."""

    def __init__(self, group: FullAttention, every: int, block_bytes: int) -> None:
        """Choose one in `every` requests with a hit, 0 for none; `block_bytes` are the bytes of a cached block."""
        self.due: list[CheckJob] = []
        self._group, self._every = group, every
        self._most = max(1, min(BLOCKS, BYTES // block_bytes))
        # Not at the same request in all engines of a fleet after their start.
        self._left = random.randrange(every) if every else -1

    def choose(self, state: RequestState, lease: CacheLease, hits: int, start: int) -> bool:
        """Return True if `state`, which has `hits` cached blocks and computes from device block `start` on, is chosen.

        A request is counted once, however often it is looked up.
        """
        if not self._every or state.drawn:
            return False
        state.drawn = True
        self._left -= 1
        if self._left >= 0:
            return False
        self._left = self._every - 1
        state.canary = Canary(lease.region_id, lease.packed, hits, 0)
        return self.again(state, start)

    def again(self, state: RequestState, start: int) -> bool:
        """Note that the request of a canary now begins at device block `start`; return whether it still is a canary."""
        canary = state.canary
        if canary is None:
            return False
        canary.first = -(-start // self._group.blocks_per_slot)
        if canary.first >= canary.hits:
            state.canary = None
        return state.canary is not None

    def computed(self, state: RequestState, tokens: int) -> None:
        """Note that `tokens` of the request are computed when the running step ends."""
        canary = state.canary
        if canary is None or tokens < canary.hits * self._group.slot_tokens:
            return
        state.canary = None
        choice = range(canary.first, canary.hits)
        slots = sorted(random.sample(choice, min(self._most, len(choice))))
        blocks = [block for slot in slots for block in self._group.slot_blocks(state.tables, slot, slot + 1)]
        if len(blocks) == len(slots) * self._group.columns(0):
            self.due.append(CheckJob(state.id, canary.region, pick_refs(canary.packed, slots), blocks))

    def take(self) -> list[CheckJob]:
        due, self.due = self.due, []
        return due
