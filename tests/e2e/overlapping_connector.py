"""The connector, where loads take long, and overlap if an engine announces its layers: a toy's times are short."""

from __future__ import annotations

import time

from kvcache_client.devices import Job
from kvcache_client.devices.cpu import CpuDevice
from kvcache_client.engines.vllm.connector import KVCacheServerConnector
from kvcache_client.scheduler.cost_model import Overlap
from kvcache_client.worker import layered

__all__ = ["KVCacheServerConnector"]

layered.LEAST = 1
setattr(Overlap, "wins", lambda self, *_: sum(self._ready.values()) >= self.ranks)  # noqa: B010
_copy = CpuDevice._copy


def _late(self: CpuDevice, job: Job, part: slice) -> None:
    if not job.saves:
        time.sleep(0.02)
    _copy(self, job, part)


setattr(CpuDevice, "_copy", _late)  # noqa: B010
