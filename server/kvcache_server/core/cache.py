"""The cache as one pure state machine: requests in, replies out, and effects for the daemon to deliver.

It uses no sockets, clocks or threads. It passes each request to the part that answers it, and does the work that
involves several parts: the end of a session, a clear, a restart. Each change of a slot's row is written into the region
before the reply that reports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcache_proto import messages as m
from kvcache_proto.errors import ClientError, NotPermitted, Unavailable
from kvcache_proto.region import RegionRows
from kvcache_proto.types import PoolGeometry
from kvcache_server import status
from kvcache_server.core.checksums import Checksums
from kvcache_server.core.effects import Actor, Effects, SessionGone
from kvcache_server.core.eviction.policy import WORTH, Eviction
from kvcache_server.core.eviction.worth import likely
from kvcache_server.core.index import Account, Block, Share
from kvcache_server.core.invalidation import Invalidation
from kvcache_server.core.journal import NamespaceCleared, SessionEnded, SessionOpened
from kvcache_server.core.limits import LOOK, Limits
from kvcache_server.core.lookups import Lookups
from kvcache_server.core.pins import uncover_all
from kvcache_server.core.pool import Pool
from kvcache_server.core.registry import Registry
from kvcache_server.core.reservations import Reservations
from kvcache_server.core.retention import Retention, Retentions
from kvcache_server.core.sampling import KeyedHasher, keyed_draw
from kvcache_server.core.sessions import NOBODY, Engine, Session
from kvcache_server.core.sweeper import AT_ONCE, Sweeper
from kvcache_server.core.tiers import Tiers

if TYPE_CHECKING:
    from kvcache_server.core.recovery.read_rows import Snapshot

_NEARLY_FULL = 8  # with at most one free page in this many, blocks may be evicted faster than a tier writes
EPOCH_SHIFT = 40  # lease and reservation numbers start with the daemon's epoch, so that none is used twice


class Cache:
    """All state of the daemon. A method either succeeds, or raises a KVCacheError and changes nothing.

    Attributes: `effects` is an outbox of events, which the caller delivers; `sweeper` has deferred work, which the
    caller runs. `namespaces` and `sessions` are keyed by number.
    """

    def __init__(
        self,
        buffer: memoryview,
        geometry: PoolGeometry,
        limits: Limits | None = None,
        seed: int = 0,
        epoch: int = 1,
        secret: bytes = b"",
        policy: str = WORTH,
        ready_pages: int | None = None,
    ) -> None:
        """Make an empty cache: in a fresh region or, with `epoch` above 1, in one whose rows are then restored.

        `secret`, up to 64 bytes that no client knows, determines which blocks are in samples. `policy` is the eviction
        policy, one of POLICIES. Only the first `ready_pages` pages are usable until `grow` adds more; None means all.
        """
        self.limits = limits = limits or Limits()
        self.geometry, self.epoch = geometry, epoch
        self.rows = RegionRows(buffer, geometry)
        if epoch == 1:
            self.rows.format()
        self.effects = Effects()
        self.counters, self.refusals = self.effects.counters, self.effects.refusals
        self.sweeper = sweeper = Sweeper(self.effects)
        # Generations of a fresh region start at random, so references into an older region match nothing.
        self.pool = pool = Pool(
            self.rows, seed & ((1 << 63) - 1), geometry.pages if ready_pages is None else ready_pages
        )
        draw = keyed_draw(secret)
        self.hasher = KeyedHasher(draw)
        self.eviction = eviction = Eviction(pool, sweeper, limits, draw, self.hasher, policy)
        self.registry = registry = Registry(pool, eviction, sweeper, limits)
        self.namespaces, self.sessions = registry.namespaces, registry.sessions
        self.lookups = Lookups(pool, eviction, self.effects, limits)
        self.reservations = Reservations(pool, eviction, registry.engines, sweeper, limits)
        self.lookups.last = self.reservations.last = epoch << EPOCH_SHIFT
        self.invalidation = Invalidation(pool, eviction, self.reservations, sweeper)
        self.retentions = Retentions(pool, eviction, self.invalidation, registry, sweeper, limits)
        self._grace_until = 0.0
        self._handlers: dict[type, Callable[[Session, Any], m.Reply | None]] = {
            m.Acquire: self.lookups.acquire,
            m.Release: self.lookups.release,
            m.ReportDevice: self.lookups.report_device,
            m.Reserve: self.reservations.reserve,
            m.Settle: self.reservations.settle,
            m.Attach: self._attach,
            m.Detach: registry.detach,
            m.Invalidate: self.invalidation.invalidate,
            m.Ping: lambda session, request: m.Pong(request.id),
            m.Clear: self._clear,
            m.Reclaim: self._reclaim,
            m.Fence: self._fence,
            m.Retain: self.retentions.retain,
            m.Drop: self.retentions.drop,
            m.Pin: self.retentions.pin,
            m.Unpin: self.retentions.unpin,
        }

    # State, for callers outside the core, which do not access its parts.

    @property
    def capacity(self) -> int:
        """Bytes available to blocks."""
        return self.pool.capacity

    @property
    def used(self) -> int:
        """Bytes that blocks occupy."""
        return self.eviction.fair_share.used

    def doubled_bytes(self) -> int:
        """Estimate the bytes of blocks that are also on devices, where no request uses them."""
        pages = self.pool.blocks
        sample = [block for block in pages[:: max(1, len(pages) // LOOK)] if block is not None and block.visible]
        return int(self.eviction.holders.doubled(sample) * self.used)

    @property
    def is_growing(self) -> bool:
        """Whether more pages will be ready soon."""
        return self.pool.is_growing

    @property
    def is_nearly_full(self) -> bool:
        """Whether blocks are about to be evicted."""
        return self.pool.free.pages <= self.geometry.pages // _NEARLY_FULL

    @property
    def generation(self) -> int:
        """The last generation that was given to a block."""
        return self.pool.generation

    @property
    def in_grace(self) -> bool:
        """Whether sessions of the previous daemon are still reconnecting, so that nothing is evicted."""
        return self.eviction.frozen

    @property
    def evicts_by_age(self) -> bool:
        """Whether blocks are evicted by age, because their learned worth predicts worse."""
        return self.eviction.ranking.by_age

    @property
    def evictions(self) -> Counter[str]:
        """Numbers of evicted blocks, by cause."""
        return self.eviction.evictions

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engines by name."""
        return self.registry.engines

    @property
    def disconnected(self) -> Mapping[int, Session]:
        """The sessions whose handshake connection has closed and whose process may still run."""
        return self.registry.disconnected

    def holders(self) -> Iterable[Session]:
        """Return the sessions that may have leases."""
        return self.registry.holders()

    def shares(self) -> list[Share]:
        """Return the share of each engine in each namespace."""
        return list(self.eviction.fair_share.shares)

    def blocks_of(self, allocated_bytes: int) -> int:
        """Return the number of blocks of `allocated_bytes` bytes that the pool has room for."""
        return self.pool.blocks_of(allocated_bytes)

    def blocks_at(self, begin: int, end: int) -> list[Block]:
        """Return the blocks whose first page is in the half-open range from `begin` to `end`."""
        return [block for block in self.pool.blocks[begin:end] if block is not None]

    def is_likely_to_return(self, account: Account) -> bool:
        """Whether most blocks of the account that were requested once will be requested again."""
        return likely(self.eviction.learner.worths, account.share)

    def next_evictable(self, most: int) -> list[Block]:
        """See Ranking.next_evictable."""
        return self.eviction.ranking.next_evictable(most)

    def retained_for(self, engine: str, request: str) -> list[Retention]:
        """Return the retentions of a request of an engine."""
        return self.retentions.of_request(engine, request)

    def lend(self, session: Session, blocks: Sequence[Block]) -> tuple[int, bytes, bytes]:
        """See Lookups.lend."""
        return self.lookups.lend(session, blocks)

    def grow(self, ready_pages: int) -> None:
        """Use the first `ready_pages` pages from now on."""
        self.pool.grow(ready_pages)

    def sampled_requests(self) -> tuple[list[tuple[int, bytes, bool]], int]:
        """Return the latest requests for a sample of the blocks, and the number of these that the pool has room for.

        Each request has the tick, the hash of the block, and whether it was cached.
        """
        self.eviction.learner.learn()
        monitor = self.eviction.learner.monitor
        return list(monitor.requests), monitor.slots

    def memory_figures(self) -> status.Memory:
        """Return the sizes of the pool, and its bytes by state."""
        pool, geometry = self.pool, self.geometry
        busy, quarantined = pool.busy * geometry.page_bytes, pool.quarantine.bytes
        return status.Memory(
            region_id=geometry.region_id.hex(),
            bytes=pool.capacity,
            used_bytes=self.used,
            pages=geometry.pages,
            page_bytes=geometry.page_bytes,
            blocks_quarantined=len(pool.quarantine),
            ready_bytes=pool.used - busy,
            writing_bytes=busy - quarantined,
            quarantined_bytes=quarantined,
            free_bytes=pool.capacity - pool.used,
            free_runs=len(pool.free.runs()),
        )

    @property
    def evicted_unread(self) -> int:
        """Number of evicted blocks that no lookup had found."""
        return self.eviction.evicted_unread

    def eviction_figures(self) -> status.Eviction:
        """Return figures about the choice of blocks to evict, and its quality."""
        return self.eviction.figures()

    def retained(self, now: float) -> status.Hints:
        """Return the figures of retentions by engines and pins by operators. O(retentions): a few milliseconds."""
        return self.retentions.figures(now)

    # Settings.

    def set_limits(self, limits: Limits) -> None:
        """Apply `limits` from now on. Usage that already exceeds them stays, but does not grow."""
        self.limits = self.registry.limits = self.retentions.limits = limits
        for part in (self.eviction, self.lookups, self.reservations):
            part.set_limits(limits)

    def keep_checksums(self, checksums: Checksums) -> None:
        """Store the checksums of writers in `checksums`, and answer readers from there."""
        self.lookups.checksums = self.reservations.checksums = checksums

    def use_tiers(self, tiers: Tiers | None) -> None:
        """Request uncached blocks from `tiers` from now on."""
        self.lookups.tiers = self.eviction.tiers = tiers

    # Requests.

    def handle(self, session: int, request: m.Request, now: float) -> m.Reply | None:
        """Handle one request of an open session, and return the reply; None for a Release.

        Raises a ClientError for an invalid request; then nothing has changed.
        """
        reply = self.answer(session, request, now)
        self.eviction.learner.learn()
        return reply

    def answer(self, session: int, request: m.Request, now: float) -> m.Reply | None:
        """Like `handle`, but the next `handle` or `tick` learns from the lookup, together with other lookups."""
        requester, kind = self.sessions[session], type(request)
        if kind is m.Acquire or kind is m.Release:  # their effects name no actor
            self._begin_turn(now)
        else:
            self._begin_turn(now, Actor(now, requester.engine.name, getattr(request, "namespace", 0)))
        return self._handlers[kind](requester, request)

    def _begin_turn(self, now: float, actor: Actor | None = None) -> None:
        if actor is not None:
            self.effects.actor = actor
        self.pool.set_time(now)
        self.sweeper.now, self.sweeper.at_once = now, AT_ONCE
        self.eviction.looks = LOOK

    def _attach(self, session: Session, request: m.Attach) -> m.Attached:
        reply = self.registry.attach(session, request)
        self.reservations.attached(session, self.namespaces[reply.namespace])
        return reply

    # Sessions.

    def open_session(self, engine: str, label: str, now: float, user: int = NOBODY, is_operator: bool = False) -> int:
        """See Registry.open."""
        return self.registry.open(engine, label, now, user, is_operator)

    def resume_session(self, session: int, label: str, now: float, user: int = NOBODY) -> None:
        """See Registry.resume."""
        self.registry.resume(session, label, now, user)

    def disconnect_session(self, session: int, now: float) -> None:
        """See Registry.disconnect."""
        self.registry.disconnect(session, now)

    def end_session(self, session: int, now: float) -> None:
        """End the session of an ended process: release its grants, and quarantine the slots that it may be writing."""
        engine = self.registry.forget(session)
        self.reservations.forget_writer(session)
        self.effects.records.append(SessionEnded(session))
        self.effects.changes.append(SessionGone(session))
        self._begin_turn(now, Actor(now, engine.name))
        settle = self.reservations.writer_ended(engine, session)
        self.sweeper.add(lambda: settle() or self.registry.prune())

    def abandon(self, session: int, reservation: int, now: float) -> None:
        """Give back a reservation whose reply could not be sent."""
        engine = self.sessions[session].engine
        self.effects.actor = Actor(now, engine.name)
        self.reservations.abandon(engine.reservations[reservation])

    def fence_off(self, session: int, now: float) -> int:
        """End a disconnected session that holds slots: an operator states that its process no longer writes.

        Return the number of reservations that it was a writer of. Raises ClientError if the session is not
        disconnected; then nothing has changed.
        """
        fenced = self.registry.disconnected.get(session)
        if fenced is None:
            reason = "it is attached: end its process" if session in self.sessions else "there is none"
            raise ClientError(f"session {session} cannot be fenced off: {reason}")
        written = sum(session in reservation.writers for reservation in fenced.engine.reservations.values())
        self.end_session(session, now)
        self.counters["sessions_fenced"] += 1
        return written

    # Time.

    def tick(self, now: float) -> None:
        """Do the periodic work, such as freeing slots after their quarantine. Call it a few times per second."""
        self._begin_turn(now, Actor(now))
        self.eviction.learner.learn()
        self.registry.tick(now)
        self.eviction.due.end_if(lambda each: each.until <= now)
        if self.eviction.frozen and (not self.registry.not_reclaimed or now >= self._grace_until):
            self.eviction.frozen = False
        self.sweeper.add(self.reservations.free_quarantined)
        self.retentions.tick(now)
        self.sweeper.add(self.invalidation.remove_kept)
        if not self.eviction.frozen and (abandoned := self.registry.abandoned()):
            for namespace in abandoned:  # blocks in use are removed at a later tick
                self.retentions.clear(namespace.number)
                self.invalidation.clear(namespace)
            self.sweeper.add(self.registry.prune)
        uncover_all(engine.pins for engine in self.engines.values())
        uncover_all(owner.pins for owner in self.retentions.owners())

    # After a restart.

    def restore(self, snapshot: Snapshot, now: float) -> None:
        """Restore the cache from `snapshot`. This cache must be empty, on the same region, with a later epoch."""
        from kvcache_server.core.recovery.restore import Restoration  # imports numpy

        parts = (self.pool, self.registry, self.reservations, self.counters)
        Restoration(snapshot, *parts, now).run()
        self.retentions.restore(snapshot.manifest.pins)
        sessions = snapshot.manifest.sessions
        self.await_sessions([sessions[number] for number in snapshot.living], now)
        self.effects.records += map(SessionEnded, sessions.keys() - snapshot.living)
        self.effects.records += [NamespaceCleared(number, 0) for number in snapshot.manifest.cleared]
        self.registry.prune()
        self._begin_turn(now)
        self.retentions.tick(now)
        self.sweeper.finish()

    def await_sessions(self, sessions: Collection[SessionOpened], now: float) -> None:
        """Evict nothing until `sessions`, of the last epoch, have reclaimed their leases or the grace period ends."""
        self.registry.expect(sessions, now)
        self.eviction.frozen = bool(sessions)
        self._grace_until = now + self.limits.grace

    def _reclaim(self, session: Session, request: m.Reclaim) -> m.Reclaimed:
        """Restore the leases of a resumed session, and the reservations whose replies it received.

        A session may reclaim once. Raises NotPermitted if it has nothing to reclaim; then nothing has changed.
        """
        if not session.may_reclaim:
            raise NotPermitted(f"session {session.id} has nothing to reclaim: it has not resumed since the last time")
        session.may_reclaim = False
        self.reservations.abandon_undelivered(session, request.heard)
        former = self.registry.take_former(session.id)
        lost = self.lookups.reclaim(session, request, former)
        self.registry.end_leases_of(former)
        self.registry.not_reclaimed.discard(session.id)
        return m.Reclaimed(request.id, lost)

    # Operators.

    def _fence(self, session: Session, request: m.Fence) -> m.Fenced:
        return m.Fenced(request.id, self.fence_off(request.session, self.sweeper.now))

    def _clear(self, session: Session, request: m.Clear) -> m.Cleared:
        return m.Cleared(request.id, self.clear(request.namespace, session.engine.name, self.sweeper.now))

    def clear(self, namespace: str, by: str, now: float) -> int:
        """Forget all blocks of the namespace with this id, or of all namespaces for "", and return their number.

        `by` is the engine that requests it. Raises ClientError if the namespace does not exist, Unavailable during the
        grace period; then nothing has changed.
        """
        spaces = [self.registry.find(namespace)] if namespace else list(self.namespaces.values())
        if self.eviction.frozen:
            raise Unavailable(
                "engines are reconnecting after a restart, and the blocks that they read are not known yet: try again"
            )
        self._begin_turn(now, Actor(now, by))
        cleared = 0
        for each in spaces:
            self.retentions.clear(each.number)
            cleared += self.invalidation.clear(each)
        return cleared
