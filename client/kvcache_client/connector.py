"""The module that vLLM's `kv_connector_module_path` names: the connector's documented place."""

from __future__ import annotations

from typing import Any

from kvcache_client.engines.vllm import connector
from kvcache_client.engines.vllm.connector import KVCacheServerConnector

__all__ = ["KVCacheServerConnector"]


def __getattr__(name: str) -> Any:
    """Let the connector's own module explain what vLLM looks for here in vain."""
    return getattr(connector, name)
