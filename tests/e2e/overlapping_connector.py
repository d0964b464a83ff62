"""The connector, where loads take long, and overlap if an engine announces its layers: a toy's times are short."""

from __future__ import annotations

import time
from typing import Any

from kvcache_client.devices.cpu import CpuDevice
from kvcache_client.engines.vllm.connector import KVCacheServerConnector
from kvcache_client.scheduler.pace import Overlap
from kvcache_client.worker import layered

__all__ = ["KVCacheServerConnector"]

layered.LEAST = 1
setattr(Overlap, "wins", lambda self, *_: sum(self._ready.values()) >= self.ranks)  # noqa: B010
_load = CpuDevice._load


def _late(self: CpuDevice, *arguments: Any) -> None:
    time.sleep(0.02)
    _load(self, *arguments)


setattr(CpuDevice, "_load", _late)  # noqa: B010
