"""The core's reports about its work: to the state file, to insight and to KV events. Pure.

The core calls none of them. It appends to one outbox. The daemon delivers records before the next reply is sent: no
client learns of a change that the state file lacks. It delivers changes by the end of the loop's turn. A lookup with
full hits appends nothing.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from kvcache_server.core.index import Block
from kvcache_server.core.journal import Record
from kvcache_server.core.sessions import Namespace

CLEARED = "cleared"


class Actor(msgspec.Struct, gc=False, frozen=True):
    """On whose behalf the core works: an engine, or "" for the daemon itself.

    `at` is the time of the request in seconds, `namespace` the number of the namespace in it, 0 for none.
    """

    at: float = 0.0
    engine: str = ""
    namespace: int = 0


class Shown(msgspec.Struct, gc=False):
    """Lookups find `blocks` from now on. One without a parent has been removed since: its `Gone` follows."""

    blocks: list[Block]


class Gone(msgspec.Struct, gc=False):
    """Lookups no longer find `blocks`; or, for `cause` CLEARED, have not found them since the namespace was emptied."""

    blocks: list[Block]
    cause: str
    actor: Actor


class Refused(msgspec.Struct, gc=False):
    """A block is not stored. `name` is its hash and the tag of its group."""

    name: bytes
    cause: str
    actor: Actor


class Hinted(msgspec.Struct, gc=False):
    """`blocks` that an engine's `request` wanted to retain are not retained, or no longer, for `cause`."""

    at: float
    engine: str
    request: str
    cause: str
    blocks: int


class NamespaceOpened(msgspec.Struct, gc=False):
    """A session has attached a new namespace."""

    namespace: Namespace


class NamespaceClosed(msgspec.Struct, gc=False):
    """A namespace without sessions and blocks is forgotten."""

    namespace: Namespace


class NamespaceEmptied(msgspec.Struct, gc=False):
    """A clear has hidden all blocks of the namespace. Blocks that lookups find in it were shown after this."""

    namespace: Namespace


class SessionGone(msgspec.Struct, gc=False):
    """The session with this number has ended: its process is gone."""

    session: int


Change = Shown | Gone | Refused | Hinted | NamespaceOpened | NamespaceClosed | NamespaceEmptied | SessionGone


class Effects:
    """The outbox: `records` for the state file, `changes` for all others, both in order; and the counters.

    `refusals` counts blocks that were neither granted nor given out, by reason.
    """

    __slots__ = ("actor", "changes", "counters", "records", "refusals")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.changes: list[Change] = []
        self.counters: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.actor = Actor()

    def __bool__(self) -> bool:
        return bool(self.records or self.changes)

    def take(self) -> tuple[list[Record], list[Change]]:
        taken = self.records, self.changes
        self.records, self.changes = [], []
        return taken

    def shown(self, block: Block) -> None:
        changes = self.changes
        if changes and type(last := changes[-1]) is Shown:
            last.blocks.append(block)
        else:
            changes.append(Shown([block]))

    def gone(self, block: Block, cause: str) -> None:
        changes = self.changes
        if changes and type(last := changes[-1]) is Gone and last.cause == cause and last.actor is self.actor:
            last.blocks.append(block)
        else:
            changes.append(Gone([block], cause, self.actor))

    def refused(self, name: bytes, cause: str) -> None:
        self.changes.append(Refused(name, cause, self.actor))
