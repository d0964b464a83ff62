"""The requests of one engine, and their device blocks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kvcache_client.scheduler.request_state import RequestState, follow_blocks
from kvcache_client.scheduler.views import RequestView, StepView


class Requests:
    """The requests that have not finished, by id, and the finished ones that the ranks do not know of yet."""

    def __init__(self, table_tokens: Sequence[int]) -> None:
        """`table_tokens` are the tokens per block of each of the engine's groups."""
        self._table_tokens, *self._other_tokens = table_tokens
        self._states: dict[str, RequestState] = {}
        self.get = self._states.get  # called for each request in each step
        self._finished: list[str] = []
        self._allocated: list[RequestState] = []  # those that received device blocks since the last step

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def known(self, request: RequestView) -> RequestState | None:
        """Return the present state of a request; None for a new one, even if an earlier one had its id."""
        state = self._states.get(request.id)
        if state is None or state.request.key is not request.key:
            return None
        state.request = request
        return state

    def begin(self, request: RequestView) -> RequestState:
        """Return the state of a new request."""
        state = self._states[request.id] = RequestState(request)
        return state

    def allocated(self, state: RequestState) -> None:
        """Note that a request has received device blocks, and has nothing to load."""
        self._allocated.append(state)

    def follow(self, step: StepView) -> list[int]:
        """Follow the block tables; return the device blocks that get other contents before or in `step`."""
        given = follow_blocks(self._states, step, self._table_tokens, self._other_tokens)
        if self._allocated:
            # If one of these is not in the step, another connector loads into its blocks.
            computed = {*step.scheduled}
            waiting = [state for state in self._allocated if state.id not in computed]
            self._allocated.clear()
            given += [block for state in waiting for table in state.tables for block in table]
        return given

    def finish(self, request_id: str) -> RequestState | None:
        """Forget a request that has finished; return its state, None if it is unknown."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._finished.append(request_id)
        return state

    @property
    def has_finished(self) -> bool:
        """Whether there are finished requests that the ranks do not know of yet."""
        return bool(self._finished)

    def take_finished(self, waiting: Collection[str]) -> list[str]:
        """Return the finished requests to report to the ranks now: all but the `waiting` ones, which may have more
        saves."""
        ready = [request_id for request_id in self._finished if request_id not in waiting]
        self._finished = [request_id for request_id in self._finished if request_id in waiting]
        return ready
