"""What the scheduler's side knows of one request of the engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvcache_client.scheduler.cache import CacheLease
from kvcache_client.scheduler.views import BlockTables, RequestView, StepView

PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds without saves of a chain that was refused; doubled each time


@dataclass(slots=True)
class LookupResult:
    """What the daemon answered.

    Attributes:
        wanted: cached blocks asked for.
        hits: cached blocks that may be loaded.
        at: when it was asked.
        had: cached blocks of whose tails none was asked for.
        offered: the step in which the engine was offered this last.
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
    """Blocks of one request that the cache has and that the engine computes.

    `hits` slots are in `packed`; those before `first` came from the engine's own prefix cache when it asked last.
    """

    region: bytes
    packed: bytes
    hits: int
    first: int


@dataclass(slots=True)
class Waits:
    """What a request waits for, or has waited for, before it is scheduled. If a field is a time, 0 stands for none.

    Attributes:
        put_off: whether its last lookup was put off for what was on its way, or kept back.
        pending_until: how long it waits for blocks that are being written; it does so once.
        pending: the first of these, and how long it may be waited for after a vain wait.
        tier_asked: when it first waited for a tier.
        tier_until: no lookup before; a tier brings its blocks, or is asked for them.
        loads_to_end: no lookup before so many loads of the engine have ended: they hold what it may pin.
        quota_until: but not for longer.
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
    """The `request` whose load brings what another one would load.

    That one began to follow when the engine had its first `start` device blocks itself, and goes on until `until`, for
    all loads together.
    """

    request: str = ""
    start: int = 0
    until: float = 0.0


@dataclass(slots=True)
class SaveProgress:
    """How far a request is saved.

    Attributes:
        saved: cached blocks from the root on that the daemon has, or was asked to take.
        retry_at: no saves before that time; 0 for none.
        pause: seconds until then if it is refused once more.
        junction: cached blocks after which others could continue if its windows there were saved.
        limit: cached blocks from the root on that may be saved; None: all.
        limited_by: why no more of them.
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
    others: list[list[int]] = field(default_factory=list)  # those of the engine's further groups
    logged: bool = False  # whether its line was logged
    noted: str = ""  # the cause that was noted for the daemon last
    barred: bool = False  # it has KV of other weights

    # Lookups and loads.
    lookup: LookupResult | None = None
    start: int = 0  # device blocks that the engine had itself when it asked last
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
    drawn: bool = False  # whether it was counted among the requests of which one in many is a canary
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

    `block_tokens` are those of a block of the engine's first group, `others` those of its further groups.
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
