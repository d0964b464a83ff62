"""A rank's side of the connector: vLLM's calls, in terms of the work in `kvcache_client.worker`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvcache_client.devices import CopyError
from kvcache_client.engines.vllm import compat
from kvcache_client.engines.vllm.early_start import claim, open_session
from kvcache_client.engines.vllm.groups import Member, hash_tokens, uncompressed_reason, writes_early
from kvcache_client.engines.vllm.identity import has_experts, plain_member, rank_block_bytes, share_of_rank
from kvcache_client.engines.vllm.running_engine import rank_in_engine
from kvcache_client.engines.vllm.setup import Setup
from kvcache_client.engines.vllm.side import RankReport, RankShare, Side, StepMetadata, close_later
from kvcache_client.engines.vllm.stats import Feed
from kvcache_client.engines.vllm.wrapped import before_sleep, before_step
from kvcache_client.step_plan import Report
from kvcache_client.worker.layered import EarlyLoads
from kvcache_client.worker.places import RankFacts, RankTable
from kvcache_client.worker.worker import Worker
from kvcache_proto.errors import ConfigError


class RankSide(Side):
    """Without a `worker`, it takes no part."""

    in_scheduler = False

    def __init__(self) -> None:
        super().__init__()
        self.worker: Worker | None = None
        self.early: EarlyLoads | None = None  # gets the layers of a step, if the engine may announce them
        self.metadata: StepMetadata | None = None  # of the step that runs; None for another connector's
        self.quiet = threading.Event()  # not set while copies of a worker that was given up may still run
        self.quiet.set()
        self._share: RankShare | None = None  # if the scheduler's side needs it
        self._rank = 0
        self._num_blocks = 0
        self._has_groups = False
        self._writes_early = False  # whether a step may write to blocks before any hook is called
        self._step = 0  # the last plan's number
        # Loads that the engine waits for and that this rank has not reported, by request, with their device blocks.
        # Whatever fails here, each end is reported to the engine.
        self._awaited: dict[str, list[int]] = {}
        self._coming: set[str] = set()  # layered loads that it has not reported complete
        self._not_loaded: set[int] = set()  # device blocks of awaited loads that have failed
        self._failed: set[str] = set()  # in an engine with groups, requests whose loads have failed

    def open(self, setup: Setup) -> None:
        parallel, kv_cache = setup.vllm.parallel_config, setup.kv_cache
        self._has_groups, self._writes_early = bool(setup.groups), writes_early(kv_cache)
        self._num_blocks = int(kv_cache.num_blocks)
        self._rank = rank = rank_in_engine(parallel)

        def compressed(member: Member) -> bool:
            return setup.compress and not uncompressed_reason(member, setup.split.parts)

        groups = [
            [
                RankTable(member.layers, member.block_bytes, table.blocks, compressed(member))
                for member, table in zip(merged.members, merged.group.tables, strict=True)
            ]
            for merged in setup.groups
        ]
        if groups:
            block_bytes = setup.split.parts * setup.spec.groups[0].shards[0]
            block_bytes = block_bytes // (setup.per_slot * setup.block_tokens) * hash_tokens(kv_cache)
        else:
            block_bytes = rank_block_bytes(kv_cache)
        facts = RankFacts(
            block_bytes,
            setup.per_slot,
            has_experts(setup.vllm),
            groups,
            sharers=setup.split.sharers(rank, setup.ranks) if setup.settings.peer_loads == "auto" else (),
            compress=not groups and compressed(plain_member(kv_cache)),
            joins_later=setup.stages > 1,
        )
        session, registration = claim(setup.engine, f"rank {rank}")
        self.session = session = session or open_session(setup.settings, setup.engine, f"rank {rank}")
        self.worker = worker = Worker(
            session, setup.spec, setup.settings, setup.split, rank, facts, setup.wants_events, registration
        )
        if setup.settings.overlap != "off" and compat.announces_layers(setup.vllm):
            self.early = worker.loads.early
        before_sleep(parallel.worker_cls, worker.drain)
        if self._writes_early:
            before_step(parallel.worker_cls)
        self.feed = Feed(lambda: session.counters, lambda: worker.counters)
        if setup.stages > 1:
            self._share = RankShare(share_of_rank(setup.spec, setup.groups, kv_cache))

    def give_up(self, fault: str) -> None:
        self.fault = fault
        worker, self.worker, self.early, self.feed = self.worker, None, None, None
        if worker is not None:
            worker.abandon()
        self.quiet.clear()

        def when_closed() -> None:
            if worker is None or worker.wait_quiet():
                self.quiet.set()

        close_later(worker, self.session, then=when_closed)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = self.early = None

    def get_handshake_metadata(self) -> RankShare | None:
        """Of several connectors, vLLM asks one for metadata and gives it to all; with stages, most of them raise."""
        ours = self._share is not None and getattr(get_kv_transfer_group(), "rank_side", None) is self
        return self._share if ours else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self.worker is None:
            return
        try:
            self.worker.register(kv_caches, self._num_blocks)
        except (ConfigError, CopyError) as error:
            self.worker.decline(str(error))

    def unregister_kv_caches(self) -> None:
        """From 0.33 on, called before the device's memory is unmapped."""
        if self.worker is not None:
            self.worker.drain()

    def before_step(self, metadata: Any) -> None:
        """Begin a step before its runner does. vLLM has no such hook: see `wrapped`."""
        if self._writes_early:
            self._begin(metadata, late=False)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._begin(kv_connector_metadata, late=self._writes_early)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = connector_metadata if isinstance(connector_metadata, StepMetadata) else None
        if self.metadata is None:
            return
        plan = self.metadata.plan
        if plan.number > self._step:  # a plan may be presented more than once
            self._step = plan.number
            self._awaited.update((load.request, load.blocks) for load in plan.loads)
            self._coming.update(load.request for load in plan.loads if load.layered)
        # For a runner that has not called handle_preemptions.
        self._begin(connector_metadata, late=self._writes_early)
        if self.worker is not None:
            self.worker.load(plan)

    def _begin(self, metadata: Any, late: bool) -> None:
        if self.worker is not None and isinstance(metadata, StepMetadata):
            self.worker.begin(metadata.plan, late, metadata.idle)

    def announce(self, to: Callable[[str], None], layer_name: str) -> None:
        to(layer_name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received = self._received()
        for request in received:
            self._awaited.pop(request, None)
        return None, received or None

    def _received(self) -> set[str]:
        if self.worker is not None:
            received = self.worker.received(self.metadata is not None and self.metadata.idle)
            if received and self._has_groups:
                self._failed |= self.worker.take_failed()
            return received
        if not (self._awaited and self.quiet.is_set()):
            return set()
        if self._has_groups:
            self._failed |= set(self._awaited)
        else:
            self._not_loaded.update(block for blocks in self._awaited.values() for block in blocks)
        return set(self._awaited)

    def take_failed(self) -> set[str]:
        """Return the requests whose loads have failed since the last call, in an engine with several groups."""
        failed, self._failed = self._failed, set()
        return failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self.worker is not None:
            return self.worker.take_errors()
        blocks, self._not_loaded = self._not_loaded, set()
        return blocks

    def build_connector_worker_meta(self) -> RankReport | None:
        if self.worker is not None:
            report = self.worker.take_report()
            if self.metadata is not None and self.metadata.plan.timed:
                report.timed.append(self.metadata.plan.number)
        else:
            fault, self.fault = self.fault, ""
            over = [(request, 0.0) for request in self._coming] if self.quiet.is_set() else []
            report = Report(declined={self._rank: fault} if fault else {}, arrived=over)
        self._coming.difference_update(request for request, _ in report.arrived)
        return RankReport(report) if report else None
