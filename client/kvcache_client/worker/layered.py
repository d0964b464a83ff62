"""Loads that run while the engine computes: each layer waits only for its own section.

Such a load is reported to the engine as ended when it begins. All later computation must wait: layer by layer in a step
in which the engine announces every layer, otherwise for the whole load before the step.

No interface says whether an engine announces its layers: it depends on its version, its attention backend, and the
graphs that it has captured. So this watches the steps that compute prompts, and loads run like this only once one of
them has announced all layers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from kvcache_client.devices import Device, Job
from kvcache_client.session.region import Region
from kvcache_client.step_plan import LoadJob, StepPlan
from kvcache_client.worker.rank import Rank, jobs_of

MOST = 16  # sections of a block: the first layers wait for the first one, and each is a batch of copies
LEAST = 128 << 10  # bytes of a section: smaller pieces take the bus longer
AHEAD = 4  # sections whose copies are begun before the layers that wait for them
ARRIVAL_SECONDS = 1.0  # that a step waits for the end of the loads that its layers have waited for
_LOST = "a load has failed after its request was computed with it"
_UNANNOUNCED = "the engine has computed with layers that it has not announced, while they were being loaded"


def section_ends(layers: Sequence[int], every: int = 1) -> list[int]:
    """Return the ends of a block's sections; [] if it is too small to be divided.

    `layers` are the ends of the layers' KV. Each section has whole layers and, but for the last one, ends at a multiple
    of `every` bytes.
    """
    count = min(MOST, layers[-1] // LEAST)
    if count < 2:
        return []
    ends: list[int] = []
    for end in layers:
        whole = end == layers[-1] or end % every == 0
        if whole and end * count >= layers[-1] * (len(ends) + 1) and end not in ends:
            ends.append(end)
    return ends if len(ends) > 1 else []


class LayeredLoads:
    """The layered loads of one rank. Called by its thread.

    Attributes:
        ready: whether the last step that computed prompts has announced all layers.
    """

    def __init__(self, device: Device, layers: Mapping[str, int], ends: Sequence[int]) -> None:
        """`layers` maps each layer's name to the end of its KV in a slot; `ends` are the ends of the sections."""
        self._device = device
        self._section_of = {name: 1 + sum(each < end for each in ends) for name, end in layers.items()}
        self._count = len(ends)
        self.ready = False
        self._announced: set[str] | None = None  # layers in this step, if it computes prompts
        self._waiting: list[list[Job]] = [[] for _ in range(self._count + 1)]  # by section: not waited for yet
        self._next = self._count + 1  # the first section that has any
        self._begun = self._count  # the last section whose copies have begun
        self._blocks: set[int] = set()  # device blocks that these jobs fill
        self._read: frozenset[int] = frozenset()  # this step may read these: loads that it starts are for the next

    def sections(self) -> range:
        return range(1, self._count + 1)

    def start(self, jobs: Iterable[Job], blocks: Iterable[int]) -> None:
        """Start a load of device `blocks`: `jobs` are those of all sections, in their order.

        Beginning copies takes the engine's thread up to a millisecond, in which it submits no layer. So only those of
        the first section begin here, and the rest while the device computes the layers before theirs.
        """
        for job in jobs:
            self._waiting[job.section].append(job)
            job.later = job.section > 1
            self._device.load(job)
        self._blocks.update(blocks)
        self._next = self._begun = 1

    def enter_step(self, prompts: bool, given: Collection[int]) -> None:
        """A step is about to compute, `prompts` or not; `given` are the blocks that it gives to other requests."""
        self._announced = set() if prompts else None
        if self._blocks and not (prompts and self.ready and self._blocks.isdisjoint(given)):
            self.wait_all()
        self._read = frozenset(self._blocks)

    def give(self, blocks: Collection[int]) -> None:
        """A step that computes nothing gives `blocks` to other requests: writes to them come after the loads."""
        if not self._blocks.isdisjoint(blocks):
            self.wait_all()

    def layer(self, name: str) -> None:
        """The engine is about to submit the work that reads the KV of a layer."""
        if self._announced is None:
            return
        self._announced.add(name)
        section = self._section_of.get(name, 0)  # a layer that shares the KV of an earlier one has none
        if section >= self._next:
            self._wait(section)

    def layer_left(self, name: str) -> None:
        """The engine has submitted the work that reads the KV of a layer."""
        if self._begun < min(self._section_of.get(name, 0) + AHEAD, self._count):
            self._begin(self._begun + 1)

    def leave_step(self) -> set[int]:
        """A step has been submitted. Return the device blocks that it may have read before they were filled."""
        if self._announced is None:
            return set()
        self.ready = self._section_of.keys() <= self._announced
        self._announced = None
        unfilled = self._blocks & self._read
        if unfilled:
            self.wait_all()
        return unfilled

    def wait_all(self) -> None:
        """Let all work that is submitted from now on wait for the loads."""
        self._wait(self._count)

    def start_all(self) -> None:
        """Begin all copies that were to begin later."""
        self._begin(self._count)

    def _begin(self, section: int) -> None:
        for each in range(self._begun + 1, section + 1):
            for job in self._waiting[each]:
                self._device.start(job)
        self._begun = max(self._begun, section)

    def _wait(self, section: int) -> None:
        self._begin(section)
        while self._next <= section:
            for job in self._waiting[self._next]:
                self._device.hold(job)
            self._waiting[self._next] = []
            self._next += 1
        if self._next > self._count:
            self._blocks = set()


class EarlyLoads:
    """The loads of one rank that are reported when they begin, and what became of them.

    Attributes:
        layered: lets the layers of the engine wait for their sections; None if this rank cannot.
        listens: whether `layer` and `layer_left` are to be called in this step.
    """

    def __init__(self, rank: Rank, find_failed: Callable[[LoadJob, Region, Job], list[int]]) -> None:
        """`find_failed` returns the device blocks that a load has not filled; it does not raise."""
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
        self._arrived.append((job.request, done.seconds, self._find_failed(job, region, done)))
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
        """Return the loads that have ended since the last call: the request, and the seconds, 0 for ordinary ones."""
        found, self._reported = self._reported, []
        return found

    def take_ready(self) -> dict[int, bool]:
        """Return whether the engine announces its layers to this rank, if that has changed since the last call."""
        if self.layered is None or self.layered.ready == self._was_ready:
            return {}
        self._was_ready = self.layered.ready
        return {self._rank.number: self._was_ready}
