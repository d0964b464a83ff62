"""Canaries on a rank: blocks that the engine has computed are compared with those in the cache."""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np

from kvcache_client.devices import Job, Scratch
from kvcache_client.step_plan import CheckJob
from kvcache_client.worker.rank import Rank, copy_pieces
from kvcache_client.worker.tolerance import Format, find_format
from kvcache_proto.types import REF_BYTES

logger = logging.getLogger("vllm.kvcache.worker")


class CanaryChecks:
    """Compares blocks with the cache, within the numerical noise of their values."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._format: Format | None = None  # of the values in a block

    def set_dtypes(self, dtypes: Collection[str]) -> None:
        """Compare values of these types. Without a format for them, nothing is compared."""
        layout = self._rank.layout
        self._format = find_format(set(dtypes), layout.spec.identity.get("kv_dtype", ""), layout.facts.experts)

    @property
    def knows_noise(self) -> bool:
        return self._format is not None

    def begin(self, job: CheckJob) -> None:
        """Copy the blocks out, as a save does, and compare them with the cache."""
        rank, layout = self._rank, self._rank.layout
        if layout.reads[0] not in layout.writes or rank.device is None:  # another rank compares the same bytes
            return
        region, namespace, form = rank.session.region, rank.namespace, self._format
        if region is None or region.id != job.region or namespace is None or form is None:
            rank.counts.add("canary_skipped")
            return
        if layout.place(region, job.refs, len(job.blocks)) is None:
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
                rank.verifier.compare(namespace, region, job, scratch.buffer, form)

        copy_pieces(rank.device.save, scratch, None, pieces, ended)
