"""Which requests may hold device blocks while they load, in engines that could wait forever for these blocks. Pure.

Before vLLM 0.32, a scheduler goes through its waiting requests in order, and stops at the first one that does not fit.
Requests that load wait in the same queue. If one of them stands behind a request that does not fit, it is never looked
at again, and its blocks never become free. So two rules hold in these engines:

- No load begins behind a request that has to wait: requests that hold blocks stand before those that need them.
- The requests that hold blocks, and the largest one that may get in between, together fit into the device's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcache_client.scheduler.cache import Counts
from kvcache_client.scheduler.requests import RequestState

WAIT: tuple[None, bool] = (None, False)


class Admission:
    def __init__(
        self, counters: Counts, blocks: int, table_tokens: Sequence[int], lookahead: int, in_order: bool
    ) -> None:
        """Decide for an engine with `blocks` device blocks, of `table_tokens` tokens each, by group.

        A request needs room for `lookahead` tokens beyond its own in a step. Each is seen before all later ones if the
        engine is `in_order`: not with priorities, nor if it sets requests aside for its own reasons.
        """
        self._counters, self._blocks, self._table_tokens = counters, blocks, table_tokens
        self._lookahead, self._in_order = lookahead, in_order
        self._waits = False  # whether a request has to wait in this schedule
        self._holders: dict[str, tuple[frozenset[int], int]] = {}  # by request: its blocks, and how many more it needs
        self._held: Counter[int] = Counter()  # how many requests hold each block
        self._largest = 0  # tokens of the largest request

    def answer(self, state: RequestState, tokens: int | None, is_load: bool) -> tuple[int | None, bool]:
        """Return the answer for the engine instead of `tokens` and `is_load`: the same, to wait, or to load nothing."""
        self._largest = max(self._largest, state.request.tokens)
        self._in_order &= not state.request.set_aside
        if tokens is None:
            self._waits = True
        elif is_load:
            if self._waits:
                self._counters.add("loads_behind_waiting")
                return WAIT
            if not self._fits(state.request.tokens):
                self._counters.add("loads_without_room")
                if not self._holders:
                    return 0, False
                self._waits = True
                return WAIT
        return tokens, is_load

    def _fits(self, tokens: int) -> bool:
        """Return True if a request of `tokens` tokens may hold blocks.

        If so, the first request that holds blocks gets the rest that it needs once nothing runs; and so does the
        largest one before it, if requests do not come in order.
        """
        whole = self._needs(tokens)
        if self._in_order and not self._holders:
            return True  # the engine takes no request that does not fit by itself
        rest = max(more for _, more in self._holders.values()) if self._in_order else self._needs(self._largest)
        return len(self._held) + whole + rest <= self._blocks

    def _needs(self, tokens: int) -> int:
        return sum(-(-(tokens + self._lookahead) // each) for each in self._table_tokens)

    def hold(self, state: RequestState) -> None:
        """Note that a request has received blocks to load into."""
        self.leave((state.id,))
        blocks = frozenset(block for table in state.tables for block in table)
        more = max(0, self._needs(state.request.tokens) - sum(map(len, state.tables)))
        self._holders[state.id] = blocks, more
        self._held.update(blocks)

    def leave(self, requests: Iterable[str]) -> None:
        """Note requests that run, or have ended: their blocks become free by themselves."""
        for request in requests:
            if held := self._holders.pop(request, None):
                self._held.subtract(held[0])
        if not self._holders:
            self._held.clear()

    def scheduled(self, requests: Iterable[str]) -> None:
        """Note that a schedule is over, in which these requests run."""
        self._waits = False
        if self._holders:
            self.leave(requests)
            self._held += Counter()  # drops blocks that no request holds
