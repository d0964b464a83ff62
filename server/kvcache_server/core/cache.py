"""The cache as one pure state machine: `handle(session, request, now) -> reply`. No socket, clock, thread or torch.

It composes the pool (bytes), the index (blocks), the writing (who may write, and how that ends) and the shares (who
gives way), and writes every change of a slot's row into the region before the reply that tells of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, ClientError, NotPermitted, UnknownHandle
from kvcache_proto.region import RegionRows, slot_size
from kvcache_proto.types import MAX_NAME, PoolGeometry, check_hashes
from kvcache_server.core import maintenance
from kvcache_server.core.checksums import Sums
from kvcache_server.core.eviction.fair_share import Shares
from kvcache_server.core.eviction.policy import Room
from kvcache_server.core.extents import fit
from kvcache_server.core.index import Account, Block, Group
from kvcache_server.core.invalidation import distrust
from kvcache_server.core.journal import (
    EngineForgotten,
    EngineMade,
    ExtentRetired,
    NamespaceForgotten,
    NamespaceMade,
    Record,
    Resized,
    SessionEnded,
)
from kvcache_server.core.leases import Lease, pay_all
from kvcache_server.core.limits import Limits
from kvcache_server.core.lookup import long_prefix
from kvcache_server.core.pool import Pool
from kvcache_server.core.reservations import Writing
from kvcache_server.core.restate import restate
from kvcache_server.core.sampling import keyed_draw
from kvcache_server.core.sessions import NOBODY, Engine, Namespace, Session, Users, Watcher
from kvcache_server.core.slices import LOOK, Chores, Steps, begin, finish
from kvcache_server.insight import explanations
from kvcache_server.insight import stats as report
from kvcache_server.insight.lookup_tap import Traffic
from kvcache_server.insight.miss_log import Misses

MAX_ATTACHED = 16  # namespaces of a session: an engine is in one, and in the next one after a reset
OPERATORS = 16  # sessions beyond max_sessions that are kept for who runs the daemon
LIFE_SHIFT = 40  # numbers of leases and reservations begin with the daemon's life: none comes again


class Cache:
    """All state of the daemon. Every method either does what it says, or raises a KVCacheError and changes nothing."""

    def __init__(
        self,
        buffer: memoryview,
        geometry: PoolGeometry,
        limits: Limits | None = None,
        seed: int = 0,
        journal: Callable[[Record], None] = lambda record: None,
        life: int = 1,
        secret: bytes = b"",
    ) -> None:
        """An empty cache in a fresh region; with `life` above 1, one that recovery.py fills from the region's rows.

        `journal` notes each record down before it returns. `secret`, up to 64 bytes that no client knows, decides which
        blocks are in samples.
        """
        self.draw = keyed_draw(secret)
        self.geometry = geometry
        self.sums: Sums | None = None  # given by who has a place for them
        self.watcher: Watcher | None = None
        limits = limits or Limits()
        self.life = life
        self.rows = RegionRows(buffer, geometry)
        if life == 1:
            self.rows.format()
        # A fresh region starts at random generations: a reference into an older one matches nothing here.
        self.pool = Pool(self.rows, seed & ((1 << 63) - 1))
        self.shares = Shares(self.pool.capacity, limits.namespace_floor)
        self.namespaces: dict[int, Namespace] = {}
        self.engines: dict[str, Engine] = {}
        self.sessions: dict[int, Session] = {}
        self.users = Users()
        self.absent: dict[int, Engine] = {}  # sessions without a door whose processes may live
        self.awaited: set[int] = set()  # sessions of the last life that have not restated what they hold
        self.grace_until = 0.0
        self.wanted = 0  # bytes of the pool after a resize; 0: as it is
        self.refusals: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self.told: Counter[str] = Counter()  # what clients have counted, those that are gone among them
        self.misses = Misses()
        self.traffic = Traffic()
        self.room = Room(self.pool, self.shares, limits.namespace_ceiling, self.counters, self.misses)
        self.writing = Writing(
            *(self.pool, self.room, limits, self.engines, journal, self.counters, self.refusals, self.misses)
        )
        self.writing.last_reservation = self.last_lease = life << LIFE_SHIFT
        self.last_namespace = self.last_engine = self.last_session = 0
        self.chores = Chores()
        self.distrusts = 0  # blocks that were found to be wrong
        self.distrusting: list[list[Block]] = []  # blocks that are about to be forgotten: what is above them is already
        self._freeing = False
        self._journal = journal
        self.by_id: dict[str, Namespace] = {}
        self.bound(limits)
        self._handlers: dict[type, Any] = {
            m.Acquire: self._acquire,
            m.Release: self._release,
            m.Reserve: self._reserve,
            m.Settle: self._settle,
            m.Attach: self._attach,
            m.Detach: self._detach,
            m.Distrust: self._distrust,
            m.Ping: self._ping,
            m.Stats: self._stats,
            m.Clear: self._clear,
            m.Restate: self._restate,
            m.Fence: self._fence,
            m.Tell: self._tell,
            m.Remark: self._remark,
            m.Why: self._why,
            m.Watch: self._watch,
        }

    def bound(self, limits: Limits) -> None:
        """Go by `limits` from now on. What exceeds them stays, and nothing is added to it."""
        self.limits = limits
        self.writing.bound(limits)
        self.room.bound(limits.namespace_ceiling)
        self.shares.bound(self.pool.capacity, limits.namespace_floor)
        self.pin_quota = int(limits.pin_quota * self.pool.capacity)

    def resize(self, size: int) -> int:
        """Make the pool smaller, by `shrinking`, to the whole extents in `size` bytes; return how many bytes that is.

        Raises BadArgument where that is none, or more than there is.
        """
        self.wanted = maintenance.smaller(self.pool, size)
        self._journal(Resized(self.wanted))
        return self.wanted

    def shrinking(self, now: float) -> Steps[int | None]:
        """Give up one extent on the way to the size that was asked for; return its number, whose memory may go now.

        None where the size is reached, or all extents are being read or written: try again later.
        """
        return maintenance.shrinking(self, now)

    def shrink(self, now: float) -> int | None:
        """Do all of `shrinking` at once."""
        return finish(self.shrinking(now))

    def retire(self, extent: int) -> None:
        """Give up an idle extent."""
        self._journal(ExtentRetired(extent))
        self.pool.retire(extent)
        self.bound(self.limits)

    def handle(self, session: int, request: m.Request, now: float) -> m.Reply | None:
        """Answer one request of an open session; Release has no answer.

        Raises a ClientError that says what is wrong with the request; the state is then unchanged.
        """
        reply = self.begin(session, request, now)
        return finish(reply) if isinstance(reply, Generator) else reply

    def begin(self, session: int, request: m.Request, now: float) -> m.Reply | None | Steps[m.Reply | None]:
        """As `handle`, but take one slice: where that is not all of it, return what is left to do.

        Whoever gets it goes on with it to the end, also where the session ends in between.
        """
        return self._handlers[type(request)](self.sessions[session], request, now)  # type: ignore[no-any-return]

    # Sessions.

    def open_session(self, engine: str, label: str, now: float, user: int = NOBODY, is_operator: bool = False) -> int:
        """Return the number of a new session of `engine`, run by `user`. Raises BadArgument, NotPermitted at a limit.

        For who runs the daemon there are a few places more: `status` must get in where all others are taken.
        """
        if not 1 <= len(engine) <= MAX_NAME or len(label) > MAX_NAME:
            raise BadArgument(f"engine id of {len(engine)}, label of {len(label)} characters: 1 and 0 to {MAX_NAME}")
        limits, there = self.limits, len(self.sessions) + len(self.absent)
        if there >= limits.max_sessions + (OPERATORS if is_operator else 0):
            raise NotPermitted(f"{there} sessions are open: max_sessions is {limits.max_sessions}")
        own = self.users.sessions[user]
        if own >= limits.user_sessions and user != NOBODY and not is_operator:
            raise NotPermitted(f"uid {user} has {own} sessions: max_user_sessions is {limits.user_sessions}")
        self.last_session += 1
        return self._enter(self.last_session, self.engine(engine), label, now, user)

    def resume_session(self, session: int, label: str, now: float, user: int = NOBODY) -> None:
        """Let an absent session go on, without its leases yet. Raises UnknownHandle where it is none."""
        engine = self.absent.pop(session, None)
        if engine is None:
            raise UnknownHandle(f"session {session} is none that could come back")
        engine.absent.discard(session)
        self._enter(session, engine, label, now, user)
        self.sessions[session].may_restate = True
        self.counters["sessions_resumed"] += 1

    def _enter(self, number: int, engine: Engine, label: str, now: float, user: int) -> int:
        session = Session(number, engine, label, now, user)
        self.users.add(number, user)
        self.sessions[number] = engine.sessions[number] = session
        return number

    def engine(self, name: str) -> Engine:
        """Return the engine with that id, new where there is none."""
        if name not in self.engines:
            self.last_engine += 1
            self.engines[name] = Engine(self.last_engine, name)
            self._journal(EngineMade(self.last_engine, name))
        return self.engines[name]

    def leave_session(self, session: int) -> None:
        """End the session's leases: its door has closed. What it may be writing stays its own, for it may live."""
        left = self.sessions.pop(session)
        engine = left.engine
        del engine.sessions[session]
        for lease in list(left.leases):
            self._end_lease(left, lease)
        for namespace, _ in left.attached.values():
            engine.note_writers(namespace)
        self.awaited.discard(session)
        self.absent[session] = engine
        engine.absent.add(session)

    def end_session(self, session: int, now: float) -> None:
        """End all that the session held, for its process is gone: what it might be writing goes into quarantine."""
        if session in self.sessions:
            self.leave_session(session)
        engine = self.absent.pop(session)
        engine.absent.discard(session)
        self.awaited.discard(session)
        self.users.drop(session)
        self.writing.disband(session)
        self._journal(SessionEnded(session))
        self.chores.do(self._end(engine, session, now))

    def _end(self, engine: Engine, session: int, now: float) -> Steps[None]:
        yield from self.misses.throughout(self.writing.writer_gone(engine, session, now), now, engine.name, 0)
        self.prune()

    def abandon(self, session: int, reservation: int, now: float) -> None:
        """Give back what was granted and what its session could not be told of."""
        engine = self.sessions[session].engine
        self.chores.do(
            self.misses.throughout(self.writing.abandon(engine.reservations[reservation]), now, engine.name, 0)
        )

    def prune(self) -> None:
        """Drop engines and namespaces that nobody is in and that hold nothing."""
        for account in self.shares.prune():
            del self.engines[account.engine].accounts[(account.group.namespace, account.group.number)]
        for engine in list(self.engines.values()):
            if not (engine.sessions or engine.absent or engine.accounts) and engine.pins.settled:
                del self.engines[engine.name]
                self._journal(EngineForgotten(engine.number))
        used = {account.group.namespace for account in self.shares.accounts}
        for session in self.sessions.values():
            used.update(session.attached)
        for namespace in [each for number, each in self.namespaces.items() if number not in used]:
            del self.namespaces[namespace.number], self.by_id[namespace.id]
            namespace.forget()
            for engine in self.engines.values():
                engine.writers.pop(namespace.number, None)
            self._journal(NamespaceForgotten(namespace.number))

    def tick(self, now: float) -> None:
        """Free the slots whose quarantine is over, and count what was released. Call it a few times a second."""
        if self.room.frozen and (not self.awaited or now >= self.grace_until):
            self.room.frozen = False
        if not self._freeing:
            self.chores.do(self._free(now))
        pay_all(engine.pins for engine in self.engines.values())
        self.room.ages.tick(self.pool.generation, now)
        self.traffic.tick(now)

    def _free(self, now: float) -> Steps[None]:
        self._freeing = True
        try:
            yield from self.writing.tick(now)
        finally:
            self._freeing = False

    def await_sessions(self, sessions: dict[int, Engine], users: Mapping[int, int], now: float) -> None:
        """Evict nothing until `sessions`, of the last life, have restated what they hold, or the grace is over.

        `users` says whose each of them is.
        """
        self.absent.update(sessions)
        for number, engine in sessions.items():
            engine.absent.add(number)
            self.users.add(number, users[number])
        self.awaited = set(sessions)
        self.room.frozen = bool(sessions)
        self.grace_until = now + self.limits.grace

    def _restate(self, session: Session, request: m.Restate, now: float) -> m.Restated | Steps[m.Restated]:
        return begin(self.misses.throughout(restate(self, session, request, now), now, session.engine.name, 0))

    def _fence(self, session: Session, request: m.Fence, now: float) -> m.Fenced:
        return m.Fenced(request.id, self.fence_off(request.session, now))

    def fence_off(self, session: int, now: float) -> int:
        """Give a session up that holds slots and never comes back: an operator says that it writes no more.

        Returns how many reservations ended. Raises ClientError where the session is not away.
        """
        if session not in self.absent:
            there = "it is attached: end its process" if session in self.sessions else "there is none"
            raise ClientError(f"session {session} cannot be fenced off: {there}")
        held = sum(session in reservation.writers for reservation in self.absent[session].reservations.values())
        self.end_session(session, now)
        self.counters["sessions_fenced"] += 1
        return held

    def _attach(self, session: Session, request: m.Attach, now: float) -> m.Attached:
        spec, shards = request.spec, request.shards
        if len(set(shards)) != len(shards) or any(not 0 <= shard < spec.shards for shard in shards):
            raise BadArgument(f"shards {shards}: distinct numbers from 0 to {spec.shards - 1}")
        if not 0 <= request.ceiling_bytes < 1 << 62:
            raise BadArgument(f"ceiling_bytes {request.ceiling_bytes}: 0 to {1 << 62}")
        namespace = self.by_id.get(spec.id)
        if len(session.attached) >= MAX_ATTACHED and (namespace is None or namespace.number not in session.attached):
            raise NotPermitted(f"this session has attached {MAX_ATTACHED} namespaces: detach one first")
        if namespace is None:
            if len(self.namespaces) >= self.limits.max_namespaces:
                raise NotPermitted(f"{len(self.namespaces)} namespaces: max_namespaces is {self.limits.max_namespaces}")
            own, most = sum(each.user == session.user for each in self.namespaces.values()), self.limits.user_namespaces
            if own >= most and session.user != NOBODY:
                raise NotPermitted(f"uid {session.user} has made {own} namespaces: max_user_namespaces is {most}")
            for each in spec.groups:
                self.pool.check_size(slot_size(each.block_bytes))
            namespace = Namespace(self.last_namespace + 1, spec, self.pool.capacity, self.draw, session.user)
            self._journal(NamespaceMade(namespace.number, spec))
            self.add_namespace(namespace)
        else:
            namespace.spec.check_same_geometry(spec)
            session.engine.check_writers(session, namespace, shards)
        engine = session.engine
        session.attached[namespace.number] = (namespace, tuple(shards))
        for group in namespace.groups:
            account = self.account(engine, group)
            account.ceiling = request.ceiling_bytes or account.ceiling
        engine.note_writers(namespace)
        return m.Attached(request.id, namespace.number)

    def _detach(self, session: Session, request: m.Detach, now: float) -> None:
        left = session.attached.pop(request.namespace, None)
        if left is None:
            self.counters["detaches_unknown"] += 1
            return
        session.engine.note_writers(left[0])
        self.prune()

    def add_namespace(self, namespace: Namespace) -> None:
        self.last_namespace = max(self.last_namespace, namespace.number)
        namespace.fit = fit(namespace.spec, self.geometry)
        self.namespaces[namespace.number] = self.by_id[namespace.id] = namespace
        if self.watcher is not None:
            self.watcher.made(namespace)
        self.misses.know(namespace.number, namespace.spec)

    def account(self, engine: Engine, group: Group) -> Account:
        """Return what the engine stored in the group, joined to the shares."""
        key = (group.namespace, group.number)
        if key not in engine.accounts:
            engine.accounts[key] = Account(engine.name, group)
            self.shares.join(engine.accounts[key])
        return engine.accounts[key]

    # Reading.

    def _acquire(self, session: Session, request: m.Acquire, now: float) -> m.Acquired | Steps[m.Acquired]:
        namespace, group = session.group(request.namespace, request.group)
        hashes = request.hashes
        if len(hashes) > LOOK:
            return begin(self._acquire_long(session, request, namespace, group))
        return self._give(session, request, namespace, group, group.prefix(hashes))

    def _acquire_long(
        self, session: Session, request: m.Acquire, namespace: Namespace, group: Group
    ) -> Steps[m.Acquired]:
        found = yield from long_prefix(self, session, group, request.hashes)
        return self._give(session, request, namespace, group, found)

    def _give(
        self, session: Session, request: m.Acquire, namespace: Namespace, group: Group, found: list[Block]
    ) -> m.Acquired:
        hashes = request.hashes
        hits = len(found)
        if hits < len(hashes):
            missed = hashes[hits:]
            if len(hashes) <= LOOK:  # else they are checked
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
            if len(session.leases) >= self.limits.max_leases:
                self.refusals["leases"] += hits
                return m.Acquired(request.id, 0, 0, 0, b"", hits)
            size, cover = hits * group.slot_bytes, 0
            if engine.pins.bytes + size > self.pin_quota:
                affordable, size, cover = engine.pins.fit(found, self.pin_quota)
                withheld = hits - affordable
                if withheld:
                    self.refusals["quota"] += withheld
                    hits, pending = affordable, 0
                if not hits:
                    return m.Acquired(request.id, 0, 0, 0, b"", withheld)
            self.last_lease = lease = self.last_lease + 1
            self.pin(session, lease, found[hits - 1], size, cover)
        if hits < len(found):
            del found[hits:]
        self.pool.read(found[-1])
        found[-1].account.hit_bytes += hits * group.slot_bytes
        group.hit_blocks += hits
        self.counters["blocks_hit"] += hits
        slots = b"".join([block.ref for block in found])
        sums = self.sums.read(slots, group.sum_offsets) if request.verify and self.sums else b""
        return m.Acquired(request.id, lease, hits, pending, slots, withheld, sums)

    def _release(self, session: Session, request: m.Release, now: float) -> None:
        unknown = 0
        for lease in request.leases:
            if lease in session.leases:
                self._end_lease(session, lease)
            else:
                unknown += 1
        if unknown:
            self.counters["releases_unknown"] += unknown

    @staticmethod
    def pin(session: Session, number: int, block: Block, size: int, cover: int = 0) -> None:
        block.pins += 1
        session.leases[number] = lease = Lease(block, size, cover)
        session.engine.pins.add(number, lease)

    @staticmethod
    def _end_lease(session: Session, number: int) -> None:
        lease = session.leases.pop(number)
        session.engine.pins.drop(number, lease)
        lease.block.unpin()

    # Writing.

    def _reserve(self, session: Session, request: m.Reserve, now: float) -> m.Reserved | Steps[m.Reserved]:
        _, group = session.group(request.namespace, request.group)
        granting = self.writing.reserve(session, request, self.account(session.engine, group), now)
        return begin(self.misses.throughout(granting, now, session.engine.name, request.namespace))

    def _settle(self, session: Session, request: m.Settle, now: float) -> m.Settled | Steps[m.Settled]:
        return begin(
            self.misses.throughout(self.writing.settle(session, request, self.sums), now, session.engine.name, 0),
        )

    def _distrust(self, session: Session, request: m.Distrust, now: float) -> m.Distrusted | Steps[m.Distrusted]:
        return begin(self.misses.throughout(distrust(self, session, request), now, session.engine.name, 0))

    # Questions.

    def _remark(self, session: Session, request: m.Remark, now: float) -> None | Steps[None]:
        return begin(explanations.take(self, session, request, now))

    def _why(self, session: Session, request: m.Why, now: float) -> m.Explained | Steps[m.Explained]:
        return begin(explanations.answer_why(self, request, now))

    def _watch(self, session: Session, request: m.Watch, now: float) -> m.Watched:
        return self.traffic.since(request, now)

    def remember(self, session: int, request: m.Acquire, reply: m.Acquired, frame: bytes, now: float) -> None:
        """Note a lookup that was just answered, for who asks later. `frame` is the request as it came.

        After the answer has left: nobody waits for this.
        """
        explanations.remember(self, self.sessions[session], request, reply, frame, now)

    # Admin.

    def _tell(self, session: Session, request: m.Tell, now: float) -> None:
        session.tell(request.breaker, request.counts, self.told)

    @staticmethod
    def _ping(session: Session, request: m.Ping, now: float) -> m.Pong:
        return m.Pong(request.id)

    def _stats(self, session: Session, request: m.Stats, now: float) -> m.Report | Steps[m.Report]:
        return begin(self._reporting(request, now))

    def _reporting(self, request: m.Stats, now: float) -> Steps[m.Report]:
        return m.Report(request.id, (yield from report.stats(self, now)))

    def _clear(self, session: Session, request: m.Clear, now: float) -> m.Cleared | Steps[m.Cleared]:
        return begin(maintenance.clear_and_tell(self, session, request, now))

    def clearing(self, namespace: str, by: str, now: float) -> Steps[int]:
        """Forget what may be forgotten of the namespace with that id, or of all for ""; return how many blocks.

        What is stored meanwhile stays. Raises ClientError where there is none, Unavailable during the grace.
        """
        return maintenance.clearing(self, namespace, by, now)

    def clear(self, namespace: str, by: str, now: float) -> int:
        """Do all of `clearing` at once."""
        return finish(self.clearing(namespace, by, now))

    def reporting(self, now: float) -> Steps[dict[str, Any]]:
        """Return what `status` shows; see insight/stats.py."""
        return report.stats(self, now)

    def stats(self, now: float) -> dict[str, Any]:
        """Do all of `reporting` at once."""
        return finish(self.reporting(now))

    def check_integrity(self) -> None:
        """Raise AssertionError unless all that must always hold does. O(blocks): for tests, and for an idle daemon."""
        report.check_integrity(self)
