"""The entry point of vLLM's plugin loader, which calls it in every process of an engine, the API server's too."""

from __future__ import annotations

import logging

from kvcache_client.engines.vllm.early_start import install
from kvcache_client.settings import CONNECTOR

logger = logging.getLogger("vllm.kvcache")


def register_vllm_connector() -> None:
    """Make `kv_connector="KVCacheServerConnector"` known to vLLM, and let ranks prepare the region while they start.

    Touches no device and starts nothing by itself.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kvcache_client.connector", CONNECTOR)
    try:
        install()
    except Exception as error:  # noqa: BLE001 - this vLLM starts its ranks in another way: the connector does it later
        logger.info("the region is not prepared while ranks start: %s", error, exc_info=error)
