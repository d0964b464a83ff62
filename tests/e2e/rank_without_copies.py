"""The connector, in an engine whose last rank cannot copy: its self-test says so."""

from __future__ import annotations

from typing import Any

from kvcache_client.devices import CopyError
from kvcache_client.engines.vllm.connector import KVCacheServerConnector
from kvcache_client.worker import worker

__all__ = ["KVCacheServerConnector"]

_check_copies = worker.check_copies


def _fail(*arguments: Any) -> None:
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.rank_in_group == group.world_size - 1:
        raise CopyError("byte 7 of block 0 came back wrong")
    _check_copies(*arguments)


worker.check_copies = _fail
