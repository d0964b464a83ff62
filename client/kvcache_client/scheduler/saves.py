"""The way out of a block, on the scheduler's side.

Full by the end of step N, its `Reserve` is sent while step N is planned, the answer is picked up while step N + 1 is
planned, and the ranks copy it at the start of step N + 1, before anything of that step touches device memory. So no
step waits for the daemon, and no block is kept from the engine for our sake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.events import Events
from kvcache_client.scheduler.request_state import PAUSE, Tracked
from kvcache_client.session.breaker import Backoff
from kvcache_client.session.checksums import chosen
from kvcache_client.session.counters import LoggedCounters
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.reservation import Reservation, Ticket
from kvcache_client.step_plan import SHIPPED, SaveJob, full_slots, pick_refs, slot_hashes
from kvcache_proto.errors import KVCacheError
from kvcache_proto.messages import Run
from kvcache_proto.types import MAX_HASHES, Outcome

INSIST = 2.0  # seconds for which blocks whose Reserve is refused as a whole wait for one that is not
FIRST_RETRY, LAST_RETRY = 0.005, 5.0  # seconds between two that are refused as a whole; doubled each time
_ADVANCES = {"present", "in_flight"}
_OPERATORS = {"no_space", "quota"}  # refusals that somebody can do something about


@dataclass(slots=True)
class _Asked:
    """A run of blocks to be reserved. `whole` is how many of them still hold what was to be saved."""

    state: Tracked
    first: int
    run: Run
    blocks: list[int]
    whole: int


@dataclass(slots=True)
class _Sent:
    """What one step asks for, in one `Reserve`."""

    namespace: Namespace
    asked: list[_Asked]
    ticket: Ticket | None = None  # None: not asked yet, or refused as a whole


class _Refusals:
    """Refusals of a Reserve as a whole, one after the other: how long blocks wait, and when the daemon is asked again.

    A rank that joins a step behind, after a reset or a restart of the daemon, ends them soon. One that cannot join does
    not, and the daemon is asked less and less.
    """

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        self.why = ""
        self._since: float | None = None  # the first one; None: the last answer was none
        self._retry_at = 0.0

    def add(self, why: str, now: float) -> None:
        self.why = why
        if self._since is None:
            self._since = now
        if now >= self._retry_at:  # of those that were under way together the first counts
            self._retry_at = now + self._backoff.next()

    def end(self) -> None:
        if self._since is not None:
            self._since, self._retry_at = None, 0.0
            self._backoff.reset()

    def hopeless(self, now: float) -> bool:
        """Whether they have gone on for so long that blocks do not wait for their end."""
        return self._since is not None and now - self._since >= INSIST

    def may_send(self, now: float) -> bool:
        """Whether to ask now. While there are refusals, the next question is put off by the backoff."""
        if self._since is None:
            return True
        if now < self._retry_at:
            return False
        self._retry_at = now + self._backoff.next()
        return True


class Saves:
    """Reservations asked for, and device blocks that were saved from."""

    def __init__(
        self,
        engine_block: int,
        blocks_per_slot: int,
        prompt_only: bool,
        tally: LoggedCounters,
        verify: str = "off",
        events: Events | None = None,
        lost: Callable[[str, Sequence[bytes]], None] = lambda request, hashes: None,
    ) -> None:
        """`verify` says of which blocks the ranks take a checksum; `events` hears of what they are told to save, `lost`
        of what others got too early."""
        self._block, self._per_slot, self._prompt_only, self._tally = engine_block, blocks_per_slot, prompt_only, tally
        self._verify, self._events, self._lost = verify, events, lost
        self._next: list[_Asked] = []
        self._shipped: dict[tuple[int, int], tuple[str, list[bytes]]] = {}  # by reservation and first position
        self._sent: list[_Sent] = []
        self._refusals = _Refusals()

    @property
    def waiting(self) -> bool:
        """Whether answers are out, or blocks wait to be asked for."""
        return bool(self._sent)

    def ask(self, state: Tracked, computed: int) -> None:
        """Note the blocks of `state` that are full once `computed` tokens are computed, for the next `send`."""
        request = state.request
        full = full_slots(len(request.block_hashes), computed, self._block, self._per_slot)
        if self._prompt_only:
            full = min(full, request.num_prompt_tokens // (self._block * self._per_slot))
        first = state.saved
        if full <= first or state.excluded or state.barred or state.loading:
            return
        blocks = state.blocks[first * self._per_slot : full * self._per_slot]
        if len(blocks) < (full - first) * self._per_slot or (state.retry_at and time.monotonic() < state.retry_at):
            return
        hashes = slot_hashes(request.block_hashes, self._per_slot)
        run = Run(list(hashes[first:full]), hashes[first - 1] if first else None)
        self._next.append(_Asked(state, first, run, blocks, full - first))
        state.saved = full

    def unsaved(self, state: Tracked, computed: int, up: bool, now: float) -> tuple[str, Sequence[bytes]]:
        """Return why blocks of a request that ends were not asked for, and their hashes; "" where all were."""
        request = state.request
        full = full_slots(len(request.block_hashes), computed, self._block, self._per_slot)
        if full <= state.saved or state.excluded or state.loading:
            return "", ()
        hashes = slot_hashes(request.block_hashes, self._per_slot)[state.saved : full]
        if state.barred:
            return "weights", hashes
        if state.retry_at and now < state.retry_at:
            return "paused", hashes
        if not up:
            return "down", hashes
        return ("save_prompt" if self._prompt_only else ""), hashes

    def send(self, namespace: Namespace) -> None:
        """Send one `Reserve` for all that was noted: a batch that fills its blocks in one step asks once."""
        while self._next:
            count = hashes = 0
            while count < len(self._next) and (not count or hashes + self._next[count].whole <= MAX_HASHES):
                hashes += self._next[count].whole
                count += 1
            asked, self._next = self._next[:count], self._next[count:]
            self._sent.append(_Sent(namespace, asked))
            self._send(self._sent[-1], time.monotonic())

    def _send(self, sent: _Sent, now: float) -> None:
        if self._refusals.may_send(now):
            sent.ticket = sent.namespace.reserve_runs_later([each.run for each in sent.asked])

    def answers(self, given: list[int], wait: float | None) -> list[SaveJob]:
        """Turn the answers that have come, or come within `wait` seconds, into jobs; with `wait`, want no others.

        Blocks of `given` that are unanswered then are lost: somebody else has them. Those that are answered are not,
        for the ranks save before the step begins.
        """
        jobs: list[SaveJob] = []
        unanswered = []
        until = time.monotonic() + wait if wait is not None else None
        gone = set(given)
        for sent in self._sent:
            reservation = self._answer(sent, until)
            if reservation is None:
                if sent.ticket is None and self._refusals.hopeless(time.monotonic()):
                    self._refuse(sent)
                    continue
                for asked in sent.asked:
                    self._lose(asked, gone)
                unanswered.append(sent)
                continue
            if not reservation.failed:
                self._refusals.end()
            at = granted = 0  # where the run begins among all hashes, and among those that were granted
            for asked in sent.asked:
                end = at + len(asked.run.hashes)
                places = [place - at for place in reservation.granted[granted:] if place < end]
                job = self._job(sent.namespace, asked, reservation, granted, places)
                if job is not None:
                    jobs.append(job)
                self._judge(asked, reservation, at)
                at, granted = end, granted + len(places)
        self._sent = unanswered
        return jobs

    def given_away(self, jobs: Iterable[tuple[int, int]]) -> None:
        """Note jobs that a rank has not begun, for their blocks were others' by then; other ranks report them, too."""
        for job in jobs:
            if (shipped := self._shipped.pop(job, None)) is not None:
                self._lost(*shipped)

    def concerned(self) -> set[str]:
        """Return the requests whose answers are out."""
        return {asked.state.id for sent in self._sent for asked in sent.asked}

    def drop(self) -> None:
        """Give back what no rank has heard of."""
        for sent in self._sent:
            if sent.ticket is not None:
                sent.ticket.cancel()
            self._tally.add("saves_dropped", sum(asked.whole for asked in sent.asked))
        self._sent.clear()

    def _job(
        self, namespace: Namespace, asked: _Asked, reservation: Reservation, first: int, places: list[int]
    ) -> SaveJob | None:
        """Return the job for what was granted of a run and is still whole; give the rest back.

        `places` in the run were granted, as the reservation's blocks from `first` on.
        """
        slot = self._per_slot
        kept = [first + at for at, place in enumerate(places) if place < asked.whole]
        dropped = list(range(first + len(kept), first + len(places)))
        if dropped:
            self._tally.add("saves_dropped", len(dropped))
            every = range(namespace.spec.shards)
            namespace.settle(reservation.id, Outcome.NEVER_STARTED, dropped, every, reservation.region_id)
        if not kept:
            return None
        blocks = [block for place in places[: len(kept)] for block in asked.blocks[place * slot : (place + 1) * slot]]
        refs = pick_refs(reservation.packed, kept)
        if self._events is not None:
            for position, place in zip(kept, places, strict=False):
                slot_number = asked.first + place
                self._events.shipped(reservation.region_id, reservation.id, position, asked.state.request, slot_number)
        hashes = [asked.run.hashes[place] for place in places[: len(kept)]]
        self._shipped[reservation.id, kept[0]] = asked.state.id, hashes
        if len(self._shipped) > SHIPPED:
            del self._shipped[next(iter(self._shipped))]
        summed = chosen(self._verify, hashes, reservation.region_id)
        return SaveJob(asked.state.id, reservation.region_id, reservation.id, kept, refs, blocks, summed)

    def _answer(self, sent: _Sent, until: float | None) -> Reservation | None:
        """Return the answer if it has come, or comes until then; where it is a refusal as a whole, `ticket` is None."""
        now = time.monotonic()
        if sent.ticket is None:
            self._send(sent, now)
        if sent.ticket is None:
            return None
        try:
            reservation = sent.ticket.poll()
            if reservation is None and until is not None:
                reservation = sent.ticket.wait(max(0.0, until - now))
        except KVCacheError as error:
            sent.ticket = None
            self._refusals.add(str(error), time.monotonic())
            return None
        return reservation

    def _refuse(self, sent: _Sent) -> None:
        self._tally.warn("saves_refused", f"saves are refused: {self._refusals.why}")
        for asked in sent.asked:
            asked.state.refuse(asked.first, "refused", time.monotonic())

    def _judge(self, asked: _Asked, reservation: Reservation, begin: int) -> None:
        for at in range(len(asked.run.hashes)):
            why = reservation.refused.get(begin + at, "present")
            if why not in _ADVANCES:
                if why in _OPERATORS:
                    self._tally.warn(f"saves_{why}", f"blocks are not saved: {why} (see `kvcache-server status`)")
                else:
                    self._tally.add(f"saves_{why}")
                asked.state.refuse(asked.first + at, why, time.monotonic())
                return
        asked.state.pause = PAUSE

    def _lose(self, asked: _Asked, gone: set[int]) -> None:
        """Cut `asked` before the first block that somebody else has got: those after it would hang in the air."""
        for at, block in enumerate(asked.blocks[: asked.whole * self._per_slot] if gone else ()):
            if block in gone:
                self._lost(asked.state.id, asked.run.hashes[at // self._per_slot : asked.whole])
                asked.whole = at // self._per_slot
                asked.state.saved = min(asked.state.saved, asked.first + asked.whole)
                return
