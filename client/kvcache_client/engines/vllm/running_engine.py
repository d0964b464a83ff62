"""Facts of the running vLLM, and of the engines in this process."""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any
from weakref import WeakValueDictionary

from kvcache_client.engines.vllm import compat
from kvcache_client.engines.vllm.identity import RuntimeFacts
from kvcache_proto.endpoint import check_endpoint, default_endpoint
from kvcache_proto.types import MAX_NAME

logger = logging.getLogger("vllm.kvcache")

_connectors: WeakValueDictionary[tuple[object, str, str], Any] = WeakValueDictionary()  # by side, engine and endpoint


def runtime_facts(vllm_config: Any, spec: Any = None) -> RuntimeFacts:
    """Return the facts that the engine's configuration does not have.

    `spec` is a layer's specification, if this process has no model.
    """
    import transformers
    import vllm
    from vllm.platforms import current_platform
    from vllm.utils.hashing import get_hash_fn_by_name

    seed = os.environ.get("PYTHONHASHSEED")
    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    return RuntimeFacts(
        version=vllm.__version__,
        device=f"{current_platform.device_type} {current_platform.get_device_name()}",
        hash_bytes=len(hash_function("length")),
        seed=f"PYTHONHASHSEED={seed}" if seed is not None else compat.fixed_seed(hash_function),
        layout=compat.process_layout(vllm_config, spec),
        transformers=transformers.__version__,
    )


def engine_name(vllm_config: Any, engine_id: str = "") -> str:
    """Return a unique name for this engine: its configured id, or `engine_id`, and a tag made from its instance id.

    Copied unit files repeat the configured id. The instance id is drawn when an engine's configuration is made, and the
    scheduler and all ranks share that configuration.
    """
    configured, instance = engine_id or str(vllm_config.kv_transfer_config.engine_id), _instance(vllm_config)
    tag = "-" + hashlib.blake2b(instance.encode(), digest_size=4).hexdigest() if instance else ""
    return configured[: MAX_NAME - len(tag)] + tag


def has_another(connector: object, in_scheduler: bool, vllm_config: Any, endpoint: str) -> bool:
    """Return True if another connector of this process serves the same side of the same engine at `endpoint`.

    If none does, `connector` is noted as the one, as long as it lives or until `retire`.
    """
    instance = _instance(vllm_config)
    here = check_endpoint(endpoint) if endpoint else default_endpoint()
    return bool(instance) and _connectors.setdefault((in_scheduler, instance, here), connector) is not connector


def retire(connector: object) -> None:
    """Allow another connector to take the place of this one."""
    for place, there in list(_connectors.items()):
        if there is connector:
            del _connectors[place]


def _instance(vllm_config: Any) -> str:
    """Return an id that no other engine has. Data-parallel ranks are engines of one configuration."""
    instance = str(getattr(vllm_config, "instance_id", None) or "")
    rank = vllm_config.parallel_config.data_parallel_index
    return f"{instance} {rank}" if instance and rank else instance


def join_logs(quiet: bool) -> None:
    """Send the log lines of sessions and devices to vLLM's log.

    One process of an engine logs that the daemon is gone, and back; its other processes are `quiet`.
    """
    ours, theirs = logging.getLogger("kvcache_client"), logging.getLogger("vllm")
    ours.setLevel(theirs.getEffectiveLevel())
    logging.getLogger("kvcache_client.session").setLevel(logging.ERROR if quiet else logging.NOTSET)
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.propagate = not theirs.handlers


def rank_in_engine(parallel_config: Any) -> int:
    """Return the number of this process's rank, as vLLM counts: stages, prefill context parallelism, tensor
    parallelism."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    stage = get_pp_group().rank_in_group if parallel_config.pipeline_parallel_size > 1 else 0
    prefill = compat.prefill_ranks(parallel_config)
    rank = stage * prefill + (get_pcp_group().rank_in_group if prefill > 1 else 0)
    return int(rank * parallel_config.tensor_parallel_size + get_tp_group().rank_in_group)
