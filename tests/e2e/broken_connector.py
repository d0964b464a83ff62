"""The connector, in an engine where every slot turns out to be another block's by the time that it has been read."""

from __future__ import annotations

from typing import Any

from kvcache_client.engines.vllm.connector import KVCacheServerConnector
from kvcache_client.session.region import Region

__all__ = ["KVCacheServerConnector"]

_current = Region.current


def _stale(self: Region, packed: bytes) -> Any:
    return _current(self, packed) & False


Region.current = _stale  # type: ignore[method-assign]
