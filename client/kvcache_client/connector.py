"""The module that vLLM's `kv_connector_module_path` names."""

from kvcache_client.engines.vllm.connector import KVCacheServerConnector

__all__ = ["KVCacheServerConnector"]
