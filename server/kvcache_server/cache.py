"""The cache as one pure state machine: `handle(session, request, now) -> reply`. No socket, clock, thread or torch.

It composes the pool (bytes), the index (blocks), the reservations (who may write) and the shares (who gives way), and
writes every change of a slot's row into the region before the reply that tells of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, ClientError, NotPermitted, UnknownHandle
from kvcache_proto.region import READY, RegionRows
from kvcache_proto.types import (
    MAX_HASHES,
    MAX_NAME,
    Outcome,
    PoolGeometry,
    Refusal,
    Verdict,
    check_hashes,
)
from kvcache_server import report
from kvcache_server.index import GONE, HIDDEN, Account, Block, Group
from kvcache_server.leases import Grant, Lease, Quarantine, Reservation
from kvcache_server.limits import Limits
from kvcache_server.pool import Pool
from kvcache_server.room import Room
from kvcache_server.sessions import Engine, Namespace, Session
from kvcache_server.shares import Shares


class Cache:
    """All state of the daemon. Every method either does what it says, or raises a KVCacheError and changes nothing."""

    def __init__(self, buffer: memoryview, geometry: PoolGeometry, limits: Limits | None = None, seed: int = 0) -> None:
        self.geometry = geometry
        self.limits = limits or Limits()
        self.rows = RegionRows(buffer, geometry)
        self.rows.format()
        # A fresh region starts at random generations: a reference into an older one matches nothing here.
        self.pool = Pool(self.rows, seed & ((1 << 63) - 1))
        self.shares = Shares(self.pool.capacity, self.limits.namespace_floor)
        self.quarantine = Quarantine()
        self.namespaces: dict[int, Namespace] = {}
        self._by_id: dict[str, Namespace] = {}
        self.engines: dict[str, Engine] = {}
        self.sessions: dict[int, Session] = {}
        self.refusals: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self._room = Room(self.pool, self.shares, self.limits.namespace_ceiling, self.counters)
        self._tick = 0
        self._last_namespace = self._last_session = self._last_lease = 0
        self._last_reservation = seed >> 16  # no number of an earlier life comes again
        self._pin_quota = int(self.limits.pin_quota * self.pool.capacity)
        self._handlers: dict[type, Any] = {
            m.Acquire: self._acquire,
            m.Release: self._release,
            m.Reserve: self._reserve,
            m.Settle: self._settle,
            m.Attach: self._attach,
            m.Detach: self._detach,
            m.Ping: self._ping,
            m.Stats: self._stats,
            m.Clear: self._clear,
        }

    def handle(self, session: int, request: m.Request, now: float) -> m.Reply | None:
        """Answer one request of an open session; Release has no answer.

        Raises a ClientError that says what is wrong with the request; the state is then unchanged.
        """
        return self._handlers[type(request)](self.sessions[session], request, now)  # type: ignore[no-any-return]

    # Sessions.

    def open_session(self, engine: str, label: str, now: float) -> int:
        """Return the number of a new session of `engine`. Raises BadArgument, NotPermitted at the limit."""
        if not 1 <= len(engine) <= MAX_NAME or len(label) > MAX_NAME:
            raise BadArgument(f"engine id of {len(engine)}, label of {len(label)} characters: 1 and 0 to {MAX_NAME}")
        if len(self.sessions) >= self.limits.max_sessions:
            raise NotPermitted(f"{len(self.sessions)} sessions are open: max_sessions is {self.limits.max_sessions}")
        self._last_session += 1
        owner = self.engines.setdefault(engine, Engine(engine))
        session = Session(self._last_session, owner, label, now)
        self.sessions[session.id] = owner.sessions[session.id] = session
        return session.id

    def end_session(self, session: int, now: float) -> None:
        """End all that the session held: leases at once; shards that it might be writing are dead, in quarantine."""
        ended = self.sessions.pop(session)
        engine = ended.engine
        del engine.sessions[session]
        for lease in list(ended.leases):
            self._end_lease(ended, lease)
        for namespace, _ in ended.attached.values():
            engine.note_writers(namespace)
        for reservation in list(engine.reservations.values()):
            written = sum(1 << shard for shard, writer in enumerate(reservation.writers) if writer == session)
            for grant in list(reservation.grants):
                if dead := written & ~grant.settled:
                    grant.tainted_until = now + self.limits.quarantine
                    self.counters["shards_dead"] += dead.bit_count()
                    self._settle_shards(grant, dead, Verdict.FAILED)
        self._prune()

    def _prune(self) -> None:
        """Drop engines and namespaces that nobody is in and that hold nothing."""
        for account in self.shares.prune():
            del self.engines[account.engine].accounts[(account.group.namespace, account.group.number)]
        for engine in list(self.engines.values()):
            if not engine.sessions and not engine.accounts:
                del self.engines[engine.name]
        used = {account.group.namespace for account in self.shares.accounts}
        for session in self.sessions.values():
            used.update(session.attached)
        for namespace in [each for number, each in self.namespaces.items() if number not in used]:
            del self.namespaces[namespace.number], self._by_id[namespace.id]

    def tick(self, now: float) -> None:
        """Free the slots whose quarantine is over. Call it a few times a second."""
        for extent, slot in self.quarantine.over(now):
            extent.busy -= 1
            self.pool.give_back(extent, slot)

    def _attach(self, session: Session, request: m.Attach, now: float) -> m.Attached:
        spec, shards = request.spec, request.shards
        if len(set(shards)) != len(shards) or any(not 0 <= shard < spec.shards for shard in shards):
            raise BadArgument(f"shards {shards}: distinct numbers from 0 to {spec.shards - 1}")
        if not 0 <= request.ceiling_bytes < 1 << 62:
            raise BadArgument(f"ceiling_bytes {request.ceiling_bytes}: 0 to {1 << 62}")
        namespace = self._by_id.get(spec.id)
        if namespace is None:
            if len(self.namespaces) >= self.limits.max_namespaces:
                raise NotPermitted(f"{len(self.namespaces)} namespaces: max_namespaces is {self.limits.max_namespaces}")
            namespace = Namespace(self._last_namespace + 1, spec, self.pool.capacity)
            for group in namespace.groups:
                self.pool.check_size(group.slot_bytes)
            self._last_namespace += 1
            self.namespaces[namespace.number] = self._by_id[namespace.id] = namespace
        else:
            namespace.spec.check_same_geometry(spec)
        engine = session.engine
        session.attached[namespace.number] = (namespace, tuple(shards))
        for group in namespace.groups:
            account = self._account(engine, group)
            account.ceiling = request.ceiling_bytes or account.ceiling
        engine.note_writers(namespace)
        return m.Attached(request.id, namespace.number)

    def _detach(self, session: Session, request: m.Detach, now: float) -> None:
        left = session.attached.pop(request.namespace, None)
        if left is None:
            self.counters["detaches_unknown"] += 1
            return
        session.engine.note_writers(left[0])
        self._prune()

    def _account(self, engine: Engine, group: Group) -> Account:
        key = (group.namespace, group.number)
        if key not in engine.accounts:
            engine.accounts[key] = Account(engine.name, group)
            self.shares.join(engine.accounts[key])
        return engine.accounts[key]

    # Reading.

    def _acquire(self, session: Session, request: m.Acquire, now: float) -> m.Acquired:
        namespace, group = session.group(request.namespace, request.group)
        hashes = request.hashes
        if len(hashes) > MAX_HASHES:
            check_hashes(hashes, group.hash_bytes)
        found = group.prefix(hashes)
        hits = len(found)
        if hits < len(hashes):
            missed = hashes[hits:]
            check_hashes(missed, group.hash_bytes)
            group.ghosts.missed(missed)
        engine = session.engine
        namespace.lookups += 1
        namespace.requested_blocks += len(hashes)
        self.counters["blocks_requested"] += len(hashes)
        if hits and engine.writers[request.namespace] is None:
            # A rank that has not mapped the region could not load what its scheduler is offered.
            self.counters["ranks_missing"] += 1
            hits = 0
        pending = group.pending_after(hashes, hits) if hits == len(found) else 0
        if not hits:
            return m.Acquired(request.id, 0, 0, pending, b"")
        lease = withheld = 0
        if request.pin:
            if engine.pinned + hits * group.slot_bytes > self._pin_quota:
                affordable = engine.affordable(found, self._pin_quota)
                withheld = max(0, hits - affordable)
                if withheld:
                    self.refusals["quota"] += withheld
                    hits, pending = affordable, 0
                if not hits:
                    return m.Acquired(request.id, 0, 0, 0, b"", withheld)
            block = found[hits - 1]
            block.pins += 1
            self._last_lease = lease = self._last_lease + 1
            size = hits * group.slot_bytes
            session.leases[lease] = Lease(block, size)
            engine.pinned += size
        if hits < len(found):
            del found[hits:]
        self._touch(found[-1])
        found[-1].account.hit_bytes += hits * group.slot_bytes
        namespace.hit_blocks += hits
        self.counters["blocks_hit"] += hits
        return m.Acquired(request.id, lease, hits, pending, b"".join([block.ref for block in found]), withheld)

    def _release(self, session: Session, request: m.Release, now: float) -> None:
        for lease in request.leases:
            if lease in session.leases:
                self._end_lease(session, lease)
            else:
                self.counters["releases_unknown"] += 1

    def _end_lease(self, session: Session, number: int) -> None:
        lease = session.leases.pop(number)
        session.engine.pinned -= lease.bytes
        self._unpin(lease.block)

    @staticmethod
    def _unpin(block: Block) -> None:
        block.pins -= 1
        block.account.enter(block)

    def _touch(self, block: Block) -> None:
        self._tick = block.tick = self._tick + 1
        extent, slot = self.pool.locate(block)
        extent.newest = self._tick
        self.rows.set_tick(self.pool.row(extent, slot), self._tick)

    # Writing.

    def _reserve(self, session: Session, request: m.Reserve, now: float) -> m.Reserved:
        namespace, group = session.group(request.namespace, request.group)
        engine = session.engine
        check_hashes([each for run in request.runs for each in run.hashes], group.hash_bytes)
        for run in request.runs:
            if not run.hashes:
                raise BadArgument("a run without a hash")
            chain = run.hashes if run.parent is None else [run.parent, *run.hashes]
            check_hashes(chain[:1], group.hash_bytes)
            if len(set(chain)) != len(chain):
                raise BadArgument("a hash occurs twice in one run")
        writers = self._writers(session, namespace)
        self._last_reservation += 1
        reservation = Reservation(self._last_reservation, group, session.id, writers, now)
        account = self._account(engine, group)
        answers = bytearray()
        for run in request.runs:
            self._grant_run(reservation, account, run, answers, now)
        for refusal, count in Counter(answers).items():
            if refusal:
                self.refusals[Refusal(refusal).name.lower()] += count
        granted = reservation.grants
        self.counters["blocks_reserved"] += len(granted)
        if not granted:
            return m.Reserved(request.id, 0, bytes(answers), b"")
        reservation.unsettled = len(granted)
        engine.reservations[reservation.id] = reservation
        slots = b"".join([grant.block.ref for grant in granted])
        return m.Reserved(request.id, reservation.id, bytes(answers), slots)

    def _grant_run(
        self, reservation: Reservation, account: Account, run: m.Run, answers: bytearray, now: float
    ) -> None:
        group = reservation.group
        parent = group.root if run.parent is None else self._known(group, run.parent)
        if parent is not None:
            parent.pins += 1  # making room must not take the very block that the run hangs on
        for block_hash in run.hashes:
            if parent is None:
                answers.append(Refusal.NO_PARENT)
                continue
            answer, block = self._grant(reservation, account, parent, block_hash, now)
            answers.append(answer)
            self._unpin(parent)
            parent = block
            if parent is not None:
                parent.pins += 1
        if parent is not None:
            self._unpin(parent)

    def _writers(self, session: Session, namespace: Namespace) -> tuple[int, ...]:
        shards = namespace.spec.shards
        if len(session.attached[namespace.number][1]) == shards:
            return (session.id,) * shards
        writers = session.engine.writers[namespace.number]
        if writers is None:
            raise BadArgument(f"not every one of {shards} shards is attached by a session of {session.engine.name!r}")
        return writers

    @staticmethod
    def _known(group: Group, block_hash: bytes) -> Block | None:
        pending = group.pending.get(block_hash)
        return pending.block if pending is not None else group.visible.get(block_hash)

    def _grant(
        self, reservation: Reservation, account: Account, parent: Block, block_hash: bytes, now: float
    ) -> tuple[Refusal, Block | None]:
        """Answer for one hash below `parent`; the block, if there is one, is the parent of the next."""
        group = reservation.group
        block = group.visible.get(block_hash)
        if block is not None:
            self._touch(block)
            return Refusal.PRESENT, block
        rival = group.pending.get(block_hash)
        if rival is not None and (
            rival.ready
            or now - rival.reservation.created < self.limits.supersede_after
            or parent.is_below(rival.block)  # no chain of hashes asks for this, and its children would form a circle
        ):
            return Refusal.IN_FLIGHT, rival.block
        place = self._room.make(account, parent, self._held)
        if isinstance(place, Refusal):
            return place, None
        extent, slot = place
        self._tick += 1
        block = Block(HIDDEN, self._tick, block_hash, b"", account)
        generation = self.pool.place(extent, slot, block)
        block.link(parent)
        if rival is not None:
            self._supersede(rival, block)
        grant = Grant(block, extent, slot, reservation)
        group.pending[block_hash] = grant
        reservation.grants.append(grant)
        account.bytes += group.slot_bytes
        extent.busy += 1
        extent.newest = self._tick
        self.rows.open_row(
            self.pool.row(extent, slot),
            generation,
            self._tick,
            group.namespace,
            group.number,
            reservation.owner,
            *self.row_and_generation(parent),
            block_hash,
        )
        return Refusal.GRANTED, block

    def _supersede(self, rival: Grant, block: Block) -> None:
        """Let `block` take the place of one that is long in the writing; what hangs below it moves over."""
        self.counters["blocks_superseded"] += 1
        rival.fate = Verdict.SUPERSEDED
        rival.block.unlink()
        rival.block.pins = GONE
        row, generation = self.row_and_generation(block)
        for child in rival.block.children():
            child.unlink()
            child.link(block)
            self.rows.set_parent(self.row_and_generation(child)[0], row, generation)

    def row_and_generation(self, block: Block | None) -> tuple[int, int]:
        """Return how a row names its parent; a root's parent is (0, 0)."""
        if block is None or block.parent is None:
            return 0, 0
        return self.pool.row(*self.pool.locate(block)), int.from_bytes(block.ref[8:16], "little")

    def _settle(self, session: Session, request: m.Settle, now: float) -> m.Settled:
        if request.region != self.geometry.region_id:
            raise UnknownHandle("the reservation belongs to another region")
        reservation = session.engine.reservations.get(request.reservation)
        if reservation is None:
            raise UnknownHandle(f"reservation {request.reservation}: settled, or of another engine")
        count = len(reservation.writers)
        for shard in request.shards:
            if not 0 <= shard < count:
                raise BadArgument(f"shard {shard}: 0 to {count - 1}")
            if session.id != reservation.writers[shard] and not (
                session.id == reservation.owner and request.outcome == Outcome.NEVER_STARTED
            ):
                raise BadArgument(f"shard {shard} is written by session {reservation.writers[shard]}")
        if not request.shards or request.outcome not in list(Outcome):
            raise BadArgument(f"shards {request.shards}, outcome {request.outcome}: at least one shard, 0 to 2")
        grants = reservation.grants
        positions = request.positions or range(len(grants))
        if min(positions) < 0 or max(positions) >= len(grants) or len(set(positions)) != len(positions):
            raise BadArgument(f"positions of {len(grants)} granted blocks, each once")
        shards = sum(1 << shard for shard in set(request.shards))
        verdict = Verdict.VISIBLE if request.outcome == Outcome.COMMITTED else Verdict.FAILED
        self.counters[f"shards_{Outcome(request.outcome).name.lower()}"] += len(positions) * shards.bit_count()
        return m.Settled(
            request.id,
            bytes(
                [
                    self._settle_shards(grants[position], shards & ~grants[position].settled, verdict)
                    for position in positions
                ]
            ),
        )

    def _settle_shards(self, grant: Grant, shards: int, verdict: Verdict) -> Verdict:
        """Settle those shards of one grant; with the last one the grant becomes READY or is given back."""
        if not shards:
            self.counters["settled_twice"] += 1
            if grant.fate is not None or not grant.whole:
                return grant.fate or Verdict.PARTIAL
            return Verdict.VISIBLE if grant.block.visible else Verdict.HIDDEN
        group, reservation = grant.reservation.group, grant.reservation
        if verdict is Verdict.FAILED and grant.fate is None:
            # Whatever waits below it can never be reached by way of it.
            self._doom(grant)
        grant.settled |= shards
        row = self.pool.row(grant.extent, grant.slot)
        self.rows.set_settled(row, grant.settled)
        if not grant.whole:
            return grant.fate or Verdict.PARTIAL
        reservation.unsettled -= 1
        if not reservation.unsettled:
            engine = grant.block.account.engine
            self.engines[engine].reservations.pop(reservation.id, None)
            reservation.grants = []  # each refers back to it, and the daemon never looks for circles among the old
        if grant.fate is not None:
            self.counters[f"blocks_{grant.fate.name.lower()}"] += 1
            self._give_back(grant)
            return grant.fate
        self.counters["blocks_committed"] += 1
        grant.ready = True
        grant.extent.busy -= 1
        self.rows.set_state(row, READY)
        parent = grant.block.parent
        assert parent is not None
        if not parent.visible:
            return Verdict.HIDDEN
        group.show(grant.block)
        return Verdict.VISIBLE

    def _doom(self, grant: Grant) -> None:
        """A block that hangs in the tree will not become visible: take it, and all below it, out of the index."""
        group = grant.reservation.group
        parent = grant.block.parent
        for block in grant.block.subtree()[::-1]:
            each = group.pending.pop(block.hash)
            block.unlink()
            block.pins = GONE
            each.fate = Verdict.FAILED if each is grant else Verdict.ORPHANED
            if each.ready:
                # Its writers have all settled: nobody will come back for it.
                self.counters["blocks_orphaned"] += 1
                each.extent.busy += 1
                self._give_back(each)
        if parent is not None:
            parent.account.enter(parent)

    def _give_back(self, grant: Grant) -> None:
        grant.block.account.bytes -= grant.reservation.group.slot_bytes
        if grant.tainted_until:
            self.quarantine.add(grant.tainted_until, grant.extent, grant.slot)
        else:
            grant.extent.busy -= 1
            self.pool.give_back(grant.extent, grant.slot)

    def _held(self) -> Iterator[Block]:
        """Yield the ends of what is read or written now: leased blocks, and blocks that are not visible yet."""
        for session in self.sessions.values():
            for lease in session.leases.values():
                yield lease.block
        for namespace in self.namespaces.values():
            for group in namespace.groups:
                for grant in group.pending.values():
                    yield grant.block

    # Admin.

    @staticmethod
    def _ping(session: Session, request: m.Ping, now: float) -> m.Pong:
        return m.Pong(request.id)

    def _stats(self, session: Session, request: m.Stats, now: float) -> m.Report:
        return m.Report(request.id, self.stats(now))

    def _clear(self, session: Session, request: m.Clear, now: float) -> m.Cleared:
        if request.namespace and request.namespace not in self._by_id:
            raise ClientError(f"no namespace {request.namespace!r}; there are: {', '.join(self._by_id) or 'none'}")
        only = self._by_id.get(request.namespace)
        chosen = [each for each in self.shares.accounts if only is None or each.group.namespace == only.number]
        return m.Cleared(request.id, self._room.clear(chosen))

    def stats(self, now: float) -> dict[str, Any]:
        """Return what `status` shows; see report.py."""
        return report.stats(self, now)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all that must always hold does. O(blocks): for tests, and for an idle daemon."""
        report.check_integrity(self)
