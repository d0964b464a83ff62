"""The vLLM connector: it passes every call to the scheduler's or the rank's side, and decides nothing.

An engine that cannot be cached is declined with one log line, and runs as if there were no connector.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvcache_client.engines.vllm import compat
from kvcache_client.engines.vllm.early_start import discard
from kvcache_client.engines.vllm.guard import hook, report
from kvcache_client.engines.vllm.rank_side import RankSide
from kvcache_client.engines.vllm.scheduler_side import SchedulerSide
from kvcache_client.engines.vllm.setup import BESIDE
from kvcache_client.engines.vllm.side import Side
from kvcache_client.engines.vllm.stats import CacheMetrics, CacheStats
from kvcache_client.scheduler.scheduler import Scheduler
from kvcache_client.worker.worker import Worker
from kvcache_proto.errors import ConfigError

_own_hook, _scheduler_hook, _rank_hook = (partial(hook, side) for side in ("own_side", "scheduler_side", "rank_side"))


class KVCacheServerConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads from and saves to the daemon of this host. Its `kv_connector_extra_config` is in client/README.md."""

    _cache_hit_source = compat.cache_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler_side, self.rank_side = SchedulerSide(), RankSide()  # the one of the other role does nothing
        self.own_side: Side = self.scheduler_side if role == KVConnectorRole.SCHEDULER else self.rank_side
        self._start(vllm_config, kv_cache_config)
        if role == KVConnectorRole.WORKER and self._worker is None:
            discard()

    def give_up(self, where: str, error: Exception) -> None:
        """Let the engine continue without the cache."""
        self.own_side.give_up(report(where, error, self.own_side.in_scheduler))

    @property
    def _scheduler(self) -> Scheduler | None:
        return self.scheduler_side.scheduler

    @property
    def _worker(self) -> Worker | None:
        return self.rank_side.worker

    # Both sides.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Request heads before tokens if each head is to be a shard. vLLM drops this if its backend cannot do it."""
        model, wanted = vllm_config.model_config, vllm_config.kv_transfer_config.kv_connector_extra_config
        by_head = wanted.get("share_tp") is True and model is not None and not getattr(model, "use_mla", False)
        return compat.head_major_layout() if by_head else None

    @property
    def requires_kv_delivery(self) -> bool:
        """No: this is a cache, and a save that is dropped is a miss later."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CacheStats:
        return CacheStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> CacheMetrics:
        return CacheMetrics(*arguments, **named)

    _start = _own_hook(Side.start)
    get_kv_connector_stats = _own_hook(Side.get_kv_connector_stats)
    shutdown = _own_hook(Side.shutdown)

    # The scheduler's side.

    set_xfer_handshake_metadata_pp_aware = _scheduler_hook(SchedulerSide.set_xfer_handshake_metadata_pp_aware)
    bind_gpu_block_pool = _scheduler_hook(SchedulerSide.bind_gpu_block_pool)
    on_new_request = _scheduler_hook(SchedulerSide.on_new_request)
    get_num_new_matched_tokens = _scheduler_hook(SchedulerSide.get_num_new_matched_tokens, lambda *_, **__: (0, False))
    update_state_after_alloc = _scheduler_hook(SchedulerSide.update_state_after_alloc)
    build_connector_meta = _scheduler_hook(SchedulerSide.build_connector_meta, SchedulerSide.last_metadata)
    update_connector_output = _scheduler_hook(SchedulerSide.update_connector_output)
    take_events = _scheduler_hook(SchedulerSide.take_events, lambda *_, **__: ())
    request_finished = _scheduler_hook(SchedulerSide.request_finished, lambda *_, **__: (False, None))
    request_finished_all_groups = request_finished
    # If nothing is saved or loaded any more, there is nothing to reset.
    reset_cache = _scheduler_hook(SchedulerSide.reset_cache, lambda *_, **__: True)

    # A rank's side.

    get_handshake_metadata = _rank_hook(RankSide.get_handshake_metadata)
    register_kv_caches = _rank_hook(RankSide.register_kv_caches)
    unregister_kv_caches = _rank_hook(RankSide.unregister_kv_caches)
    before_step = _rank_hook(RankSide.before_step)
    handle_preemptions = _rank_hook(RankSide.handle_preemptions)
    get_finished = _rank_hook(RankSide.get_finished, lambda *_, **__: (None, None))
    build_connector_worker_meta = _rank_hook(RankSide.build_connector_worker_meta)
    get_block_ids_with_load_errors = _rank_hook(RankSide.get_block_ids_with_load_errors, lambda *_, **__: set())
    _bind = _rank_hook(RankSide.bind_connector_metadata)
    _announce = _rank_hook(RankSide.announce)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._bind(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: loads begin in `bind_connector_metadata`. From 0.32 on, this is called after the forward pass,
        for which the device would then wait."""

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.rank_side.metadata = None

    def wait_for_layer_load(self, layer_name: str) -> None:
        early = self.rank_side.early
        if early is not None and early.listens:
            self._announce(early.layer, layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves nothing: whole blocks are saved a step later."""
        early = self.rank_side.early
        if early is not None and early.listens:
            self._announce(early.layer_left, layer_name)

    def wait_for_save(self) -> None:
        """Does nothing: blocks that are being saved are guarded when they are given away."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """From vLLM 0.32 on. With several groups, loads fail by request, not by block."""
        results = super().get_transfer_results(finished_req_ids)
        if failed := self.rank_side.take_failed():
            results.failed_recving = failed
        return results


def __getattr__(name: str) -> Any:
    """Explain why vLLM looks here for a connector of its own: `--kv-offloading-size` makes it do so."""
    names: Iterable[str] = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector")
    if name in names:
        raise ConfigError(BESIDE)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
