"""Saves on the scheduler's side: reservations, and the jobs of the ranks. Pure: the clock is given.

A block that is full by the end of step N is reserved while step N is planned. The answer is taken while step N + 1 is
planned, and the ranks copy the block at the start of step N + 1, before anything of that step touches device memory. So
no step waits for the daemon, and no block is withheld from the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcache_client.scheduler.cache import CacheNamespace, CachePendingReservation, CacheReservation, Counts
from kvcache_client.scheduler.device_cache import Eager
from kvcache_client.scheduler.events import EngineEvents
from kvcache_client.scheduler.groups import FullAttention, HybridGroups
from kvcache_client.scheduler.notes import Notes
from kvcache_client.scheduler.requests import PAUSE, RequestState, SaveProgress
from kvcache_client.session.breaker import Backoff
from kvcache_client.session.checksums import chosen
from kvcache_client.step_plan import SHIPPED, SaveJob, pick_refs
from kvcache_proto.errors import KVCacheError
from kvcache_proto.messages import Run
from kvcache_proto.types import MAX_BLOCKS, Outcome

INSIST = 2.0  # seconds that blocks are kept while every Reserve is refused as a whole
FIRST_RETRY, LAST_RETRY = 0.005, 5.0  # seconds between two refused attempts; doubled each time
NOT_COMPRESSED = 4096  # blocks that could not be compressed and are remembered
DEMANDED = 1 << 16  # cached blocks whose requests are counted: those that were requested last
_ADVANCES = {"present", "in_flight"}
_OPERATORS = {"quota"}  # refusals that an operator can remedy; "no_space" mostly concerns blocks of little value


@dataclass(slots=True)
class _Asked:
    """A run of blocks to be reserved; the first `whole` blocks still have the content to be saved.

    In a suffix group, the blocks at `gone` no longer have it. If the device is about to evict them, it is `late`: their
    request may have ended long ago, and is known only for events.
    """

    state: RequestState | None
    slots: Sequence[int]  # of the blocks in the request's chain, consecutive but in a suffix group; () for a tail
    run: Run
    blocks: list[int]
    whole: int
    suffix: bool = False
    late: bool = False
    gone: set[int] = field(default_factory=set)

    @property
    def id(self) -> str:
        return self.state.id if self.state is not None and not self.late else ""

    @property
    def progress(self) -> SaveProgress | None:
        """The progress that the answer changes, if any."""
        return self.state.progress if self.state is not None and not (self.late or self.suffix) else None


@dataclass(slots=True)
class _Sent:
    """All runs that one step reserves, in one `Reserve`."""

    namespace: CacheNamespace
    asked: list[_Asked]
    pending: CachePendingReservation | None = None  # None: not sent yet, or refused as a whole


class _Refusals:
    """Consecutive refusals of a `Reserve` as a whole: how long blocks wait, and when it is sent again.

    They end soon if a rank joins a step late, after a reset or a restart of the daemon. If a rank cannot join, they do
    not end, and the attempts become less and less frequent.
    """

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        self.why = ""
        self._since: float | None = None  # when they began; None: the last answer was no refusal
        self._retry_at = 0.0

    def add(self, why: str, now: float) -> None:
        self.why = why
        if self._since is None:
            self._since = now
        if now >= self._retry_at:  # of several that were sent together, only the first counts
            self._retry_at = now + self._backoff.next()

    def end(self) -> None:
        if self._since is not None:
            self._since, self._retry_at = None, 0.0
            self._backoff.reset()

    def hopeless(self, now: float) -> bool:
        """Return True once they have gone on for so long that blocks no longer wait for their end."""
        return self._since is not None and now - self._since >= INSIST

    def may_send(self, now: float) -> bool:
        """Return True if to send now. While there are refusals, the next attempt is delayed by the backoff."""
        if self._since is None:
            return True
        if now < self._retry_at:
            return False
        self._retry_at = now + self._backoff.next()
        return True


class Demand:
    """Counts how many requests of this engine asked for each cached block, for `min_hits`."""

    def __init__(self, group: FullAttention, least: int) -> None:
        """A block that fewer than `least` requests asked for is not saved; 0 is no limit."""
        self._group, self._least = group, least
        self._counts: dict[bytes, int] = {}  # in the order of their last request

    def ask(self, state: RequestState) -> None:
        """Count a request once, and limit how much of it is saved. Blocks that it wants retained are saved anyway."""
        request = state.request
        if self._least < 2 or state.counted:
            return
        state.counted = True
        enough = 0
        for at, key in enumerate(self._group.prompt_keys(request)):
            count = self._counts[key] = self._counts.pop(key, 0) + 1
            if count >= self._least and at == enough:
                enough += 1
        while len(self._counts) > DEMANDED:
            del self._counts[next(iter(self._counts))]
        if (request.hint is None or not request.hint.retained) and state.progress.limit is None:
            state.progress.limit, state.progress.limited_by = enough, "min_hits"


class Saves:
    """Requested reservations, and jobs that ranks have. `waiting` are reservations without an answer."""

    def __init__(
        self,
        group: FullAttention,
        verify: str,
        counters: Counts,
        notes: Notes,
        events: EngineEvents | None,
        clock: Callable[[], float],
        demand: Demand,
        timing: Eager,
    ) -> None:
        """`verify` selects the blocks that the ranks take checksums of; `events` gets the blocks that they are to save.

        `demand` limits the saves; `timing` keeps full blocks until they are due.
        """
        self.waiting: list[_Sent] = []
        self.demand, self.timing = demand, timing
        self._group, self._verify = group, verify
        self._counters, self._notes, self._events, self._clock = counters, notes, events, clock
        self._next: list[_Asked] = []
        self._shipped: dict[tuple[int, int], tuple[str, list[bytes]]] = {}  # by reservation and first position
        self._not_compressed: dict[bytes, None] = {}  # hashes of blocks that ranks could not compress
        self._refusals = _Refusals()

    def ask(self, state: RequestState, computed: int, before: int) -> None:
        """Note the blocks of `state` that are full once `computed` tokens are computed, for the next `send`.

        At least `before` of its tokens were computed when the engine last gave away blocks behind a window.
        """
        request, group, progress = state.request, self._group, state.progress
        first, full = progress.saved, group.full(request, computed)
        if progress.limit is not None:
            full = min(full, progress.limit)
        if full <= first or request.uncacheable or state.barred or state.loading or self._paused(state):
            return
        if self.timing.hold(state, first, full):
            progress.saved = full
            return
        keys = group.keys(request.hashes)
        if self._not_compressed:  # a chain that was saved behind one of these would be lost again
            end = next((slot for slot in range(first, full) if keys[slot] in self._not_compressed), full)
            if end < full:
                progress.limit, progress.limited_by, full = end, "not_compressed", end
            if full <= first:
                return
        if group.has_full:
            blocks = group.slot_blocks(state.tables, first, full)
            if len(blocks) < (full - first) * group.columns(0):
                return
            self._ask_run(state, keys, first, full, blocks)
        progress.saved = full
        if isinstance(group, HybridGroups):
            for number in group.suffixes:
                wanted = group.suffix_slots(number, request, first, full, progress.limit, progress.divergence)
                self._ask_suffix(state, keys, number, group.suffix_blocks(number, state.tables, wanted, before))

    def ask_states(self, state: RequestState, offers: Sequence[tuple[int, int, int]]) -> None:
        """Note states that the running step makes: `offers` are (the engine's group, device block, tokens before it).

        Call it after `ask`, in the same step: a state is saved if the blocks before it are.
        """
        request, group, slots = state.request, self._group, state.progress.saved
        if request.uncacheable or state.barred or state.loading or not isinstance(group, HybridGroups):
            return
        if group.prompt_only:
            slots = min(slots, request.prompt_tokens // group.slot_tokens)
        if not self._paused(state):
            keys = group.keys(request.hashes)
            for number, slot, blocks in group.state_slots(offers):
                if slot < slots:
                    self._ask_suffix(state, keys, number, {slot: blocks})
            for end, found in group.tails_made(request, state.tables, offers):
                if end // group.blocks_per_slot <= slots:
                    self._ask_tail(state, keys, end, found)

    def ask_due(self) -> None:
        """Note the blocks that were kept and are due, for the next `send`."""
        for due in self.timing.due():
            columns, count = self._group.columns(0), len(due.keys)
            for at in range(0, count, MAX_BLOCKS):
                hashes = due.keys[at : at + MAX_BLOCKS]
                leaving = max(0, due.leaving - (count - at - len(hashes)))
                parent = due.keys[at - 1] if at else due.parent
                run = Run(hashes, parent, 0, min(leaving, len(hashes)), int(due.idle * 1000), due.found)
                blocks = due.blocks[at * columns : (at + len(hashes)) * columns]
                state, last = due.source or (None, 0)
                slots = range(last + 1 - count + at, last + 1 - count + at + len(hashes))
                self._next.append(_Asked(state, slots, run, blocks, len(hashes), late=True))

    def _ask_run(self, state: RequestState, keys: Sequence[bytes], first: int, end: int, blocks: list[int]) -> None:
        """Note the cached blocks of a request from `first` to `end`; each has the same number of device `blocks`."""
        columns = len(blocks) // (end - first)
        for slot in range(first, end, MAX_BLOCKS):
            hashes = list(keys[slot : min(end, slot + MAX_BLOCKS)])
            theirs = blocks[(slot - first) * columns : (slot - first + MAX_BLOCKS) * columns]
            run = Run(hashes, keys[slot - 1] if slot else None)
            self._next.append(_Asked(state, range(slot, slot + len(hashes)), run, theirs, len(hashes)))

    def _ask_suffix(self, state: RequestState, keys: Sequence[bytes], number: int, slots: dict[int, list[int]]) -> None:
        wanted = list(slots)
        for at in range(0, len(wanted), MAX_BLOCKS):
            part = wanted[at : at + MAX_BLOCKS]
            run = Run([keys[slot] for slot in part], None, number)
            blocks = [block for slot in part for block in slots[slot]]
            self._next.append(_Asked(state, part, run, blocks, len(part), suffix=True))

    def _ask_tail(self, state: RequestState, keys: Sequence[bytes], end: int, found: list[list[int]]) -> None:
        """Note the tail after `end` blocks of the engine, with its device blocks by group."""
        name, slot = self._group.tail_name(state.request, end), end // self._group.blocks_per_slot
        if not name or (state.progress.limit is not None and slot >= state.progress.limit):
            return
        parent = keys[slot - 1] if slot else None
        for number, blocks in enumerate(found):
            run = Run([name], parent if number == 0 else None, number)
            self._next.append(_Asked(state, (), run, blocks, 1, suffix=True))

    def _paused(self, state: RequestState) -> bool:
        return bool(state.progress.retry_at) and self._clock() < state.progress.retry_at

    def unsaved(self, state: RequestState, computed: int, up: bool) -> tuple[str, Sequence[bytes]]:
        """Return the reason that blocks of an ending request were not reserved, and their hashes; "" if all were."""
        if state.request.uncacheable or state.loading:
            return "", ()
        hashes = self._group.unsaved(state.request, state.progress.saved, computed)
        if not hashes:
            return "", ()
        if state.barred:
            return "weights", hashes
        if self._paused(state):
            return "paused", hashes
        if not up:
            return "down", hashes
        if state.progress.limit is not None:
            return state.progress.limited_by, hashes
        return ("save_prompt" if self._group.prompt_only else ""), hashes

    def send(self, namespace: CacheNamespace) -> None:
        """Send the noted blocks: one Reserve for all that one step fills, unless they are too many for one."""
        kept, evicted = self.timing.changes()
        if kept or evicted:
            namespace.report_device(kept, evicted)
        while self._next:
            count = hashes = 0
            while count < len(self._next) and (not count or hashes + self._next[count].whole <= MAX_BLOCKS):
                hashes += self._next[count].whole
                count += 1
            sent = _Sent(namespace, self._next[:count])
            self._next = self._next[count:]
            self.waiting.append(sent)
            self._send(sent, self._clock())

    def _send(self, sent: _Sent, now: float) -> CachePendingReservation | None:
        if self._refusals.may_send(now):
            sent.pending = sent.namespace.reserve_runs_later([each.run for each in sent.asked])
        return sent.pending

    def answers(self, given: list[int], wait: float | None) -> list[SaveJob]:
        """Turn the answers that have come, or come within `wait` seconds, into jobs; with `wait`, cancel the rest.

        Blocks of `given` that are still unanswered are lost: other requests have them. Answered ones are not, because
        the ranks save before the step begins.
        """
        jobs: list[SaveJob] = []
        unanswered = []
        until = self._clock() + wait if wait is not None else None
        gone = set(given)
        for sent in self.waiting:
            reservation = self._answer(sent, until)
            if reservation is None:
                if sent.pending is None and self._refusals.hopeless(self._clock()):
                    self._refuse(sent)
                    continue
                for asked in sent.asked:
                    self._lose(asked, gone)
                unanswered.append(sent)
                continue
            if not reservation.failed:
                self._refusals.end()
            at = granted = 0  # the run's offset in all hashes, and in the granted ones
            for asked in sent.asked:
                end = at + len(asked.run.hashes)
                places = [place - at for place in reservation.granted[granted:] if place < end]
                job = self._job(sent.namespace, asked, reservation, granted, places)
                if job is not None:
                    jobs.append(job)
                self._judge(asked, reservation, at)
                at, granted = end, granted + len(places)
        self.waiting = unanswered
        return jobs

    def given_away(self, jobs: Iterable[tuple[int, int]]) -> None:
        """Note jobs that a rank has not begun because their blocks were given away; other ranks report them, too."""
        for job in jobs:
            if (shipped := self._shipped.pop(job, None)) is not None:
                self._notes.add(shipped[0], "given_away", self._clock(), shipped[1])

    def not_compressed(self, jobs: Iterable[tuple[int, int, list[int]]]) -> None:
        """Remember blocks that a rank could not compress: chains are saved up to them from now on."""
        for reservation, first, lost in jobs:
            _, hashes = self._shipped.get((reservation, first), ("", []))
            self._not_compressed.update((hashes[index], None) for index in lost if index < len(hashes))
        while len(self._not_compressed) > NOT_COMPRESSED:
            del self._not_compressed[next(iter(self._not_compressed))]

    def concerned(self) -> set[str]:
        """Return the requests whose reservations are not answered."""
        return {asked.id for sent in self.waiting for asked in sent.asked}

    def drop(self) -> None:
        """Give back reservations that no rank has."""
        for sent in self.waiting:
            if sent.pending is not None:
                sent.pending.cancel()
            self._counters.add("saves_dropped", sum(asked.whole for asked in sent.asked))
        self.waiting.clear()

    def _job(
        self, namespace: CacheNamespace, asked: _Asked, reservation: CacheReservation, first: int, places: list[int]
    ) -> SaveJob | None:
        """Return the job for the granted blocks of a run that are still whole; give the rest back.

        `places` in the run were granted, as the reservation's blocks from `first` on.
        """
        sound = [
            (first + at, place) for at, place in enumerate(places) if place < asked.whole and place not in asked.gone
        ]
        kept, whole = [position for position, _ in sound], [place for _, place in sound]
        if len(kept) < len(places):
            dropped = [position for position in range(first, first + len(places)) if position not in kept]
            self._counters.add("saves_dropped", len(dropped))
            every = range(namespace.spec.shards)
            namespace.settle(reservation.id, Outcome.NEVER_STARTED, dropped, every, reservation.region_id)
        if not kept:
            return None
        if asked.run.leaving:
            self._counters.add("blocks_saved_again", len(kept))
        group = asked.run.group
        columns = self._group.columns(group)
        blocks = [block for place in whole for block in asked.blocks[place * columns : (place + 1) * columns]]
        hashes = [asked.run.hashes[place] for place in whole]
        if self._events is not None and asked.state is not None and asked.slots:
            for position, place in sound:
                slot, request = asked.slots[place], asked.state.request
                self._events.shipped(reservation.region_id, reservation.id, position, request, slot, group)
        if not asked.suffix:
            self._shipped[reservation.id, kept[0]] = asked.id, hashes
            if len(self._shipped) > SHIPPED:
                del self._shipped[next(iter(self._shipped))]
        refs, summed = pick_refs(reservation.packed, kept), chosen(self._verify, hashes, reservation.region_id)
        return SaveJob(asked.id, reservation.region_id, reservation.id, kept, refs, blocks, summed, group)

    def _answer(self, sent: _Sent, until: float | None) -> CacheReservation | None:
        """Return the answer if it has come, or comes until then; if it is a refusal as a whole, `pending` is None."""
        now = self._clock()
        pending = sent.pending or self._send(sent, now)
        if pending is None:
            return None
        try:
            reservation = pending.poll()
            return pending.wait(max(0.0, until - now)) if reservation is None and until is not None else reservation
        except KVCacheError as error:
            sent.pending = None
            self._refusals.add(str(error), self._clock())
            return None

    def _refuse(self, sent: _Sent) -> None:
        self._counters.warn("saves_refused", f"saves are refused: {self._refusals.why}")
        for asked in sent.asked:
            if asked.progress is not None:
                asked.progress.refuse(asked.slots[0], "refused", self._clock())

    def _judge(self, asked: _Asked, reservation: CacheReservation, begin: int) -> None:
        for at in range(len(asked.run.hashes)):
            why = reservation.refused.get(begin + at, "present")
            if why not in _ADVANCES:
                if why in _OPERATORS:
                    self._counters.warn(f"saves_{why}", f"blocks are not saved: {why} (see `kvcache-server status`)")
                else:
                    self._counters.add(f"saves_{why}")
                # For a suffix group, the chain's own run decides when to go on.
                if asked.progress is not None:
                    asked.progress.refuse(asked.slots[at], why, self._clock())
                return
        if asked.progress is not None:
            asked.progress.pause = PAUSE

    def _lose(self, asked: _Asked, gone: set[int]) -> None:
        """Cut `asked` before the first block that was given away: blocks after it could not be reached.

        Blocks of a suffix group do not depend on each other.
        """
        per_slot = self._group.columns(asked.run.group)
        if asked.suffix:
            asked.gone.update(at // per_slot for at, block in enumerate(asked.blocks) if block in gone)
            return
        for at, block in enumerate(asked.blocks[: asked.whole * per_slot] if gone else ()):
            if block in gone:
                lost = asked.run.hashes[at // per_slot : asked.whole]
                self._notes.add(asked.id, "given_away", self._clock(), lost)
                asked.whole = at // per_slot
                if asked.progress is not None:
                    asked.progress.saved = min(asked.progress.saved, asked.slots[asked.whole])
                return
