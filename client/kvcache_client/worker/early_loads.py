"""Loads that are reported when they begin, because the engine computes while they run: see `layered`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Set

from kvcache_client.devices import Job
from kvcache_client.session.region import Region
from kvcache_client.step_plan import LoadJob, StepPlan
from kvcache_client.worker.layered import LayeredLoads
from kvcache_client.worker.rank import Rank, jobs_of

logger = logging.getLogger("vllm.kvcache.worker")

ARRIVAL_SECONDS = 1.0  # that a step waits for the end of the loads that its layers have waited for
_LOST = "a load has failed after its request was computed with it"
_UNANNOUNCED = "the engine has computed with layers that it has not announced, while they were being loaded"


class EarlyLoads:
    """The early loads of one rank.

    Attributes:
        layered: lets the layers of the engine wait for their sections; None if this rank cannot.
        listens: whether `layer` and `layer_left` are to be called in this step.
    """

    def __init__(self, rank: Rank, find_failed: Callable[[LoadJob, Region, Job], list[int]]) -> None:
        """`find_failed` returns the device blocks that a load has not filled."""
        self._rank, self._find_failed = rank, find_failed
        self.layered: LayeredLoads | None = None
        self.listens = False
        self._was_ready = False  # as last reported to the scheduler's side
        self._coming: set[str] = set()  # requests whose loads have been reported, and have not ended
        self._ending = False  # one of these requests has finished: no step will wait for its layers
        self._ended = threading.Condition()
        self._arrived: deque[tuple[str, float, list[int]]] = deque()  # with the blocks that failed
        self._reported: list[tuple[str, float]] = []

    @property
    def is_running(self) -> bool:
        return bool(self._coming)

    def enter_step(self, plan: StepPlan, idle: bool) -> None:
        """The engine is about to carry out `plan`; an `idle` step computes nothing."""
        if self.layered is None:
            return
        if idle:
            self.layered.give(plan.given)
        else:
            self.layered.enter_step(plan.timed, plan.given)
        self.listens = plan.timed and not idle  # most steps only generate: their layers need not be announced

    def finish(self, requests: list[str]) -> None:
        """Requests have finished: no step will wait for the layers of those that still load."""
        self._ending = not self._coming.isdisjoint(requests)

    def layer(self, name: str) -> None:
        """The engine is about to read the KV of a layer."""
        if self.layered is not None:
            self.layered.layer(name)

    def layer_left(self, name: str) -> None:
        """The engine has submitted the work that reads the KV of a layer."""
        if self.layered is not None:
            self.layered.layer_left(name)

    def begin(self, job: LoadJob, region: Region) -> bool:
        """Start a load from a `region` that copies reach without a thread; return whether it can be an early one.

        It must not fail any more, because its request is computed with the loaded blocks. So its slots must be the
        leased ones.
        """
        layered, layout = self.layered, self._rank.layout
        if layered is None or not layered.ready or region.id != job.region:
            return False
        placed = layout.place(region, job.refs, job.skip + len(job.blocks))
        if placed is None or not region.current(job.refs).all():
            return False
        pieces = layout.places[0].cut(placed.offsets, job.blocks, job.skip)
        jobs = jobs_of(region, placed.runs, pieces, lambda done: self._end(job, region, done), layered.sections())
        with self._ended:
            self._coming.add(job.request)
        layered.start(jobs, job.blocks)
        self._rank.counts.add("loads_layered")
        return True

    def _end(self, job: LoadJob, region: Region, done: Job) -> None:
        """On a thread of the device."""
        failed = job.blocks
        try:
            failed = self._find_failed(job, region, done)
        except Exception:  # the step that waits for this load, and other copies, need this thread
            self._rank.counts.add("load_ends_failed")
            logger.exception("request %s: its load cannot be checked and counts as failed", job.request)
        finally:
            self._arrived.append((job.request, done.seconds, failed))
            with self._ended:
                self._coming.discard(job.request)
                self._ended.notify_all()

    def loaded_otherwise(self, request: str) -> None:
        """Report the end of a load that could not be an early one."""
        self._arrived.append((request, 0.0, []))

    def leave_step(self, idle: bool) -> tuple[Set[int], str]:
        """The engine has submitted a step. Return the device blocks that it may have computed with in vain, and the
        reason that this rank can take no part any more, "" if it can."""
        if self.layered is None and not self._arrived:
            return frozenset(), ""
        invalid: set[int] = set()
        why = ""
        if self.layered is not None:
            if not idle and (unfilled := self.layered.leave_step()):
                invalid |= unfilled
                self._rank.counts.add("loads_unannounced")
                why = _UNANNOUNCED
            if self._coming and (self._ending or not idle):
                # The work that the engine has submitted waits for them, too, so their end is reported with the step
                # that needs them. After an idle step there may be no such step for long: a lease whose request was
                # aborted would keep its blocks.
                self.layered.start_all()
                with self._ended:
                    self._ended.wait_for(lambda: not self._coming, ARRIVAL_SECONDS)
        while self._arrived:
            request, seconds, failed = self._arrived.popleft()
            self._reported.append((request, seconds))
            if failed:
                invalid.update(failed)
                why = _LOST
        return invalid, why

    def wait_all(self) -> None:
        """Let all work that the engine submits from now on wait for these loads."""
        if self.layered is not None:
            self.layered.wait_all()

    def start_all(self) -> None:
        """Begin all copies that were to begin later."""
        if self.layered is not None:
            self.layered.start_all()

    def take_arrived(self) -> list[tuple[str, float]]:
        """Return the requests of these loads that have ended since the last call, and the seconds that each copy took.

        The time is 0 for ordinary loads.
        """
        found, self._reported = self._reported, []
        return found

    def take_ready(self) -> dict[int, bool]:
        """Return whether the engine announces its layers to this rank, if that has changed since the last call."""
        if self.layered is None or self.layered.ready == self._was_ready:
            return {}
        self._was_ready = self.layered.ready
        return {self._rank.number: self._was_ready}
