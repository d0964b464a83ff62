"""The entry point of vLLM's plugin loader, which calls it in every process of an engine, the API server's too."""

from __future__ import annotations

CONNECTOR = "KVCacheServerConnector"


def register_vllm_connector() -> None:
    """Make `kv_connector="KVCacheServerConnector"` known to vLLM. Touches no device and starts nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvcache_client.connector", CONNECTOR)
