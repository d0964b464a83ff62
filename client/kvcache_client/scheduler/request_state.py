"""The state of one request of the engine on the scheduler's side. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcache_client.scheduler.cache import CacheLease
from kvcache_client.scheduler.views import BlockTables, RequestView, StepView

PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds without saves of a chain that was refused; doubled each time


@dataclass(slots=True)
class LookupResult:
    """The daemon's answer to a lookup.

    Attributes:
        wanted: number of cached blocks requested.
        hits: number of cached blocks that may be loaded.
        at: when it was requested.
        had: cached blocks whose tails were not requested.
        offered: the step in which this was last offered to the engine.
        sums: checksums of the blocks that are to be verified.
        awaited: hash of the first cached block after the hits, if it is being written.
    """

    lease: CacheLease
    wanted: int
    hits: int
    at: float
    offered: int = 0
    sums: bytes = b""
    had: int = 0
    awaited: bytes = b""


@dataclass(slots=True)
class Canary:
    """Blocks of one request that are cached and that the engine computes anyway.

    `hits` slots are in `packed`; those before `first` came from the engine's own prefix cache at its last query.
    """

    region: bytes
    packed: bytes
    hits: int
    first: int


@dataclass(slots=True)
class Waits:
    """The waits of a request before it is scheduled, past ones included. If a field is a time, 0 is none.

    Attributes:
        put_off: whether the request waited after its last lookup, for blocks on their way or withheld ones.
        pending_until: until when it waits for blocks that are being written; it does so once.
        pending: the first of these, and how many seconds a request may wait for it after a vain wait.
        tier_asked: when it first waited for a tier.
        tier_until: no lookup before; a tier loads its blocks, or is looked up.
        loads_to_end: no lookup before this many loads of the engine have ended: they hold its pin quota.
        quota_until: until when it waits for these loads at most.
    """

    put_off: bool = False
    pending_until: float = 0.0
    pending: tuple[bytes, float] = b"", 0.0
    tier_asked: float = 0.0
    tier_until: float = 0.0
    loads_to_end: int = 0
    quota_until: float = 0.0


@dataclass(slots=True)
class Following:
    """The `request` whose load brings the blocks that another request would load.

    The other request began to follow when the engine had its first `start` device blocks itself, and goes on until
    `until`, for all loads together.
    """

    request: str = ""
    start: int = 0
    until: float = 0.0


@dataclass(slots=True)
class SaveProgress:
    """The progress of a request's saves.

    Attributes:
        saved: cached blocks from the root on that the daemon has, or was asked to save.
        retry_at: no saves before this time; 0 for none.
        pause: seconds until then if it is refused once more.
        junction: cached blocks after which other requests could continue if the windows there were saved.
        limit: cached blocks from the root on that may be saved; None: all.
        limited_by: the reason of the limit.
    """

    saved: int = 0
    retry_at: float = 0.0
    pause: float = PAUSE
    junction: int = 0
    limit: int | None = None
    limited_by: str = "drop"

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
    blocks: list[int] = field(default_factory=list)  # device blocks
    others: list[list[int]] = field(default_factory=list)  # blocks of the engine's further groups
    logged: bool = False  # whether its log line was written
    noted: str = ""  # the last cause that was noted for the daemon
    barred: bool = False  # it has KV from other weights

    # Lookups and loads.
    lookup: LookupResult | None = None
    start: int = 0  # device blocks that the engine had itself at its last query
    waits: Waits = field(default_factory=Waits)
    following: Following = field(default_factory=Following)
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

    @property
    def tables(self) -> BlockTables:
        return [self.blocks, *self.others]


def follow_blocks(
    requests: Mapping[str, RequestState], step: StepView, block_tokens: int, others: Sequence[int] = ()
) -> list[int]:
    """Follow the block tables of `requests`; return the device blocks that `step` gives to any request.

    `block_tokens` are the tokens per block of the engine's first group, `others` those of its further groups.
    """
    given: list[int] = []
    for new in step.started:
        table = new.blocks[0]
        given.extend(table[new.computed // block_tokens :])
        for more, tokens in zip(new.blocks[1:], others, strict=False):
            given.extend(more[new.computed // tokens :])
        if (state := requests.get(new.request)) is not None:
            state.blocks, state.others = list(table), [list(more) for more in new.blocks[1:]]
    for request_id, added in zip(step.running, step.added, strict=True):
        if not added:
            continue
        state = requests.get(request_id)
        if added[0]:
            given.extend(added[0])
            if state is not None:
                state.blocks.extend(added[0])
        for number in range(len(others)):
            if more := added[number + 1]:
                given.extend(more)
                if state is not None:
                    state.others[number].extend(more)
    return given
