"""The scheduler's side: decides what a step loads and saves, and never touches a tensor."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvcache_client.scheduler.canaries import Canaries
from kvcache_client.scheduler.checkpoint import Check
from kvcache_client.scheduler.events import Events
from kvcache_client.scheduler.loads import Loads
from kvcache_client.scheduler.notes import Notes
from kvcache_client.scheduler.pace import Pace
from kvcache_client.scheduler.request_state import Lookup, Tracked, follow_blocks, track
from kvcache_client.scheduler.saves import Saves
from kvcache_client.scheduler.summary import Summary
from kvcache_client.session.checksums import pick_sums
from kvcache_client.session.counters import LoggedCounters
from kvcache_client.session.session import Session
from kvcache_client.settings import Settings
from kvcache_client.step_plan import NOTHING, CheckJob, LoadJob, SaveJob, StepPlan, cut_load, hit_limit, slot_hashes
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import NamespaceSpec

logger = logging.getLogger("vllm.kvcache.scheduler")

PENDING_WAIT = 0.05  # seconds that a request waits, once, for blocks that are being written
QUOTA_WAIT = 0.25  # seconds that it waits, in all, for running loads to give back what the engine may pin
LOOKUP_AGE = 0.1  # seconds after which a lookup that found less than all is asked anew
NAME_EVERY = 1.0  # seconds between two lookups of a request that bear its name
IDLE_SCHEDULES = 2  # schedules after which a lease that no load has taken is given back
FAILED_LOADS = 3  # in a row, and no hit is offered for LOAD_PAUSE seconds
LOAD_PAUSE = 10.0


class Scheduler:
    """One engine's decisions. Called by the engine's scheduler thread alone; never raises for the daemon's sake."""

    def __init__(
        self,
        session: Session,
        spec: NamespaceSpec,
        settings: Settings,
        engine_block: int,
        blocks_per_slot: int,
        saves: bool = True,
        loads: bool = True,
        volatile: int = 0,
        tell: bool = False,
        checkpoint: Callable[[], str] = lambda: "",
    ) -> None:
        """`volatile` cached blocks at the end of a hit are computed anew: a drafter's KV depends on the next token.

        `tell` keeps `events` for who asks for them. `checkpoint` returns what `spec` calls so, as it is now; "" where
        that is not known.
        """
        self._session, self._settings = session, settings
        self._block, self._per_slot, self._slot_tokens = engine_block, blocks_per_slot, engine_block * blocks_per_slot
        self._saving, self._loading, self._volatile = saves, loads, volatile
        self._block_bytes = spec.groups[0].block_bytes // blocks_per_slot  # of the engine's blocks, all ranks together
        self._ceiling = settings.num_cpu_blocks * spec.groups[0].block_bytes
        self._namespace = session.attach(spec, (), self._ceiling)
        self._announce: NamespaceSpec | None = spec
        self._checkpoint, self._weights_of = checkpoint, spec.identity.get("checkpoint", "")
        self._check: Check | None = None  # after a reset, until it is known which weights the engine has
        self._resets = 0
        self._step = 0
        self._requests: dict[str, Tracked] = {}
        self._held: set[str] = set()  # requests whose lookup holds a lease
        self._loads = Loads()
        self._new_loads: list[LoadJob] = []
        self._finished: list[str] = []
        self._failures = 0
        self._no_loads_until = 0.0
        self._spent = 0.0  # seconds of this schedule that lookups took: all of them together have one deadline
        self._tally = LoggedCounters(logger)
        self._summary = Summary(lambda line: logger.info("engine %s, %s", session.engine, line), self._tally.snapshot)
        self._verify, self._shards = settings.verify, spec.shards
        self.events = Events(engine_block, blocks_per_slot) if tell else None
        self._notes = Notes()
        self._saves = Saves(
            *(engine_block, blocks_per_slot, settings.save == "prompt", self._tally, settings.verify, self.events),
            lambda request, hashes: self._remember(request, "given_away", hashes),
        )
        session.add_counts(self._tally.snapshot)
        self._declined: dict[int, str] = {}  # ranks that take no part, and why
        self._sources: set[int] = set()  # device blocks that ranks were told to read and nobody was given since
        self.pace = Pace()
        self._canaries = Canaries(settings.canary_every, spec.groups[0].block_bytes, blocks_per_slot)

    @property
    def counters(self) -> dict[str, int]:
        """What was declined, dropped or refused, by reason."""
        return self._tally.snapshot()

    # Lookups.

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the `computed` ones the cache has, and whether they come asynchronously.

        (None, False): to be asked again. Blocks are being written that are worth a short wait, running loads hold all
        that this engine may pin, or another request's load brings most of what this one would load.
        """
        state = self._track(request)
        if self._check is not None and self._check.waits(time.monotonic()) and not self._settled():
            return None, False
        if state.barred and computed == 0:
            state.barred = False
        reason = self._no_lookup(state, computed)
        if reason:
            self._tally.add(f"lookups_declined_{reason}" if reason != "not_wanted" else "lookups_not_wanted")
            self._note(state, reason)
            self._forget_lookup(state)
            return 0, False
        limit = min(hit_limit(request.num_tokens, self._slot_tokens), len(request.block_hashes) // self._per_slot)
        start = computed // self._block
        if limit * self._per_slot <= start or self._canaries.again(state, start):
            self._forget_lookup(state)
            return 0, False
        now = time.monotonic()
        if self._loads and state.wait_loads > self._loads.ended and now < state.quota_until:
            return None, False
        if self._loads.following(state, start, now):
            return None, False
        lookup = state.lookup
        if lookup is not None and lookup.hits and not lookup.lease.id:
            lookup = None  # its lease was given back
        if lookup is None or (lookup.hits < min(limit, lookup.wanted) and now - lookup.at > LOOKUP_AGE):
            if self._spent > self._session.deadline:
                self._tally.add("lookups_over_budget")
                self._note(state, "over_budget")
                self._forget_lookup(state)
                return 0, False
            lookup = self._look_up(state, limit, now)
            self._spent += time.monotonic() - now
        if self._worth_waiting(state, lookup, start, now):
            state.waits = True
            self._forget_lookup(state)
            return None, False
        lookup.asked, state.start = self._step, start
        tokens = min(lookup.hits, limit) * self._slot_tokens - computed
        if tokens <= 0:
            self._release(state)
            return 0, False
        if not self.pace.worth_loading(tokens // self._block, tokens):
            self._tally.add("lookups_declined_slow")
            self._note(state, "slow")
            self._forget_lookup(state)
            return 0, False
        if self._worth_following(state, start, min(lookup.hits, limit), now):
            self._tally.add("lookups_waited_for_load")
            self._forget_lookup(state)
            return None, False
        if self._canaries.choose(state, lookup.lease, min(lookup.hits, limit), start):
            self._tally.add("canary_requests")
            self._note(state, "canary")
            self._forget_lookup(state)
            return 0, False
        return tokens, True

    def _no_lookup(self, state: Tracked, computed: int) -> str:
        if not self._loading:
            return "not_wanted"
        if self._declined:
            return "rank"
        if state.excluded:
            return state.excluded
        if state.barred or not self._settled():
            return "weights"
        if state.load_failed:
            return "load_failed"
        if computed % self._block:
            return "unaligned"
        if getattr(state.request, "skip_reading_prefix_cache", False):
            return "by_request"
        if self._no_loads_until and time.monotonic() < self._no_loads_until:
            return "loads_fail"
        if not self._session.up:
            return "down"
        return ""

    def _look_up(self, state: Tracked, limit: int, now: float) -> Lookup:
        request, waited, state.waits = state.request, state.waits, False
        # A request that waits to be scheduled is looked up again and again: the daemon hears of it now and then.
        named = waited or not state.named_at or now - state.named_at > NAME_EVERY
        self._forget_lookup(state)
        hashes = slot_hashes(request.block_hashes, self._per_slot)[:limit]
        try:
            lease = self._namespace.acquire(
                hashes,
                verify=self._verify != "off",
                request=request.request_id if named else "",
                tokens=request.num_prompt_tokens,
                salted=bool(getattr(request, "cache_salt", None)),
            )
        except KVCacheError as error:
            self._tally.warn("lookups_refused", f"lookups are refused: {error}")
            self._note(state, "refused")
            lease = self._namespace.acquire(())
        if named:
            state.named_at = now
        if lease.failed:
            self._note(state, "deadline" if self._namespace.attached else "down")
        else:
            state.saved = lease.hits + lease.pending
            if self.events is not None and not lease.withheld:
                self.events.looked_up(state.request, lease.hits, limit)
            if waited and lease.hits == len(hashes):
                self._note(state, "came")
        state.lookup = Lookup(lease, limit, max(0, lease.hits - self._volatile), now)
        state.lookup.sums = pick_sums(self._verify, hashes, lease.sums, self._shards, lease.region_id)
        if lease.id:
            self._held.add(state.request.request_id)
        return state.lookup

    def _worth_waiting(self, state: Tracked, lookup: Lookup, start: int, now: float) -> bool:
        lease = lookup.lease
        if lease.withheld and self._loads:
            # What is loading now gives its slots back soon; to compute what is cached takes longer.
            state.quota_until = state.quota_until or now + QUOTA_WAIT
            if now < state.quota_until:
                state.wait_loads = self._loads.ended + 1
                self._tally.add("lookups_waited_for_quota")
                return True
        if not lease.pending or (lease.hits + lease.pending) * self._per_slot <= start:
            return False
        if not state.wait_until:
            state.wait_until = now + PENDING_WAIT
        return now < state.wait_until

    def _worth_following(self, state: Tracked, start: int, hits: int, now: float) -> bool:
        """Whether another request's load brings most of what this one would load."""
        if self._loads.idle or self._failures:  # while loads fail, each request has its own
            return False
        hashes = slot_hashes(state.request.block_hashes, self._per_slot)[start // self._per_slot : hits]
        return self._loads.follow(state, start, hashes, now)

    def _forget_lookup(self, state: Tracked) -> None:
        self._release(state)
        state.lookup = None

    def _release(self, state: Tracked) -> None:
        if state.lookup is not None and state.lookup.lease.id:
            state.lookup.lease.release()
            self._held.discard(state.request.request_id)

    # Loads.

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Note that `request` has `blocks`, and that `external` tokens of them are to be loaded."""
        state = self._track(request)
        state.blocks = list(blocks)
        lookup = state.lookup
        if lookup is not None and not state.told:
            state.told = True
            self._summary.request(request.num_tokens, lookup.hits * self._slot_tokens, max(external, 0))
            logger.debug(
                "request %s: %s tokens, %s hit, %s to load",
                *(request.request_id, f"{request.num_tokens:,}"),
                *(f"{lookup.hits * self._slot_tokens:,}", f"{external:,}"),
            )
        if external <= 0:
            self._forget_lookup(state)
            return
        lease, sums = (lookup.lease, lookup.sums) if lookup is not None and lookup.lease.id else (None, b"")
        count = external // self._block
        self._tally.add("needed_blocks", -(-external // self._slot_tokens))
        self._tally.add("needed_bytes", count * self._block_bytes)
        # The engine waits for this load whatever we think of it: without a lease it is one that fails.
        region, packed = (lease.region_id, lease.packed) if lease else (b"", b"")
        job = cut_load(request.request_id, region, packed, state.blocks, state.start, count, self._per_slot, sums)
        self._new_loads.append(job)
        begin, end = state.start // self._per_slot, (state.start + count) // self._per_slot
        hashes = slot_hashes(request.block_hashes, self._per_slot)[begin:end]
        self._loads.begin(request.request_id, lease, job.blocks, hashes)
        self._held.discard(request.request_id)
        state.lookup, state.loading = None, True

    def ended(self, received: Sequence[str], invalid: set[int]) -> None:
        """Note that every rank has ended the loads of `received`, and that device blocks `invalid` did not arrive."""
        if invalid:
            self._loads.fail(invalid)
        for request_id in received:
            ended = self._loads.end(request_id)
            if ended is None:
                continue
            if ended.lease is not None:
                ended.lease.release()
            state = self._requests.get(request_id)
            if state is not None:
                state.loading = False
                if ended.failed:
                    state.load_failed, state.saved = True, 0
                    self._note(state, "load_failed")
            self._judge(ended.failed)

    def copied(self, counts: Mapping[str, int]) -> None:
        """Note what ranks have copied since the last time, for the summary in the log."""
        self._summary.copied(counts)

    def given_away(self, jobs: Sequence[tuple[int, int]]) -> None:
        """Note saves, by reservation and first position, that a rank has not begun before others got their blocks."""
        self._saves.given_away(jobs)

    def _judge(self, failed: bool) -> None:
        self._failures = self._failures + 1 if failed else 0
        if failed:
            self._tally.add("loads_failed")
        if self._failures >= FAILED_LOADS:
            self._no_loads_until = time.monotonic() + LOAD_PAUSE
            self._failures = 0
            self._tally.warn("loads_fail", f"{FAILED_LOADS} loads in a row failed: no hits for {LOAD_PAUSE:.0f} s")

    # One step.

    def plan(self, output: Any) -> StepPlan:
        """Return what the ranks do in the step that `output` describes. Called once a schedule."""
        self._step += 1
        self._spent = 0.0
        self.pace.step(output.total_num_scheduled_tokens, time.monotonic())
        self._loads.scheduled()
        if self._check is not None:
            self._settled()
        if self._notes.entries:
            self._tell()
        if not (self._requests or self._saves.waiting or self._canaries.waiting or self._finished or self._announce):
            return NOTHING
        given = follow_blocks(self._requests, output, self._block)
        loads, self._new_loads = self._new_loads, []
        for load in loads:
            given.extend(load.blocks)
        # An idle step may be the last one before the engine sleeps: it waits a little for a daemon that is well, and
        # leaves no answer that nobody would pick up.
        idle = output.total_num_scheduled_tokens == 0
        wait = (self._session.deadline if self._session.up else 0.0) if idle else None
        saves = self._saves.answers(given, wait) if self._saves.waiting else []
        checks = self._canaries.take() if self._canaries.waiting else []
        # A namespace that the ranks have not heard of takes no reservations; the first one they know by themselves.
        known = self._announce is None or self._step == 1
        saving = known and self._may_save
        for request_id, tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None:
                computed = state.request.num_computed_tokens + tokens
                self._canaries.computed(state, computed, self._slot_tokens)
                if saving:
                    self._saves.ask(state, computed)
        if saving:
            self._saves.send(self._namespace)
        if self._held:
            self._give_back()
        guarded = self._guarded(given, [*saves, *checks])
        finished = self._take_finished() if self._finished else []
        if not (saves or loads or guarded or finished or checks or self._announce):
            return NOTHING
        plan = StepPlan(self._step, saves, guarded, loads, finished, self._announce, checks)
        self._announce = None
        return plan

    def _guarded(self, given: list[int], jobs: Sequence[SaveJob | CheckJob]) -> list[int]:
        """Return which of `given` a rank may still be reading for these `jobs` or for older ones."""
        for job in jobs:
            self._sources.update(job.blocks)
        if not self._sources:
            return []
        guarded = [block for block in given if block in self._sources]
        self._sources.difference_update(guarded)
        return guarded

    def _take_finished(self) -> list[str]:
        """Return the requests of which no more saves will come."""
        waiting = self._saves.concerned()
        ready = [request_id for request_id in self._finished if request_id not in waiting]
        self._finished = [request_id for request_id in self._finished if request_id in waiting]
        return ready

    def finished(self, request: Any) -> None:
        """Save what the last step has filled; the engine may take the blocks back at once."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        self._forget_lookup(state)
        self._finished.append(request.request_id)
        self._canaries.computed(state, request.num_computed_tokens, self._slot_tokens)
        if self._may_save:
            self._saves.ask(state, request.num_computed_tokens)
            self._saves.send(self._namespace)
        if self._saving and not self._declined:
            up, now = self._may_save, time.monotonic()
            why, hashes = self._saves.unsaved(state, request.num_computed_tokens, up, now)
            if why:
                self._remember(request.request_id, why, hashes)
        if self._notes.entries:
            self._tell()

    def ranks_declined(self, changed: dict[int, str]) -> None:
        """Note which ranks take no part in the cache, and why; "" for one that does again.

        A block is whole with the shards of all ranks: while one takes no part, the engine looks nothing up and saves
        nothing.
        """
        before = bool(self._declined)
        self._declined |= changed
        self._declined = {rank: why for rank, why in self._declined.items() if why}
        if self._declined and not before:
            self._saves.drop()
            rank, why = min(self._declined.items())
            logger.error("this engine runs without the KV cache server: rank %d takes no part: %s", rank, why)
        elif before and not self._declined:
            logger.info("every rank takes part again: this engine uses the KV cache server")

    # What the daemon is told, for who asks why.

    def _note(self, state: Tracked, cause: str) -> None:
        if state.noted != cause:  # it is asked for again and again
            state.noted = cause
            self._remember(state.id, cause)

    def _remember(self, request: str, cause: str, hashes: Sequence[bytes] = ()) -> None:
        self._tally.add("notes_dropped", self._notes.add(request, cause, time.monotonic(), hashes))

    def _tell(self) -> None:
        if self._session.up and self._namespace.attached:
            notes = self._notes.take(time.monotonic())
            if not self._namespace.remark(notes):
                self._tally.add("notes_unsaid", len(notes))

    # The rest.

    def reset(self) -> bool:
        """The weights may have changed: go on as `on_reset` says. Others stay where they are."""
        # The device memory that these were to be read from may be unmapped before the next step: sleep resets first.
        self._saves.drop()
        for state in self._requests.values():
            self._forget_lookup(state)
            state.barred, state.saved, state.retry_at, state.canary = True, 0, 0.0, None
        self._canaries.forget()
        self._loads.forget()
        self._resets += 1
        how = self._settings.on_reset
        if how == "keep":
            self._check = Check(self._checkpoint)
            return True
        # A version names one state of the weights, and the engine leaves that with its next reset.
        return self._move(how if how != "new" and self._resets == 1 else uuid.uuid4().hex)

    def _settled(self) -> bool:
        """Return whether it is known which weights the engine has; after a reset that may keep them, find out."""
        if self._check is None:
            return True
        found = self._check.found
        if found is None:
            return False
        self._check = None
        if found and found == self._weights_of:
            logger.info("cache reset: the checkpoint is what it was, namespace %s is kept", self._namespace.id)
            return True
        self._weights_of = found
        return self._move(uuid.uuid4().hex)

    def _move(self, weights: str) -> bool:
        """Leave the namespace for that of other weights."""
        spec = self._namespace.spec.with_weights(weights)
        try:
            # The engine's steps wait for this call: a daemon that is slow to answer is joined later.
            left, self._namespace = self._namespace, self._session.attach(spec, (), self._ceiling, wait=False)
            self._session.detach(left)
        except KVCacheError as error:
            logger.error("the cache could not be reset, saves and loads stop: %s", error)
            self._saving = self._loading = False
            return False
        self._announce = spec
        if self.events is not None:
            self.events.reset()
        logger.info("cache reset: this engine goes on in namespace %s, weights %s", spec.id, weights)
        return True

    def close(self) -> None:
        """Give back whatever no rank has heard of, and end the session."""
        self._summary.close()
        self._saves.drop()
        self._session.close()

    @property
    def _may_save(self) -> bool:
        """Whether a Reserve that is sent now can be answered; right after a reset the namespace is not joined yet."""
        ready = self._saving and not self._declined and self._check is None
        return ready and self._session.up and self._namespace.attached

    def _track(self, request: Any) -> Tracked:
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            if state is not None:
                self._forget_lookup(state)
            state = self._requests[request.request_id] = track(request)
        return state

    def _give_back(self) -> None:
        for request_id in list(self._held):
            state = self._requests[request_id]
            if state.lookup is None or self._step - state.lookup.asked > IDLE_SCHEDULES:
                self._tally.add("leases_given_back")
                self._forget_lookup(state)
