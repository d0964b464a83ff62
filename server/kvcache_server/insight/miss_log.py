"""What is remembered in case somebody asks why a request had no hit. Pure; explanations.py makes an answer of it.

Of a lookup that misses, the frame is kept in which it came. Of a block that leaves, or is refused, the name is kept,
and an Occasion that it shares with the other blocks of the same request. Everything is bounded, and says what it has
forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvcache_proto.types import NamespaceSpec
from kvcache_server.core.effects import Actor

LOOKUPS = 16 << 20  # bytes of the lookups that are remembered, each of which counts for EACH more
EACH = 512
GENERATIONS, GENERATION = 8, 1 << 14  # blocks that left: so many dicts of so many names, the oldest of which goes whole
NOTES = 4096
SPACES = 1024


class Lookup(msgspec.Struct, gc=False, frozen=True):
    """A lookup that missed something.

    `frame` is the request as it came: what it asked for is decoded again when somebody wants to know, for to keep
    some dozen objects costs more than to keep one. After its `hits`, that many `blocks` were kept back for `cause`;
    `generation` is that of the last slot that was given away before.
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
    """When, why and for whom blocks left, or were not let in; `namespace` is the number of who asked for it."""

    at: float
    cause: str
    engine: str
    namespace: int


class EngineNote(NamedTuple):
    """An engine's note about one of its requests; `blocks` is how many were not saved."""

    at: float
    engine: str
    request: str
    cause: str
    blocks: int


class MissLog:
    """Lookups that missed, what engines told, blocks that left, and namespaces that were."""

    def __init__(self) -> None:
        self.lookups: deque[Lookup] = deque()
        self.notes: deque[EngineNote] = deque(maxlen=NOTES)
        self.spaces: dict[int, NamespaceSpec] = {}
        self.facts: dict[int, frozenset[tuple[str, str]]] = {}  # of each of them: what may set it apart
        self.started_at = 0.0
        self.empty_reason = ""
        self._held = 0
        self._names: deque[dict[bytes, Occasion]] = deque([{}], GENERATIONS)
        self._since: deque[float] = deque([0.0], GENERATIONS)
        self._young = self._names[-1]
        self._actor: Actor | None = None  # of the latest occasion
        self._occasion = Occasion(0.0, "", "", 0)

    def started(self, now: float, how: str) -> None:
        """Note that the daemon begins, and `how` it came to be empty: "" where it found what the last one had."""
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

    def left(self, name: bytes, cause: str, actor: Actor) -> None:
        """Remember that the block has left, or was refused, on behalf of `actor`. `name` is its hash and its group's
        tag."""
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
        """Return the last occasion on which the block left, or was not let in, not after `before`."""
        for names in reversed(self._names):
            occasion = names.get(name)
            if occasion is not None and occasion.at <= before:
                return occasion
        return None

    def names(self) -> Iterator[list[bytes]]:
        """Yield the names of the blocks that have left, or were not let in, GENERATION at a time."""
        return map(list, list(self._names))

    @property
    def departures(self) -> int:
        return sum(map(len, self._names))

    @property
    def since(self) -> float:
        """From when on the blocks that left are remembered."""
        return self._since[0]

    # Namespaces.

    def know(self, number: int, spec: NamespaceSpec) -> None:
        """Remember a namespace, after it has gone, too."""
        self.spaces[number] = spec
        self.facts[number] = frozenset({"model": spec.model, **spec.identity}.items())
        if len(self.spaces) > SPACES:
            oldest = min(self.spaces)
            del self.spaces[oldest], self.facts[oldest]
