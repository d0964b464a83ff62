"""The cache as one pure state machine: requests in, replies out, and effects for the daemon to deliver.

No socket, clock, thread or torch. Each part has one responsibility. The cache passes each request to its part, and does
what involves several parts: the end of a session, a clear, a restart. Every change of a slot's row is written into the
region before the reply that reports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvcache_proto import messages as m
from kvcache_proto.errors import ClientError, Unavailable
from kvcache_proto.region import RegionRows
from kvcache_proto.types import PoolGeometry
from kvcache_server.core.checksums import Checksums
from kvcache_server.core.effects import Actor, Effects, NamespaceEmptied, SessionGone
from kvcache_server.core.eviction.policy import WORTH, Eviction
from kvcache_server.core.index import Holds
from kvcache_server.core.invalidation import Invalidation
from kvcache_server.core.journal import SessionEnded
from kvcache_server.core.limits import Limits
from kvcache_server.core.lookups import Lookups
from kvcache_server.core.pins import uncover_all
from kvcache_server.core.pool import Pool
from kvcache_server.core.registry import Registry
from kvcache_server.core.reservations import Reservations
from kvcache_server.core.retention import Retentions
from kvcache_server.core.sampling import Lots, keyed_draw
from kvcache_server.core.sessions import NOBODY, Engine, Session
from kvcache_server.core.slices import Chores, Result, Steps, begin, finish

if TYPE_CHECKING:
    from kvcache_server.core.recovery.snapshot import Snapshot

EPOCH_SHIFT = 40  # numbers of leases and reservations begin with the daemon's epoch: none is used twice


class Cache:
    """All state of the daemon. A method either succeeds, or raises a KVCacheError and changes nothing.

    Attributes: `effects` is the outbox of what happened; `chores` is work that no request waits for. The caller
    delivers and does both.
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
    ) -> None:
        """Make an empty cache in a fresh region; with `epoch` above 1, one to be restored from the region's rows.

        `secret`, up to 64 bytes that no client knows, determines which blocks are in samples. `policy` is one of
        POLICIES, by which blocks are evicted.
        """
        limits = limits or Limits()
        self.geometry, self.epoch = geometry, epoch
        self.rows = RegionRows(buffer, geometry)
        if epoch == 1:
            self.rows.format()
        self.effects = Effects()
        self.chores = Chores()
        self.counters: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.holds = Holds()
        # Generations of a fresh region start at random, so references into an older region match nothing.
        self.pool = Pool(self.rows, seed & ((1 << 63) - 1))
        draw = keyed_draw(secret)
        self.lots = Lots(draw)
        self.eviction = Eviction(self.pool, limits, self.counters, self.effects, self.chores, draw, self.lots, policy)
        self.learner = self.eviction.learner
        self.registry = Registry(self.pool, self.eviction, limits, self.counters, self.effects)
        # Shorthands.
        self.namespaces, self.engines = self.registry.namespaces, self.registry.engines
        self.sessions = self.registry.sessions
        self.lookups = Lookups(self.pool, self.learner, self.holds, limits, self.counters, self.refusals)
        self.reservations = Reservations(
            *(self.pool, self.eviction, self.engines, limits),
            *(self.counters, self.refusals, self.effects, self.chores),
        )
        self.lookups.last = self.reservations.last = epoch << EPOCH_SHIFT
        self.invalidation = Invalidation(
            *(self.pool, self.eviction, self.lookups, self.reservations, self.counters, self.effects)
        )
        self.retentions = Retentions(self.pool, self.eviction, self.namespaces, limits, self.effects)
        self.limits = limits
        self._grace_until = 0.0
        self._ticking = False
        self._handlers: dict[type, Any] = {
            m.Acquire: self.lookups.acquire,
            m.Release: self.lookups.release,
            m.Reserve: self._reserve,
            m.Settle: self._settle,
            m.Attach: self._attach,
            m.Detach: self._detach,
            m.Distrust: self._distrust,
            m.Ping: self._ping,
            m.Clear: self._clear,
            m.Restate: self._restate,
            m.Fence: self._fence,
            m.Retain: self._retain,
            m.Drop: self._drop,
            m.Pin: self._pin,
            m.Unpin: self._unpin,
        }

    def keep_checksums(self, checksums: Checksums) -> None:
        """Store the checksums of writers in `checksums`, and answer readers from there."""
        self.lookups.checksums = self.reservations.checksums = checksums

    def set_limits(self, limits: Limits) -> None:
        """Apply `limits` from now on. What already exceeds them stays, but does not grow."""
        self.limits = self.registry.limits = limits
        for part in (self.eviction, self.lookups, self.reservations, self.retentions):
            part.set_limits(limits)

    # Requests.

    def handle(self, session: int, request: m.Request, now: float) -> m.Reply | None:
        """Answer one request of an open session; Release has no answer.

        Raises a ClientError if something is wrong with the request; then the state is unchanged.
        """
        begun = self.begin(session, request, now)
        reply = finish(begun) if isinstance(begun, Generator) else begun
        self.learner.learn()
        return reply

    def begin(self, session: int, request: m.Request, now: float) -> m.Reply | None | Steps[m.Reply | None]:
        """Like `handle`, but do only one slice; if more is left, return it as steps.

        The caller must continue them to the end, even if the session ends in between. What a lookup teaches is learned
        later, with other lookups.
        """
        self.pool.set_time(now)
        return self._handlers[type(request)](self.sessions[session], request, now)  # type: ignore[no-any-return]

    def _for(self, session: Session, now: float, steps: Steps[Result], namespace: int = 0) -> Result | Steps[Result]:
        """Do the first slice of `steps` on behalf of the session's engine."""
        return begin(self.effects.on_behalf(Actor(now, session.engine.name, namespace), steps))

    def _reserve(self, session: Session, request: m.Reserve, now: float) -> m.Reserved:
        self.learner.learn()
        if self.learner.due:
            self.chores.do(self.eviction.refreshing())
        self.effects.actor = Actor(now, session.engine.name, request.namespace)
        return self.reservations.reserve(session, request, partial(self.registry.account, session.engine), now)

    def _settle(self, session: Session, request: m.Settle, now: float) -> m.Settled:
        self.effects.actor = Actor(now, session.engine.name)
        return self.reservations.settle(session, request)

    def _distrust(self, session: Session, request: m.Distrust, now: float) -> m.Distrusted | Steps[m.Distrusted]:
        return self._for(session, now, self._distrusting(session, request))

    def _distrusting(self, session: Session, request: m.Distrust) -> Steps[m.Distrusted]:
        self.retentions.distrusting += 1
        try:
            return (yield from self.invalidation.distrust(session, request))
        finally:
            self.retentions.distrusting -= 1
            self.retentions.doubts += 1

    def _retain(self, session: Session, request: m.Retain, now: float) -> m.Retained | Steps[m.Retained]:
        return self._for(session, now, self.retentions.retain(session, request, now))

    def _drop(self, session: Session, request: m.Drop, now: float) -> m.Dropped:
        return self.retentions.drop(session, request)

    def _pin(self, session: Session, request: m.Pin, now: float) -> m.Pinned | Steps[m.Pinned]:
        return self._for(session, now, self.retentions.pin(self.registry.by_id, session, request))

    def _unpin(self, session: Session, request: m.Unpin, now: float) -> m.Unpinned:
        return self.retentions.unpin(session, request)

    def _attach(self, session: Session, request: m.Attach, now: float) -> m.Attached:
        reply = self.registry.attach(session, request)
        self.reservations.attached(session, self.namespaces[reply.namespace])
        return reply

    def _detach(self, session: Session, request: m.Detach, now: float) -> None:
        self.registry.detach(session, request)

    @staticmethod
    def _ping(session: Session, request: m.Ping, now: float) -> m.Pong:
        return m.Pong(request.id)

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
        """End a session whose process is gone, with all that it holds; slots that it may be writing are quarantined."""
        engine = self.registry.forget(session)
        self.reservations.forget_writer(session)
        self.effects.records.append(SessionEnded(session))
        self.effects.changes.append(SessionGone(session))
        self.chores.do(self.effects.on_behalf(Actor(now, engine.name), self._end(engine, session, now)))

    def _end(self, engine: Engine, session: int, now: float) -> Steps[None]:
        yield from self.reservations.writer_ended(engine, session, now)
        self.registry.prune()

    def abandon(self, session: int, reservation: int, now: float) -> None:
        """Give back a reservation whose reply could not be sent."""
        engine = self.sessions[session].engine
        giving_back = self.reservations.abandon(engine.reservations[reservation])
        self.chores.do(self.effects.on_behalf(Actor(now, engine.name), giving_back))

    def _fence(self, session: Session, request: m.Fence, now: float) -> m.Fenced:
        return m.Fenced(request.id, self.fence_off(request.session, now))

    def fence_off(self, session: int, now: float) -> int:
        """End a disconnected session that holds slots: an operator states that it no longer writes.

        Returns how many reservations ended. Raises ClientError if the session is not disconnected.
        """
        absent = self.registry.disconnected
        if session not in absent:
            there = "it is attached: end its process" if session in self.sessions else "there is none"
            raise ClientError(f"session {session} cannot be fenced off: {there}")
        held = sum(session in reservation.writers for reservation in absent[session].reservations.values())
        self.end_session(session, now)
        self.counters["sessions_fenced"] += 1
        return held

    # Time.

    def tick(self, now: float) -> None:
        """Free slots whose quarantine is over, and account for released leases. Call it a few times per second."""
        self.pool.set_time(now)
        self.learner.learn()
        self.registry.tick(now)
        if self.eviction.frozen and (not self.registry.not_restated or now >= self._grace_until):
            self.eviction.frozen = False
        if not self._ticking:
            self.chores.do(self.effects.on_behalf(Actor(now), self._tick_parts(now)))
        uncover_all(engine.pins for engine in self.engines.values())
        uncover_all(owner.pins for owner in self.retentions.owners())

    def _tick_parts(self, now: float) -> Steps[None]:
        self._ticking = True
        try:
            yield from self.reservations.tick(now)
            yield from self.retentions.tick(now)
            if not self.eviction.frozen:
                yield from self._end_abandoned(now)
        finally:
            self._ticking = False

    def _end_abandoned(self, now: float) -> Steps[None]:
        """Remove namespaces that nobody can attach again, with their blocks; blocks in use go at a later tick."""
        abandoned = self.registry.abandoned()
        for namespace in abandoned:
            yield from self.retentions.clear(namespace.number)
            accounts = self.eviction.fair_share.accounts
            yield from self.eviction.clear([each for each in accounts if each.group.namespace == namespace.number])
        if abandoned:
            self.registry.prune()

    # After a restart.

    def restore(self, snapshot: Snapshot, now: float) -> None:
        """Restore the cache from `snapshot`. This cache must be empty, on the same region, with a later epoch."""
        from kvcache_server.core.recovery.restore import Restoration  # imports numpy

        parts = (self.pool, self.registry, self.reservations, self.counters)
        Restoration(snapshot, *parts, now, self.limits.quarantine).run()
        self.retentions.restore(snapshot.manifest.pins)
        sessions = snapshot.manifest.sessions
        living = {number: sessions[number] for number in snapshot.living}
        self.await_sessions(
            {number: self.registry.engine(opened.engine) for number, opened in living.items()},
            {number: opened.user for number, opened in living.items()},
            now,
        )
        self.effects.records += map(SessionEnded, sessions.keys() - snapshot.living)
        self.registry.prune()
        finish(self.retentions.tick(now))

    def await_sessions(self, sessions: dict[int, Engine], users: Mapping[int, int], now: float) -> None:
        """Evict nothing until `sessions`, of the last epoch, have restated what they hold, or the grace period is over.

        `users` has the user of each session.
        """
        self.registry.expect(sessions, users)
        self.eviction.frozen = bool(sessions)
        self._grace_until = now + self.limits.grace

    def _restate(self, session: Session, request: m.Restate, now: float) -> m.Restated | Steps[m.Restated]:
        return self._for(session, now, self._restating(session, request, now))

    def _restating(self, session: Session, request: m.Restate, now: float) -> Steps[m.Restated]:
        """Restore what a resumed session holds: its leases, and the reservations whose replies it received.

        It may restate once. Raises NotPermitted if the session has nothing to restate; then nothing has changed.
        """
        self.lookups.begin_to_restate(session)
        yield from self.reservations.abandon_undelivered(session, request.heard, now)
        holders = [each for each in self.registry.holders() if each.engine is session.engine]
        holders = [each for each in holders if each is session or each.id != session.id]  # not as it was when it left
        lost = yield from self.lookups.restate(session, request, holders)
        self.registry.end_leases(session.id)
        self.registry.not_restated.discard(session.id)
        return m.Restated(request.id, lost)

    # Operators.

    def _clear(self, session: Session, request: m.Clear, now: float) -> m.Cleared | Steps[m.Cleared]:
        return begin(self._clear_and_answer(session, request, now))

    def _clear_and_answer(self, session: Session, request: m.Clear, now: float) -> Steps[m.Cleared]:
        return m.Cleared(request.id, (yield from self.clearing(request.namespace, session.engine.name, now)))

    def clearing(self, namespace: str, by: str, now: float) -> Steps[int]:
        """Forget the unused blocks of the namespace with that id, or of all for ""; return how many.

        Blocks stored in the meantime stay. Raises ClientError if the namespace does not exist, Unavailable during the
        grace period.
        """
        ids = self.registry.by_id
        only = ids.get(namespace)
        if namespace and only is None:
            raise ClientError(f"no namespace {namespace!r}; there are: {', '.join(ids) or 'none'}")
        if self.eviction.frozen:
            raise Unavailable(
                "engines are reconnecting after a restart, and the blocks that they read are not known yet: try again"
            )
        accounts = self.eviction.fair_share.accounts
        chosen = [each for each in accounts if only is None or each.group.namespace == only.number]
        ending = self.retentions.clear(only.number if only is not None else None)
        yield from self.effects.on_behalf(Actor(now, by), ending)
        cleared = yield from self.effects.on_behalf(Actor(now, by), self.eviction.clear(chosen))
        for each in list(self.namespaces.values()) if only is None else [only]:
            if each.number in self.namespaces and not any(group.visible for group in each.groups):
                self.effects.changes.append(NamespaceEmptied(each))
        return cleared

    def clear(self, namespace: str, by: str, now: float) -> int:
        """Do all of `clearing` at once."""
        return finish(self.clearing(namespace, by, now))
