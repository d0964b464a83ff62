"""Loads that run while the engine computes: each layer waits only for its own section.

Such a load is reported to the engine as ended when it begins. All later computation must wait: layer by layer in a step
in which the engine announces every layer, otherwise for the whole load before the step.

No interface says whether an engine announces its layers: it depends on its version, its attention backend, and the
graphs that it has captured. So this watches the steps that compute prompts, and loads run like this only once one of
them has announced all layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvcache_client.devices import Device, Job

MOST = 16  # sections of a block: the first layers wait for the first one, and each is a batch of copies
LEAST = 128 << 10  # bytes of a section: smaller pieces take the bus longer
AHEAD = 4  # sections whose copies are begun before the layers that wait for them


def section_ends(layers: Sequence[int]) -> list[int]:
    """Return the ends of a block's sections in its slot; [] if it is too small to be divided.

    `layers` are the ends of the layers' KV. Each section has whole layers.
    """
    count = min(MOST, layers[-1] // LEAST)
    if count < 2:
        return []
    ends: list[int] = []
    for end in layers:
        if end * count >= layers[-1] * (len(ends) + 1) and end not in ends:
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
