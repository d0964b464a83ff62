"""What the scheduler's side knows of one request of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcache_client.session.lease import Lease

PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds without saves of a chain that was refused; doubled each time


@dataclass(slots=True)
class Lookup:
    lease: Lease
    wanted: int  # cached blocks asked for
    hits: int  # cached blocks that may be loaded
    at: float
    asked: int = 0  # the step that asked last
    sums: bytes = b""  # checksums of the blocks that are to be verified


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
class Tracked:
    """A request and its chain. `saved` counts the cached blocks from the root on that the daemon has, or was asked to
    take."""

    request: Any
    blocks: list[int] = field(default_factory=list)
    saved: int = 0
    lookup: Lookup | None = None
    start: int = 0  # device blocks that the engine had itself when it asked last
    told: bool = False  # whether its line was logged
    noted: str = ""  # what the daemon was told of it last
    named_at: float = 0.0  # when a lookup last had its name; 0: none had
    waits: bool = False  # for what its last lookup found on its way, or kept back
    loading: bool = False
    load_failed: bool = False
    barred: bool = False  # it has KV of other weights
    wait_until: float = 0.0  # for blocks that were being written; 0: it has not waited
    wait_loads: int = 0  # no lookup before so many loads of the engine have ended: they hold what it may pin
    quota_until: float = 0.0  # but not for longer; 0: it has not waited
    follows: str = ""  # the request whose load brings what this one would load
    follow_start: int = 0  # device blocks that the engine had itself when it began to follow
    follow_until: float = 0.0  # but not for longer, for all loads together; 0: it has followed none
    retry_at: float = 0.0  # no saves before that
    pause: float = PAUSE
    drawn: bool = False  # whether it was counted among the requests of which one in many is a canary
    canary: Canary | None = None
    excluded: str = ""  # why its hashes do not name content

    @property
    def id(self) -> str:
        return str(self.request.request_id)

    def refuse(self, saved: int, why: str, now: float) -> None:
        """Save nothing of this chain for a while, then go on at `saved`, or from the root where a parent is gone."""
        paused = self.retry_at > now
        self.saved = 0 if why == "no_parent" and not paused else min(self.saved, saved)
        if not paused:
            self.retry_at = now + self.pause
            self.pause = min(self.pause * 2, LONGEST_PAUSE)


def track(request: Any) -> Tracked:
    """Return what is known of a new request. A cache salt is content: it is in the hashes of all who use it alike."""
    tracked = Tracked(request)
    for name, why in (("lora_request", "lora"), ("mm_features", "multimodal")):
        if getattr(request, name, None):
            tracked.excluded = why
    if getattr(request, "prompt_embeds", None) is not None:
        tracked.excluded = "prompt_embeds"
    return tracked


def follow_blocks(requests: Mapping[str, Tracked], output: Any, engine_block: int) -> list[int]:
    """Follow the block tables of `requests`; return the device blocks that the step `output` gives to somebody."""
    given: list[int] = []
    for new in output.scheduled_new_reqs:
        state = requests.get(new.req_id)
        if state is not None:
            state.blocks = list(new.block_ids[0])
        given.extend(new.block_ids[0][new.num_computed_tokens // engine_block :])
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    for request_id, ids, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        if not ids or not ids[0]:
            continue
        state = requests.get(request_id)
        if request_id in resumed:
            given.extend(ids[0][computed // engine_block :])
            if state is not None:
                state.blocks = list(ids[0])
        else:
            given.extend(ids[0])
            if state is not None:
                state.blocks.extend(ids[0])
    return given
