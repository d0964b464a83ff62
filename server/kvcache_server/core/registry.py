"""The registry of namespaces, engines and sessions: admission, disconnected sessions, and removal of unused entries.

Pure; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, ClientError, NotPermitted, UnknownHandle
from kvcache_proto.types import MAX_NAME
from kvcache_server.core.effects import NamespaceClosed, NamespaceOpened
from kvcache_server.core.eviction.policy import Eviction
from kvcache_server.core.index import Account, Group, Share
from kvcache_server.core.journal import EngineForgotten, EngineMade, NamespaceForgotten, NamespaceMade, SessionOpened
from kvcache_server.core.limits import STEP, Limits
from kvcache_server.core.pool import Pool
from kvcache_server.core.sessions import NOBODY, Engine, Namespace, Session
from kvcache_server.core.sweeper import Sweeper

MAX_ATTACHED = 16  # namespaces per session: an engine is in one, and after a reset also in the next one
OPERATORS = 16  # sessions beyond max_sessions that are reserved for operators


class Registry:
    """Attributes: `disconnected` are the sessions whose handshake connection has closed but whose process may live.
    `not_reclaimed` are sessions of the last epoch that have not reclaimed their leases. `leaving` has sessions as they
    were when their handshake connection closed, with leases that have not been reclaimed yet, and when these end.
    `ended` are sessions whose leases are being released.
    """

    def __init__(self, pool: Pool, eviction: Eviction, sweeper: Sweeper, limits: Limits) -> None:
        self.namespaces: dict[int, Namespace] = {}
        self.by_id: dict[str, Namespace] = {}
        self.engines: dict[str, Engine] = {}
        self.sessions: dict[int, Session] = {}
        self.disconnected: dict[int, Session] = {}
        self.not_reclaimed: set[int] = set()
        self.leaving: dict[int, tuple[float, Session]] = {}
        self.ended: list[Session] = []
        self.last_namespace = self.last_engine = self.last_session = 0
        self.limits = limits
        self._pool, self._eviction, self._fair_share = pool, eviction, eviction.fair_share
        self._sweeper, self._effects, self._counters = sweeper, sweeper.effects, sweeper.effects.counters

    # Sessions.

    def open(self, engine: str, label: str, now: float, user: int = NOBODY, is_operator: bool = False) -> int:
        """Return the number of a new session of `engine`, run by `user`. Raises BadArgument, NotPermitted at a limit.

        Operators have some extra sessions, so that `status` works when all regular ones are taken.
        """
        if not 1 <= len(engine) <= MAX_NAME or len(label) > MAX_NAME:
            raise BadArgument(
                f"engine id of {len(engine)}, label of {len(label)} characters: must have 1 and 0 to {MAX_NAME}"
            )
        limits, there = self.limits, len(self.sessions) + len(self.disconnected)
        if there >= limits.max_sessions + (OPERATORS if is_operator else 0):
            raise NotPermitted(f"{there} sessions are open: max_sessions is {limits.max_sessions}")
        own = sum(each.user == user for each in (*self.sessions.values(), *self.disconnected.values()))
        if own >= limits.user_sessions and user != NOBODY and not is_operator:
            raise NotPermitted(f"uid {user} has {own} sessions: max_user_sessions is {limits.user_sessions}")
        self.last_session += 1
        self._enter(Session(self.last_session, self.engine(engine), label, now, user, is_operator))
        return self.last_session

    def resume(self, number: int, label: str, now: float, user: int = NOBODY) -> None:
        """Resume a disconnected session, which may reclaim its leases. Raises UnknownHandle if it has ended."""
        former = self.disconnected.pop(number, None)
        if former is None:
            raise UnknownHandle(f"session {number} cannot be resumed: it has ended")
        former.engine.disconnected.discard(number)
        if number in self.leaving:
            self.leaving[number] = now + self.limits.grace, self.leaving.pop(number)[1]
        self._enter(Session(number, former.engine, label, now, user, may_reclaim=True))
        self._counters["sessions_resumed"] += 1

    def _enter(self, session: Session) -> None:
        self.sessions[session.id] = session.engine.sessions[session.id] = session

    def disconnect(self, number: int, now: float) -> None:
        """Note that the handshake connection of a session has closed. Its process may still live, write and read.

        So it keeps its reservations, and for the grace period its leases, which it may reclaim.
        """
        session = self.sessions.pop(number)
        engine = session.engine
        del engine.sessions[number]
        if number in self.leaving:  # it has not reclaimed those that it had before
            self.end_leases_of(session)
        elif session.leases:
            self.leaving[number] = now + self.limits.grace, session
        for namespace, _ in session.attached.values():
            self._note_members(engine, namespace)
        session.attached.clear()  # it may outlive the namespaces
        self._note_disconnected(session)
        if not session.may_reclaim:
            self.not_reclaimed.discard(number)

    def holders(self) -> list[Session]:
        """Return the sessions that may have leases."""
        return [*self.sessions.values(), *(session for _, session in self.leaving.values()), *self.ended]

    def take_former(self, number: int) -> Session | None:
        """Remove and return a session as it was when its handshake connection closed, if it has leases that were not
        reclaimed; else None."""
        return self.leaving.pop(number)[1] if number in self.leaving else None

    def end_leases_of(self, session: Session | None) -> None:
        """End the leases of a session that has ended, or has reclaimed them."""
        if session is not None and session.leases:
            self.ended.append(session)
            self._sweeper.add(self._end_some_leases)

    def _end_some_leases(self) -> bool:
        if self.ended:
            session = self.ended[-1]
            for number in list(islice(session.leases, 4 * STEP)):
                session.unpin(number)
            if not session.leases:
                self.ended.pop()
        return bool(self.ended)

    def tick(self, now: float) -> None:
        """End leases of sessions whose handshake connection closed too long ago."""
        for number, (until, _) in list(self.leaving.items()):
            if now < until:
                break
            self.end_leases_of(self.take_former(number))

    def _note_disconnected(self, session: Session) -> None:
        self.disconnected[session.id] = session
        session.engine.disconnected.add(session.id)

    def forget(self, number: int) -> Engine:
        """Remove a session whose process is gone, and return its engine."""
        if number in self.sessions:
            self.disconnect(number, 0.0)
        self.end_leases_of(self.take_former(number))
        engine = self.disconnected.pop(number).engine
        self._eviction.due.end_if(lambda each: each.session.id == number)
        engine.disconnected.discard(number)
        self.not_reclaimed.discard(number)
        return engine

    def expect(self, sessions: Iterable[SessionOpened], now: float) -> None:
        """Add `sessions` of the last epoch, which may come back, as disconnected."""
        for each in sessions:
            self._note_disconnected(Session(each.number, self.engine(each.engine), each.label, now, each.user))
        self.not_reclaimed = set(self.disconnected)

    # Engines and namespaces.

    def engine(self, name: str) -> Engine:
        """Return the engine with that id; create it if needed."""
        if name not in self.engines:
            self.last_engine += 1
            self.engines[name] = Engine(self.last_engine, name)
            self._effects.records.append(EngineMade(self.last_engine, name))
        return self.engines[name]

    def account(self, engine: Engine, group: Group) -> Account:
        """Return the engine's account in the group; create it if needed."""
        key = (group.namespace, group.number)
        account = engine.accounts.get(key)
        if account is None:
            share = engine.shares.get(group.namespace)
            if share is None:
                share = engine.shares[group.namespace] = Share(engine.name, group.namespace)
            account = engine.accounts[key] = Account(share, group)
            self._fair_share.join(account)
        return account

    def attach(self, session: Session, request: m.Attach) -> m.Attached:
        """Attach the session to a namespace, which is created if needed. Raises BadArgument, NotPermitted."""
        spec, shards = request.spec, request.shards
        if len(set(shards)) != len(shards) or any(not 0 <= shard < spec.shards for shard in shards):
            raise BadArgument(f"shards {shards}: must be distinct, 0 to {spec.shards - 1}")
        if not 0 <= request.ceiling_bytes < 1 << 62:
            raise BadArgument(f"ceiling_bytes {request.ceiling_bytes}: must be 0 to {1 << 62}")
        namespace = self.by_id.get(spec.id)
        if len(session.attached) >= MAX_ATTACHED and (namespace is None or namespace.number not in session.attached):
            raise NotPermitted(f"this session has attached {MAX_ATTACHED} namespaces: detach one first")
        if namespace is None:
            namespace = self._make_namespace(session, request)
        else:
            namespace.spec.check_same_geometry(spec)
            session.engine.check_writers(session, namespace, shards)
        engine = session.engine
        session.attached[namespace.number] = (namespace, tuple(shards))
        for group in namespace.groups:
            share = self.account(engine, group).share
        share.ceiling = request.ceiling_bytes or share.ceiling
        self._note_members(engine, namespace, request.reports_leaving)
        return m.Attached(request.id, namespace.number)

    def _make_namespace(self, session: Session, request: m.Attach) -> Namespace:
        spec, limits = request.spec, self.limits
        if len(self.namespaces) >= limits.max_namespaces:
            raise NotPermitted(f"{len(self.namespaces)} namespaces: max_namespaces is {limits.max_namespaces}")
        own = sum(each.user == session.user for each in self.namespaces.values())
        if own >= limits.user_namespaces and session.user != NOBODY:
            most = limits.user_namespaces
            raise NotPermitted(f"uid {session.user} has made {own} namespaces: max_user_namespaces is {most}")
        size, capacity = max(each.block_bytes for each in spec.groups), self._pool.capacity
        if size > capacity:
            raise BadArgument(
                f"a block of {size} bytes does not fit into a region of {capacity} bytes: "
                "start the daemon with a larger size"
            )
        namespace = Namespace(self.last_namespace + 1, spec, self._pool.geometry.page_bytes, session.user)
        self._effects.records.append(NamespaceMade(namespace.number, spec))
        self.add_namespace(namespace)
        self._effects.changes.append(NamespaceOpened(namespace))
        return namespace

    def find(self, id_: str) -> Namespace:
        """Return the namespace with that id. Raises ClientError."""
        if id_ not in self.by_id:
            raise ClientError(f"no namespace {id_!r}; there are: {', '.join(self.by_id) or 'none'}")
        return self.by_id[id_]

    def add_namespace(self, namespace: Namespace) -> None:
        self.last_namespace = max(self.last_namespace, namespace.number)
        self.namespaces[namespace.number] = self.by_id[namespace.id] = namespace

    def detach(self, session: Session, request: m.Detach) -> None:
        left = session.attached.pop(request.namespace, None)
        if left is None:
            self._counters["detaches_unknown"] += 1
            return
        self._note_members(session.engine, left[0])
        self._eviction.due.end_if(
            lambda each: (each.session.id, each.group.namespace) == (session.id, request.namespace)
        )
        self.prune()

    def _note_members(self, engine: Engine, namespace: Namespace, reports: bool = False) -> None:
        """Note that a session of the engine has attached or detached."""
        engine.note_writers(namespace)
        if (share := engine.shares.get(namespace.number)) is not None:
            self._eviction.holders.update(share, reports)

    def abandoned(self) -> list[Namespace]:
        """Return the namespaces that no client can attach again.

        A member whose handshake connection has closed may come back and attach again, as long as its process lives.
        """
        found = [each for each in self.namespaces.values() if each.spec.ephemeral]
        if not found:
            return found
        kept = {number for session in self.sessions.values() for number in session.attached}
        for engine in self.engines.values():
            if engine.disconnected:
                kept.update(engine.shares)
        return [each for each in found if each.number not in kept]

    def prune(self) -> bool:
        """Remove engines and namespaces without sessions and blocks. As a step of the sweeper, it leaves nothing."""
        records = self._effects.records
        gone = self._fair_share.prune()
        if gone:
            self._eviction.forget_accounts(gone)
        for account in gone:
            engine, group = self.engines[account.engine], account.group
            del engine.accounts[(group.namespace, group.number)]
            engine.shares.pop(group.namespace, None)
        for engine in list(self.engines.values()):
            if not (engine.sessions or engine.disconnected or engine.accounts) and engine.pins.settled:
                del self.engines[engine.name]
                records.append(EngineForgotten(engine.number))
        used = {account.group.namespace for account in self._fair_share.accounts}
        for session in self.sessions.values():
            used.update(session.attached)
        for namespace in [each for number, each in self.namespaces.items() if number not in used]:
            del self.namespaces[namespace.number], self.by_id[namespace.id]
            for group in namespace.groups:
                self._eviction.forget(group)
            namespace.forget()
            for engine in self.engines.values():
                engine.writers.pop(namespace.number, None)
            records.append(NamespaceForgotten(namespace.number))
            self._effects.changes.append(NamespaceClosed(namespace))
        return False
