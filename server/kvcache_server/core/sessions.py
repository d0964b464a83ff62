"""The state of a namespace, of an engine, and of a session. Pure; registry.py has the lists of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from kvcache_proto.errors import BadArgument, NotPermitted, UnknownHandle
from kvcache_proto.types import FULL, SUFFIX, NamespaceSpec
from kvcache_server.core.index import Account, Block, Group, Reservation, Share
from kvcache_server.core.pins import Lease, Pins

REMEMBERED = 1024  # requests per engine whose lookups are remembered
NOBODY = -1  # the uid of sessions without a process, and of those that an older daemon stored without a uid


class Namespace:
    __slots__ = ("groups", "hit_blocks", "id", "lookups", "number", "requested_blocks", "shards", "spec", "user")

    def __init__(self, number: int, spec: NamespaceSpec, page_bytes: int, user: int = NOBODY) -> None:
        self.number = number
        self.user = user  # the creator's uid; NOBODY for namespaces of an earlier daemon
        self.spec = spec
        self.id, self.shards = spec.id, spec.shards
        self.groups: list[Group] = []
        for at, each in enumerate(spec.groups):
            above = self.groups[0] if at and each.kind == SUFFIX and spec.groups[0].kind == FULL else None
            self.groups.append(Group(number, at, each, spec.hash_bytes, page_bytes, above))
        first = self.groups[0]
        first.suffixes = [group for group in self.groups if group.spec.kind == SUFFIX]
        first.leaf_is_useless = any(suffix.is_suffix and not suffix.spec.chunk_blocks for suffix in first.suffixes)
        self.lookups = self.requested_blocks = self.hit_blocks = 0

    @property
    def overhead(self) -> float:
        """The fraction of a block's pages that is unused, in the group that fits worst."""
        return max(1 - group.spec.block_bytes / group.allocated_bytes for group in self.groups)

    def group(self, number: int) -> Group:
        """Return the group with this number. Raises BadArgument."""
        if not 0 <= number < len(self.groups):
            raise BadArgument(f"group {number}: this namespace has {len(self.groups)}")
        return self.groups[number]

    def forget(self) -> None:
        """Drop references that form cycles. The namespace is not used again."""
        for group in self.groups:
            group.forget()


class RequestLookups(msgspec.Struct, gc=False):
    """The lookups of one engine's request in one group: lookups, distinct blocks, and hits."""

    lookups: int = 0
    blocks: int = 0
    hits: int = 0


@dataclass(eq=False, slots=True)
class Engine:
    """The sessions with one engine id, and their common state."""

    number: int
    name: str
    disconnected: set[int] = field(default_factory=set)  # its sessions whose handshake connection has closed
    sessions: dict[int, Session] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    accounts: dict[tuple[int, int], Account] = field(default_factory=dict)  # by namespace and group
    shares: dict[int, Share] = field(default_factory=dict)  # by namespace
    # By namespace; None if a shard has no writer.
    writers: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)
    is_tier: bool = False  # it fetches blocks that lookups requested: they are stored regardless of their worth
    writing: int = 0  # bytes of blocks that are unsettled in its reservations
    # Of the last requests, by request and group's tag.
    _lookups: OrderedDict[tuple[str, bytes], RequestLookups] = field(default_factory=OrderedDict)

    def lookups_of(self, request: str, group: Group) -> RequestLookups:
        """Return the record of the earlier lookups of `request` in `group`, which the caller updates.

        An engine repeats the lookup of a request that waits or was preempted. Each lookup without a request's name
        counts as a request of its own.
        """
        if not request:
            return RequestLookups()
        key, lookups = (request, group.tag), self._lookups
        found = lookups.get(key)
        if found is None:
            lookups[key] = found = RequestLookups()
            if len(lookups) > REMEMBERED:
                lookups.popitem(last=False)
        return found

    def check_writers(self, joining: Session, namespace: Namespace, shards: Collection[int]) -> None:
        """Raise NotPermitted if two sessions would write the same shard once `joining` writes `shards`.

        Sessions that write all shards are each their own writer. If one session writes fewer, or none, as a scheduler
        does, each shard must have one writer: ranks of two engines with the same id would get each other's
        reservations.
        """
        whole, writers = len(shards) == namespace.shards, dict.fromkeys(shards, joining)
        rivals: tuple[int, Session, Session] | None = None
        for session in self.sessions.values():
            attached = session.attached.get(namespace.number)
            if attached is None or session is joining:
                continue
            whole = whole and len(attached[1]) == namespace.shards
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
        """Update the writer of each shard after a session has attached or detached."""
        writers: dict[int, int] = {}
        attached = [session for session in self.sessions.values() if namespace.number in session.attached]
        for session in attached:
            writers.update(dict.fromkeys(session.attached[namespace.number][1], session.id))
        if namespace.number in self.shares:
            self.shares[namespace.number].live = bool(attached)
        shards = range(namespace.shards)
        whole = len(writers) == len(shards)
        self.writers[namespace.number] = tuple(writers[shard] for shard in shards) if whole else None


@dataclass(eq=False, slots=True)
class Session:
    id: int
    engine: Engine
    label: str
    opened: float
    user: int = NOBODY
    is_operator: bool = False
    may_reclaim: bool = False  # it has resumed, and not reclaimed its leases yet
    attached: dict[int, tuple[Namespace, tuple[int, ...]]] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)

    @property
    def connected(self) -> bool:
        """Whether its handshake connection is open. A resumed session is a new object."""
        return self.engine.sessions.get(self.id) is self

    @property
    def title(self) -> str:
        return f"session {self.id}" + (f" ({self.label})" if self.label else "")

    def pin(self, number: int, block: Block | None, size: int, cover: int = 0, suffixes: Sequence[Block] = ()) -> None:
        """Start a lease on `block`, its ancestors, and the blocks of suffix groups; see Lease for the other
        arguments."""
        self.leases[number] = self.engine.pins.hold(block, size, cover, suffixes)

    def unpin(self, number: int) -> None:
        self.engine.pins.release(self.leases.pop(number))

    def group(self, number: int, group: int) -> tuple[Namespace, Group]:
        """Return an attached namespace and one of its groups. Raises UnknownHandle, BadArgument."""
        attached = self.attached.get(number)
        if attached is None:
            raise UnknownHandle(f"namespace {number}: this session has not attached it")
        return attached[0], attached[0].group(group)
