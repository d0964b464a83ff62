"""A rank's side: it carries out plans and decides nothing.

It settles its own shard of every block that it copies, on the thread that saw the end of the copy: an engine that has
gone idle takes no more steps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcache_client.devices import CopyError, Device, Job, Memory, Scratch, open_device
from kvcache_client.devices.layout import Fragment, Tensor, block_fragments, layer_ends, part_fragments, runs
from kvcache_client.devices.registration import Registration
from kvcache_client.devices.self_test import check_copies
from kvcache_client.devices.several import SeveralLayouts
from kvcache_client.session.counters import Counters
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.region import Placed, Region
from kvcache_client.session.session import Session
from kvcache_client.settings import ConnectorSettings
from kvcache_client.spans import Runs
from kvcache_client.step_plan import SHIPPED, CheckJob, LoadJob, RankVerdicts, SaveJob, StepPlan, pick_refs
from kvcache_client.worker.facts import RankFacts
from kvcache_client.worker.layered import LayeredLoads, section_ends
from kvcache_client.worker.places import WHOLE, Piece, Places, without_nulls
from kvcache_client.worker.shards import Shards
from kvcache_client.worker.tolerance import Format, find_format
from kvcache_client.worker.verification import Verifier
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import REF_BYTES, Finding, NamespaceSpec, Outcome

logger = logging.getLogger("vllm.kvcache.worker")

CARRIES = 5e9  # bytes per second that a thread is taken to carry, until one has been measured
CHANGE = 0.1  # smallest relative change of that rate that is reported to the scheduler's side
DRAIN = 60.0  # seconds between two log lines about copies that do not end
_JOINING = "it has not joined the namespace yet"
ARRIVAL = 1.0  # seconds that a step waits for the end of what its layers have waited for
LINGER = 0.001  # seconds that a step without work waits for a load that is about to end
_LOST = "a load has failed after its request was computed with it"
_UNANNOUNCED = "the engine has computed with layers that it has not announced, while they were being loaded"
_LATE = "the executor bypasses Worker.execute_model, so that blocks may be overwritten before they are saved"


@dataclass(slots=True)
class _Stored:
    """What has been stored of one request, for one log line once all of it is stored."""

    jobs: int = 0
    blocks: int = 0
    seconds: float = 0.0
    finished: bool = False


class Worker:
    """One rank. The rank's own thread calls `begin`, `load` and `received` in every step.

    Attributes:
        listens: whether `layer` and `layer_left` are to be called in this step.
    """

    def __init__(
        self,
        session: Session,
        spec: NamespaceSpec,
        settings: ConnectorSettings,
        shards: Shards,
        rank: int,
        facts: RankFacts,
        events: bool = False,
        registration: Registration | None = None,
    ) -> None:
        """Serve one rank of an engine.

        Args:
            events: whether to keep the daemon's verdicts for `take_verdicts`.
            registration: has page-locked the session's region already, if given.
        """
        self._session, self._spec, self._settings = session, spec, settings
        self._rank, self._facts = rank, facts
        self._shards = shards
        self._reads, self._writes = shards.of_rank(rank)
        self._parts = WHOLE  # how its shards divide a block
        part_bytes = facts.block_bytes // len(self._reads)
        # Of each group, as `Places` takes them.
        self._columns = [] if facts.groups else [[(0, part_bytes, facts.blocks_per_slot)]]
        self._places: list[Places] = []
        self._device: Device | None = None
        self._registration = registration
        self._straight: Region | None = None  # a region that copies reach without a thread
        self._carries = CARRIES  # bytes per second, carried by a thread
        self._carried = 0.0  # what was reported to the scheduler's side last
        self._namespace: Namespace | None = None
        self._declined = ""  # why this rank takes no part, whatever the daemon says
        self._joining = facts.joins_later
        self._reported = _JOINING if facts.joins_later else ""  # why it takes no part, as the scheduler's side knows
        self._begun = self._loaded = 0  # numbers of the last plans carried out
        self._epoch = 0  # counts changes of the weights
        self._abandoned = False
        self._done: deque[tuple[str, list[int]]] = deque()  # requests whose load has ended, and blocks that failed
        self._errors: set[int] = set()
        self._failed: set[str] = set()  # requests whose load has failed, in an engine with several groups
        self._loading: dict[str, tuple[int, list[int]]] = {}  # jobs left of a load that has several, blocks that failed
        self._loading_lock = threading.Lock()
        self._layered: LayeredLoads | None = None
        self._was_ready = False  # as the scheduler's side knows it
        self._coming: set[str] = set()  # requests whose layered loads have been reported, and have not ended
        self.listens = False
        self._ending = False  # one of them has finished: no step will wait for its layers
        self._arrival = threading.Condition()
        self._arrived: deque[tuple[str, float, list[int]]] = deque()  # such loads, and blocks that failed
        self._arrivals: list[tuple[str, float]] = []
        self._verdicts: deque[RankVerdicts] | None = deque() if events else None
        self._stored: dict[str, _Stored] = {}
        self._given_away: deque[tuple[int, int]] = deque(maxlen=SHIPPED)
        self._stored_lock = threading.Lock()
        self._counts = Counters()
        self._verifier = Verifier(self._reads, self._writes, self._counts)
        self._follow(spec)
        session.add_counts(self._counts.snapshot)
        self._format: Format | None = None  # of the values in a block

    @property
    def counters(self) -> dict[str, int]:
        """What was skipped or failed, by reason."""
        return self._counts.snapshot()

    def register(self, kv_caches: dict[str, Any], num_blocks: int) -> None:
        """Take the KV tensors, one or several per layer, and join the namespace.

        Raises ConfigError where they do not hold what the KV cache specification says, Unsupported for a device that
        this version cannot copy from, CopyError where copies do not work. The caller then calls `decline`.
        """
        tensors = list(_flatten(kv_caches.values()))
        layouts = self._find_layouts(kv_caches, num_blocks)
        ends = self._layer_ends(kv_caches, num_blocks) if self._settings.overlap != "off" else {}
        parts = section_ends(list(ends.values())) if ends else []
        devices: list[Device] = []
        try:
            count = self._parts.blocks(num_blocks)
            for fragments in layouts:
                devices.append(open_device(tensors[0].device.type, runs(fragments), count, keep=tensors, ends=parts))
            device = devices[0] if len(devices) == 1 else SeveralLayouts(devices)
            for each, fragments in zip(devices, layouts, strict=True):
                check_copies(each, runs(fragments), count, parts)
        except CopyError:
            for each in reversed(devices):
                each.close()
            raise
        if self._registration is not None:
            device.adopt(self._registration)
            self._registration = None
        self._device = device
        if parts:
            self._layered = LayeredLoads(device, ends, parts)
        if self._facts.groups:  # the values that are compared are those of the full group
            tensors = list(_flatten(kv_caches[name] for table in self._facts.groups[0] for name in table.layers))
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        self._format = find_format(dtypes, self._spec.identity.get("kv_dtype", ""), self._facts.experts)
        if self._format is None and self._settings.canary_every:
            logger.warning("no canaries: the numerical noise in KV of %s is not known", ", ".join(sorted(dtypes)))
        self._session.on_region(self._device.register)
        if not self._joining:
            self._attach(self._spec, wait=True)
        logger.info(
            "rank %d: %d fragments per block, %s bytes, %s of %d, namespace %s; %s bytes are page-locked",
            *(self._rank, max(map(len, layouts)) * self._parts.number, f"{self._facts.block_bytes:,}"),
            *(_named(self._reads), self._spec.shards, "to come" if self._joining else self._spec.id),
            f"{device.registered()[1]:,}",
        )

    def _find_layouts(self, kv_caches: dict[str, Any], num_blocks: int) -> list[list[Fragment]]:
        """Return the fragments of a block in each layout; groups that overlay each other have the same one."""
        if not self._facts.groups:
            described, parts = map(_describe, _flatten(kv_caches.values())), len(self._reads)
            if parts == 1:
                return [block_fragments(described, num_blocks, self._facts.block_bytes)]
            size, by_head = self._facts.block_bytes // parts, self._shards.by_head
            fragments, self._parts = part_fragments(described, num_blocks, size, parts, by_head)
            self._follow(self._spec)
            return [fragments]
        layouts: list[list[Fragment]] = []
        self._columns = []
        for tables in self._facts.groups:
            columns = []
            for table in tables:
                tensors = _flatten(kv_caches[name] for name in table.layers)
                fragments = block_fragments(map(_describe, tensors), num_blocks, table.block_bytes)
                if fragments not in layouts:
                    layouts.append(fragments)
                columns.append((layouts.index(fragments), table.block_bytes, table.blocks))
            self._columns.append(columns)
        self._follow(self._spec)
        return layouts

    def _layer_ends(self, kv_caches: dict[str, Any], num_blocks: int) -> dict[str, int]:
        """Return where the KV of each layer ends in a block of this rank; {} for an engine with several groups."""
        if self._facts.groups:
            return {}
        layers = [[_describe(tensor) for tensor in _flatten([cache])] for cache in kv_caches.values()]
        ends = layer_ends(layers, num_blocks, self._parts.number, self._shards.by_head)
        return dict(zip(kv_caches, ends, strict=True))

    def _follow(self, spec: NamespaceSpec) -> None:
        """Note where this rank's shard lies in the slots of `spec`."""
        self._spec = spec
        places = zip(spec.groups, self._columns, strict=False)
        begin = self._reads[0]
        self._places = [Places(group.shard_offset(begin), columns, self._parts) for group, columns in places]
        self._verifier.follow(spec)

    def _attach(self, spec: NamespaceSpec, wait: bool) -> None:
        self._follow(spec)
        if self._namespace is not None:
            self._session.detach(self._namespace)
        try:
            self._namespace = self._session.attach(spec, self._writes, wait=wait, insist=True)
        except KVCacheError as error:
            self._namespace = None
            self.decline(str(error))

    def decline(self, why: str) -> None:
        """Take no part in the cache from now on. The scheduler's side learns it with the next step, and logs it."""
        self._declined = why
        logger.info("rank %d takes no part in the cache: %s", self._rank, why)

    def abandon(self) -> None:
        """Let all that still reads the engine's blocks fail: they are given to others without a fence from now on."""
        self._abandoned = True
        if self._layered is not None:
            self._layered.wait_all()

    # One step.

    def begin(self, plan: StepPlan, late: bool = False, idle: bool = False) -> None:
        """Start the saves of `plan`, then guard their blocks, before anything of the step touches device memory.

        Where that is too `late`, because the step may have overwritten blocks, the rank takes no part from now on. An
        `idle` step computes nothing.
        """
        if self._device is None:
            return
        self._device.enter_step()
        if self._layered is not None:
            if idle:
                self._layered.give(plan.given)
            else:
                self._layered.enter_step(plan.timed, plan.given)
            self.listens = plan.timed and not idle  # most steps only generate: theirs need not be announced
        if plan.number <= self._begun:
            return
        self._begun = plan.number
        if late:
            self.decline(_LATE)
        if late or plan.unguarded:
            self.abandon()
        if plan.namespace is not None and plan.namespace != self._spec:
            self._epoch += 1
            self._attach(plan.namespace, wait=False)  # a step must not wait for a daemon that is slow to answer
        for job in plan.saves:
            self._save(self._device, job)
        for check in plan.checks:
            self._check(self._device, check)
        self._ending = not self._coming.isdisjoint(plan.finished)
        for request in plan.finished:
            self._finish(request)
        if plan.given:
            self._device.fence(self._parts.all(plan.given))

    def load(self, plan: StepPlan) -> None:
        """Start the loads of `plan`."""
        if plan.number <= self._loaded:
            return
        self._loaded = plan.number
        for job in plan.loads:
            if not (job.layered and self._load_layered(job)):
                self._load(job)

    def layer(self, name: str) -> None:
        """The engine is about to read the KV of a layer."""
        if self._layered is not None:
            self._layered.layer(name)

    def layer_left(self, name: str) -> None:
        """The engine has submitted what reads the KV of a layer."""
        if self._layered is not None:
            self._layered.layer_left(name)

    def received(self, idle: bool = False) -> set[str]:
        """Return the requests whose loads have ended since the last call, well or not, each once.

        An `idle` engine has nothing to compute until they have ended: it waits a millisecond for one that is about to.
        """
        if self._device is not None:
            self._device.leave_step()
            self._device.poll()
            if idle and not self._done and not self._coming:
                self._device.linger(LINGER)
        if self._layered is not None and not idle and (unfilled := self._layered.leave_step()):
            self._errors |= unfilled
            self._counts.add("loads_unannounced")
            self.decline(_UNANNOUNCED)
        if self._layered is not None and self._coming and (self._ending or not idle):
            # What the engine has submitted waits for them, too. So it hears of their end with the step that needs them.
            # After an idle step there may be none for long: a lease whose request was aborted would keep its blocks.
            self._layered.start_all()
            with self._arrival:
                self._arrival.wait_for(lambda: not self._coming, ARRIVAL)
        while self._arrived:
            request, seconds, failed = self._arrived.popleft()
            self._arrivals.append((request, seconds))
            if failed:
                self._errors.update(failed)
                self.decline(_LOST)
        requests = set()
        while self._done:
            request, failed = self._done.popleft()
            requests.add(request)
            if self._facts.groups and failed:
                self._failed.add(request)
            else:
                self._errors.update(failed)
        return requests

    def take_failed(self) -> set[str]:
        """Return the requests whose loads have failed, since the last call, in an engine with several groups."""
        failed, self._failed = self._failed, set()
        return failed

    def take_errors(self) -> set[int]:
        """Return the device blocks that loads did not fill, since the last call."""
        errors, self._errors = self._errors, set()
        return errors

    def take_arrived(self) -> list[tuple[str, float]]:
        """Return the requests of `layered` loads that have ended since the last call, and how long each copy took.

        The time is 0 for those that were loaded like others.
        """
        found, self._arrivals = self._arrivals, []
        return found

    def take_ready(self) -> dict[int, bool]:
        """Return whether the engine announces its layers to this rank, where that has changed since the last call."""
        if self._layered is None or self._layered.ready == self._was_ready:
            return {}
        self._was_ready = self._layered.ready
        return {self._rank: self._was_ready}

    def take_carried(self) -> dict[int, float]:
        """Return, where it has changed, the seconds that a thread of this rank takes to carry one block of the engine.

        0 where copies go straight between the device and the region.
        """
        region = self._session.region
        if self._device is None or region is None or region is self._straight:
            return {}
        _, locked = self._device.registered()
        if locked == region.bytes:
            self._straight = region
        seconds = (1 - locked / region.bytes) * self._facts.block_bytes / self._carries
        if abs(seconds - self._carried) <= CHANGE * self._carried:
            return {}
        self._carried = seconds
        return {self._rank: seconds}

    def take_declined(self) -> dict[int, str]:
        """Return why this rank takes no part in the cache, by its number, where that has changed since the last call.

        "" where it takes part again: the daemon that refused it has been replaced.
        """
        namespace = self._namespace
        why = self._declined or (namespace.refused if namespace is not None else "")
        if not why and self._joining:
            if namespace is None or not namespace.attached:
                return {}
            self._joining = False
        if why == self._reported:
            return {}
        self._reported = why
        return {self._rank: why}

    def take_given_away(self) -> list[tuple[int, int]]:
        """Return the saves, by reservation and first position, that were cancelled since the last call."""
        return [self._given_away.popleft() for _ in range(len(self._given_away))]

    def take_verdicts(self) -> list[RankVerdicts]:
        """Return the daemon's verdicts on settlements since the last call."""
        if not self._verdicts:
            return []
        return [self._verdicts.popleft() for _ in range(len(self._verdicts))]

    # Saves.

    def _save(self, device: Device, job: SaveJob) -> None:
        if not self._writes:
            return
        region, namespace = self._session.region, self._namespace
        if region is None or region.id != job.region or namespace is None:
            # The reservation ended with the region that it was made in.
            self._counts.add("saves_of_another_region", len(job.positions))
            return
        placed = self._place(region, job.refs, len(job.blocks), job.group)
        if placed is None:
            self._counts.add("saves_of_odd_places", len(job.positions))
            namespace.settle(job.reservation, Outcome.FAILED, job.positions, region_id=job.region)
            return
        with self._stored_lock:
            self._stored.setdefault(job.request, _Stored()).jobs += 1
        parts = [shard - self._reads[0] for shard in self._writes]
        pieces = self._places[job.group].cut(placed.offsets, job.blocks, parts=parts)
        _start(device.save, region, placed.runs, pieces, lambda done: self._saved(namespace, region, job, done))

    def _saved(self, namespace: Namespace, region: Region, job: SaveJob, done: Job) -> None:
        self._check_read(done)
        if done.error or not job.summed:
            self._settle(namespace, job, done, b"")
        else:
            self._verifier.after_save(region, job, lambda sums: self._settle(namespace, job, done, sums))

    def _check_read(self, done: Job) -> None:
        """Fail a job that may have read what other requests have written."""
        if self._abandoned and not done.error:
            done.error = "its blocks may have been overwritten"

    def _settle(self, namespace: Namespace, job: SaveJob, done: Job, sums: bytes) -> None:
        try:
            self._settle_end(namespace, job, done, sums)
        except Exception:  # other copies need this thread; the daemon frees the slots when the session ends
            self._counts.add("save_ends_failed")
            logger.exception("request %s: its save was not settled", job.request)

    def _settle_end(self, namespace: Namespace, job: SaveJob, done: Job, sums: bytes) -> None:
        outcome = Outcome.FAILED if done.error else Outcome.COMMITTED
        if done.cancelled:
            outcome = Outcome.NEVER_STARTED
            self._counts.add("saves_given_away", len(job.positions))
            self._given_away.append((job.reservation, job.positions[0]))
        elif done.error:
            self._counts.add("saves_failed", len(job.positions))
            logger.warning("request %s: %d blocks were not stored: %s", job.request, len(job.positions), done.error)
        else:
            written = self._places[job.group].bytes * len(self._writes) // len(self._reads)
            self._count_copy("saved_bytes", "save_us", len(job.positions) * written, done)
        kept = self._verdicts
        then = None if kept is None else lambda verdicts: kept.append(_rank_verdicts(job, verdicts))
        namespace.settle(job.reservation, outcome, job.positions, region_id=job.region, then=then, sums=sums)
        with self._stored_lock:
            stored = self._stored[job.request]
            stored.jobs -= 1
            stored.seconds += done.seconds
            if not done.error and not job.group:
                stored.blocks += len(job.positions)
            line = self._line(job.request, stored)
        if line:
            logger.debug("%s", line)

    def _count_copy(self, size: str, time: str, copied: int, done: Job) -> None:
        self._counts.add(size, copied)
        self._counts.add(time, round(done.seconds * 1e6))

    def _finish(self, request: str) -> None:
        with self._stored_lock:
            stored = self._stored.get(request)
            if stored is None:
                return
            stored.finished = True
            line = self._line(request, stored)
        if line:
            logger.debug("%s", line)

    def _line(self, request: str, stored: _Stored) -> str:
        if stored.jobs or not stored.finished:
            return ""
        del self._stored[request]
        return "" if self._rank else "stored " + self._amount(stored.blocks, stored.seconds, request)

    def _amount(self, slots: float, seconds: float, request: str) -> str:
        size = slots * self._places[0].bytes
        tokens = slots * self._spec.groups[0].block_tokens
        return (
            f"{slots:,.0f} blocks ({tokens:,.0f} tokens), {size / (1 << 20):.1f} MiB, "
            f"{size / max(seconds, 1e-9) / 1e9:.1f} GB/s, request {request}, engine {self._session.engine}"
        )

    # Canaries.

    def _check(self, device: Device, job: CheckJob) -> None:
        """Copy the blocks out, as a save does, and compare them with the cache."""
        if self._reads[0] not in self._writes:  # another rank compares the same bytes
            return
        region, namespace, form = self._session.region, self._namespace, self._format
        if region is None or region.id != job.region or namespace is None or form is None:
            self._counts.add("canary_skipped")
            return
        if self._place(region, job.refs, len(job.blocks)) is None:
            self._counts.add("canary_skipped")
            return
        places, slots = self._places[0], len(job.refs) // REF_BYTES
        scratch = Scratch(slots * places.bytes)
        pieces = places.cut(places.bytes * np.arange(slots, dtype=np.int64) - places.begin, job.blocks)

        def ended(done: Job) -> None:
            self._check_read(done)
            if done.error:
                self._counts.add("canary_failed")
                logger.warning("request %s: the blocks of its canary were not copied: %s", job.request, done.error)
            else:
                self._verifier.compare(namespace, region, job, scratch.buffer, form)

        _start(device.save, scratch, None, pieces, ended)

    # Loads.

    def _load(self, job: LoadJob) -> None:
        region = self._session.region
        if self._device is None or region is None or region.id != job.region:
            self._counts.add("loads_of_another_region")
            self._end_load(job, job.blocks or [0])
            return
        placed = self._place(region, job.refs, job.skip + len(job.blocks), job.group)
        if placed is None:
            self._counts.add("loads_of_odd_places")
            self._end_load(job, job.blocks)
            return
        pieces = self._places[job.group].cut(placed.offsets, job.blocks, job.skip)
        if self._facts.groups:
            pieces = without_nulls(pieces)
        epoch = self._epoch
        _start(self._device.load, region, placed.runs, pieces, lambda done: self._filled(job, region, epoch, done))

    def _load_layered(self, job: LoadJob) -> bool:
        """Start a load and report it at once; return whether that is possible.

        Nothing may go wrong with it any more, because its request is computed with what it brings. So its copies take
        no thread, and its slots are those that were leased.
        """
        region, layered = self._session.region, self._layered
        if layered is None or not layered.ready or region is None or region is not self._straight:
            return False
        if region.id != job.region:
            return False
        placed = self._place(region, job.refs, job.skip + len(job.blocks))
        if placed is None or not region.current(job.refs).all():
            return False
        pieces = self._places[0].cut(placed.offsets, job.blocks, job.skip)
        jobs = _jobs(region, placed.runs, pieces, lambda done: self._arrive(job, region, done), layered.sections())
        self._done.append((job.request, []))
        with self._arrival:
            self._coming.add(job.request)
        layered.start(jobs, job.blocks)
        self._counts.add("loads_layered")
        return True

    def _arrive(self, job: LoadJob, region: Region, done: Job) -> None:
        """Note the end of a load that was reported at its beginning. On a thread of the device."""
        failed = job.blocks
        try:
            failed = self._not_filled(job, region, self._epoch, done, None if done.error else _all_sound(job))
        except Exception:  # the step that waits for this load, and other copies, need this thread
            self._counts.add("load_ends_failed")
            logger.exception("request %s: its load cannot be checked and counts as failed", job.request)
        finally:
            self._arrived.append((job.request, done.seconds, failed))
            with self._arrival:
                self._coming.discard(job.request)
                self._arrival.notify_all()

    def _end_load(self, job: LoadJob, failed: list[int]) -> None:
        """Report the load of a request with the last of its jobs."""
        if job.jobs > 1:
            with self._loading_lock:
                left, before = self._loading.pop(job.request, (job.jobs, []))
                failed = [*before, *failed]
                if left > 1:
                    self._loading[job.request] = left - 1, failed
                    return
        self._done.append((job.request, failed))
        if job.layered:
            self._arrived.append((job.request, 0.0, []))

    def _place(self, region: Region, refs: bytes, blocks: int, group: int = 0) -> Placed | None:
        """Return where the blocks lie that `refs` refer to, None unless they have room for so many of the engine's.

        The scheduler has checked them against its own mapping; the addresses are made in this one.
        """
        if len(refs) // REF_BYTES * self._places[group].columns < blocks:
            return None
        return region.place(refs, self._spec.groups[group].block_bytes)

    def _filled(self, job: LoadJob, region: Region, epoch: int, done: Job) -> None:
        if done.error or not job.sums:
            self._judge(job, region, epoch, done, None if done.error else _all_sound(job))
        else:
            self._verifier.after_load(region, job, lambda sound: self._judge(job, region, epoch, done, sound))

    def _judge(self, job: LoadJob, region: Region, epoch: int, done: Job, sound: npt.NDArray[np.bool_] | None) -> None:
        """Report a load that has ended, whose `sound` slots are good. On a thread of the device or the verifier."""
        failed = job.blocks
        try:
            failed = self._not_filled(job, region, epoch, done, sound)
        except Exception:  # the engine waits for this load: whatever went wrong here, the load has failed
            self._counts.add("load_ends_failed")
            logger.exception("request %s: its load cannot be checked and counts as failed", job.request)
        finally:
            self._end_load(job, failed)

    def _not_filled(
        self, job: LoadJob, region: Region, epoch: int, done: Job, sound: npt.NDArray[np.bool_] | None
    ) -> list[int]:
        """Return the device blocks that do not hold what was to be loaded.

        A slot that another writer has got meanwhile does not hold the block any more.
        """
        failed = job.blocks
        if done.error:
            logger.warning("request %s: %d blocks were not loaded: %s", job.request, len(failed), done.error)
        elif sound is not None:
            current = region.current(job.refs)
            (wrong,) = (current & ~sound).nonzero()
            if len(wrong) and self._namespace is not None:
                refs = pick_refs(job.refs, wrong.tolist())
                self._verifier.alarm(self._namespace, region, refs, Finding.CORRUPT, job.request)
            if epoch == self._epoch:
                columns = self._places[job.group].columns
                good = np.repeat(current & sound, columns)[job.skip : job.skip + len(job.blocks)]
                failed = [block for block, fine in zip(job.blocks, good.tolist(), strict=True) if not fine]
        size = len(job.blocks) * self._places[job.group].bytes // self._places[job.group].columns
        if not done.direct and done.seconds > 0 and not done.error:
            self._carries = size / done.seconds
        if failed:
            self._counts.add("load_blocks_failed", len(failed))
        else:
            self._count_copy("loaded_bytes", "load_us", size, done)
            if not self._rank and not job.group:
                slots = len(job.blocks) / self._places[0].columns
                logger.debug("loaded %s", self._amount(slots, done.seconds, job.request))
        return failed

    # The end.

    def drain(self) -> None:
        """Wait for running copies, at most `drain_ms`: the device's memory is about to be unmapped, or this ends."""
        if self._layered is not None:
            self._layered.start_all()
        if self._device is not None and not self._device.drain(self._settings.drain_ms / 1000):
            self._counts.add("drains_cut_short")
            logger.warning("rank %d: copies were still running after %.0f ms", self._rank, self._settings.drain_ms)

    def close(self) -> None:
        """Wait as `drain` does, settle the saves that are left as failed, and end the session."""
        if self._registration is not None:
            self._registration.close()
        self.drain()
        if self._device is not None:
            self._device.close()
        self._verifier.close()
        self._session.close()

    def wait_quiet(self) -> bool:
        """Wait until no copy can touch the engine's blocks any more; return False where the device cannot say."""
        try:
            while self._device is not None and not self._device.drain(DRAIN):
                logger.warning("rank %d: copies have not ended after %.0f s", self._rank, DRAIN)
        except Exception as error:  # noqa: BLE001 - the device has failed, too
            logger.debug("rank %d: the device cannot say whether copies run", self._rank, exc_info=error)
            return False
        return True


def _start(
    copy: Callable[[Job], None],
    region: Memory,
    runs: Runs | None,
    pieces: Sequence[Piece],
    ended: Callable[[Job], None],
) -> None:
    """Start a copy for each piece; `ended` gets the last one once all have ended, with what became of them together."""
    for job in _jobs(region, runs, pieces, ended):
        copy(job)


def _jobs(
    region: Memory,
    runs: Runs | None,
    pieces: Sequence[Piece],
    ended: Callable[[Job], None],
    sections: Sequence[int] = (0,),
) -> list[Job]:
    """Return a copy for each section of each piece, section by section; `ended` is as above."""
    if len(pieces) == len(sections) == 1:
        (piece,) = pieces
        return [Job(region, piece.blocks, piece.offsets, ended, runs, layout=piece.layout, section=sections[0])]
    lock, done = threading.Lock(), []

    def ended_one(job: Job) -> None:
        with lock:
            done.append(job)
            if len(done) < len(pieces) * len(sections):
                return
        job.error = next((each.error for each in done if each.error), "")
        job.cancelled = all(each.cancelled for each in done)
        job.direct = all(each.direct for each in done)
        job.seconds = sum(each.seconds for each in done)
        ended(job)

    return [
        Job(region, piece.blocks, piece.offsets, ended_one, runs, layout=piece.layout, section=section)
        for section in sections
        for piece in pieces
    ]


def _named(shards: Sequence[int]) -> str:
    return f"shard {shards[0]}" if len(shards) == 1 else f"shards {shards[0]} to {shards[-1]}"


def _rank_verdicts(job: SaveJob, verdicts: Sequence[int]) -> RankVerdicts:
    return RankVerdicts(job.region, job.reservation, job.positions, list(map(int, verdicts)))


def _all_sound(job: LoadJob) -> npt.NDArray[np.bool_]:
    return np.ones(len(job.refs) // REF_BYTES, np.bool_)


def _flatten(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flatten(value)
        else:
            yield value


def _describe(tensor: Any) -> Tensor:
    size = tensor.element_size()
    strides: Sequence[int] = tensor.stride()
    return Tensor(tensor.data_ptr(), tuple(tensor.shape), tuple(stride * size for stride in strides), size)
