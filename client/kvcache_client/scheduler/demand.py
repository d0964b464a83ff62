"""Counts how many requests of this engine asked for each cached block, for `min_hits`. Pure."""

from __future__ import annotations

from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.request_state import RequestState

BLOCKS = 1 << 16  # cached blocks that are remembered: those that were requested last


class Demand:
    """The demand in one engine. A block that fewer than `least` requests asked for is not saved; 0 is no limit."""

    def __init__(self, group: FullAttention, least: int) -> None:
        self._group, self._least = group, least
        self._counts: dict[bytes, int] = {}  # in the order of their last request

    def ask(self, state: RequestState) -> None:
        """Count a request once, and limit how much of it is saved. Blocks that it wants retained are saved anyway."""
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
