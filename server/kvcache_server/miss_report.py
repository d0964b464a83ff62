"""The answer of `kvcache-server why`: why a request had no hit, or not for all of its blocks. Pure.

Times are in seconds. A field is never removed; a new one has a default. Causes are explained in commands/why.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

# Why a daemon began with an empty cache; "" if it found the previous daemon's.
EmptyReason = Literal["", "first", "fresh", "not_kept", "resized", "no_state", "distrusted"]

Difference = tuple[str, Any, Any]  # a fact in which two namespaces differ: its name, and its values here and there


def differences(here: Mapping[str, Any], there: Mapping[str, Any], absent: Any = "") -> list[Difference]:
    """Return (field, here, there) for each fact in which two namespaces differ, in the order of the facts.

    `absent` stands for a fact that only the other namespace has.
    """
    keys = [*here, *(key for key in there if key not in here)]
    return [(key, here.get(key, absent), there.get(key, absent)) for key in keys if here.get(key) != there.get(key)]


class Run(msgspec.Struct, omit_defaults=True):
    """Blocks `first` to `last` of a prompt, all missing for one cause, or hits.

    `engine` was behind it, between `ages_s` before the lookup. Evicted blocks had been `asked` for once, twice or more
    often, had been unused for `unused_s`, and were the oldest or the least valuable ones (`by_age`). `namespace` and
    `model` name another namespace, which differs in `fields`. `cached_now` of the blocks are cached now.
    """

    first: int
    last: int
    cause: str
    engine: str = ""
    ages_s: tuple[float, float] | None = None
    unused_s: tuple[float, float] | None = None
    asked: str = ""
    by_age: bool | None = None
    namespace: str = ""
    model: str = ""
    fields: list[Difference] = []
    cached_now: int | None = None

    def extend(self, other: Run) -> bool:
        """Take up a run that follows this one, if it has the same cause and facts; return whether it has."""
        if self._facts() != other._facts():
            return False
        self.last = other.last
        self.ages_s, self.unused_s = _span(self.ages_s, other.ages_s), _span(self.unused_s, other.unused_s)
        return True

    def _facts(self) -> tuple[object, ...]:
        return self.cause, self.engine, self.asked, self.by_age, self.namespace, self.model, self.fields


def _span(one: tuple[float, float] | None, other: tuple[float, float] | None) -> tuple[float, float] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


class TierRun(msgspec.Struct):
    """What a tier did about blocks `first` to `last`, which were not in memory.

    It had `found` blocks, and brought `brought` of them, the last one `after_s` after the lookup.
    """

    tier: str
    cause: str
    first: int
    last: int
    why: str = ""
    found: int = 0
    brought: int = 0
    after_s: float = 0.0


class Note(msgspec.Struct):
    """An engine's note about the request; `blocks` is the number of blocks that were not saved."""

    cause: str
    age_s: float
    blocks: int


class Retained(msgspec.Struct):
    """A retention for the request: `blocks` of the `wanted` blocks are cached, and kept for `ends_s` from now on."""

    blocks: int
    wanted: int
    ends_s: float


class Explanation(msgspec.Struct):
    """The last lookup of one engine's request, if `runs` has any, and the engine's notes."""

    request: str
    engine: str
    notes: list[Note]
    retained: list[Retained]
    lookups: int
    runs: list[Run] = []
    age_s: float = 0.0
    namespace: str = ""
    model: str = ""
    block_tokens: int = 0
    tokens: int = 0
    blocks: int = 0
    hits: int = 0
    tiers: list[TierRun] = []


class Remembered(msgspec.Struct):
    """How far back the records reach, and why the daemon began with an empty cache; "" if it did not."""

    lookups: int
    lookups_since_s: float
    departures: int
    departures_since_s: float
    began_s: float
    began_empty: EmptyReason


class Answer(msgspec.Struct):
    """`matches` are the latest of the `matched` requests whose ids are or contain `asked`. If it is only one, then
    `explained` has the latest of the `engines` that had it. `latest` are the latest requests that missed something.
    """

    asked: str
    matches: list[str]
    matched: int
    latest: list[str]
    remembered: Remembered
    engines: int = 0
    explained: list[Explanation] = []
