"""The requests of one engine on the scheduler's side: their states, and their device blocks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvcache_client.scheduler.cache import CacheLease
from kvcache_client.scheduler.views import RequestView, StepView

PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds without saves of a chain that was refused; doubled each time


@dataclass(slots=True)
class LookupResult:
    """The daemon's answer to a lookup."""

    lease: CacheLease
    wanted: int  # number of cached blocks requested
    hits: int  # number of whole cached blocks that may be loaded
    at: float  # when it was requested
    offered: int = 0  # the step in which this was last offered to the engine
    sums: bytes = b""  # checksums of the blocks that are to be verified
    had: int = 0  # cached blocks whose suffix groups were not requested
    tail: int = 0  # blocks of the engine in the hits and the tail after them; 0 if there is no tail
    awaited: bytes = b""  # hash of the first cached block after the hits, if it is being written


@dataclass(slots=True)
class Canary:
    """Blocks of one request that are cached and that the engine computes anyway."""

    region: bytes
    packed: bytes
    hits: int  # slots in `packed`
    first: int  # those before it came from the engine's own prefix cache at its last query


@dataclass(slots=True)
class Waits:
    """The waits of a request before it is scheduled, past ones included. If a field is a time, 0 is none."""

    put_off: bool = False  # whether it waited after its last lookup, for blocks on their way or withheld ones
    pending_until: float = 0.0  # until when it waits for blocks that are being written; it does so once
    pending: tuple[bytes, float] = b"", 0.0  # the first of these, and seconds to wait for it after a vain wait
    tier_asked: float = 0.0  # when it first waited for a tier
    tier_until: float = 0.0  # no lookup before; a tier loads its blocks, or is looked up
    loads_to_end: int = 0  # no lookup before this many loads of the engine have ended: they hold its pin quota
    quota_until: float = 0.0  # until when it waits for these loads at most
    followed: str = ""  # the request whose load brings the blocks that this one would load
    followed_at: int = 0  # device blocks that the engine had itself when this one began to follow that load
    follows_until: float = 0.0  # until when it follows loads, all of them together


@dataclass(slots=True)
class SaveProgress:
    """The progress of a request's saves. Numbers of cached blocks count from the root on."""

    saved: int = 0  # cached blocks that the daemon has, or was asked to save
    retry_at: float = 0.0  # no saves before this time; 0 for none
    pause: float = PAUSE  # seconds until then if it is refused once more
    divergence: int = 0  # cached blocks after which other requests could continue if the windows there were saved
    limit: int | None = None  # cached blocks that may be saved; None: all
    limited_by: str = "drop"  # the reason of the limit

    def refuse(self, saved: int, why: str, now: float) -> None:
        """Save nothing of this chain for a while, then go on at `saved`, or from the root if a parent is gone."""
        paused = self.retry_at > now
        self.saved = 0 if why == "no_parent" and not paused else min(self.saved, saved)
        if not paused:
            self.retry_at = now + self.pause
            self.pause = min(self.pause * 2, LONGEST_PAUSE)


@dataclass(slots=True)
class RequestState:
    """A request and its chain."""

    request: RequestView  # as of the last call about it
    tables: list[list[int]] = field(default_factory=lambda: [[]])  # device blocks, by group of the engine
    logged: bool = False  # whether its log line was written
    noted: str = ""  # the last cause that was noted for the daemon
    barred: bool = False  # it has KV from other weights

    # Lookups and loads.
    lookup: LookupResult | None = None
    start: int = 0  # device blocks that the engine had itself at its last query
    waits: Waits = field(default_factory=Waits)
    admitted: bool | None = None  # whether the gate lets its hits be loaded; None: not decided yet
    loading: bool = False
    load_failed: bool = False

    # Saves.
    progress: SaveProgress = field(default_factory=SaveProgress)
    counted: bool = False  # whether it was counted among the requests that ask for its blocks
    retained: bool = False  # whether the daemon was asked to retain its prompt

    # Canaries.
    drawn: bool = False  # whether it was counted for the choice of canaries
    canary: Canary | None = None

    @property
    def id(self) -> str:
        return self.request.id


class Requests:
    """The requests that have not finished, by id. `finished` are those that have, and that the ranks do not know of."""

    def __init__(self, table_tokens: Sequence[int]) -> None:
        """`table_tokens` are the tokens per block of each of the engine's groups."""
        self._table_tokens = table_tokens
        self._states: dict[str, RequestState] = {}
        self.get = self._states.get  # called for each request in each step
        self.finished: list[str] = []
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
        state = self._states[request.id] = RequestState(request)
        return state

    def allocated(self, state: RequestState) -> None:
        """Note that a request has received device blocks, and has nothing to load."""
        self._allocated.append(state)

    def follow(self, step: StepView) -> list[int]:
        """Follow the block tables; return the device blocks that get other contents before or in `step`."""
        given = follow_blocks(self._states, step, self._table_tokens)
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
            self.finished.append(request_id)
        return state

    def take_finished(self, waiting: Collection[str]) -> list[str]:
        """Return the finished requests to report to the ranks now: all but the `waiting` ones, which may have more
        saves."""
        ready = [request_id for request_id in self.finished if request_id not in waiting]
        self.finished = [request_id for request_id in self.finished if request_id in waiting]
        return ready


def follow_blocks(requests: Mapping[str, RequestState], step: StepView, table_tokens: Sequence[int]) -> list[int]:
    """Follow the block tables of `requests`; return the device blocks that `step` gives to any request."""
    given: list[int] = []
    for new in step.started:
        for table, tokens in zip(new.blocks, table_tokens, strict=False):
            given.extend(table[new.computed // tokens :])
        if (state := requests.get(new.request)) is not None:
            state.tables = [list(table) for table in new.blocks]
    for request_id, added in zip(step.running, step.added, strict=True):
        if not added:
            continue
        state = requests.get(request_id)
        for number, blocks in enumerate(added):
            if blocks:
                given.extend(blocks)
                if state is not None:
                    state.tables[number].extend(blocks)
    return given
