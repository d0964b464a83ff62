"""The records that explain why a request had no hit. Pure; miss_causes.py makes answers from them.

For a lookup that misses, the request's frame is kept. For a block that is removed or refused, its name is kept, with an
Occasion shared by similar blocks of the same request. Everything is bounded, and reports how far back it reaches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import msgspec

from kvcache_proto.types import NamespaceSpec
from kvcache_server.core.effects import Actor
from kvcache_server.core.eviction.worth import one_off
from kvcache_server.core.index import CLASS_MASK, FIRST_TICK, TICKS_PER_SECOND, Block
from kvcache_server.miss_report import EmptyReason, TierRun

LOOKUPS = 16 << 20  # bytes of remembered lookups; each one, and each tier's report about it, counts as EACH more
EACH = 512
REPEATED_AFTER = 1.0  # seconds
GENERATIONS, GENERATION = 8, 1 << 14  # removed blocks: number of dicts, and names in each; the oldest dict is dropped
NOTES = 4096
SPACES = 1024


class Below(Protocol):
    """A tier's report about blocks that a lookup missed."""

    def tier_runs(self, at: float) -> Iterable[TierRun]:
        """Return the facts, by runs of blocks; `at` is the time of the lookup."""
        ...


class Lookup(msgspec.Struct, gc=False, frozen=True):
    """A lookup that missed something.

    `frame` is the encoded request. It is only decoded for an answer, because keeping dozens of objects costs more than
    keeping one. After its `hits`, `blocks` blocks were withheld for `cause`. `generation` is that of the last slot
    granted before. `below` has the tiers' reports about the blocks after the hits.
    """

    at: float
    engine: str
    request: str
    frame: bytes
    hits: int
    cause: str
    blocks: int
    generation: int
    below: tuple[Below, ...] = ()

    @property
    def size(self) -> int:
        return len(self.frame) + EACH * (1 + len(self.below))

    def repeats(self, other: Lookup) -> bool:
        """Whether it is another lookup of the same request, with the same result."""
        found = self.request, self.hits, self.cause, self.blocks, self.below
        return found == (other.request, other.hits, other.cause, other.blocks, other.below)


class Occasion(msgspec.Struct, gc=False, frozen=True):
    """When, why and for whom blocks were removed or refused. `namespace` is that of the request behind it.

    If the blocks were chosen for eviction, `asked` is their class plus 1, otherwise 0. `unused` is the number of whole
    seconds since their last use. `by_age` is whether they were evicted as the least recently used.
    """

    at: float
    cause: str
    engine: str
    namespace: int
    asked: int = 0
    unused: float = 0.0
    by_age: bool = False


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
        self.started_at = 0.0
        self.empty_reason: EmptyReason = ""
        self._last: dict[str, Lookup] = {}  # by engine
        self._held = 0
        self._names: deque[dict[bytes, Occasion]] = deque([{}], GENERATIONS)
        self._since: deque[float] = deque([0.0], GENERATIONS)
        self._young = self._names[-1]
        self._actor: Actor | None = None  # of the latest occasions, by the fields in which they differ
        # By cause, second of the last use, class, by age.
        self._occasions: dict[tuple[str, int, int, bool], Occasion] = {}

    def started(self, now: float, how: EmptyReason) -> None:
        """Record the start of the daemon, and the reason that its cache is empty; "" if it found the previous one's."""
        self.started_at = self._since[0] = now
        self.empty_reason = how

    # Lookups.

    def missed(self, lookup: Lookup) -> None:
        """Remember a lookup.

        A request that waits to be scheduled is looked up again and again. If nothing has changed, that is remembered
        once in REPEATED_AFTER seconds.
        """
        last = self._last.get(lookup.engine)
        if last is not None and lookup.at - last.at < REPEATED_AFTER and lookup.repeats(last):
            return
        self._last[lookup.engine] = lookup
        self.lookups.append(lookup)
        self._held += lookup.size
        while self._held > LOOKUPS:
            oldest = self.lookups.popleft()
            self._held -= oldest.size
            if self._last.get(oldest.engine) is oldest:
                del self._last[oldest.engine]

    # Blocks.

    def removed(self, name: bytes, cause: str, actor: Actor) -> None:
        """Record that a block was removed or refused on behalf of `actor`. `name` is its hash and its group's tag."""
        self._note(name, self._occasion(actor, cause, 0, False))

    def chosen(self, blocks: Iterable[Block], cause: str, actor: Actor, by_age: bool) -> None:
        """Record that blocks were evicted, because they were worth least or, `by_age`, as the least recently used."""
        last, occasion = -1, None
        for block in blocks:
            if occasion is None or block.tick != last:  # blocks above a leaf often have its tick
                last, aged = block.tick, by_age and not one_off(block.account.share, block.tick & CLASS_MASK)
                occasion = self._occasion(actor, cause, last, aged)
            self._note(block.hash + block.account.group.tag, occasion)

    def _occasion(self, actor: Actor, cause: str, tick: int, by_age: bool) -> Occasion:
        if actor is not self._actor:
            self._actor, self._occasions = actor, {}
        key = cause, tick // TICKS_PER_SECOND, tick & CLASS_MASK, by_age
        occasion = self._occasions.get(key)
        if occasion is None:
            used = (tick - FIRST_TICK) // TICKS_PER_SECOND  # below 0: a block to evict first, or of an older release
            facts = (key[2] + 1, max(actor.at - used, 0.0), by_age) if used >= 0 else (0, 0.0, False)
            occasion = self._occasions[key] = Occasion(actor.at, cause, actor.engine, actor.namespace, *facts)
        return occasion

    def _note(self, name: bytes, occasion: Occasion) -> None:
        self._young[name] = occasion
        if len(self._young) >= GENERATION:
            self._young = {}
            self._names.append(self._young)
            self._since.append(occasion.at)

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
        if len(self.spaces) > SPACES:
            del self.spaces[min(self.spaces)]
