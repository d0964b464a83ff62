"""Copies of a rank from the device: saves, and canaries, whose blocks are compared with those in the cache."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from kvcache_client.devices import Job, Scratch
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.region import Region
from kvcache_client.step_plan import SHIPPED, CheckJob, RankVerdicts, SaveJob, pick_refs
from kvcache_client.worker.rank import Rank, copy_pieces
from kvcache_client.worker.tolerance import Format, find_format
from kvcache_proto.types import REF_BYTES, Outcome

logger = logging.getLogger("vllm.kvcache.worker")


@dataclass(slots=True)
class _Stored:
    """The stored blocks of one request, for one line in the log."""

    jobs: int = 0
    blocks: int = 0
    seconds: float = 0.0
    finished: bool = False


class Saves:
    """Copies the blocks of save jobs, and settles them on the thread that saw the end of the copy."""

    def __init__(self, rank: Rank, events: bool) -> None:
        """With `events`, the daemon's verdicts are kept for `take_verdicts`."""
        self._rank = rank
        self._verdicts: deque[RankVerdicts] | None = deque() if events else None
        self._given_away: deque[tuple[int, int]] = deque(maxlen=SHIPPED)
        self._not_compressed: deque[tuple[int, int, list[int]]] = deque(maxlen=SHIPPED)
        self._stored: dict[str, _Stored] = {}
        self._lock = threading.Lock()

    def begin(self, job: SaveJob) -> None:
        rank, layout = self._rank, self._rank.layout
        if not layout.writes or rank.device is None:
            return
        region, namespace = rank.session.region, rank.namespace
        if region is None or region.id != job.region or namespace is None:
            # The reservation ended with the region that it was made in.
            rank.counts.add("saves_of_another_region", len(job.positions))
            return
        placed = layout.place(region, job.refs, len(job.blocks), job.group)
        if placed is None:
            rank.counts.add("saves_of_odd_places", len(job.positions))
            namespace.settle(job.reservation, Outcome.FAILED, job.positions, region_id=job.region)
            return
        with self._lock:
            self._stored.setdefault(job.request, _Stored()).jobs += 1
        parts = [shard - layout.reads[0] for shard in layout.writes]
        places = layout.places[job.group]

        def ended(done: Job) -> None:
            kept = job
            if not done.error:
                try:
                    lost = places.lost(region.buffer, placed.offsets, placed.runs, parts).tolist()
                    kept = self._without(lost, namespace, job) if lost else job
                except Exception as error:  # the save must end, as a failed one
                    done.error = f"{type(error).__name__}: {error}"
                    logger.exception("request %s: it is not known whether its blocks could be compressed", job.request)
            self._ended(namespace, region, kept, done)

        pieces = places.cut(placed.offsets, job.blocks, parts=parts)
        copy_pieces(rank.device.save, region, placed.runs, pieces, ended)

    def _without(self, lost: list[int], namespace: Namespace, job: SaveJob) -> SaveJob:
        """Settle the blocks that could not be compressed, by their indices, as failed. Return the job without them."""
        if not self._rank.counts.snapshot().get("blocks_not_compressed"):
            logger.warning(
                "rank %d: a block cannot be compressed, because its exponents differ too much, so it is not stored. If "
                "blocks_not_compressed keeps rising, set `compress: off`",
                self._rank.number,
            )
        self._rank.counts.add("blocks_not_compressed", len(lost))
        self._not_compressed.append((job.reservation, job.positions[0], lost))
        self._report(namespace, job, [job.positions[index] for index in lost], Outcome.FAILED)
        kept = [index for index in range(len(job.positions)) if index not in set(lost)]
        summed = set(job.summed)
        return replace(
            job,
            positions=[job.positions[index] for index in kept],
            refs=pick_refs(job.refs, kept),
            summed=[number for number, index in enumerate(kept) if index in summed],
        )

    def _ended(self, namespace: Namespace, region: Region, job: SaveJob, done: Job) -> None:
        self._rank.check_read(done)
        if done.error or not job.summed:
            self._settle(namespace, job, done, b"")
        else:
            self._rank.verifier.after_save(region, job, lambda sums: self._settle(namespace, job, done, sums))

    def _settle(self, namespace: Namespace, job: SaveJob, done: Job, sums: bytes) -> None:
        try:
            self._settle_end(namespace, job, done, sums)
        except Exception:  # other copies need this thread; the daemon frees the slots when the session ends
            self._rank.counts.add("save_ends_failed")
            logger.exception("request %s: its save was not settled", job.request)

    def _settle_end(self, namespace: Namespace, job: SaveJob, done: Job, sums: bytes) -> None:
        rank, layout = self._rank, self._rank.layout
        outcome = Outcome.FAILED if done.error else Outcome.COMMITTED
        if done.cancelled:
            outcome = Outcome.NEVER_STARTED
            rank.counts.add("saves_given_away", len(job.positions))
            self._given_away.append((job.reservation, job.positions[0]))
        elif done.error:
            rank.counts.add("saves_failed", len(job.positions))
            logger.warning("request %s: %d blocks were not stored: %s", job.request, len(job.positions), done.error)
        else:
            written = layout.places[job.group].bytes * len(layout.writes) // len(layout.reads)
            rank.count_copy("saved_bytes", "save_us", len(job.positions) * written, done)
        if job.positions:
            self._report(namespace, job, job.positions, outcome, sums)
        with self._lock:
            stored = self._stored[job.request]
            stored.jobs -= 1
            stored.seconds += done.seconds
            if not done.error and not job.group:
                stored.blocks += len(job.positions)
            ended = self._take_stored(job.request, stored)
        self._log_stored(job.request, ended)

    def _report(
        self, namespace: Namespace, job: SaveJob, positions: list[int], outcome: Outcome, sums: bytes = b""
    ) -> None:
        """Settle some positions of a job."""
        kept, place = self._verdicts, (job.region, job.reservation, positions)
        then = None if kept is None else lambda found: kept.append(RankVerdicts(*place, list(map(int, found))))
        namespace.settle(job.reservation, outcome, positions, region_id=job.region, then=then, sums=sums)

    def finish(self, request: str) -> None:
        """Log the stored blocks of a request that has no more saves, once its running saves have ended."""
        ended = None
        with self._lock:
            if (stored := self._stored.get(request)) is not None:
                stored.finished = True
                ended = self._take_stored(request, stored)
        self._log_stored(request, ended)

    def _take_stored(self, request: str, stored: _Stored) -> _Stored | None:
        """Remove and return the figures of a request whose saves have all ended."""
        return self._stored.pop(request) if stored.finished and not stored.jobs else None

    def _log_stored(self, request: str, stored: _Stored | None) -> None:
        """Log the figures, without the lock: the engine's step takes it."""
        if stored is not None and not self._rank.number:
            logger.debug("stored %s", self._rank.amount(stored.blocks, stored.seconds, request))

    def take_given_away(self) -> list[tuple[int, int]]:
        """Return the saves, by reservation and first position, that were cancelled since the last call."""
        return [self._given_away.popleft() for _ in range(len(self._given_away))]

    def take_not_compressed(self) -> list[tuple[int, int, list[int]]]:
        """Return the saves, by reservation and first position, with blocks that could not be compressed, since the last
        call, and the indices of these blocks."""
        return [self._not_compressed.popleft() for _ in range(len(self._not_compressed))]

    def take_verdicts(self) -> list[RankVerdicts]:
        """Return the daemon's verdicts on settlements since the last call."""
        verdicts = self._verdicts
        return [verdicts.popleft() for _ in range(len(verdicts))] if verdicts else []


class CanaryChecks:
    """Compares blocks with the cache, within the numerical noise of their values."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._format: Format | None = None  # of the values in a block

    def set_dtypes(self, dtypes: Collection[str]) -> bool:
        """Compare values of these types; return False if nothing can be compared, because they have no format."""
        layout = self._rank.layout
        self._format = find_format(set(dtypes), layout.spec.identity.get("kv_dtype", ""), layout.facts.experts)
        return self._format is not None

    def begin(self, job: CheckJob) -> None:
        """Copy the blocks out, as a save does, and compare them with the cache."""
        rank, layout = self._rank, self._rank.layout
        if layout.reads[0] not in layout.writes or rank.device is None:  # another rank compares the same bytes
            return
        region, namespace, form = rank.session.region, rank.namespace, self._format
        if (
            region is None
            or region.id != job.region
            or namespace is None
            or form is None
            or layout.place(region, job.refs, len(job.blocks)) is None
        ):
            rank.counts.add("canary_skipped")
            return
        places, slots = layout.places[0], len(job.refs) // REF_BYTES
        scratch = Scratch(slots * places.bytes)
        pieces = places.cut(places.bytes * np.arange(slots, dtype=np.int64) - places.begin, job.blocks)

        def ended(done: Job) -> None:
            rank.check_read(done)
            if done.error:
                rank.counts.add("canary_failed")
                logger.warning("request %s: the blocks of its canary were not copied: %s", job.request, done.error)
            else:
                rank.verifier.compare(namespace, region, job, scratch.buffer, form, places.raw)

        copy_pieces(rank.device.save, scratch, None, pieces, ended)
