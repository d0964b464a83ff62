"""How many requests of this engine have asked for each cached block, for `min_hits`. Pure."""

from __future__ import annotations

from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.request_state import RequestState

BLOCKS = 1 << 16  # cached blocks that are remembered: those that were asked for last


class Demand:
    """Of one engine. A block of which fewer than `least` requests have asked is not saved; 0 is no limit."""

    def __init__(self, group: FullAttention, least: int) -> None:
        self._group, self._least = group, least
        self._counts: dict[bytes, int] = {}  # in the order in which they were asked for last

    def ask(self, state: RequestState) -> None:
        """Count a request once, and limit what is saved of it. What it wants to be retained is saved in any case."""
        request = state.request
        if self._least < 2 or state.counted:
            return
        state.counted = True
        keys = self._group.keys(request.hashes)[: request.prompt_tokens // self._group.slot_tokens]
        enough = 0
        for at, key in enumerate(keys):
            count = self._counts[key] = self._counts.pop(key, 0) + 1
            if count >= self._least and at == enough:
                enough += 1
        while len(self._counts) > BLOCKS:
            del self._counts[next(iter(self._counts))]
        if (request.hint is None or request.hint.retained is None) and state.progress.limit is None:
            state.progress.limit, state.progress.limited_by = enough, "min_hits"
