"""Which requests may hold device blocks while they load, in engines that could wait for these blocks for ever. Pure.

Before vLLM 0.32, a scheduler goes through its waiting requests in order, and stops at the first one that does not fit.
Requests that load wait in the same queue. One of them that stands behind a request that does not fit is never looked at
again, and the blocks that it holds never become free. So two rules hold in these engines:

- No load begins behind a request that was asked to wait: those who hold blocks stand before those who need them.
- The requests that hold blocks, and the largest one that may get in between, fit into the device's memory together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvcache_client.scheduler.cache import Counts
from kvcache_client.scheduler.request_state import RequestState

WAIT: tuple[None, bool] = (None, False)


class Admission:
    """Of one engine."""

    def __init__(
        self, counters: Counts, blocks: int, table_tokens: Sequence[int], lookahead: int, in_order: bool
    ) -> None:
        """Decide for an engine with so many device `blocks`.

        Args:
            table_tokens: tokens of a block of each group.
            lookahead: tokens beyond those of a request for which it needs room in a step.
            in_order: whether each request is seen before all that came later. An engine with priorities does not
                promise that, nor does one that sets requests aside for reasons of its own.
        """
        self._counters, self._blocks, self._table_tokens, self._lookahead = counters, blocks, table_tokens, lookahead
        self._in_order = in_order
        self._waits = False  # whether a request was asked to wait in this schedule
        self._holders: dict[str, tuple[frozenset[int], int]] = {}  # by request: its blocks, and how many more it needs
        self._held: Counter[int] = Counter()  # how many of them hold each block
        self._largest = 0  # tokens of a request

    def answer(self, state: RequestState, tokens: int | None, is_load: bool) -> tuple[int | None, bool]:
        """Return what the engine is told instead of `tokens` and `is_load`: the same, to wait, or to load nothing."""
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
        """Return whether a request of so many tokens may hold blocks.

        Then the first of those that hold blocks gets what it needs once nothing runs, and so does, if requests are not
        asked in order, the largest one before it.
        """
        whole = self._needs(tokens)
        if self._in_order and not self._holders:
            return True  # the engine takes no request that does not fit alone
        rest = max(more for _, more in self._holders.values()) if self._in_order else self._needs(self._largest)
        return len(self._held) + whole + rest <= self._blocks

    def _needs(self, tokens: int) -> int:
        return sum(-(-(tokens + self._lookahead) // each) for each in self._table_tokens)

    def hold(self, state: RequestState) -> None:
        """Note that a request has got blocks to load into."""
        self.leave((state.id,))
        blocks = frozenset(block for table in state.tables for block in table)
        more = max(0, self._needs(state.request.tokens) - sum(map(len, state.tables)))
        self._holders[state.id] = blocks, more
        self._held.update(blocks)

    def leave(self, requests: Iterable[str]) -> None:
        """Note requests that run, or have ended: what they hold becomes free by itself."""
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
            self._held += Counter()  # drops what nobody holds
