"""The way out of a block, on the scheduler's side.

Full by the end of step N, its `Reserve` is sent while step N is planned, the answer is picked up while step N + 1 is
planned, and the ranks copy it at the start of step N + 1, before anything of that step touches device memory. So no
step waits for the daemon, and no block is kept from the engine for our sake.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvcache_client.handles import Namespace
from kvcache_client.plan import SaveJob, full_slots, pick_refs, slot_hashes
from kvcache_client.reservation import Reservation, Ticket
from kvcache_client.tally import Tally
from kvcache_client.tracked import PAUSE, Tracked
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import Outcome

TRIES = 20
_ADVANCES = {"present", "in_flight"}
_OPERATORS = {"no_space", "quota"}  # refusals that somebody can do something about


@dataclass(slots=True)
class _Asked:
    """A run of blocks whose `Reserve` is out. `whole` is how many of them still hold what was to be saved."""

    namespace: Namespace
    state: Tracked
    first: int
    hashes: list[bytes]
    parent: bytes | None
    blocks: list[int]
    whole: int
    ticket: Ticket
    tries: int = 1


class Saves:
    """Reservations asked for, and device blocks that were saved from."""

    def __init__(self, engine_block: int, blocks_per_slot: int, prompt_only: bool, tally: Tally) -> None:
        self._block, self._per_slot, self._prompt_only, self._tally = engine_block, blocks_per_slot, prompt_only, tally
        self._asked: list[_Asked] = []
        self._sources: set[int] = set()  # device blocks that were saved from and not given to anybody since

    @property
    def waiting(self) -> bool:
        """Whether answers are out."""
        return bool(self._asked)

    def ask(self, namespace: Namespace, state: Tracked, computed: int) -> None:
        """Send a `Reserve` for the blocks of `state` that are full once `computed` tokens are computed."""
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
        parent = hashes[first - 1] if first else None
        run = list(hashes[first:full])
        ticket = namespace.reserve_later(run, parent)
        self._asked.append(_Asked(namespace, state, first, run, parent, blocks, full - first, ticket))
        state.saved = full

    def answers(self, given: list[int], wait: float) -> list[SaveJob]:
        """Turn the answers that have come, or come within `wait` seconds, into jobs.

        Blocks of `given` that are unanswered then are lost: somebody else has them. Those that are answered are not,
        for the ranks save before the step begins.
        """
        jobs: list[SaveJob] = []
        unanswered = []
        until = time.monotonic() + wait if wait else 0.0
        gone = set(given)
        for asked in self._asked:
            try:
                reservation = asked.ticket.poll()
                if reservation is None and wait:
                    reservation = asked.ticket.wait(max(0.0, until - time.monotonic()))
            except KVCacheError as error:
                if not self._again(asked, error):
                    continue
                reservation = None
            if reservation is None:
                self._lose(asked, gone)
                unanswered.append(asked)
                continue
            job = self._job(asked, reservation)
            if job is not None:
                jobs.append(job)
                self._sources.update(job.blocks)
            self._judge(asked, reservation)
        self._asked = unanswered
        return jobs

    def guarded(self, given: list[int]) -> list[int]:
        """Return which of `given` a rank may still be saving from."""
        if not self._sources:
            return []
        guarded = [block for block in given if block in self._sources]
        self._sources.difference_update(guarded)
        return guarded

    def concerned(self) -> set[str]:
        """Return the requests whose answers are out."""
        return {asked.state.id for asked in self._asked}

    def close(self) -> None:
        """Give back what no rank has heard of."""
        for asked in self._asked:
            asked.ticket.cancel()
            self._tally.add("saves_dropped", asked.whole)
        self._asked.clear()

    def _job(self, asked: _Asked, reservation: Reservation) -> SaveJob | None:
        """Return the job for what was granted and is still whole; give the rest back."""
        granted, slot = reservation.granted, self._per_slot
        kept = [at for at, place in enumerate(granted) if place < asked.whole]
        dropped = list(range(len(kept), len(granted)))
        if dropped:
            self._tally.add("saves_dropped", len(dropped))
            every = range(asked.namespace.spec.shards)
            asked.namespace.settle(reservation.id, Outcome.NEVER_STARTED, dropped, every, reservation.region_id)
        if not kept:
            return None
        blocks = [block for at in kept for block in asked.blocks[granted[at] * slot : (granted[at] + 1) * slot]]
        refs = pick_refs(reservation.packed, kept)
        return SaveJob(asked.state.id, reservation.region_id, reservation.id, kept, refs, blocks)

    def _again(self, asked: _Asked, error: KVCacheError) -> bool:
        """Ask once more: after a reset or a restart of the daemon a rank may be a step behind in joining."""
        if asked.tries < TRIES:
            asked.tries += 1
            asked.ticket = asked.namespace.reserve_later(asked.hashes, asked.parent)
            return True
        self._tally.warn("saves_refused", f"saves are refused: {error}")
        asked.state.refuse(asked.first, "refused", time.monotonic())
        return False

    def _judge(self, asked: _Asked, reservation: Reservation) -> None:
        for at, why in reservation.refused.items():
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
                asked.whole = at // self._per_slot
                asked.state.saved = min(asked.state.saved, asked.first + asked.whole)
                return
