"""Decides, for one engine, which blocks each step loads and saves. Uses no tensors or sockets; its clock is given."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set

import msgspec

from kvcache_client.scheduler.admission import Admission
from kvcache_client.scheduler.cache import CacheSession
from kvcache_client.scheduler.canaries import Canaries
from kvcache_client.scheduler.cost_model import Gate, Overlap
from kvcache_client.scheduler.device_cache import DeviceCache, Eager
from kvcache_client.scheduler.events import EngineEvents
from kvcache_client.scheduler.groups import Found, FullAttention, HybridGroups
from kvcache_client.scheduler.hints import Hints
from kvcache_client.scheduler.loads import Loads
from kvcache_client.scheduler.lookups import Lookups
from kvcache_client.scheduler.membership import Membership
from kvcache_client.scheduler.notes import Notes
from kvcache_client.scheduler.requests import LookupResult, Requests, RequestState
from kvcache_client.scheduler.saves import Demand, Saves
from kvcache_client.scheduler.summary import Summary
from kvcache_client.scheduler.views import BlockTables, EngineFacts, RequestView, StepView
from kvcache_client.session.counters import LoggedCounters
from kvcache_client.settings import ConnectorSettings
from kvcache_client.step_plan import NOTHING, CheckJob, LoadJob, Report, SaveJob, StepPlan
from kvcache_proto.types import NamespaceSpec

logger = logging.getLogger("vllm.kvcache.scheduler")


class Scheduler:
    """Called only by the engine's scheduler thread; never raises because of the daemon.

    `events` are changes of the blocks that the engine may load; None unless the engine reports them.
    """

    def __init__(
        self,
        session: CacheSession,
        spec: NamespaceSpec,
        settings: ConnectorSettings,
        engine: EngineFacts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns seconds, and never goes back."""
        block_bytes = spec.groups[0].block_bytes
        self._session, self._clock, self._engine = session, clock, engine
        self._group = group = _group_rules(engine, spec, settings)
        self._counters = counters = LoggedCounters(logger)
        self.events = EngineEvents(group, engine.describe) if engine.describe else None
        self.gate = Gate(counters, settings.gate == "auto", group.block_tokens)
        self.overlap = Overlap(self.gate.costs, settings.overlap == "auto", engine.ranks, engine.step_tokens)
        reports = settings.device_aware == "auto" and engine.evicted_next is not None and engine.saves
        self._membership = Membership(session, spec, settings, engine.checkpoint, self.events, engine.joining, reports)
        self._notes = Notes(counters)
        self._lookups = Lookups(group, spec.shards, settings.verify, counters, self._notes, self.events, engine.saves)
        self._loads = Loads(group, counters, block_bytes // engine.blocks_per_slot)
        self._admission: Admission | None = None
        if engine.device_blocks:
            self._admission = Admission(
                counters, engine.device_blocks, engine.tables, engine.lookahead, engine.in_order
            )
        timing, lazy = Eager(), settings.save_mode == "lazy"
        if engine.evicted_next is not None and engine.saves and (lazy or reports):
            timing = DeviceCache(group, engine, counters, clock, lazy, reports, self.events is not None)
        demand = Demand(group, settings.min_hits)
        self._saves = Saves(group, settings.verify, counters, self._notes, self.events, clock, demand, timing)
        self._hints = Hints(group, counters)
        self._canaries = Canaries(group, settings.canary_every if group.has_full else 0, block_bytes)
        self._summary = Summary(lambda line: logger.info("engine %s, %s", session.engine, line), counters.snapshot)
        self._requests = Requests(engine.tables)
        # Device blocks that ranks read, or fill for a request that already runs, until they are reassigned.
        self._being_read: set[int] = set()
        self._step = 0
        session.add_counts(counters.snapshot)

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of declined, dropped and refused blocks and requests, by reason."""
        return self._counters.snapshot()

    # Lookups.

    @property
    def loads(self) -> bool:
        return self._engine.loads

    def queued(self, request: RequestView) -> None:
        """Note that the engine, which `loads`, has queued a request."""
        self._lookups.queue.add(request)

    def matched_tokens(self, request: RequestView, computed: int) -> tuple[int | None, bool]:
        """Return the number of cached tokens beyond the `computed` ones, and whether they are loaded asynchronously.

        (None, False) means "retry later": other sessions are writing blocks that are worth a short wait, running loads
        use up this engine's pin quota, another request is loading most of the blocks, or the engine could wait forever
        for the device blocks that this load would hold.
        """
        state = self._track(request)
        if self._lookups.queue.leave(request.id):
            state.waits.put_off = True
        tokens, is_load = self._match(state, computed)
        return (tokens, is_load) if self._admission is None else self._admission.answer(state, tokens, is_load)

    def _match(self, state: RequestState, computed: int) -> tuple[int | None, bool]:
        request, now = state.request, self._clock()
        if self._membership.waits(now):
            return None, False
        if state.barred and computed == 0:
            state.barred = False
        if reason := self._no_lookup(state, computed, now):
            self._counters.add(f"lookups_declined_{reason}" if reason != "not_wanted" else "lookups_not_wanted")
            return self._decline(state, reason, now)
        if state.admitted is False:
            return 0, False
        limit, start = self._group.loadable(request), computed // self._group.block_tokens
        if self._group.farthest(request) <= start or self._canaries.again(state, start):
            self._lookups.forget(state)
            return 0, False
        if len(self._loads) and state.waits.loads_to_end > self._loads.ended and now < state.waits.quota_until:
            return None, False
        if now < state.waits.tier_until or self._loads.following(state, start, now):
            return None, False
        lookup = self._lookups.known(state, limit, start, now)
        if lookup is None:
            if self._lookups.spent > self._session.deadline:
                self._counters.add("lookups_over_budget")
                return self._decline(state, "over_budget", now)
            lookup = self._lookups.ask(state, self._membership.namespace, limit, start, now)
            self._lookups.spent += self._clock() - now
        if self._is_worth_waiting(state, lookup, computed, limit, now):
            state.waits.put_off = True
            self._lookups.forget(state)
            return None, False
        lookup.offered, state.start = self._step, start
        hits = min(lookup.hits, limit)
        end = lookup.tail or hits * self._group.blocks_per_slot
        tokens = end * self._group.block_tokens - computed
        if tokens <= 0:
            self._lookups.release(state)
            return 0, False
        if not self.gate.admits(state, computed, computed + tokens):
            return self._decline(state, "slow", now)
        if self._loads.follow(state, start, end, lookup.tail, now):
            self._counters.add("lookups_waited_for_load")
            self._lookups.forget(state)
            return None, False
        if self._canaries.choose(state, lookup.lease, hits, start):
            self._counters.add("canary_requests")
            return self._decline(state, "canary", now)
        return tokens, True

    def _is_worth_waiting(
        self, state: RequestState, lookup: LookupResult, computed: int, limit: int, now: float
    ) -> bool:
        """Whether a writer, an ending lease or a tier provides more blocks before they could be computed."""
        lease, tokens = lookup.lease, self._group.slot_tokens
        if coming := lease.pending + lease.withheld:
            wanted = min(lease.hits + coming, limit) * tokens
            patience = self.gate.patience(computed, wanted) if wanted > computed else 0.0
            start = computed // self._group.block_tokens
            if self._lookups.worth_waiting(state, lookup, start, self._loads, patience, now):
                return True
        if not lease.eta:
            return False
        begin, end = lease.hits * tokens, min(lease.hits + (lease.coming or lookup.wanted), limit) * tokens
        begin = max(begin, computed)
        return end > begin and self._lookups.waits_for_tier(state, lookup, self.gate.patience(begin, end), now)

    def _no_lookup(self, state: RequestState, computed: int, now: float) -> str:
        """Return the reason that no blocks are looked up for a request; "" if they are."""
        if not self._engine.loads or self._membership.lost:
            return "not_wanted"
        if self._membership.declined or self._membership.joining:
            return "rank"
        if state.request.uncacheable:
            return state.request.uncacheable
        if state.barred or not self._membership.compare_weights():
            return "weights"
        if state.load_failed:
            return "load_failed"
        if computed % self._group.align:
            return "unaligned"
        if state.request.skips_cache:
            return "by_request"
        if self._loads.paused(now):
            return "loads_fail"
        if not self._session.up:
            return "down"
        return ""

    def _decline(self, state: RequestState, cause: str, now: float) -> tuple[int, bool]:
        """Offer nothing, and note the reason."""
        self._notes.note(state, cause, now)
        self._lookups.forget(state)
        return 0, False

    # Loads.

    def allocated(self, request: RequestView, tables: BlockTables, external: int) -> None:
        """Note that `request` has the device blocks in `tables`, and that `external` of its tokens are to be loaded."""
        state = self._track(request)
        state.tables = [list(table) for table in tables]
        if request.hint is not None and self._may_hint:
            self._hints.retain(state, self._membership.namespace)
        self._saves.demand.ask(state)
        if state.lookup is not None and not state.logged:
            state.logged = True
            end = state.lookup.tail or state.lookup.hits * self._group.blocks_per_slot
            found = end * self._group.block_tokens
            self._summary.request(request.tokens, found, max(external, 0))
            logger.debug(
                "request %s: %s tokens, %s hit, %s to load",
                *(request.id, f"{request.tokens:,}", f"{found:,}", f"{external:,}"),
            )
        if external <= 0:
            self._lookups.forget(state)
            self._requests.allocated(state)
            return
        if self._admission is not None:
            self._admission.hold(state)
        self._load(state, external)

    def _load(self, state: RequestState, external: int) -> None:
        """Begin the load that the engine waits for; without a lease, the load fails."""
        request, group, start = state.request, self._group, state.start
        lookup, count = self._lookups.take(state), external // group.block_tokens
        lease, jobs, ranks = lookup.lease if lookup is not None else None, [], 0
        if lookup is not None and lease is not None and not (group.suffixes and external % group.block_tokens):
            slots = Found(lease.region_id, lease.packed, lease.hits, lookup.had, lookup.sums, lookup.tail)
            jobs = group.cut_loads(request.id, slots, state.tables, start, count)
            if jobs and self._overlaps(state, lookup, external):
                ranks, jobs = self.overlap.ranks, [msgspec.structs.replace(job, layered=True) for job in jobs]
        if not jobs:
            if lease is not None:  # the engine wants to continue at a boundary that was not leased
                self._counters.add("loads_of_another_boundary")
                lease.release()
            lease, jobs = None, [LoadJob(request.id, b"", b"", state.tables[0][start : start + count])]
        names = group.names(request, start, start + count, lookup.tail if lookup is not None else 0)
        self._loads.begin(jobs, lease, names, external, ranks)
        state.loading = True

    def _overlaps(self, state: RequestState, lookup: LookupResult, external: int) -> bool:
        """Return True if a request is to be computed while it loads: its engine is otherwise idle, and no check, such
        as a checksum, can fail once the load has begun."""
        if self._group.suffixes or lookup.sums or len(self._loads) or self._loads.are_coming:
            return False
        begin = state.start * self._group.block_tokens
        end, tokens = begin + external, state.request.tokens
        # The last token of a prompt that is loaded as a whole would be computed in a block that is being filled.
        if end == tokens or not self.overlap.wins(begin, end, tokens):
            return False
        return not any(other.tables[0] for other in self._requests if other is not state)

    def ended(self, received: Sequence[str], invalid: set[int], failed: Collection[str] = ()) -> None:
        """Note that the loads of the requests `received` have ended on every rank.

        The device blocks `invalid` were not filled. Loads of the requests `failed` are incomplete.
        """
        now = self._clock()
        if invalid or failed:
            self._loads.fail(invalid, failed)
        for request_id in received:
            load = self._loads.end(request_id, now)
            if load is None:
                continue
            self.gate.costs.load_ended(request_id, load.failed, now)
            if (state := self._requests.get(request_id)) is not None:
                state.loading = False
                if load.failed:
                    state.load_failed, state.progress.saved = True, 0
                    self._notes.note(state, "load_failed", now)

    def copied(self, counts: Mapping[str, int]) -> None:
        """Note the ranks' copies since the last call, for the summary in the log."""
        self._summary.copied(counts)

    def reported(self, report: Report) -> None:
        """Process the ranks' report on a step that has ended on all ranks."""
        costs = self.gate.costs
        costs.ended(report.timed, self._clock())
        if report.declined and self._membership.ranks_declined(report.declined):
            self._saves.drop()
        costs.carried(report.carried)
        self._saves.given_away(report.given_away)
        self._saves.not_compressed(report.not_compressed)
        self.overlap.ranks_ready(report.ready)
        for request_id, seconds in report.arrived:
            if tokens := self._loads.arrived(request_id):
                costs.arrived(tokens, seconds)
        if self.events is not None:
            for verdicts in report.verdicts:
                self.events.settled(verdicts)

    # One step.

    def plan(
        self,
        step: StepView,
        states: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
        written: Sequence[int] = (),
    ) -> StepPlan:
        """Return the ranks' jobs for `step`. Called once per schedule.

        `states` are the states at boundaries that the step makes, by request: (engine's group, device block, tokens).
        `written` are device blocks that the step writes to before it computes, even if they belong to no request.
        """
        self._step += 1
        self._lookups.spent = 0.0
        if self._admission is not None:
            self._admission.scheduled(step.scheduled)
        self._loads.scheduled()
        now = self._clock()
        for request, tokens in self._loads.take_begun():
            self.gate.costs.load_began(request, tokens, now)
        timed = self.gate.costs.step(self._step, step, now, learns=not self._loads.are_coming)
        membership, requests = self._membership, self._requests
        if membership.weights_unknown:
            membership.compare_weights()
        if self._notes.entries:
            self._send_notes()
        self._announce(step.preempted if self._engine.loads else (), now)
        if not (requests or self._saves.waiting or self._canaries.due or requests.finished or membership.announced):
            return StepPlan(self._step, timed=True) if timed else NOTHING
        loads = self._loads.take_jobs() if self._loads.jobs else []
        # Device blocks whose contents the step replaces.
        given = [*requests.follow(step), *written, *(block for load in loads for block in load.blocks)]
        self._saves.timing.given(given)
        # An idle step may be the last one before the engine sleeps: it waits briefly for the answers of a healthy
        # daemon, because no later step might take them.
        wait = None if step.tokens else self._session.deadline if self._session.up else 0.0
        saves = self._saves.answers(given, wait) if self._saves.waiting else []
        checks = self._canaries.take() if self._canaries.due else []
        # Reserve nothing in a namespace that the ranks do not know yet; they know the first one from the start.
        saving = (membership.announced is None or self._step == 1) and self._may_save
        self._advance(step, saving)
        if saving:
            for request_id, offers in states.items() if states else ():
                if (state := self._requests.get(request_id)) is not None:
                    self._saves.ask_states(state, offers)
            if step.tokens:
                self._saves.ask_due()
            self._saves.send(membership.namespace)
        if self._lookups.holding:
            self._lookups.give_back_idle(self._step)
        guarded = self._guarded(given, [*saves, *checks])
        for load in loads:
            if load.layered:  # the blocks of an aborted request may be reassigned while they are being filled
                self._being_read.update(load.blocks)
        finished = requests.take_finished(self._saves.concerned()) if requests.finished else []
        if not (saves or loads or guarded or finished or checks or membership.announced or timed):
            return NOTHING
        plan = StepPlan(self._step, saves, guarded, loads, finished, membership.announced, checks, timed=timed)
        membership.announced = None
        return plan

    def _announce(self, preempted: Collection[str], now: float) -> None:
        """Tell the daemon which requests wait. The `preempted` ones do so with all blocks that they have filled."""
        queue = self._lookups.queue
        for state in filter(None, map(self._requests.get, preempted)):
            tokens = len(state.request.hashes) * self._engine.block_tokens + 1
            queue.add(msgspec.structs.replace(state.request, tokens=max(tokens, state.request.tokens)), first=True)
        if queue.has_news(now) and self._may_prefetch:
            queue.announce(self._membership.namespace, now)

    def _advance(self, step: StepView, saving: bool) -> None:
        """Note each request's computed tokens at the end of `step`: save full blocks, and compare due canaries."""
        requests, scheduled, slot_tokens = self._requests, step.scheduled, self._group.slot_tokens
        for request_id, before in zip(step.running, step.computed, strict=True):
            if (state := requests.get(request_id)) is not None:
                computed = before + scheduled[request_id]
                if state.canary is not None:
                    self._canaries.computed(state, computed)
                if saving and computed // slot_tokens > state.progress.saved:  # most steps fill no block
                    self._saves.ask(state, computed, before)
        for new in step.started:
            if (state := requests.get(new.request)) is not None:
                self._saves.timing.found(state, new.computed)
                computed = new.computed + scheduled[new.request]
                self._canaries.computed(state, computed)
                if saving:
                    self._saves.ask(state, computed, new.computed)

    def _guarded(self, given: list[int], jobs: Sequence[SaveJob | CheckJob]) -> list[int]:
        """Return the blocks of `given` that a rank may still be reading for `jobs`, or for earlier ones."""
        for job in jobs:
            self._being_read.update(job.blocks)
        if not self._being_read:
            return []
        guarded = [block for block in given if block in self._being_read]
        self._being_read.difference_update(guarded)
        return guarded

    def finished(self, request_id: str, computed: int) -> None:
        """Save the blocks that a request's last step has filled; the engine may take them back at once."""
        self._lookups.queue.leave(request_id)
        if (state := self._requests.finish(request_id)) is None:
            return
        # Saves may keep the request as long as the device has its blocks. So it drops the engine's own objects, unless
        # events need them.
        if self.events is None:
            state.request = msgspec.structs.replace(state.request, key=None, token_ids=())
        self._lookups.forget(state)
        if self._admission is not None:
            self._admission.leave((request_id,))
        self._canaries.computed(state, computed)
        if may_save := self._may_save:
            self._saves.ask(state, computed, computed)
            self._saves.timing.ending(state)
            self._saves.ask_due()
            self._saves.send(self._membership.namespace)
        if state.request.hint is not None and self._may_hint:
            self._hints.finished(state, self._membership.namespace)
        if self._engine.saves and not self._membership.lost and not self._membership.declined:
            cause, hashes = self._saves.unsaved(state, computed, may_save)
            if cause:
                self._notes.add(request_id, cause, self._clock(), hashes)
        if self._notes.entries:
            self._send_notes()

    # The rest.

    def reset(self) -> bool:
        """Apply `on_reset`, because the weights may have changed. Return True if the engine still shares blocks.

        Drop requested jobs that have not begun: a reset may precede sleep, so that the device memory that they would
        read may be unmapped before the next step.
        """
        self._saves.drop()
        self._saves.timing.forget()
        for state in self._requests:
            self._bar(state)
        self._canaries.due.clear()
        self._loads.forget()
        return self._membership.reset()

    def doubt(self, adapters: Set[int]) -> None:
        """Bar the running requests of these LoRA adapters, by number, because their weights may change."""
        for state in self._requests:
            if state.request.adapter in adapters:
                self._bar(state)

    def _bar(self, state: RequestState) -> None:
        """Neither load nor save blocks of a request until it is computed again from its first token."""
        self._lookups.forget(state)
        state.barred, state.progress.saved, state.progress.retry_at, state.canary = True, 0, 0.0, None

    def close(self) -> None:
        """Give back reservations that no rank has received, and end the session."""
        self._summary.close()
        self._saves.drop()
        self._session.close()

    @property
    def _may_hint(self) -> bool:
        return self._group.has_full and self._membership.shares

    @property
    def _may_prefetch(self) -> bool:
        membership = self._membership
        return self._session.up and membership.shares and not membership.joining and membership.namespace.attached

    @property
    def _may_save(self) -> bool:
        """Whether blocks can be reserved now: right after a reset, the namespace is not attached yet."""
        membership = self._membership
        if not membership.shares or membership.joining:
            return False
        return self._engine.saves and self._session.up and membership.namespace.attached

    def _send_notes(self) -> None:
        if self._session.up and self._membership.namespace.attached:
            self._notes.send(self._membership.namespace, self._clock())

    def _track(self, request: RequestView) -> RequestState:
        if (state := self._requests.known(request)) is not None:
            return state
        if (former := self._requests.get(request.id)) is not None:
            self._lookups.forget(former)
        state = self._requests.begin(request)
        if request.hint is not None or request.bad_hints:
            self._hints.begin(state)
        return state


def _group_rules(engine: EngineFacts, spec: NamespaceSpec, settings: ConnectorSettings) -> FullAttention:
    """Return the rules by which the engine's blocks are matched, loaded and saved."""
    tokens, only_prompts = engine.block_tokens, settings.save == "prompt"
    if not engine.groups:
        return FullAttention(tokens, engine.blocks_per_slot, engine.volatile, only_prompts)
    checkpoint = settings.checkpoint_tokens
    return HybridGroups(engine.groups, spec.groups, tokens, only_prompts, checkpoint, engine.volatile, engine.tails)
