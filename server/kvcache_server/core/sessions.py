"""Namespaces, engines and sessions, and what each of them holds. Pure; registry.py has the lists of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvcache_proto.errors import BadArgument, NotPermitted, UnknownHandle
from kvcache_proto.types import NamespaceSpec
from kvcache_server.core.extent_sizing import Fit
from kvcache_server.core.index import KINDS, Account, Block, Group, Reservation
from kvcache_server.core.pins import Lease, Pins

NOBODY = -1  # the user of sessions without a process, and of those that an older daemon stored without a user


class Namespace:
    __slots__ = ("fit", "groups", "id", "lookups", "noted", "number", "requested_blocks", "spec", "user")

    def __init__(self, number: int, spec: NamespaceSpec, user: int = NOBODY) -> None:
        self.number = number
        self.user = user  # who created it; unknown for those of an earlier daemon
        self.spec = spec
        self.id = spec.id
        self.groups = [KINDS[each.kind](number, at, each, spec.hash_bytes) for at, each in enumerate(spec.groups)]
        self.lookups = self.requested_blocks = 0
        self.fit = Fit(0, 0.0)
        self.noted = False  # whether its fit has been logged

    def forget(self) -> None:
        """Drop references that form cycles. The namespace is not used again."""
        for group in self.groups:
            group.forget()


class Engine:
    """The sessions with one engine id, and what they hold together."""

    __slots__ = ("accounts", "disconnected", "name", "number", "pins", "reservations", "sessions", "writers", "writing")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.disconnected: set[int] = set()  # its sessions whose door has closed
        self.sessions: dict[int, Session] = {}
        self.reservations: dict[int, Reservation] = {}
        self.accounts: dict[tuple[int, int], Account] = {}
        self.writers: dict[int, tuple[int, ...] | None] = {}  # by namespace; None if a shard has no writer
        self.pins = Pins()
        self.writing = 0  # bytes of slots that are unsettled in its reservations

    def check_writers(self, joining: Session, namespace: Namespace, shards: Collection[int]) -> None:
        """Raise NotPermitted if two sessions would write one shard once `joining` writes `shards`.

        Sessions that write all shards are each their own writer. If one session writes fewer, or none, as a scheduler
        does, each shard must have one writer: ranks of two engines with the same id would get each other's
        reservations.
        """
        whole, writers = len(shards) == namespace.spec.shards, dict.fromkeys(shards, joining)
        rivals: tuple[int, Session, Session] | None = None
        for session in self.sessions.values():
            attached = session.attached.get(namespace.number)
            if attached is None or session is joining:
                continue
            whole = whole and len(attached[1]) == namespace.spec.shards
            for shard in attached[1]:
                if writers.setdefault(shard, session) is not session:
                    rivals = rivals or (shard, writers[shard], session)
        if rivals is not None and not whole:
            shard, first, second = rivals
            raise NotPermitted(
                f"shard {shard} of namespace {namespace.id} has two writers, {first.title} and {second.title}, "
                f"with the same engine id, {self.name!r}: give each engine its own id"
            )

    def note_writers(self, namespace: Namespace) -> None:
        """Update which session writes which shard, after a session has attached or detached."""
        writers: dict[int, int] = {}
        inside = [session for session in self.sessions.values() if namespace.number in session.attached]
        for session in inside:
            writers.update(dict.fromkeys(session.attached[namespace.number][1], session.id))
        for account in self.accounts.values():
            if account.group.namespace == namespace.number:
                account.live = bool(inside)
        shards = range(namespace.spec.shards)
        whole = len(writers) == len(shards)
        self.writers[namespace.number] = tuple(writers[shard] for shard in shards) if whole else None


class Users:
    """The number of sessions per user, connected or disconnected."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self.sessions: Counter[int] = Counter()

    def add(self, session: int, user: int) -> None:
        """Assign `session` to `user`."""
        self.drop(session)
        self._of[session] = user
        self.sessions[user] += 1

    def drop(self, session: int) -> None:
        user = self._of.pop(session, None)
        if user is not None:
            self.sessions[user] -= 1
            if not self.sessions[user]:
                del self.sessions[user]


class Session:
    __slots__ = ("attached", "engine", "id", "is_operator", "label", "leases", "may_restate", "opened", "user")

    def __init__(
        self, number: int, engine: Engine, label: str, opened: float, user: int = NOBODY, is_operator: bool = False
    ) -> None:
        self.id = number
        self.user = user
        self.is_operator = is_operator
        self.engine = engine
        self.label = label
        self.opened = opened
        self.may_restate = False  # it has resumed, and has not restated what it holds
        self.attached: dict[int, tuple[Namespace, tuple[int, ...]]] = {}
        self.leases: dict[int, Lease] = {}

    @property
    def connected(self) -> bool:
        """Whether its door is open. A resumed session is a new object."""
        return self.engine.sessions.get(self.id) is self

    @property
    def title(self) -> str:
        return f"session {self.id}" + (f" ({self.label})" if self.label else "")

    def check_connected(self) -> None:
        """Raise UnknownHandle if it has left."""
        if not self.connected:
            raise UnknownHandle(f"session {self.id} has left")

    def pin(self, number: int, block: Block, size: int, cover: int = 0) -> None:
        """Start a lease on `block`, and so on all above it; see Lease for `size` and `cover`."""
        block.pins += 1
        self.leases[number] = lease = Lease(block, size, cover)
        self.engine.pins.add(number, lease)

    def unpin(self, number: int) -> None:
        """End a lease."""
        lease = self.leases.pop(number)
        self.engine.pins.drop(number, lease)
        lease.block.unpin()

    def group(self, number: int, group: int) -> tuple[Namespace, Group]:
        """Return an attached namespace and one of its groups. Raises UnknownHandle, BadArgument."""
        attached = self.attached.get(number)
        if attached is None:
            raise UnknownHandle(f"namespace {number}: this session has not attached it")
        groups = attached[0].groups
        if not 0 <= group < len(groups):
            raise BadArgument(f"group {group}: this namespace has {len(groups)}")
        return attached[0], groups[group]
