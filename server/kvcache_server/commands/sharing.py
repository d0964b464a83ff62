"""Why namespaces of one model share no blocks, within a daemon or between two hosts: lines of `status`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, groupby, islice, product
from math import comb
from operator import attrgetter

import msgspec

from kvcache_proto.errors import ConfigError
from kvcache_server.miss_report import Difference, differences
from kvcache_server.status import Group, Status

MOST_PAIRS = 5  # of namespaces to compare, of one daemon, or of one model on two hosts
_MOST_OTHERS = 4  # further facts to name
_model = attrgetter("model")


class Space(msgspec.Struct):
    """The facts of a namespace in a report of `status`, also one of an older daemon."""

    id: str
    model: str
    identity: dict[str, str] = {}
    groups: list[Group] = []  # empty, as the identity, if there are too many namespaces
    hash_bytes: int = 0

    def fields(self) -> dict[str, object]:
        """Return the fields of the groups, in their order."""
        return {
            f"groups[{at}].{field}": value
            for at, group in enumerate(self.groups)
            for field, value in msgspec.structs.asdict(group).items()
        }


class _Report(msgspec.Struct):
    namespaces: list[Space]


def spaces_of(figures: Status) -> list[Space]:
    """Return the namespaces of a report, those with the most bytes first."""
    return [
        Space(each.id, each.model, each.identity, each.groups, each.hash_bytes)
        for each in sorted(figures.namespaces, key=lambda each: -each.bytes)
    ]


def read(text: bytes, name: str) -> list[Space]:
    """Return the namespaces in the output of `status --json`. Raises ConfigError for anything else; `name` is that of
    the source."""
    try:
        return msgspec.json.decode(text, type=_Report).namespaces
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: not the output of `kvcache-server status --json`: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{name}: not JSON: {error}") from None


def within(spaces: Sequence[Space]) -> list[str]:
    """Return lines on namespaces of one daemon with the same model, and how they differ."""
    by_model = [list(same) for _, same in groupby(sorted(spaces, key=_model), key=_model)]
    pairs = (pair for same in by_model for pair in combinations(same, 2))
    lines = [
        f"namespaces {one.id} and {other.id} of {one.model} differ {_first(one, other)}"
        for one, other in islice(pairs, MOST_PAIRS)
    ]
    if (more := sum(comb(len(same), 2) for same in by_model) - len(lines)) > 0:
        lines.append(f"and {more:,} more pairs of namespaces that have one model")
    return lines


def between(here: Sequence[Space], there: Sequence[Space]) -> list[str]:
    """Return lines on how two hosts share: for each model of both, its common namespaces or how they differ."""
    models = dict.fromkeys(map(_model, here)), dict.fromkeys(map(_model, there))
    lines: list[str] = []
    for model in models[0]:
        if model in models[1]:
            lines += _between([one for one in here if one.model == model], [one for one in there if one.model == model])
    if not lines:
        lines.append("no model is on both hosts: nothing is shared")
    for where, mine, others in (("here", *models), ("there", *models[::-1])):
        if only := [model for model in mine if model not in others]:
            lines.append(f"only {where}: {', '.join(only)}")
    return lines


def _between(here: list[Space], there: list[Space]) -> Iterator[str]:
    """Yield the lines on one model."""
    model, theirs = here[0].model, {space.id: space for space in there}
    for one in here:
        other = theirs.get(one.id)
        if other is not None and _apart(one, other):  # impossible within a daemon: it compares geometries
            yield f"{model}: not shared: namespace {one.id}, whose blocks differ {_first(one, other)}"
        elif other is not None:
            yield f"{model}: shared: namespace {one.id}"
    mine = {space.id for space in here}
    alone = [one for one in here if one.id not in theirs], [other for other in there if other.id not in mine]
    if any(alone):
        left, right = alone[0] or here, alone[1] or there
        for one, other in islice(product(left, right), MOST_PAIRS):
            yield f"{model}: not shared: namespaces {one.id} here and {other.id} there differ {_first(one, other)}"
        if (more := len(left) * len(right) - MOST_PAIRS) > 0:
            yield f"{model}: not shared: {more:,} more pairs of namespaces"


def _apart(one: Space, other: Space) -> list[Difference]:
    """Return the facts in which two namespaces differ, in the order of NamespaceSpec's fields; facts missing in a
    report are not compared."""
    complete = bool(one.groups and other.groups)
    apart: list[Difference] = []
    if complete and len(one.groups) != len(other.groups):
        apart.append(("groups", len(one.groups), len(other.groups)))
    elif complete:
        apart += differences(one.fields(), other.fields(), None)
    if complete or (one.identity and other.identity):
        apart += differences(one.identity, other.identity, None)
    if complete:
        apart += differences({"hash_bytes": one.hash_bytes}, {"hash_bytes": other.hash_bytes})
    return apart


def _first(one: Space, other: Space) -> str:
    """Return the first difference between two namespaces, and the names of a few further ones."""
    apart = _apart(one, other)
    if not apart:
        return "in something that these reports leave out"
    (field, here, there), *more = apart
    shown = ("nothing" if value is None else repr(value) for value in (here, there))
    said = f"first in: {field}: {' != '.join(shown)}"
    names = [each[0] for each in more[:_MOST_OTHERS]]
    if more:
        said += f" (also in: {', '.join(names)}{', ...' if len(more) > len(names) else ''})"
    return said
