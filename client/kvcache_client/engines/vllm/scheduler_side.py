"""The scheduler's side of the connector: vLLM's calls, in terms of the decisions in `kvcache_client.scheduler`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from kvcache_client.engines.vllm import compat
from kvcache_client.engines.vllm.early_start import open_session
from kvcache_client.engines.vllm.events import HostEvents
from kvcache_client.engines.vllm.groups import ends_within_blocks, first_spec, hash_tokens, writes_early
from kvcache_client.engines.vllm.identity import checkpoint_id, with_stages
from kvcache_client.engines.vllm.lora import Adapters
from kvcache_client.engines.vllm.setup import Setup
from kvcache_client.engines.vllm.side import RankReport, RankShare, Side, StepMetadata, close_later
from kvcache_client.engines.vllm.stats import CacheStats, Feed
from kvcache_client.engines.vllm.views import Contents, request_view, step_view
from kvcache_client.scheduler.scheduler import Scheduler
from kvcache_client.scheduler.views import EngineFacts, Table
from kvcache_client.step_plan import NOTHING, LoadJob, Report, StepPlan
from kvcache_proto.errors import ConfigError, KVCacheError
from kvcache_proto.types import SUFFIX, NamespaceSpec

logger = logging.getLogger("vllm.kvcache")

_WITHOUT = "this engine runs without the KV cache server: %s"
_NO_SHARES = (
    "with pipeline parallelism, each rank has to tell the scheduler what it stores of a block, and vLLM brings no such "
    "word from rank %d; beside another connector of a MultiConnector, it never does"
)
_EMPTY, _IDLE = StepMetadata(), StepMetadata(idle=True)


class SchedulerSide(Side):
    """Without a `scheduler`, it offers nothing."""

    in_scheduler = True

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler | None = None
        self._setup: Setup | None = None
        self._waits_for_shares = False
        self._contents = Contents()
        self._block_pool: Any = None
        self._events: HostEvents | None = None
        self._has_groups = self._writes_early = False
        self._step = 0  # the last plan's number
        # Loads that the engine waits for and that no plan has yet, by request, with their device blocks. Whatever fails
        # here, each end is reported to the engine.
        self._awaited: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}  # tokens that requests had when they were offered a load

    def open(self, setup: Setup) -> None:
        """Begin to use the cache; with pipeline stages, once the ranks' shares are known."""
        self._setup, self._has_groups = setup, bool(setup.groups)
        self._writes_early = writes_early(setup.kv_cache)
        self._waits_for_shares = setup.stages > 1
        if not self._waits_for_shares:
            self._open(setup, setup.spec, ())

    def _open(self, setup: Setup, spec: NamespaceSpec, joining: Collection[int]) -> None:
        self.session = session = open_session(setup.settings, setup.engine, "scheduler")
        try:
            scheduler = Scheduler(session, spec, setup.settings, self._facts(setup, joining))
        except KVCacheError as error:
            logger.error(_WITHOUT, error)
            session.close()
            return
        self.scheduler = scheduler
        lora = getattr(setup.vllm, "lora_config", None)
        digest = Adapters(lora, scheduler.doubt).digest if lora else None
        self._contents = Contents(digest, setup.multimodal)
        self.feed = Feed(lambda: session.counters, lambda: scheduler.counters, up=lambda: session.up)
        if not session.up:  # the session has logged it
            return
        group = spec.groups[0]
        logger.info(
            "KV cache server at %s: namespace %s, blocks of %d tokens, %.1f KiB in %d shards, engine %s",
            *(session.endpoint, spec.id, group.block_tokens, group.block_bytes / 1024, spec.shards, setup.engine),
        )
        for suffix, merged in zip(spec.groups, setup.groups, strict=False):
            if suffix.kind == SUFFIX:
                logger.info(
                    "of %d of vLLM's KV cache groups, only the last %d blocks of a prefix are needed; %.1f KiB each",
                    *(len(merged.members), suffix.window_blocks, suffix.block_bytes / 1024),
                )

    def _facts(self, setup: Setup, joining: Collection[int]) -> EngineFacts:
        config, kv_cache, tokens, per_slot = setup.vllm, setup.kv_cache, setup.block_tokens, setup.per_slot
        transfer = config.kv_transfer_config
        table_tokens: list[int] = []
        if setup.groups:
            tokens, per_slot = hash_tokens(kv_cache), per_slot * tokens // hash_tokens(kv_cache)
            table_tokens = [int(first_spec(group).block_size) for group in kv_cache.kv_cache_groups]
        if setup.wants_events:
            tables = [merged.group.tables for merged in setup.groups] or [(Table(0, tokens, per_slot),)]
            self._events = HostEvents(kv_cache, tables, tokens, per_slot)
        why_eager = ""
        if setup.groups:
            why_eager = "one KV cache group of full attention"
        elif not config.cache_config.enable_prefix_caching:
            why_eager = "vLLM's own prefix cache (--enable-prefix-caching)"
        if why_eager and setup.settings.save_mode == "lazy":
            logger.warning("save_mode: lazy needs %s; this engine saves eagerly", why_eager)
        return EngineFacts(
            tokens,
            per_slot,
            saves=transfer.is_kv_producer,
            loads=transfer.is_kv_consumer,
            volatile=int(compat.reads_next_token(config)),
            groups=[merged.group for merged in setup.groups],
            tails=bool(setup.groups) and ends_within_blocks(kv_cache),
            table_tokens=table_tokens,
            joining=joining,
            step_tokens=config.scheduler_config.max_num_batched_tokens,
            ranks=setup.ranks,
            # vLLM keeps one block for itself.
            device_blocks=kv_cache.num_blocks - 1 if compat.stops_before_loading_requests() else 0,
            lookahead=compat.lookahead(config),
            in_order=compat.asks_in_order(config),
            describe=self._events.describe if self._events is not None else None,
            checkpoint=lambda: checkpoint_id(config),
            evicted_next=None if why_eager else lambda count: compat.evicted_next(self._block_pool, count),
            hash_of=lambda block: compat.hash_of(self._block_pool, block),
        )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Take the ranks' shares, by stage and rank. Beside other connectors, the metadata may be theirs."""
        setup = self._setup
        if setup is None or not self._waits_for_shares:
            return
        self._waits_for_shares = False
        ranks = range(setup.vllm.parallel_config.tensor_parallel_size)
        said = [[metadata.get((stage, rank)) for rank in ranks] for stage in range(setup.stages)]
        shares = [[each.share for each in stage if isinstance(each, RankShare)] for stage in said]
        for number, each in enumerate(each for stage in said for each in stage):
            if not isinstance(each, RankShare):
                logger.warning(_WITHOUT, _NO_SHARES % number)
                return
        try:
            spec = with_stages(setup.spec, setup.split, shares)
        except ConfigError as error:
            logger.warning(_WITHOUT, error)
            return
        self._open(setup, spec, range(setup.ranks))

    def give_up(self, fault: str) -> None:
        self.fault = fault
        close_later(self.scheduler, self.session)
        self.scheduler = self.feed = None
        self._waits_for_shares = False

    def close(self) -> None:
        if self.scheduler is not None:
            self.scheduler.close()
        self.scheduler = None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """From 0.32 on, vLLM calls `bind_kv_cache_manager`, which calls this."""
        self._block_pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        # The digest of an adapter may take long.
        if self.scheduler is not None and self.scheduler.loads and getattr(request, "lora_request", None) is None:
            self.scheduler.queued(request_view(request, self._contents))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler is None:
            return 0, False
        tokens, is_load = self.scheduler.matched_tokens(request_view(request, self._contents), num_computed_tokens)
        if tokens:
            self._computed[request.request_id] = num_computed_tokens
        return tokens, is_load

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids()
        if num_external_tokens > 0 and self._setup is not None:
            # Earlier blocks may be shared with running requests.
            tokens = self._setup.block_tokens
            first = self._computed.pop(request.request_id, 0) // tokens
            self._awaited[request.request_id] = list(tables[0][first : first + -(-num_external_tokens // tokens)])
        if self.scheduler is not None:
            self.scheduler.allocated(request_view(request, self._contents), tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self.scheduler is None:
            return self.last_metadata(scheduler_output)
        states = compat.boundary_states(scheduler_output) if self._has_groups else None
        written = compat.written_early(scheduler_output) if self._writes_early else ()
        plan = self.scheduler.plan(step_view(scheduler_output), states, written)
        for load in plan.loads:
            self._awaited.pop(load.request, None)
        return self._metadata(plan, scheduler_output)

    def last_metadata(self, scheduler_output: Any) -> StepMetadata:
        """Return the plan for the ranks once this side was given up: nothing guards the blocks that they save.

        Loads that the engine waits for and that no plan has name no region, so that the ranks report them as failed.
        """
        loads = [LoadJob(request, b"", b"", blocks) for request, blocks in self._awaited.items()]
        self._awaited.clear()
        fault, self.fault = self.fault, ""
        plan = StepPlan(self._step + 1, loads=loads, unguarded=bool(fault)) if loads or fault else NOTHING
        return self._metadata(plan, scheduler_output)

    def _metadata(self, plan: StepPlan, scheduler_output: Any) -> StepMetadata:
        idle = not scheduler_output.total_num_scheduled_tokens
        if plan is NOTHING:
            return _IDLE if idle else _EMPTY
        self._step = plan.number
        return StepMetadata(plan, idle)

    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler is None:
            return
        received, invalid = connector_output.finished_recving, connector_output.invalid_block_ids
        if received or invalid:
            failed = getattr(connector_output, "failed_recving", None) if self._has_groups else None
            self.scheduler.ended(list(received or ()), set(invalid or ()), failed or ())
        copies = getattr(connector_output, "kv_connector_stats", None)
        if isinstance(copies, CacheStats):  # beside other connectors they are wrapped, and left out of the log
            self.scheduler.copied(copies.data)
        found = connector_output.kv_connector_worker_meta
        self.scheduler.reported(found.report if isinstance(found, RankReport) else Report())

    def take_events(self) -> Iterable[Any]:
        if self.scheduler is None or self.scheduler.events is None or self._events is None:
            return ()
        return [each for event in self.scheduler.events.take() for each in self._events.convert(event)]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._computed.pop(request.request_id, None)
        if self.scheduler is not None:
            self.scheduler.finished(request.request_id, request.num_computed_tokens)
        return False, None

    def reset_cache(self) -> bool | None:
        return True if self.scheduler is None else self.scheduler.reset()
