"""Whether the region holds what was stored, and what the engine would compute: a rank's side.

On threads of its own, so that neither a step of the engine nor the next copy waits for them; a load waits, so that
several threads share what is large. A block that fails is forgotten by the daemon, which knows who stored it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvcache_client.session.checksums import pack_sums, sum_up, sums_of_shard
from kvcache_client.session.counters import Counters
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.region import Region
from kvcache_client.step_plan import CheckJob, LoadJob, SaveJob, pick_refs
from kvcache_client.worker.tolerance import Format, difference
from kvcache_proto.text import escaped
from kvcache_proto.types import Finding, NamespaceSpec

logger = logging.getLogger("vllm.kvcache.worker")

THREADS = 4  # for one load: three sum up 100 GB/s, which is what memory gives
_SHARE = 4 << 20  # bytes that are worth a thread

_SAID = {
    Finding.CORRUPT: ("blocks_corrupt", "hold other bytes than were stored"),
    Finding.DIFFERENT: ("canary_mismatches", "are not what their tokens give"),
}


class Proof:
    """Of one shard of the blocks of one namespace's geometry."""

    def __init__(self, spec: NamespaceSpec, shard: int, counts: Counters) -> None:
        group = spec.groups[0]
        self._shard, self._shards = shard, spec.shards
        self._begin, self._size = group.shard_offset(shard), group.shards[shard]
        self._counts = counts
        self._saved = ThreadPoolExecutor(1, "kvcache-sum-saves")
        self._loaded = ThreadPoolExecutor(1, "kvcache-sum-loads")
        self._helpers = ThreadPoolExecutor(THREADS - 1, "kvcache-sum-helper")

    def after_save(self, region: Region, job: SaveJob, then: Callable[[bytes], None]) -> None:
        """Give `then` the checksums of what `job` has written, one a position, on another thread."""

        def work() -> None:
            packed = b""
            try:
                sums = sum_up(region.buffer, self._begins(region, pick_refs(job.refs, job.summed)), self._size)
                packed = pack_sums(len(job.positions), job.summed, sums)
            except Exception:  # whoever waits for the settlement must not wait for ever; without a sum it is as good
                logger.exception("no checksums of request %s", job.request)
                self._counts.add("sums_failed")
            then(packed)

        self._saved.submit(work)

    def after_load(self, region: Region, job: LoadJob, then: Callable[[npt.NDArray[np.bool_] | None], None]) -> None:
        """Give `then`, on another thread, whether each slot of `job` holds what was summed up when it was stored; None
        where that cannot be said."""

        def work() -> None:
            sound = None
            try:
                expected = sums_of_shard(job.sums, self._shard, self._shards)
                (some,) = expected.nonzero()
                sums = self._sum_up(region, self._begins(region, pick_refs(job.refs, some.tolist())))
                sound = np.ones(len(expected), np.bool_)
                sound[some] = sums == expected[some]
                self._counts.add("blocks_verified", len(some))
            except Exception:  # as above: the load has failed then
                logger.exception("the load of request %s cannot be verified", job.request)
                self._counts.add("sums_failed")
            then(sound)

        self._loaded.submit(work)

    def compare(self, namespace: Namespace, region: Region, job: CheckJob, computed: memoryview, form: Format) -> None:
        """Compare the slots of `job` with what the engine has `computed`, slot after slot, on another thread."""

        def work() -> None:
            try:
                found = {}
                for number, begin in enumerate(self._begins(region, job.refs)):
                    mine = computed[number * self._size : (number + 1) * self._size]
                    if why := difference(region.buffer[begin : begin + self._size], mine, form):
                        found[number] = why
                # Last, for what was read is the block's only where this holds after it.
                current = region.current(job.refs)
            except Exception:  # the pool would keep it to itself
                logger.exception("the canary of request %s cannot be compared", job.request)
                self._counts.add("canary_failed")
                return
            self._counts.add("canary_lost", int((~current).sum()))
            self._counts.add("canary_checked", int(current.sum()))
            wrong = [number for number in found if current[number]]
            if not wrong:
                logger.info(
                    "request %s, the canary: %d cached blocks are as they should be", job.request, current.sum()
                )
            else:
                what = f"{job.request}, the canary ({found[wrong[0]]})"
                self.alarm(namespace, region, pick_refs(job.refs, wrong), Finding.DIFFERENT, what)

        self._loaded.submit(work)

    def alarm(self, namespace: Namespace, region: Region, refs: bytes, finding: Finding, request: str) -> None:
        """Have the daemon forget the blocks in `refs`, count and log them, with the name of who stored them."""
        counter, said = _SAID[finding]
        offsets = region.offsets(refs).tolist()
        self._counts.add(counter, len(offsets))

        def tell(writers: list[tuple[str, int]]) -> None:
            logger.error(
                "request %s: %d cached blocks of namespace %s %s: shard %d, %s of the region; stored by %s",
                *(request, len(offsets), namespace.id, said, self._shard, _some(offsets), _names(writers)),
            )

        namespace.distrust(refs, self._shard, finding, region.id, tell)

    def close(self) -> None:
        """Wait for what was begun."""
        self._saved.shutdown()
        self._loaded.shutdown()
        self._helpers.shutdown()

    def _sum_up(self, region: Region, begins: list[int]) -> npt.NDArray[np.uint64]:
        parts = max(1, min(THREADS, len(begins), len(begins) * self._size // _SHARE))
        cuts = [len(begins) * number // parts for number in range(parts + 1)]
        mine, *others = [begins[begin:end] for begin, end in itertools.pairwise(cuts)]
        helped = [self._helpers.submit(sum_up, region.buffer, part, self._size) for part in others]
        return np.concatenate([sum_up(region.buffer, mine, self._size), *(each.result() for each in helped)])

    def _begins(self, region: Region, refs: bytes) -> list[int]:
        begins: list[int] = (region.offsets(refs).astype(np.int64) + self._begin).tolist()
        return begins


def _some(offsets: Sequence[int]) -> str:
    said = ", ".join(f"{offset:#x}" for offset in offsets[:4])
    return f"at {said}" + (", ..." if len(offsets) > 4 else "")


def _names(writers: Sequence[tuple[str, int]]) -> str:
    names = sorted(
        {f"engine {escaped(engine)} (session {session or 'unknown'})" for engine, session in writers if engine}
    )
    return ", ".join(names) or "nobody that the daemon knows of"
