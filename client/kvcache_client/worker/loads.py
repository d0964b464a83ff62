"""The loads of a rank: copies from the region, and the device blocks that they have filled."""

from __future__ import annotations

import logging
import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from kvcache_client.devices import Job
from kvcache_client.session.region import Placed, Region
from kvcache_client.step_plan import LoadJob, pick_refs
from kvcache_client.worker.exchange import Key
from kvcache_client.worker.layered import EarlyLoads
from kvcache_client.worker.peers import Peers, Shared
from kvcache_client.worker.places import divide, without_nulls
from kvcache_client.worker.rank import Rank, copy_pieces
from kvcache_proto.types import REF_BYTES, Finding

logger = logging.getLogger("vllm.kvcache.worker")

SHARED_BYTES = 16 << 20  # of a load that ranks share: below, telling each other takes what they save
CHUNK_BYTES = 32 << 20  # that a rank copies, at least, before the others take it
MOST_CHUNKS = 8  # of a rank: for each one, threads of all ranks wake each other, which takes up to 2 ms
CARRIES = 5e9  # bytes per second that a thread carries, until a rate has been measured
CHANGE = 0.1  # smallest relative change of that rate that is reported to the scheduler's side


class Loads:
    """Carries out load jobs; the `early` ones are reported when they begin."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.early = EarlyLoads(
            rank, lambda job, region, done: self._find_failed(job, region, done, rank.epoch, _all_sound(job))
        )
        self.invalid: set[int] = set()  # device blocks that loads did not fill
        self.failed: set[str] = set()  # requests whose loads have failed, in an engine with several groups
        self.peers: Peers | None = None  # ranks that share loads with this one
        self._done: deque[tuple[str, list[int]]] = deque()  # requests whose load has ended, and blocks that failed
        self._parts: dict[str, tuple[int, list[int]]] = {}  # of loads with several jobs: jobs left, failed blocks
        self._lock = threading.Lock()
        self._direct_region: Region | None = None  # a region that copies reach without a thread
        self._carries = CARRIES  # bytes per second, carried by a thread
        self._carried = 0.0  # last reported to the scheduler's side

    @property
    def ended(self) -> bool:
        """Whether loads have ended that `take_received` has not returned yet."""
        return bool(self._done)

    def begin(self, job: LoadJob, key: Key) -> None:
        """Start a load. Its `key` ascends, and is the same in all ranks."""
        shared = self.peers is not None and self._is_shared(job)
        if not self._begin(job, key, shared) and shared and self.peers is not None:
            self.peers.decline(key)

    def _is_shared(self, job: LoadJob) -> bool:
        """Whether ranks that hold the same KV share a load: each comes to the same result."""
        places = self._rank.layout.places[job.group]
        size = len(job.blocks) * places.bytes // places.columns
        slots, ranks = len(job.refs) // REF_BYTES, len(self._rank.layout.facts.sharers)
        return not job.layered and slots >= ranks and size >= SHARED_BYTES

    def _begin(self, job: LoadJob, key: Key, shared: bool) -> bool:
        """Return whether other ranks have a part in it."""
        rank, layout, region = self._rank, self._rank.layout, self._rank.session.region
        direct = region is not None and region is self._direct_region
        if job.layered and region is not None and direct and self.early.begin(job, region):
            self._done.append((job.request, []))
            return False
        if rank.device is None or region is None or region.id != job.region:
            rank.counts.add("loads_of_another_region")
            self._end(job, job.blocks or [0])
            return False
        placed = layout.place(region, job.refs, job.skip + len(job.blocks), job.group)
        if placed is None:
            rank.counts.add("loads_of_odd_places")
            self._end(job, job.blocks)
            return False
        epoch = rank.epoch
        peers = self.peers if shared else None
        if peers is not None and peers.ready and peers.begin(key, self._divided(job, region, placed, epoch)):
            return True
        pieces = layout.places[job.group].cut(placed.offsets, job.blocks, job.skip)
        if layout.facts.groups:
            pieces = without_nulls(pieces, layout.parts)
        copy_pieces(rank.device.load, region, placed.runs, pieces, lambda done: self._copied(job, region, epoch, done))
        return False

    def _divided(self, job: LoadJob, region: Region, placed: Placed, epoch: int) -> Shared:
        layout = self._rank.layout
        places, ranks = layout.places[job.group], layout.facts.sharers
        every = max(1, CHUNK_BYTES // places.bytes, -(-len(placed.offsets) // (len(ranks) * MOST_CHUNKS)))
        parts = divide(places, placed.offsets, job.blocks, job.skip, len(ranks), every)
        if layout.facts.groups:
            parts = [[without_nulls(pieces, layout.parts) for pieces in chunks] for chunks in parts]
        size, slots = places.bytes, len(placed.offsets)
        return Shared(
            region,
            placed.runs,
            dict(zip(ranks, parts, strict=True)),
            {rank: size * len(range(at, slots, len(ranks))) for at, rank in enumerate(ranks)},
            lambda done: self._copied(job, region, epoch, done),
        )

    def _end(self, job: LoadJob, failed: list[int]) -> None:
        """Report the load of a request with the last of its jobs."""
        if job.jobs > 1:
            with self._lock:
                left, before = self._parts.pop(job.request, (job.jobs, []))
                failed = [*before, *failed]
                if left > 1:
                    self._parts[job.request] = left - 1, failed
                    return
        self._done.append((job.request, failed))
        if job.layered:
            self.early.loaded_otherwise(job.request)

    def _copied(self, job: LoadJob, region: Region, epoch: int, done: Job) -> None:
        """On a thread of the device; checksums are verified on another one."""
        if done.error or not job.sums:
            self._end(job, self._find_failed(job, region, done, epoch, _all_sound(job)))
        else:
            self._rank.verifier.after_load(
                region, job, lambda sound: self._end(job, self._find_failed(job, region, done, epoch, sound))
            )

    def _find_failed(
        self, job: LoadJob, region: Region, done: Job, epoch: int, sound: npt.NDArray[np.bool_] | None
    ) -> list[int]:
        """Return the device blocks that a load has not filled: all of them after an error. The engine waits for it."""
        try:
            return self._not_filled(job, region, epoch, done, sound)
        except Exception:  # the engine waits for this load: it must end, as a failed one
            self._rank.counts.add("load_ends_failed")
            logger.exception("request %s: its load cannot be checked and counts as failed", job.request)
            return job.blocks

    def _not_filled(
        self, job: LoadJob, region: Region, epoch: int, done: Job, sound: npt.NDArray[np.bool_] | None
    ) -> list[int]:
        """Return the device blocks that do not have the content to be loaded; `sound` slots have the right checksum.

        A slot that has been granted to another writer meanwhile no longer holds the block.
        """
        rank, failed, places = self._rank, job.blocks, self._rank.layout.places[job.group]
        if done.error:
            logger.warning("request %s: %d blocks were not loaded: %s", job.request, len(failed), done.error)
        elif sound is not None:
            current = region.current(job.refs)
            (wrong,) = (current & ~sound).nonzero()
            if len(wrong) and rank.namespace is not None:
                refs = pick_refs(job.refs, wrong.tolist())
                rank.verifier.alarm(rank.namespace, region, refs, Finding.CORRUPT, job.request)
            if epoch == rank.epoch:
                good = np.repeat(current & sound, places.columns)[job.skip : job.skip + len(job.blocks)]
                failed = [block for block, fine in zip(job.blocks, good.tolist(), strict=True) if not fine]
        size = len(job.blocks) * places.bytes // places.columns
        if not done.direct and done.seconds > 0 and not done.error:
            self._carries = size / done.seconds
        if failed:
            rank.counts.add("load_blocks_failed", len(failed))
        else:
            rank.count_copy("loaded_bytes", "load_us", size, done)
            if not rank.number and not job.group:
                slots = len(job.blocks) / places.columns
                logger.debug("loaded %s", rank.amount(slots, done.seconds, job.request))
        return failed

    def take_received(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, well or not, each once."""
        requests = set()
        while self._done:
            request, failed = self._done.popleft()
            requests.add(request)
            if failed and self._rank.layout.facts.groups:
                self.failed.add(request)
            else:
                self.invalid.update(failed)
        return requests

    def take_carried(self) -> dict[int, float]:
        """Return the seconds that a thread of this rank takes to carry one block of the engine, if that has changed.

        0 if copies go directly between the device and the region.
        """
        device, region = self._rank.device, self._rank.session.region
        if device is None or region is None or region is self._direct_region:
            return {}
        _, locked = device.registered()
        if locked == region.bytes:
            self._direct_region = region
        places = self._rank.layout.places[0]
        seconds = (1 - locked / region.bytes) * places.bytes / places.columns / self._carries
        if abs(seconds - self._carried) <= CHANGE * self._carried:
            return {}
        self._carried = seconds
        return {self._rank.number: seconds}


def _all_sound(job: LoadJob) -> npt.NDArray[np.bool_]:
    return np.ones(len(job.refs) // REF_BYTES, np.bool_)
