"""The running loads of one engine, and the requests that wait for blocks of another request's load. Pure.

Requests of one prefix that come together would each load it over the bus. The first one loads; the engine retries the
other requests until that load has ended, and then they find the blocks in the device's own cache: the engine caches
loaded blocks in the schedule after the load's end, before or after it asks for the waiting requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.cache import CacheLease, Counts
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.requests import RequestState
from kvcache_client.step_plan import LoadJob

PATIENCE = 1.0  # seconds in all that a request waits for others' loads
FAILED_LOADS = 3  # in a row, after which no hit is offered for PAUSE seconds
PAUSE = 10.0


@dataclass(slots=True)
class Load:
    """A load of `hashes`, the cached blocks that it loads whole; `last` is the last one of them.

    `coming` is the number of ranks that still receive its bytes although it has been reported, 0 for other loads.
    """

    lease: CacheLease | None
    blocks: set[int]
    hashes: frozenset[bytes]
    last: bytes
    tokens: int
    failed: bool = False
    coming: int = 0


class Loads:
    """`ended` counts the loads that have ended; `jobs` are those that no plan has yet."""

    def __init__(self, group: FullAttention, counters: Counts, block_bytes: int) -> None:
        """`block_bytes` are the bytes of a block of the engine, on all ranks together."""
        self._group, self._block_bytes = group, block_bytes
        self.ended = 0
        self.jobs: list[LoadJob] = []
        self._begun: list[tuple[str, int]] = []  # since the last plan: requests, and the tokens of their loads
        self._counters = counters
        self._running: dict[str, Load] = {}
        self._coming: dict[str, Load] = {}  # reported, but not complete yet
        self._landed: dict[str, Load] = {}  # ended well, and perhaps not yet in the device's own cache
        self._failures = 0  # in a row
        self._paused_until = 0.0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def are_coming(self) -> bool:
        """Whether bytes of layered loads are coming, or may be."""
        return bool(self._coming) or any(load.coming for load in self._running.values())

    def begin(
        self, jobs: Sequence[LoadJob], lease: CacheLease | None, hashes: Sequence[bytes], tokens: int, ranks: int = 0
    ) -> None:
        """Note the load of `tokens` of a request, for the next plan. Without a lease, it is a load that fails.

        `ranks` is the number of ranks that report the end of a layered load separately.
        """
        self._counters.add("needed_blocks", -(-tokens // self._group.slot_tokens))
        self._counters.add("needed_bytes", tokens // self._group.block_tokens * self._block_bytes)
        self.jobs += jobs
        blocks = {block for job in jobs for block in job.blocks}
        brings = hashes if lease is not None else ()
        last = brings[-1] if brings else b""
        if not ranks:
            self._begun.append((jobs[0].request, tokens))
        self._running[jobs[0].request] = Load(lease, blocks, frozenset(brings), last, tokens, coming=ranks)

    def take_begun(self) -> list[tuple[str, int]]:
        """Return the loads that begin with the next plan, except layered ones: requests, and their tokens."""
        begun, self._begun = self._begun, []
        return begun

    def take_jobs(self) -> list[LoadJob]:
        jobs, self.jobs = self.jobs, []
        return jobs

    def fail(self, invalid: set[int], requests: Collection[str] = ()) -> None:
        """Note that the device blocks `invalid`, or the loads of `requests`, did not arrive."""
        for request, load in self._running.items():
            load.failed |= request in requests or not invalid.isdisjoint(load.blocks)

    def end(self, request: str, now: float) -> Load | None:
        """Return the load of a request, which has ended on every rank, its lease given back; None if it has none."""
        load = self._running.pop(request, None)
        if load is None:
            return None
        self.ended += 1
        if load.coming and not load.failed:
            self._coming[request] = load
        elif load.lease is not None:
            load.lease.release()
        self._failures = self._failures + 1 if load.failed else 0
        if load.failed:
            self._counters.add("loads_failed")
        else:
            self._landed[request] = load
        if self._failures >= FAILED_LOADS:
            self._paused_until = now + PAUSE
            self._failures = 0
            self._counters.warn("loads_fail", f"{FAILED_LOADS} loads in a row failed: no hits for {PAUSE:.0f} s")
        return load

    def arrived(self, request: str) -> int:
        """Note that one more rank has all bytes of a layered load. Return the load's tokens if it was the last rank."""
        # A preempted request may load again before the bytes of its first load are there.
        load = self._coming.get(request) or self._running.get(request)
        if load is None or not load.coming:
            return 0
        load.coming -= 1
        if load.coming:
            return 0
        if self._coming.pop(request, None) is not None and load.lease is not None:
            load.lease.release()
        return load.tokens

    def paused(self, now: float) -> bool:
        """Whether too many loads have failed, so that no hit is to be offered for a while."""
        return now < self._paused_until

    def scheduled(self) -> None:
        """A schedule is over: blocks that had landed before it are now in the device's own cache."""
        self._landed.clear()

    def forget(self) -> None:
        """The weights have changed: no request waits for blocks that were computed with the old ones."""
        self._landed.clear()
        for load in self._running.values():
            load.hashes = frozenset()

    def follow(self, state: RequestState, start: int, end: int, tail: int, now: float) -> bool:
        """Return True if `state` is to wait for another request's load, rather than load its blocks up to `end` itself.

        It has `start` device blocks; the last ones up to `end` are in a `tail` unless that is 0. It waits only if one
        load brings the first cached block after those, and at least half of all, and never longer than PATIENCE in all.
        While loads fail, each request has its own.
        """
        if self._failures or not (self._running or self._landed):
            return False
        waits = state.waits
        if waits.follows_until and now >= waits.follows_until:
            return False
        names = self._group.names(state.request, start, end, tail)
        for request, load in (*self._running.items(), *self._landed.items()):
            if self._group.suffixes and load.last not in names:
                continue  # it loads the suffix groups for another boundary
            if names[0] in load.hashes and request != state.id:
                brought = next((at for at, name in enumerate(names) if name not in load.hashes), len(names))
                if 2 * brought >= len(names):
                    waits.follows_until = waits.follows_until or now + PATIENCE
                    waits.followed, waits.followed_at = request, start
                    return True
        return False

    def following(self, state: RequestState, start: int, now: float) -> bool:
        """Return True if `state`, which begins at device block `start` now, is to continue waiting."""
        waits = state.waits
        if not waits.followed:
            return False
        if (
            start == waits.followed_at  # else it has found blocks in the device's own cache
            and now < waits.follows_until
            and (waits.followed in self._running or waits.followed in self._landed)
        ):
            return True
        waits.followed = ""
        return False
