"""The memory for questions why a request had no hit. Pure; explanations.py makes answers from it.

For a lookup that misses, the request's frame is kept. For a block that is removed or refused, its name is kept, with an
Occasion shared by all blocks of the same request. Everything is bounded, and reports how far back it reaches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvcache_proto.types import NamespaceSpec
from kvcache_server.core.effects import Actor

LOOKUPS = 16 << 20  # bytes of remembered lookups; each counts as EACH more
EACH = 512
GENERATIONS, GENERATION = 8, 1 << 14  # removed blocks: number of dicts, and names in each; the oldest dict is dropped
NOTES = 4096
SPACES = 1024


class Lookup(msgspec.Struct, gc=False, frozen=True):
    """A lookup that missed something.

    `frame` is the encoded request. It is only decoded for an answer, because keeping dozens of objects costs more than
    keeping one. After its `hits`, `blocks` blocks were withheld for `cause`. `generation` is that of the last slot
    granted before.
    """

    at: float
    engine: str
    request: str
    frame: bytes
    hits: int
    cause: str
    blocks: int
    generation: int


class Occasion(msgspec.Struct, gc=False, frozen=True):
    """When, why and for whom blocks were removed or refused. `namespace` is that of the request behind it."""

    at: float
    cause: str
    engine: str
    namespace: int


class EngineNote(NamedTuple):
    """An engine's note about one of its requests; `blocks` is the number of blocks not saved."""

    at: float
    engine: str
    request: str
    cause: str
    blocks: int


class MissLog:
    """Lookups that missed, notes of engines, removed blocks, and current and former namespaces."""

    def __init__(self) -> None:
        self.lookups: deque[Lookup] = deque()
        self.notes: deque[EngineNote] = deque(maxlen=NOTES)
        self.spaces: dict[int, NamespaceSpec] = {}
        self.facts: dict[int, frozenset[tuple[str, str]]] = {}  # by namespace: the facts that identify it
        self.started_at = 0.0
        self.empty_reason = ""
        self._held = 0
        self._names: deque[dict[bytes, Occasion]] = deque([{}], GENERATIONS)
        self._since: deque[float] = deque([0.0], GENERATIONS)
        self._young = self._names[-1]
        self._actor: Actor | None = None  # of the latest occasion
        self._occasion = Occasion(0.0, "", "", 0)

    def started(self, now: float, how: str) -> None:
        """Record the start of the daemon, and why its cache is empty; "" if it found the previous one's."""
        self.started_at = self._since[0] = now
        self.empty_reason = how

    # Lookups.

    def missed(self, lookup: Lookup) -> None:
        """Remember a lookup."""
        self.lookups.append(lookup)
        self._held += len(lookup.frame) + EACH
        while self._held > LOOKUPS:
            self._held -= len(self.lookups.popleft().frame) + EACH

    # Blocks.

    def removed(self, name: bytes, cause: str, actor: Actor) -> None:
        """Record that a block was removed or refused on behalf of `actor`. `name` is its hash and its group's tag."""
        occasion = self._occasion
        if actor is not self._actor or occasion.cause != cause:
            occasion = self._occasion = Occasion(actor.at, cause, actor.engine, actor.namespace)
            self._actor = actor
        self._young[name] = occasion
        if len(self._young) >= GENERATION:
            self._young = {}
            self._names.append(self._young)
            self._since.append(actor.at)

    def find(self, name: bytes, before: float) -> Occasion | None:
        """Return the last occasion, not after `before`, on which the block was removed or refused."""
        for names in reversed(self._names):
            occasion = names.get(name)
            if occasion is not None and occasion.at <= before:
                return occasion
        return None

    def names(self) -> Iterator[list[bytes]]:
        """Yield the names of removed and refused blocks, GENERATION at a time."""
        return map(list, list(self._names))

    @property
    def departures(self) -> int:
        return sum(map(len, self._names))

    @property
    def since(self) -> float:
        """The time from which on removed blocks are remembered."""
        return self._since[0]

    # Namespaces.

    def remember_namespace(self, number: int, spec: NamespaceSpec) -> None:
        """Remember a namespace, also after it is forgotten."""
        self.spaces[number] = spec
        self.facts[number] = frozenset({"model": spec.model, **spec.identity}.items())
        if len(self.spaces) > SPACES:
            oldest = min(self.spaces)
            del self.spaces[oldest], self.facts[oldest]
