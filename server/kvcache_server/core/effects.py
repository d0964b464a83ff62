"""What the core reports of its work, for the state file, for insight and for KV events. Pure.

The core calls none of them. It appends to one outbox, which the daemon empties after each slice of work, and so before
the reply leaves: nobody hears of a change that the state file does not have. A lookup that finds what it asked for
appends nothing.
"""

from __future__ import annotations

import msgspec

from kvcache_server.core.index import Block
from kvcache_server.core.journal import Record
from kvcache_server.core.sessions import Namespace
from kvcache_server.core.slices import Result, Steps


class Actor(msgspec.Struct, gc=False, frozen=True):
    """On whose behalf the core works: an engine, or the daemon itself, "".

    `at` is when the request came, in seconds; `namespace` is the number of the one that it names, 0 for none.
    """

    at: float = 0.0
    engine: str = ""
    namespace: int = 0


class Shown(msgspec.Struct, gc=False):
    """Lookups find `blocks` from now on. A block without a parent has gone again since: a `Gone` follows."""

    blocks: list[Block]


class Gone(msgspec.Struct, gc=False):
    """Lookups find `block` no more.

    `evicted` is whether it gave way to others; then `lot` is what it drew for samples (sampling.py), NO_LOT for a block
    that is in none.
    """

    block: Block
    cause: str
    actor: Actor
    evicted: bool
    lot: int


class Refused(msgspec.Struct, gc=False):
    """A block that was to be stored is not. `name` is its hash and the tag of its group."""

    name: bytes
    cause: str
    actor: Actor


class NamespaceOpened(msgspec.Struct, gc=False):
    """Somebody has attached a namespace that was not there."""

    namespace: Namespace


class NamespaceClosed(msgspec.Struct, gc=False):
    """A namespace that nobody was in and that held nothing is forgotten."""

    namespace: Namespace


class NamespaceEmptied(msgspec.Struct, gc=False):
    """A clear has left no block of the namespace."""

    namespace: Namespace


class SessionGone(msgspec.Struct, gc=False):
    """The session with that number has ended, and its process with it."""

    session: int


NO_LOT = -1  # of a block that is in no sample

Change = Shown | Gone | Refused | NamespaceOpened | NamespaceClosed | NamespaceEmptied | SessionGone


class Effects:
    """The outbox. `records` are for the state file, `changes` for all others; both are in the order of events."""

    __slots__ = ("actor", "changes", "records")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.changes: list[Change] = []
        self.actor = Actor()

    def __bool__(self) -> bool:
        return bool(self.records or self.changes)

    def take(self) -> tuple[list[Record], list[Change]]:
        """Return what there is, and forget it."""
        taken = self.records, self.changes
        self.records, self.changes = [], []
        return taken

    def on_behalf(self, actor: Actor, steps: Steps[Result]) -> Steps[Result]:
        """Do the work of `steps`; `actor` is behind whatever each of its slices reports."""
        while True:
            self.actor = actor
            try:
                next(steps)
            except StopIteration as done:
                result: Result = done.value
                return result
            yield

    def shown(self, block: Block) -> None:
        changes = self.changes
        if changes and type(last := changes[-1]) is Shown:
            last.blocks.append(block)
        else:
            changes.append(Shown([block]))

    def gone(self, block: Block, cause: str) -> None:
        self.changes.append(Gone(block, cause, self.actor, False, NO_LOT))

    def refused(self, name: bytes, cause: str) -> None:
        self.changes.append(Refused(name, cause, self.actor))
