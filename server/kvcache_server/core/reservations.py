"""Reservations: which session may write which slot, how its shards are settled, and when lookups find its block. Pure.

Every change of a slot's row is written before the reply that reports it. The order is safe if the daemon is killed
between two stores: a row is WRITING before any session may write the slot, and DOOMED before a failed shard counts as
settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, UnknownHandle
from kvcache_proto.types import MAX_BLOCKS, SUFFIX, SUM_BYTES, Outcome, Refusal, Verdict, check_hashes
from kvcache_server.core.checksums import Checksums
from kvcache_server.core.effects import Shown
from kvcache_server.core.eviction.policy import Eviction
from kvcache_server.core.index import (
    CLASS_MASK,
    CLASSES,
    EVICT_FIRST,
    GONE,
    HIDDEN,
    OFTEN,
    PACE_MASK,
    Account,
    Block,
    BottomUp,
    Grant,
    Group,
    Reservation,
)
from kvcache_server.core.journal import WritersNumbered
from kvcache_server.core.limits import LOOK, STEP, Limits
from kvcache_server.core.pool import Pool
from kvcache_server.core.sessions import Engine, Namespace, Session
from kvcache_server.core.states import COMMITTED, DOOMED, FORGOTTEN
from kvcache_server.core.sweeper import Step, Sweeper

# The most frequent answers, as globals: accessing an enum's member takes longer than looking up a hash.
_GRANTED, _PRESENT, _VISIBLE = Refusal.GRANTED, Refusal.PRESENT, Verdict.VISIBLE


class Reservations:
    """Grants and settles reservations.

    Attributes: `last` is the number of the last reservation. `writers` maps the sessions that write a block's shards to
    the number that stands for them in rows. `showing` are READY blocks that the sweeper will make visible; `orphaned`
    are doomed blocks whose descendants it will doom.
    """

    def __init__(
        self, pool: Pool, eviction: Eviction, engines: Mapping[str, Engine], sweeper: Sweeper, limits: Limits
    ) -> None:
        self.last = self.last_writers = 0
        self.writers: dict[tuple[int, ...], int] = {}
        self.showing: list[Block] = []
        self.orphaned: dict[int, Block] = {}  # by id()
        self.checksums: Checksums | None = None  # None if there is no file for them
        self._pool, self._rows, self._eviction = pool, pool.rows, eviction
        self._engines, self._sweeper = engines, sweeper
        self._classes = eviction.learner.expected
        self._effects = effects = sweeper.effects
        self._counters, self._refusals = effects.counters, effects.refusals
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits
        self._quota = int(limits.write_quota * self._pool.capacity) if limits.write_quota < 1 else 1 << 62

    # Reserve.

    def reserve(self, session: Session, request: m.Reserve) -> m.Reserved:
        """Grant as many requested blocks as possible. Raises UnknownHandle, BadArgument; then nothing has changed."""
        self._eviction.begin_reservation()
        namespace, group = session.group(request.namespace, request.group)
        runs = request.runs
        count = sum([len(run.hashes) for run in runs])
        if count > MAX_BLOCKS:
            raise BadArgument(f"{count} blocks in one reservation: at most {MAX_BLOCKS}")
        for run in runs:
            if not run.hashes:
                raise BadArgument("a run without a hash")
            run_group = session.group(request.namespace, run.group)[1] if run.group else group
            if run.parent is not None and run_group.spec.kind == SUFFIX:
                raise BadArgument("a run of a suffix group with a parent")
            if not 0 <= run.leaving <= len(run.hashes) or not 0 <= run.idle_ms < 1 << 40 or run.found < 0:
                raise BadArgument(f"leaving {run.leaving}, idle_ms {run.idle_ms}, found {run.found}: out of bounds")
            chain = run.hashes if run.parent is None else [run.parent, *run.hashes]
            check_hashes(chain, group.hash_bytes)
            if len(set(chain)) != len(chain):
                raise BadArgument("a hash occurs twice in one run")
        writers = self._writers(session, namespace)
        if writers is None:
            raise BadArgument(
                f"not all {namespace.shards} shards are attached by sessions of {session.engine.name!r}: attach "
                "them first"
            )
        self.last += 1
        number, now = self.writers[writers], self._sweeper.now
        reservation = Reservation(self.last, namespace.number, session.id, writers, number, now)
        answers = bytearray()
        # A session that has attached the namespace keeps its engine's accounts there.
        accounts = [session.engine.accounts[namespace.number, run.group or group.number] for run in runs]
        try:
            for run, account in zip(runs, accounts, strict=True):
                self._grant_run(reservation, account, run, answers)
        except Exception:  # an internal error: nothing else could give back the slots granted so far
            self.abandon(reservation)
            raise
        finally:
            self._eviction.give_back_rest()
        granted = reservation.grants
        self._counters["blocks_reserved"] += len(granted)
        if len(granted) < len(answers):
            self._note_refused(runs, accounts, answers, reservation.declined)
        slots = b"".join([grant.block.ref for grant in granted])
        return m.Reserved(request.id, reservation.id if granted else 0, bytes(answers), slots)

    def _note_refused(self, runs: list[m.Run], accounts: list[Account], answers: bytearray, declined: int) -> None:
        """Count the refused blocks, and report each with the cause."""
        for refusal, count in Counter(answers).items():
            if refusal == Refusal.NO_SPACE and declined:
                self._refusals["not_worth_it"] += declined
                count -= declined
            if refusal and count:
                self._refusals[Refusal(refusal).name.lower()] += count
        if max(answers) <= Refusal.IN_FLIGHT:
            return
        no_space = "not_worth_it" if declined else "no_space"
        causes = {Refusal.NO_PARENT: "no_parent", Refusal.NO_SPACE: "grace" if self._eviction.frozen else no_space}
        named = [(account, name) for run, account in zip(runs, accounts, strict=True) for name in run.hashes]
        for (account, name), answer in zip(named, answers, strict=True):
            if answer > Refusal.IN_FLIGHT:
                cause = causes.get(Refusal(answer)) or self._exceeded(account)
                self._effects.refused(name + account.group.tag, cause)

    def _exceeded(self, account: Account) -> str:
        """Return the quota that one more block of `account` would exceed."""
        size, share = account.group.allocated_bytes, account.share
        if self._engines[share.engine].writing + size > self._quota:
            return "refused_write_quota"
        own = share.ceiling and share.bytes + size > share.ceiling
        return "refused_own_ceiling" if own else "refused_namespace_ceiling"

    @staticmethod
    def _writers(session: Session, namespace: Namespace) -> tuple[int, ...] | None:
        """Return the writing session of each shard of the blocks that `session` reserves; None if a shard has none."""
        shards = namespace.shards
        if len(session.attached[namespace.number][1]) == shards:
            return (session.id,) * shards
        return session.engine.writers[namespace.number]

    def attached(self, session: Session, namespace: Namespace) -> None:
        """Number the writers of a session that has attached: the state file must have the number before any row."""
        writers = self._writers(session, namespace)
        if writers is not None and writers not in self.writers:
            self.writers[writers] = self.last_writers = self.last_writers + 1
            self._effects.records.append(WritersNumbered(self.last_writers, writers))

    def forget_writer(self, session: int) -> None:
        """Forget the tuples of writers with `session`, which has ended: no new reservation uses them."""
        self.writers = {writers: number for writers, number in self.writers.items() if session not in writers}

    def _grant_run(self, reservation: Reservation, account: Account, run: m.Run, answers: bytearray) -> None:
        """Grant the blocks of a run in order, until one is refused."""
        group = account.group
        above, suffix, holders = group.above, group.spec.kind == SUFFIX, self._eviction.holders
        stay, used, classes, more = len(run.hashes) - run.leaving, 0, self._classes, 0
        if run.leaving:
            used, more = self._pool.tick_before(run.idle_ms / 1000), run.found
            classes = self._eviction.learner.recall(group, [name for name in run.hashes if name not in group.visible])
        parent = group.root if run.parent is None else self._known(group, run.parent)
        if len(run.hashes) > 1 and parent is not None:
            self._eviction.set_aside(len(run.hashes) * group.pages)
        for at, block_hash in enumerate(run.hashes):
            if suffix and parent is not None:
                parent = group.root if above is group else self._known(above, block_hash)
            if parent is None:
                answers.extend(bytes([Refusal.NO_PARENT]) * (len(run.hashes) - at))
                break
            cls = min(classes.get(block_hash, 0) + more, OFTEN) if used else classes.get(block_hash, 0)
            answer, block = self._grant(reservation, account, parent, block_hash, cls, used)
            answers.append(answer)
            if at >= stay and block is not None:
                holders.let_go(account.share, block)
            if block is None and group.leaf_is_useless and parent.child is None:
                parent.tick = EVICT_FIRST  # the engine stops here, and saves no block of a suffix group
                self._eviction.drop(parent)
            parent = block

    @staticmethod
    def _known(group: Group, block_hash: bytes) -> Block | None:
        pending = group.pending.get(block_hash)
        return pending.block if pending is not None else group.visible.get(block_hash)

    def _grant(
        self, reservation: Reservation, account: Account, parent: Block, block_hash: bytes, cls: int, used: int
    ) -> tuple[Refusal, Block | None]:
        """Reserve one hash below `parent`. Return the answer, and the block, if any: the parent of the next hash.

        `cls` is its class, `used` the tick of its last use if the engine's device is about to evict it, else 0.
        """
        group = account.group
        block = group.visible.get(block_hash)
        if block is not None and block.parent is parent:
            if not used:
                self._pool.touch(block)
            elif used > block.tick:  # its device has not asked for it here
                block.tick = used | block.tick & PACE_MASK | max(block.tick & CLASS_MASK, cls)
                self._pool.write_tick(block)
            return _PRESENT, block
        if block is not None:
            # One of its ancestors is hidden already. The invalidation in progress frees its pages later.
            self.hide(block, "corrupt")
        rival = group.pending.get(block_hash)
        if rival is not None and (
            rival.ready
            or reservation.created - rival.reservation.created < self.limits.supersede_after
            or rival.block.parent is not parent  # impossible with chained hashes, or the rival is being doomed
        ):
            return Refusal.IN_FLIGHT, rival.block
        engine = self._engines[account.engine]
        if engine.writing and engine.writing + group.allocated_bytes > self._quota:
            return Refusal.QUOTA, None
        eviction = self._eviction
        declined = eviction.declined
        if not cls & PACE_MASK and parent.child is None:
            cls |= parent.tick & PACE_MASK  # a prompt that goes on keeps its pace
        parent.pins += 1  # it must not be evicted for its own child
        try:
            # Without the suffix groups' blocks, the existing block of the full group would be of no use.
            runs = eviction.make_room(account, CLASSES if group.is_suffix or engine.is_tier else cls, used)
            if eviction.declined > declined and block_hash in eviction.learner.wanted:
                eviction.declined = declined
                runs = eviction.make_room(account, CLASSES)
        finally:
            parent.pins -= 1
        if not isinstance(runs, tuple):
            reservation.declined += eviction.declined - declined
            parent.account.enter(parent)
            return runs, None
        block, grants = Block(HIDDEN, 0, block_hash, b"", account), reservation.grants
        body = (
            *(group.namespace, group.number, block_hash, reservation.owner, reservation.id),
            *(len(grants), reservation.writers_number, engine.number),
        )
        above = self._pool.generation if grants and grants[-1].block is parent else parent.generation
        row = self._pool.place(runs, block, cls, above, body, used)
        grant = Grant(block, row, reservation)
        block.link(parent)
        if rival is not None:
            self._supersede(rival, block)
        group.pending[block_hash] = grant
        if not grants:
            engine.reservations[reservation.id] = reservation
        grants.append(grant)
        reservation.unsettled += 1
        engine.writing += group.allocated_bytes
        account.share.bytes += group.allocated_bytes
        self._pool.busy += group.pages
        return _GRANTED, block

    def hide(self, block: Block, cause: str) -> None:
        """Hide a block from lookups and from the next daemon, for `cause`. It keeps its pages."""
        del block.account.group.visible[block.hash]
        self._effects.gone(block, cause)
        self._rows.set_state(self._pool.row(block), FORGOTTEN)

    def _supersede(self, rival: Grant, block: Block) -> None:
        """Replace a block that has been WRITING for too long by `block`, which also takes over its children.

        The replaced block is counted when its last shard is settled.
        """
        rival.verdict = Verdict.SUPERSEDED
        rival.block.unlink()
        rival.block.pins = GONE
        for child in rival.block.children():
            child.unlink()
            child.link(block)
            self._rows.set_parent(self._pool.row(child), block.generation)
        self._rows.set_state(rival.row, DOOMED)

    # Settle.

    def settle(self, session: Session, request: m.Settle) -> m.Settled:
        """Record shards' outcome and checksums. Raises UnknownHandle, BadArgument; then nothing has changed."""
        if request.region != self._rows.geometry.region_id:
            raise UnknownHandle("the reservation belongs to another region")
        reservation = session.engine.reservations.get(request.reservation)
        if reservation is None:
            raise UnknownHandle(f"reservation {request.reservation} is settled, or belongs to another engine")
        count = len(reservation.writers)
        for shard in request.shards:
            if not 0 <= shard < count:
                raise BadArgument(f"shard {shard}: must be 0 to {count - 1}")
            if session.id != reservation.writers[shard] and not (
                session.id == reservation.owner and request.outcome == Outcome.NEVER_STARTED
            ):
                raise BadArgument(f"shard {shard} is written by session {reservation.writers[shard]}")
        if not request.shards or request.outcome not in list(Outcome):
            raise BadArgument(f"shards {request.shards}: at least one; outcome {request.outcome}: must be 0 to 2")
        grants = reservation.grants  # a reference of our own: the last settlement clears the reservation's
        positions = request.positions or range(len(grants))
        if min(positions) < 0 or max(positions) >= len(grants) or len(set(positions)) != len(positions):
            raise BadArgument(f"positions: must be distinct, 0 to {len(grants) - 1}")
        if request.sums and len(request.sums) != len(positions) * len(request.shards) * SUM_BYTES:
            raise BadArgument(f"{len(request.sums)} bytes of checksums: must be {SUM_BYTES} per shard and position")
        shards = sum(1 << shard for shard in set(request.shards))
        committed = request.outcome == Outcome.COMMITTED
        cause = "write_failed" if request.outcome == Outcome.FAILED else "not_started"
        self._counters[f"shards_{Outcome(request.outcome).name.lower()}"] += len(positions) * shards.bit_count()
        verdicts = bytearray()
        for at, position in enumerate(positions):
            grant = grants[position]
            if not committed:
                verdicts.append(self._fail(grant, shards, cause))
                continue
            if self.checksums is not None:
                self._note_sums(self.checksums, grant, request, at * len(request.shards) * SUM_BYTES)
            verdicts.append(self._settle_shards(grant, shards & ~grant.settled))
        if self.showing and self._show_some():
            self._sweeper.add(self._show_some)
        return m.Settled(request.id, bytes(verdicts))

    def abandon(self, reservation: Reservation, tainted_until: float = 0.0) -> None:
        """Settle all unsettled shards as never started: the reply was not delivered, or an error prevented it.

        With `tainted_until`, in seconds, the slots are quarantined until then, in case a writer did receive the reply.
        """
        for grant in list(reservation.grants):
            if not grant.is_settled:
                grant.tainted_until = max(grant.tainted_until, tainted_until)
                self._fail(grant, reservation.all_shards, "not_started")

    def abandon_undelivered(self, session: Session, heard: int) -> None:
        """Abandon the reservations of a resumed session with numbers above `heard`: it never received the replies."""
        left = [each for each in session.engine.reservations.values() if each.owner == session.id and each.id > heard]
        self._counters["reservations_unheard"] += len(left)
        until = self._sweeper.now + self.limits.quarantine
        self._sweeper.add(_one_by_one(left, lambda each: self.abandon(each, until)))

    def writer_ended(self, engine: Engine, session: int) -> Step:
        """Return a step that settles as dead the shards that the ended `session` may be writing, with quarantine."""
        until = self._sweeper.now + self.limits.quarantine

        def fail(reservation: Reservation) -> None:
            written = sum(1 << shard for shard, writer in enumerate(reservation.writers) if writer == session)
            for grant in list(reservation.grants):
                if dead := written & ~grant.settled:
                    grant.tainted_until = until
                    self._counters["shards_dead"] += dead.bit_count()
                    self._fail(grant, dead, "writer_died")

        return _one_by_one([each for each in engine.reservations.values() if session in each.writers], fail)

    def free_quarantined(self) -> bool:
        """Free some of the slots whose quarantine is over; return True if more are left."""
        for _ in range(STEP):
            expired = self._pool.quarantine.pop(self._sweeper.now)
            if expired is None:
                return False
            block, pages = expired
            self._pool.busy -= pages
            self._pool.give_back(self._pool.vacate(block))
        return True

    def _fail(self, grant: Grant, shards: int, cause: str) -> Verdict:
        """Settle the unsettled ones of `shards` as failed for `cause`, and doom the block and its descendants."""
        shards &= ~grant.settled
        if shards and grant.verdict is None:
            self.doom(grant, Verdict.FAILED, cause)
        return self._settle_shards(grant, shards)

    def _settle_shards(self, grant: Grant, shards: int) -> Verdict:
        """Settle `shards` of one grant. With the last shard, the block becomes READY, or its slot is given back."""
        if not shards:
            self._counters["settled_twice"] += 1
            if grant.verdict is not None or not grant.is_settled:
                return grant.verdict or Verdict.PARTIAL
            return Verdict.VISIBLE if grant.block.visible else Verdict.HIDDEN
        reservation, block = grant.reservation, grant.block
        group = block.account.group
        settled = grant.settled = grant.settled | shards
        self._rows.set_settled(grant.row, settled)
        if settled != reservation.all_shards:
            return grant.verdict or Verdict.PARTIAL
        reservation.unsettled -= 1
        engine = self._engines[block.account.engine]
        engine.writing -= group.allocated_bytes
        if not reservation.unsettled:
            engine.reservations.pop(reservation.id, None)
            reservation.grants = []  # grants refer back to it, and old cycles are never collected
        if grant.verdict is not None:
            self._counters[f"blocks_{grant.verdict.name.lower()}"] += 1
            self._give_back(grant)
            return grant.verdict
        self._counters["blocks_committed"] += 1
        group.saved_blocks += 1
        grant.ready = True
        self._pool.busy -= group.pages
        self._rows.set_state(grant.row, COMMITTED)
        parent = block.parent
        assert parent is not None
        if not group.reaches(parent):
            return Verdict.HIDDEN
        group.show(block, self.showing)
        if self._eviction.due.waiting:
            self._eviction.due.shown(block)
        if group.is_suffix:
            self._eviction.pass_boundaries(block)
        changes = self._effects.changes  # as Effects.shown does, without the call
        if changes and type(last := changes[-1]) is Shown:
            last.blocks.append(block)
        else:
            changes.append(Shown([block]))
        return _VISIBLE

    def _show_some(self) -> bool:
        """Make some blocks of `showing`, and their READY descendants, visible; return True if more are left."""
        waiting = self.showing
        for _ in range(LOOK):
            if not waiting:
                return False
            block = waiting.pop()
            group = block.account.group
            if block.pins == GONE or block.parent is None or not group.reaches(block.parent):
                continue  # it was doomed in the meantime, or will be: its parent is hidden
            group.show(block, waiting)
            self._eviction.due.shown(block)
            self._effects.shown(block)
        return bool(waiting)

    def doom(self, grant: Grant, verdict: Verdict, cause: str) -> None:
        """Remove a block that will not become visible from the index, and then its descendants.

        The descendants are unreachable at once, and are removed in slices.
        """
        parent, block = grant.block.parent, grant.block
        self._doom_one(grant, verdict, cause)
        if parent is not None:
            parent.account.enter(parent)
        if block.child is not None:
            self.orphaned[id(block)] = block
            walk = BottomUp(block)
            self._sweeper.add(lambda: walk.go_on(self._doom_orphan))

    def _doom_one(self, grant: Grant, verdict: Verdict, cause: str) -> None:
        block = grant.block
        group = block.account.group
        del group.pending[block.hash]
        block.unlink()
        block.pins = GONE
        grant.verdict = verdict
        self._effects.refused(block.hash + group.tag, cause)
        if grant.ready:
            # All its shards are settled: no process writes to it any more.
            self._counters["blocks_unreachable"] += 1  # not blocks_orphaned: it was counted as committed
            self._pool.busy += group.pages
            self._give_back(grant)
        else:
            self._rows.set_state(grant.row, DOOMED)

    def _doom_orphan(self, block: Block) -> bool:
        """Doom a descendant of a doomed block, after its own descendants; the doomed block itself is only forgotten."""
        if block.child is not None:
            return True
        if self.orphaned.pop(id(block), None) is None and block.pins != GONE:
            self._doom_one(block.account.group.pending[block.hash], Verdict.ORPHANED, "orphaned")
        return False

    def _note_sums(self, sums: Checksums, grant: Grant, request: m.Settle, at: int) -> None:
        """Store the checksums before the shards count as settled; shards without one clear the previous block's."""
        begin, offsets = int.from_bytes(grant.block.ref[:8], "little"), grant.block.account.group.sum_offsets
        for shard in request.shards if offsets else ():
            if not grant.settled >> shard & 1:
                sums.put(self._pool.locate(begin, offsets[shard]), request.sums[at : at + SUM_BYTES])
            at += SUM_BYTES

    def _give_back(self, grant: Grant) -> None:
        block, group = grant.block, grant.block.account.group
        block.account.share.bytes -= group.allocated_bytes
        if grant.tainted_until:
            self._pool.quarantine.add(grant.tainted_until, block, group.pages)
        else:
            self._pool.busy -= group.pages
            self._pool.give_back(self._pool.vacate(block))


def _one_by_one(reservations: list[Reservation], end: Callable[[Reservation], None]) -> Step:
    """Return a step that calls `end` with one reservation at a time, in order."""

    def step() -> bool:
        if reservations:
            end(reservations.pop(0))
        return bool(reservations)

    return step
