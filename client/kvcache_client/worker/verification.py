"""Checks, on a rank, that the region holds the bytes that were stored, and those that the engine would compute.

The checks run on threads of their own, so that neither a step of the engine nor the next copy waits for them. A load
does wait, so several threads share a large one. The daemon forgets a block that fails, and names its writer.
"""

from __future__ import annotations

import itertools
import logging
import threading
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
from kvcache_proto.types import MAX_BLOCKS, REF_BYTES, Finding, NamespaceSpec, unpack_refs

logger = logging.getLogger("vllm.kvcache.worker")

THREADS = 4  # for one load: three reach 100 GB/s, the memory bandwidth
_SHARE = 4 << 20  # bytes that are worth a thread
_REPORTED = MAX_BLOCKS * REF_BYTES  # bytes of references at a time
_PATIENCE = 1.0  # seconds for the daemon to forget a wrong block

_SAID = {
    Finding.CORRUPT: ("blocks_corrupt", "hold other bytes than were stored"),
    Finding.DIFFERENT: ("canary_mismatches", "differ from what their tokens give"),
}


class Verifier:
    """Checks the shards of blocks that a rank `reads`, which are consecutive, and sums up those that it `writes`."""

    def __init__(self, reads: Sequence[int], writes: Sequence[int], counts: Counters) -> None:
        self._reads, self._writes, self._counts = reads, writes, counts
        self._parts: list[dict[int, tuple[int, int]]] = []  # of each group, offset in a slot and bytes of each shard
        self._saved = ThreadPoolExecutor(1, "kvcache-sum-saves")
        self._loaded = ThreadPoolExecutor(1, "kvcache-sum-loads")
        self._helpers = ThreadPoolExecutor(THREADS - 1, "kvcache-sum-helper")

    def follow(self, spec: NamespaceSpec) -> None:
        """From now on, check slots of this namespace."""
        self._shards = spec.shards
        self._parts = [
            {shard: (group.shard_offset(shard), group.shards[shard]) for shard in self._reads} for group in spec.groups
        ]
        self._block_bytes = [group.block_bytes for group in spec.groups]

    def after_save(self, region: Region, job: SaveJob, then: Callable[[bytes], None]) -> None:
        """Pass the checksums of the blocks written by `job`, one per position and shard, to `then` on another
        thread."""

        def work() -> None:
            packed, parts, refs = b"", self._parts[job.group], pick_refs(job.refs, job.summed)
            try:
                block_bytes = self._block_bytes[job.group]
                sums = [sum_up(region.views(refs, block_bytes, *parts[shard])) for shard in self._writes]
                packed = pack_sums(len(job.positions), job.summed, np.stack(sums, axis=1))
            except Exception:  # the settlement must not wait forever; it is as good without checksums
                logger.exception("no checksums of request %s", job.request)
                self._counts.add("sums_failed")
            then(packed)

        self._saved.submit(work)

    def after_load(self, region: Region, job: LoadJob, then: Callable[[npt.NDArray[np.bool_] | None], None]) -> None:
        """Pass to `then`, on another thread, whether each slot of `job` matches the checksum taken when it was stored.

        None if that cannot be determined.
        """

        def work() -> None:
            sound, some = None, np.empty(0, np.int64)
            try:
                good = np.ones(len(job.refs) // REF_BYTES, np.bool_)
                for shard, (begin, size) in self._parts[job.group].items():
                    expected = sums_of_shard(job.sums, shard, self._shards)
                    (some,) = expected.nonzero()
                    refs = pick_refs(job.refs, some.tolist())
                    sums = self._sum_up(region.views(refs, self._block_bytes[job.group], begin, size), size)
                    good[some] &= sums == expected[some]
                sound = good
                self._counts.add("blocks_verified", len(some))
            except Exception:  # as above: the load has failed then
                logger.exception("the load of request %s cannot be verified", job.request)
                self._counts.add("sums_failed")
            then(sound)

        self._loaded.submit(work)

    def compare(
        self,
        namespace: Namespace,
        region: Region,
        job: CheckJob,
        computed: memoryview,
        form: Format,
        raw: Callable[[memoryview], memoryview | None],
    ) -> None:
        """Compare the slots of `job` with the `computed` blocks of the engine, in order, on another thread.

        `raw` decompresses the bytes of a slot; it returns None if a block could not be compressed.
        """

        def work() -> None:
            inside = self._parts[0][self._reads[0]][0]
            size = sum(size for _, size in self._parts[0].values())
            try:
                found, skipped = {}, []
                for number, views in enumerate(region.views(job.refs, self._block_bytes[0], inside, size)):
                    mine = computed[number * size : (number + 1) * size]
                    theirs = views[0] if len(views) == 1 else memoryview(b"".join(views))
                    if theirs == mine:
                        continue
                    before, now = raw(theirs), raw(mine)
                    if now is None:
                        skipped.append(number)
                    elif before is None:
                        found[number] = "it says that it could not be compressed"
                    elif why := difference(before, now, form):
                        found[number] = why
                # Checked last: the bytes belong to the block only if this still holds after the comparison.
                current = region.current(job.refs)
            except Exception:  # the pool would swallow it
                logger.exception("the canary of request %s cannot be compared", job.request)
                self._counts.add("canary_failed")
                return
            self._counts.add("canary_lost", int((~current).sum()))
            self._counts.add("canary_skipped", int(current[skipped].sum()))
            current[skipped] = False
            wrong = [number for number in found if current[number]]
            if not wrong:
                logger.info("request %s, a canary: %d cached blocks are as computed", job.request, current.sum())
            else:
                what = f"{job.request}, a canary ({found[wrong[0]]})"
                self.alarm(namespace, region, pick_refs(job.refs, wrong), Finding.DIFFERENT, what)
            self._counts.add("canary_checked", int(current.sum()))  # the last one: whoever sees it sees the others

        self._loaded.submit(work)

    def alarm(self, namespace: Namespace, region: Region, refs: bytes, finding: Finding, request: str) -> None:
        """Have the daemon forget the blocks in `refs`; count and log them, with the names of their writers.

        Waits for its answer: the engine computes and saves these blocks again, and the daemon refuses them as long as
        it has the wrong ones.
        """
        for at in range(0, len(refs), _REPORTED):
            self._alarm_some(namespace, region, refs[at : at + _REPORTED], finding, request)

    def _alarm_some(self, namespace: Namespace, region: Region, refs: bytes, finding: Finding, request: str) -> None:
        counter, said = _SAID[finding]
        answered = threading.Event()
        offsets = [ref.offset for ref in unpack_refs(refs)]
        self._counts.add(counter, len(offsets))

        def log(writers: list[tuple[str, int]]) -> None:
            logger.error(
                "request %s: %d cached blocks of namespace %s %s: shard %d, %s of the region; stored by %s",
                *(request, len(offsets), namespace.id, said, self._reads[0], _some(offsets), _names(writers)),
            )
            answered.set()

        namespace.invalidate(refs, self._reads[0], finding, region.id, log)
        answered.wait(_PATIENCE)

    def close(self) -> None:
        """Wait for checks that have begun."""
        self._saved.shutdown()
        self._loaded.shutdown()
        self._helpers.shutdown()

    def _sum_up(self, shards: list[list[memoryview]], size: int) -> npt.NDArray[np.uint64]:
        parts = max(1, min(THREADS, len(shards), len(shards) * size // _SHARE))
        cuts = [len(shards) * number // parts for number in range(parts + 1)]
        mine, *others = [shards[begin:end] for begin, end in itertools.pairwise(cuts)]
        helped = [self._helpers.submit(sum_up, part) for part in others]
        return np.concatenate([sum_up(mine), *(each.result() for each in helped)])


def _some(offsets: Sequence[int]) -> str:
    said = ", ".join(f"{offset:#x}" for offset in offsets[:4])
    return f"at {said}" + (", ..." if len(offsets) > 4 else "")


def _names(writers: Sequence[tuple[str, int]]) -> str:
    names = sorted(
        {f"engine {escaped(engine)} (session {session or 'unknown'})" for engine, session in writers if engine}
    )
    return ", ".join(names) or "a writer that the daemon does not know"
