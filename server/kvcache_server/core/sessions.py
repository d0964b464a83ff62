"""Namespaces, engines and sessions, and the state of each. Pure; registry.py has the lists of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from kvcache_proto.errors import BadArgument, NotPermitted, UnknownHandle
from kvcache_proto.types import FULL, SUFFIX, NamespaceSpec
from kvcache_server.core.index import Account, Block, Group, Reservation, Share
from kvcache_server.core.pins import Lease, Pins

REMEMBERED = 1024  # requests per engine whose lookups were counted
NOBODY = -1  # the user of sessions without a process, and of those that an older daemon stored without a user


class Namespace:
    __slots__ = ("groups", "hit_blocks", "id", "lookups", "number", "requested_blocks", "shards", "spec", "user")

    def __init__(self, number: int, spec: NamespaceSpec, page_bytes: int, user: int = NOBODY) -> None:
        self.number = number
        self.user = user  # the creator; unknown for those of an earlier daemon
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
        """The fraction of their pages that blocks of the group with the worst fit leave unused."""
        return max(1 - group.spec.block_bytes / group.allocated_bytes for group in self.groups)

    def group(self, number: int) -> Group:
        """Return one of its groups. Raises BadArgument."""
        if not 0 <= number < len(self.groups):
            raise BadArgument(f"group {number}: this namespace has {len(self.groups)}")
        return self.groups[number]

    def forget(self) -> None:
        """Drop references that form cycles. The namespace is not used again."""
        for group in self.groups:
            group.forget()


class Asked(msgspec.Struct, gc=False):
    """The lookups of one request of an engine in a group: their number, their blocks, and how many of these were found.
    Lookups of the same blocks count once."""

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
    brings: bool = False  # whether it brings blocks that lookups asked for: stored regardless of their worth
    writing: int = 0  # bytes of blocks that are unsettled in its reservations
    # By request and group's tag, the last ones.
    _asked: OrderedDict[tuple[str, bytes], Asked] = field(default_factory=OrderedDict)

    def asked(self, request: str, group: Group) -> Asked:
        """Return the earlier lookups of `request` in `group`, as far as remembered; the caller keeps the record up to
        date.

        An engine asks again for a request that waits, or that it has preempted. Lookups without a request's name are
        each a request of their own.
        """
        if not request:
            return Asked()
        key, asked = (request, group.tag), self._asked
        found = asked.get(key)
        if found is None:
            asked[key] = found = Asked()
            if len(asked) > REMEMBERED:
                asked.popitem(last=False)
        return found

    def check_writers(self, joining: Session, namespace: Namespace, shards: Collection[int]) -> None:
        """Raise NotPermitted if two sessions would write one shard once `joining` writes `shards`.

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
        inside = [session for session in self.sessions.values() if namespace.number in session.attached]
        for session in inside:
            writers.update(dict.fromkeys(session.attached[namespace.number][1], session.id))
        if namespace.number in self.shares:
            self.shares[namespace.number].live = bool(inside)
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
    may_reclaim: bool = False  # it has resumed, and has not reclaimed its leases
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
        """Start a lease on `block`, and so on all above it, and on the blocks of suffix groups; see Lease for the
        rest."""
        self.leases[number] = self.engine.pins.hold(block, size, cover, suffixes)

    def unpin(self, number: int) -> None:
        self.engine.pins.release(self.leases.pop(number))

    def group(self, number: int, group: int) -> tuple[Namespace, Group]:
        """Return an attached namespace and one of its groups. Raises UnknownHandle, BadArgument."""
        attached = self.attached.get(number)
        if attached is None:
            raise UnknownHandle(f"namespace {number}: this session has not attached it")
        return attached[0], attached[0].group(group)
