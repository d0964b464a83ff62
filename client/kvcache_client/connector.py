"""The module that vLLM's `kv_connector_module_path` names: the connector's documented place."""

from __future__ import annotations

# `__getattr__` explains names that vLLM looks up here in vain.
from kvcache_client.engines.vllm.connector import KVCacheServerConnector, __getattr__

__all__ = ["KVCacheServerConnector", "__getattr__"]
