"""The vLLM connector: it passes every call to the scheduler's or the rank's side, and decides nothing.

An engine that cannot be cached is declined with one log line, and runs as if there were no connector.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvcache_client.devices import CopyError
from kvcache_client.engines.vllm import compat
from kvcache_client.engines.vllm.adapters import Adapters
from kvcache_client.engines.vllm.contents import Contents
from kvcache_client.engines.vllm.early_start import claim, discard, open_session
from kvcache_client.engines.vllm.events import HostEvents
from kvcache_client.engines.vllm.groups import Merged, first_spec, has_states, hash_tokens, writes_early
from kvcache_client.engines.vllm.guard import guard, report
from kvcache_client.engines.vllm.identity import (
    Share,
    checkpoint_id,
    engine_block_size,
    groups_of,
    has_experts,
    kv_layout,
    layer_spec,
    namespace_spec,
    rank_block_bytes,
    shards,
    share_of_rank,
    why_not,
    why_not_by_head,
    with_stages,
)
from kvcache_client.engines.vllm.running import (
    engine_name,
    has_another,
    join_logs,
    rank_in_engine,
    retire,
    surroundings,
    warn_of_random_seed,
)
from kvcache_client.engines.vllm.stats import CacheMetrics, CacheStats, Feed
from kvcache_client.engines.vllm.views import request_view, step_view
from kvcache_client.engines.vllm.wrapped import before_sleep, before_step
from kvcache_client.scheduler.scheduler import Scheduler
from kvcache_client.scheduler.views import EngineFacts, Table
from kvcache_client.session.session import Session
from kvcache_client.settings import ConnectorSettings, blocks_per_slot, parse_settings
from kvcache_client.step_plan import NO_REPORT, NOTHING, LoadJob, Report, StepPlan
from kvcache_client.worker.facts import RankFacts
from kvcache_client.worker.places import RankTable
from kvcache_client.worker.shards import Shards
from kvcache_client.worker.worker import Worker
from kvcache_proto.errors import ConfigError, KVCacheError
from kvcache_proto.types import TAIL, NamespaceSpec

logger = logging.getLogger("vllm.kvcache")

_BESIDE = (
    "--kv-offloading-size and {} exclude each other: vLLM replaces the connector with its own offloading. "
    "Leave --kv-offloading-size out; the daemon owns the memory: `kvcache-server serve --size`"
)
_NO_SHARES = (
    "with pipeline parallelism, each rank has to tell the scheduler what it stores of a block, and vLLM brings no such "
    "word from rank %d; beside another connector of a MultiConnector, it never does"
)
_EVENTS = (
    "block_size %d is not used: an engine that publishes KV events (--kv-events-config) caches blocks of its own size, "
    "%d tokens"
)
_TWICE = (
    "this engine has a second %s for the daemon at %s, which does nothing because the first one does everything; "
    "leave it out of `connectors`"
)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's plan, in the wrapper that vLLM sends to its ranks."""

    plan: StepPlan = field(default=NOTHING)
    idle: bool = False  # the step computes nothing


@dataclass
class RankShare(KVConnectorHandshakeMetadata):
    """A rank's share of a slot, if the scheduler's side cannot know it."""

    share: Share


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """The report of ranks, in the wrapper that vLLM sends to the scheduler's side."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReport:
        return RankReport(self.report.merged(other.report)) if isinstance(other, RankReport) else self


_EMPTY, _IDLE = StepMetadata(), StepMetadata(idle=True)


class KVCacheServerConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads from and saves to the daemon of this host. Its `kv_connector_extra_config` is in client/README.md."""

    _cache_hit_source = compat.cache_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._session: Session | None = None
        self._feed: Feed | None = None  # for vLLM's metrics
        self._contents = Contents()
        self._block_pool: Any = None
        self._wants_events = False
        self._events: HostEvents | None = None  # of the scheduler's side
        self._role, self._rank = role, 0
        self._share: RankShare | None = None  # a rank's own, if the scheduler's side needs it
        self._open_with: Callable[[list[Share]], None] | None = None  # opens the scheduler's side once all are there
        self._fault = ""  # of a side that was given up, until the other side knows
        self._step = 0  # the last plan's number
        # Loads that the engine waits for, by request, with their device blocks: on the scheduler's side those that no
        # plan has yet, on a rank those that it has not reported. Whatever fails here, each end is reported to the
        # engine.
        self._awaited: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}  # tokens that requests had when they were offered a load
        self._coming: set[str] = set()  # a rank's layered loads that it has not reported complete
        self._not_loaded: set[int] = set()  # device blocks of such loads that have failed
        self._groups: list[Merged] = []  # unless the engine has just one, of full attention
        self._failed: set[str] = set()  # in such an engine, requests whose loads have failed
        self._announces = False  # whether the engine may announce its next layer
        self._writes_early = False  # whether a step may write to blocks before any hook is called
        self._quiet = threading.Event()  # not set while copies of a worker that was given up may still run
        self._quiet.set()
        self._start(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER and self._worker is None:
            discard()

    @guard()
    def _start(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        in_scheduler = role == KVConnectorRole.SCHEDULER
        join_logs(quiet=not in_scheduler)
        transfer = vllm_config.kv_transfer_config
        # vLLM reads this later. Its default, "fail", cannot be distinguished from an explicit "fail": to have that, set
        # it in kv_connector_extra_config.
        transfer.kv_load_failure_policy = "recompute"
        settings, notes = parse_settings(transfer.kv_connector_extra_config)
        transfer.kv_load_failure_policy = settings.kv_load_failure_policy
        events = getattr(vllm_config, "kv_events_config", None)
        self._wants_events = events is not None and events.enable_kv_cache_events
        if in_scheduler:
            for note in notes:
                logger.warning("kv_connector_extra_config: %s", note)
            if getattr(vllm_config.cache_config, "kv_offloading_size", None) is not None:
                logger.warning(_BESIDE.format(type(self).__name__))
        reason = why_not(vllm_config, kv_cache_config)
        if reason:
            if in_scheduler:
                logger.warning("this engine runs without the KV cache server: %s", reason)
            return
        if has_another(self, role, vllm_config, settings.endpoint):
            if in_scheduler:
                logger.warning(_TWICE, type(self).__name__, settings.endpoint or "the default endpoint")
            return
        tokens = engine_block_size(kv_cache_config)
        if self._wants_events:  # they name blocks of the engine, each of which must be loadable by itself
            if in_scheduler and settings.block_size not in (0, tokens):
                logger.warning(_EVENTS, settings.block_size, tokens)
            per_slot = 1
        else:
            per_slot = blocks_per_slot(settings, tokens, *([tokens] if has_states(kv_cache_config) else []))
        self._groups = groups_of(kv_cache_config, per_slot)
        self._writes_early = writes_early(kv_cache_config)
        self._announces = settings.overlap != "off" and compat.announces_layers(vllm_config)
        processes = in_scheduler and vllm_config.parallel_config.distributed_executor_backend not in (None, "uni")
        found = surroundings(vllm_config, layer_spec(kv_cache_config) if processes else None)
        engine = engine_name(vllm_config)
        by_head = settings.share_tp and not getattr(vllm_config.model_config, "use_mla", False)
        if by_head and (reason := why_not_by_head(vllm_config, kv_cache_config, kv_layout(kv_cache_config, found))):
            by_head = False
            if in_scheduler:
                logger.warning("share_tp has no effect, engines share with the same number of ranks only: %s", reason)
        weights = settings.weights_version
        spec = namespace_spec(vllm_config, kv_cache_config, found, per_slot, engine, weights, by_head)
        split = shards(vllm_config, kv_cache_config, by_head)
        staged = vllm_config.parallel_config.pipeline_parallel_size > 1
        if in_scheduler:
            warn_of_random_seed(found)
            if not staged:
                self._scheduler = self._open_scheduler(settings, spec, engine, per_slot)
            else:
                self._open_with = lambda shares: self._open_staged(settings, spec, split, engine, per_slot, shares)
        else:
            self._worker = self._open_worker(settings, spec, split, engine, per_slot, staged)
            if staged:
                self._share = RankShare(share_of_rank(spec, self._groups, kv_cache_config))

    def give_up(self, where: str, error: Exception) -> None:
        """Let the engine continue without the cache.

        Nothing more is offered, loaded or saved, and loads that the engine waits for have failed.
        """
        self._fault = report(where, error, in_scheduler=self._role == KVConnectorRole.SCHEDULER)
        scheduler, worker = self._scheduler, self._worker
        if worker is not None:
            worker.abandon()
        self._scheduler = self._worker = self._feed = None
        self._quiet.clear()
        # Ending a session needs answers from the daemon, and ending copies takes time: no step waits for either.
        threading.Thread(
            target=_leave, args=(scheduler, worker, self._session, self._quiet), name="kvcache-give-up", daemon=True
        ).start()

    def _open_staged(
        self,
        settings: ConnectorSettings,
        spec: NamespaceSpec,
        split: Shards,
        engine: str,
        per_slot: int,
        shares: list[Share],
    ) -> None:
        """Open the scheduler's side of an engine with pipeline stages: it knows only the first stage's share itself."""
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        stages = [shares[at : at + ranks] for at in range(0, len(shares), ranks)]
        try:
            spec = with_stages(spec, split, stages)
        except ConfigError as error:
            logger.warning("this engine runs without the KV cache server: %s", error)
            return
        self._scheduler = self._open_scheduler(settings, spec, engine, per_slot, range(len(shares)))

    def _why_eager(self) -> str:
        """Return the feature that lazy saves need and this engine lacks, "" if it lacks none."""
        if self._groups:
            return "one KV cache group of full attention"
        if not self._vllm_config.cache_config.enable_prefix_caching:
            return "vLLM's own prefix cache (--enable-prefix-caching)"
        return ""

    def _open_scheduler(
        self, settings: ConnectorSettings, spec: NamespaceSpec, engine: str, per_slot: int, joining: Iterable[int] = ()
    ) -> Scheduler | None:
        transfer, parallel = self._vllm_config.kv_transfer_config, self._vllm_config.parallel_config
        tokens, config = engine_block_size(self._kv_cache_config), self._kv_cache_config
        if self._groups:
            tokens, per_slot = hash_tokens(config), per_slot * tokens // hash_tokens(config)
        if self._wants_events:
            tables = self._groups[0].group.tables if self._groups else (Table(0, tokens, per_slot),)
            self._events = HostEvents(config, tables, tokens)
        why_eager = self._why_eager()
        if why_eager and settings.save_mode == "lazy":
            logger.warning("save_mode: lazy needs %s; this engine saves eagerly", why_eager)
        self._session = session = open_session(settings, engine, "scheduler")
        try:
            scheduler = Scheduler(
                session,
                spec,
                settings,
                EngineFacts(
                    tokens,
                    per_slot,
                    saves=transfer.is_kv_producer,
                    loads=transfer.is_kv_consumer,
                    volatile=int(compat.reads_next_token(self._vllm_config)),
                    groups=[merged.group for merged in self._groups],
                    table_tokens=[int(first_spec(group).block_size) for group in config.kv_cache_groups],
                    joining=list(joining),
                    step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
                    ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
                    # vLLM keeps one block for itself.
                    device_blocks=config.num_blocks - 1 if compat.stops_before_loading_requests() else 0,
                    lookahead=compat.lookahead(self._vllm_config),
                    in_order=compat.asks_in_order(self._vllm_config),
                    describe=self._events.describe if self._events is not None else None,
                    checkpoint=lambda: checkpoint_id(self._vllm_config),
                    evicted_next=None if why_eager else lambda count: compat.evicted_next(self._block_pool, count),
                    hash_of=lambda block: compat.hash_of(self._block_pool, block),
                ),
            )
        except KVCacheError as error:
            logger.error("this engine runs without the KV cache server: %s", error)
            session.close()
            return None
        if lora := getattr(self._vllm_config, "lora_config", None):
            self._contents = Contents(Adapters(lora, scheduler.doubt))
        self._feed = Feed(lambda: session.counters, lambda: scheduler.counters, up=lambda: session.up)
        group = spec.groups[0]
        if not session.up:  # the session has logged it
            return scheduler
        logger.info(
            "KV cache server at %s: namespace %s, blocks of %d tokens, %.1f KiB in %d shards, engine %s",
            *(session.endpoint, spec.id, group.block_tokens, group.block_bytes / 1024, spec.shards, engine),
        )
        for tail, merged in zip(spec.groups, self._groups, strict=False):
            if tail.kind == TAIL:
                logger.info(
                    "of %d of vLLM's KV cache groups, only the last %d blocks of a prefix are needed; %.1f KiB each",
                    *(len(merged.members), tail.reach, tail.block_bytes / 1024),
                )
        return scheduler

    def _open_worker(
        self,
        settings: ConnectorSettings,
        spec: NamespaceSpec,
        split: Shards,
        engine: str,
        per_slot: int,
        joins_later: bool,
    ) -> Worker:
        self._rank = rank = rank_in_engine(self._vllm_config.parallel_config)
        block_bytes, groups = 0, []
        if self._groups:
            block_bytes = spec.groups[0].shards[0] // (per_slot * engine_block_size(self._kv_cache_config))
            block_bytes *= hash_tokens(self._kv_cache_config)
            for merged in self._groups:
                several = zip(merged.members, merged.group.tables, strict=True)
                groups.append([RankTable(one.layers, one.block_bytes, table.blocks) for one, table in several])
        session, registration = claim(engine, f"rank {rank}")
        self._session = session = session or open_session(settings, engine, f"rank {rank}")
        worker = Worker(
            session,
            spec,
            settings,
            split,
            rank,
            RankFacts(
                block_bytes or rank_block_bytes(self._kv_cache_config),
                per_slot,
                has_experts(self._vllm_config),
                groups,
                joins_later,
            ),
            self._wants_events,
            registration,
        )
        worker_class = self._vllm_config.parallel_config.worker_cls
        before_sleep(worker_class, worker.drain)
        if self._writes_early:
            before_step(worker_class)
        self._feed = Feed(lambda: session.counters, lambda: worker.counters)
        return worker

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

    @guard()
    def get_kv_connector_stats(self) -> CacheStats | None:
        return self._feed.take() if self._feed is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CacheStats:
        return CacheStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> CacheMetrics:
        return CacheMetrics(*arguments, **named)

    @guard()
    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._scheduler = self._worker = None
        retire(self)

    # The scheduler's side.

    @guard()
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the ranks' shares, by stage and rank. Beside other connectors, the metadata may be theirs."""
        open_with, self._open_with = self._open_with, None
        if open_with is None:  # not needed, or known already
            return
        parallel = self._vllm_config.parallel_config
        shares: list[Share] = []
        for stage in range(parallel.pipeline_parallel_size):
            for rank in range(parallel.tensor_parallel_size):
                said = metadata.get((stage, rank))
                if not isinstance(said, RankShare):
                    logger.warning("this engine runs without the KV cache server: " + _NO_SHARES, len(shares))
                    return
                shares.append(said.share)
        open_with(shares)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """From 0.32 on, vLLM calls `bind_kv_cache_manager`, which calls this."""
        self._block_pool = gpu_block_pool

    @guard(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        tokens, is_load = self._scheduler.matched_tokens(request_view(request, self._contents), num_computed_tokens)
        if tokens:
            self._computed[request.request_id] = num_computed_tokens
        return tokens, is_load

    @guard()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids()
        if num_external_tokens > 0:
            # Earlier blocks may be shared with running requests.
            tokens = engine_block_size(self._kv_cache_config)
            first = self._computed.pop(request.request_id, 0) // tokens
            self._awaited[request.request_id] = list(tables[0][first : first + -(-num_external_tokens // tokens)])
        if self._scheduler is not None:
            view = request_view(request, self._contents)
            self._scheduler.allocated(view, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        plan = self._plan(scheduler_output)
        idle = not scheduler_output.total_num_scheduled_tokens
        if plan is NOTHING:
            return _IDLE if idle else _EMPTY
        self._step = plan.number
        return StepMetadata(plan, idle)

    @guard(lambda self, *_: self._last_plan())
    def _plan(self, scheduler_output: Any) -> StepPlan:
        if self._scheduler is None:
            return self._last_plan()
        states = compat.boundary_states(scheduler_output) if self._groups else None
        written = compat.written_early(scheduler_output) if self._writes_early else ()
        plan = self._scheduler.plan(step_view(scheduler_output), states, written)
        for load in plan.loads:
            self._awaited.pop(load.request, None)
        return plan

    def _last_plan(self) -> StepPlan:
        """Return the plan for the ranks once this side was given up: nothing guards the blocks that they save.

        Loads that the engine waits for and that no plan has name no region, so that the ranks report them as failed.
        """
        loads = [LoadJob(request, b"", b"", blocks) for request, blocks in self._awaited.items()]
        self._awaited.clear()
        fault, self._fault = self._fault, ""
        return StepPlan(self._step + 1, loads=loads, unguarded=bool(fault)) if loads or fault else NOTHING

    @guard()
    def update_connector_output(self, connector_output: Any) -> None:
        received, invalid = connector_output.finished_recving, connector_output.invalid_block_ids
        if self._scheduler is None:
            return
        if received or invalid:
            failed = getattr(connector_output, "failed_recving", None) if self._groups else None
            self._scheduler.ended(list(received or ()), set(invalid or ()), failed or ())
        copies = getattr(connector_output, "kv_connector_stats", None)
        if isinstance(copies, CacheStats):  # beside other connectors they are wrapped, and left out of the log
            self._scheduler.copied(copies.data)
        found = connector_output.kv_connector_worker_meta
        self._scheduler.reported(found.report if isinstance(found, RankReport) else NO_REPORT)

    @guard(lambda *_: ())
    def take_events(self) -> Iterable[Any]:
        events = self._scheduler.events if self._scheduler is not None else None
        if events is None or self._events is None:
            return ()
        return [each for event in events.take() for each in self._events.convert(event)]

    @guard(lambda *_: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._computed.pop(request.request_id, None)
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id, request.num_computed_tokens)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    @guard(lambda *_: True)  # if nothing is saved or loaded any more, there is nothing to reset
    def reset_cache(self) -> bool | None:
        return True if self._scheduler is None else self._scheduler.reset()

    # A rank's side.

    @guard()
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Of several connectors, vLLM asks one for metadata and gives it to all; with stages, most of them raise."""
        return self._share if self._share is not None and get_kv_transfer_group() is self else None

    @guard()
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is None:
            return
        try:
            self._worker.register(kv_caches, self._kv_cache_config.num_blocks)
        except (ConfigError, CopyError) as error:
            self._worker.decline(str(error))

    def before_step(self, metadata: Any) -> None:
        """Begin a step before its runner does. vLLM has no such hook: see `wrapped`."""
        if self._writes_early:
            self._begin(metadata)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._begin(kv_connector_metadata, late=self._writes_early)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # For a runner that has not called handle_preemptions.
        self._begin(connector_metadata, late=self._writes_early)

    @guard()
    def _begin(self, metadata: Any, late: bool = False) -> None:
        if self._worker is not None and isinstance(metadata, StepMetadata):
            self._worker.begin(metadata.plan, late, metadata.idle)

    @guard()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if not isinstance(metadata, StepMetadata):
            return
        if metadata.plan.number > self._step:  # a plan may be presented more than once
            self._step = metadata.plan.number
            self._awaited.update((load.request, load.blocks) for load in metadata.plan.loads)
            self._coming.update(load.request for load in metadata.plan.loads if load.layered)
        if self._worker is not None:
            self._worker.load(metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        worker = self._worker
        if self._announces and worker is not None and worker.loads.early.listens:
            self._announce(worker.loads.early.layer, layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves nothing: whole blocks are saved a step later."""
        worker = self._worker
        if self._announces and worker is not None and worker.loads.early.listens:
            self._announce(worker.loads.early.layer_left, layer_name)

    @guard()
    def _announce(self, to: Callable[[str], None], layer_name: str) -> None:
        to(layer_name)

    def wait_for_save(self) -> None:
        """Does nothing: blocks that are being saved are guarded when they are given away."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        idle = isinstance(self._connector_metadata, StepMetadata) and self._connector_metadata.idle
        received = self._received(idle)
        for request in received:
            self._awaited.pop(request, None)
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """From vLLM 0.32 on. With several groups, loads fail by request, not by block."""
        results = super().get_transfer_results(finished_req_ids)
        if self._failed:
            results.failed_recving, self._failed = self._failed, set()
        return results

    @guard(lambda *_: set())
    def _received(self, idle: bool) -> set[str]:
        if self._worker is not None:
            received = self._worker.received(idle)
            if received and self._groups:
                self._failed |= self._worker.take_failed()
            return received
        if not (self._awaited and self._quiet.is_set()):
            return set()
        if self._groups:
            self._failed |= set(self._awaited)
            return set(self._awaited)
        for blocks in self._awaited.values():
            self._not_loaded.update(blocks)
        return set(self._awaited)

    @guard()
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            fault, self._fault = self._fault, ""
            over = [(request, 0.0) for request in self._coming] if self._quiet.is_set() else []
            self._coming.difference_update(request for request, _ in over)
            last = Report(declined={self._rank: fault} if fault else {}, arrived=over)
            return RankReport(last) if last else None
        report, metadata = self._worker.take_report(), self._connector_metadata
        if isinstance(metadata, StepMetadata) and metadata.plan.timed:
            report.timed.append(metadata.plan.number)
        self._coming.difference_update(request for request, _ in report.arrived)
        return RankReport(report) if report else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._not_loaded = self._not_loaded, set()
        return blocks | self._take_errors()

    @guard(lambda *_: set())
    def _take_errors(self) -> set[int]:
        return self._worker.take_errors() if self._worker is not None else set()


def _leave(scheduler: Scheduler | None, worker: Worker | None, session: Session | None, quiet: threading.Event) -> None:
    """Close a connector that was given up; set `quiet` once no copy runs any more."""
    try:
        for side in (scheduler, worker, session):
            try:
                if side is not None:
                    side.close()
            except Exception as error:  # noqa: BLE001 - what has failed once may fail again: the rest must be closed all the same
                logger.debug("an error while a failed connector was closed: %s", error, exc_info=error)
    finally:
        if worker is None or worker.wait_quiet():
            quiet.set()


def __getattr__(name: str) -> Any:
    """Explain why vLLM looks here for a connector of its own: `--kv-offloading-size` makes it do so."""
    names: Iterable[str] = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector")
    if name in names:
        raise ConfigError(_BESIDE.format("KVCacheServerConnector"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
