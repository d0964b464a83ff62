"""Reads vLLM's configuration: whether this engine can be cached, and the facts that both sides of a connector need."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from kvcache_client.devices.tuning import read_tuning
from kvcache_client.engines.vllm import compat
from kvcache_client.engines.vllm.groups import Merged, has_states
from kvcache_client.engines.vllm.identity import (
    Stored,
    engine_block_size,
    groups_of,
    kv_layout,
    layer_spec,
    namespace_spec,
    shards,
    uncompressible,
    unsupported_by_head,
    unsupported_reason,
)
from kvcache_client.engines.vllm.multimodal import unnamed_items
from kvcache_client.engines.vllm.running_engine import (
    engine_name,
    has_another,
    join_logs,
    runtime_facts,
)
from kvcache_client.settings import CONNECTOR, ConnectorSettings, blocks_per_slot, parse_settings
from kvcache_client.worker.places import Shards
from kvcache_proto.types import NamespaceSpec

logger = logging.getLogger("vllm.kvcache")

BESIDE = (
    f"--kv-offloading-size and {CONNECTOR} exclude each other: vLLM replaces the connector with its own offloading. "
    "Leave --kv-offloading-size out; the daemon owns the memory: `kvcache-server serve --size`"
)
_EVENTS = (
    "block_size %d is not used: an engine that publishes KV events (--kv-events-config) caches blocks of its own size, "
    "%d tokens"
)
_RANDOM = (
    "the block hashes of this engine begin with a random number: it shares blocks with no other engine, nor with "
    "itself after a restart. Set PYTHONHASHSEED=0 in the environment of every engine that is to share"
)
_TWICE = (
    f"this engine has a second {CONNECTOR} for the daemon at %s, which does nothing because the first one does "
    "everything; leave it out of `connectors`"
)


@dataclass(frozen=True)
class Setup:
    """An engine that can be cached. `vllm` and `kv_cache` are vLLM's configurations."""

    vllm: Any
    kv_cache: Any
    settings: ConnectorSettings
    spec: NamespaceSpec  # with pipeline stages, as if all ranks had the shares of the first stage
    split: Shards  # how the ranks hold a block
    engine: str  # its name
    per_slot: int  # blocks of the engine per cached block
    groups: list[Merged]  # of the namespace, unless the engine has just one, of full attention
    wants_events: bool  # whether it publishes KV events
    multimodal: str  # the setting, as far as the engine allows
    compress: bool  # whether what can be is stored compressed

    @property
    def block_tokens(self) -> int:
        return engine_block_size(self.vllm, self.kv_cache)

    @property
    def stages(self) -> int:
        return int(self.vllm.parallel_config.pipeline_parallel_size)

    @property
    def ranks(self) -> int:
        parallel = self.vllm.parallel_config
        return self.stages * compat.prefill_ranks(parallel) * int(parallel.tensor_parallel_size)


def read_setup(side: object, in_scheduler: bool, vllm_config: Any, kv_cache: Any) -> Setup | None:
    """Return the facts of an engine, None if `side` is not to use the cache; the scheduler's side logs why.

    Raises ConfigError for settings that are wrong, and for KV that the protocol does not allow.
    """
    join_logs(quiet=not in_scheduler)

    def log(line: str, *arguments: object) -> None:
        if in_scheduler:
            logger.warning(line, *arguments)

    transfer = vllm_config.kv_transfer_config
    # vLLM reads this later. Its default, "fail", cannot be distinguished from an explicit "fail": to have that, set
    # it in kv_connector_extra_config.
    transfer.kv_load_failure_policy = "recompute"
    settings, notes = parse_settings(transfer.kv_connector_extra_config)
    transfer.kv_load_failure_policy = settings.kv_load_failure_policy
    for note in notes:
        log("kv_connector_extra_config: %s", note)
    if getattr(vllm_config.cache_config, "kv_offloading_size", None) is not None:
        log(BESIDE)
    if reason := unsupported_reason(vllm_config, kv_cache):
        log("this engine runs without the KV cache server: %s", reason)
        return None
    if has_another(side, in_scheduler, vllm_config, settings.endpoint):
        log(_TWICE, settings.endpoint or "the default endpoint")
        return None
    events, tokens = getattr(vllm_config, "kv_events_config", None), engine_block_size(vllm_config, kv_cache)
    wants_events = events is not None and bool(events.enable_kv_cache_events)
    if wants_events:  # they name blocks of the engine, each of which must be loadable by itself
        if settings.block_size not in (0, tokens):
            log(_EVENTS, settings.block_size, tokens)
        per_slot = 1
    else:
        per_slot = blocks_per_slot(settings, tokens, *([tokens] if has_states(kv_cache) else []))
    processes = in_scheduler and vllm_config.parallel_config.distributed_executor_backend not in (None, "uni")
    found = runtime_facts(vllm_config, layer_spec(kv_cache) if processes else None)
    by_head = settings.share_tp and not getattr(vllm_config.model_config, "use_mla", False)
    if by_head and (reason := unsupported_by_head(vllm_config, kv_cache, kv_layout(kv_cache, found))):
        by_head = False
        log("share_tp has no effect, engines share with the same number of ranks only: %s", reason)
    engine, weights = engine_name(vllm_config), settings.weights_version
    multimodal = settings.multimodal
    if multimodal != "off" and (reason := unnamed_items(vllm_config)):
        multimodal = "off"
        log("requests with images, audio or video are not cached: %s", reason)
    split, groups = shards(vllm_config, kv_cache, by_head), groups_of(kv_cache, per_slot)
    compress = settings.compress == "auto"
    if compress and (reason := _without_kernels(found.device) or uncompressible(kv_cache, split)):
        compress = False
        if in_scheduler:
            logger.info("blocks are not compressed: %s", reason)
    stored = Stored(per_slot, by_head, multimodal != "off", compress)
    spec = namespace_spec(vllm_config, kv_cache, found, stored, engine, weights)
    if not found.seed:
        log(_RANDOM)
    return Setup(
        vllm_config, kv_cache, settings, spec, split, engine, per_slot, groups, wants_events, multimodal, compress
    )


def _without_kernels(device: str) -> str:
    """Return the reason that a device, `cuda` and its name for example, cannot compress; "" if it can."""
    kind = device.partition(" ")[0]
    if kind == "cuda" or (kind == "cpu" and read_tuning().compress_on_cpu):
        return ""
    return f"it needs an NVIDIA GPU, and this engine runs on {kind}"
