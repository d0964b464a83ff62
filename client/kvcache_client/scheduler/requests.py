"""The requests of one engine, and which device blocks they have. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kvcache_client.scheduler.request_state import RequestState, follow_blocks
from kvcache_client.scheduler.views import RequestView, StepView


class Requests:
    """The requests that have not finished, by id, and those of whose end the ranks do not know yet."""

    def __init__(self, table_tokens: Sequence[int]) -> None:
        """`table_tokens` are the tokens of a block of each of the engine's groups."""
        self._table_tokens, *self._other_tokens = table_tokens
        self._states: dict[str, RequestState] = {}
        self._finished: list[str] = []
        self._allocated: list[RequestState] = []  # those that have got device blocks since the last step

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def known(self, request: RequestView) -> RequestState | None:
        """Return the state of a request, as of now; None if it is a new one, even if another one had its id."""
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
        """Note that a request has got device blocks, and has nothing to load."""
        self._allocated.append(state)

    def follow(self, step: StepView) -> list[int]:
        """Follow the block tables; return the device blocks that get other contents before or in `step`."""
        given = follow_blocks(self._states, step, self._table_tokens, self._other_tokens)
        if self._allocated:
            # Of these, another connector loads into the blocks of those that are not in the step.
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
        """Whether there are any of whose end the ranks do not know yet."""
        return bool(self._finished)

    def take_finished(self, waiting: Collection[str]) -> list[str]:
        """Return those of whose end the ranks are to know now: no more saves of them come, as of those `waiting`."""
        ready = [request_id for request_id in self._finished if request_id not in waiting]
        self._finished = [request_id for request_id in self._finished if request_id in waiting]
        return ready
