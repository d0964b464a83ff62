"""The results of checks by `kvcache-server doctor`, and its report as text; the engine's side sends results. Pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from kvcache_proto.text import escaped

CheckVerdict = Literal["ok", "slow", "failed", "untested"]
How = Literal["", "measured", "simulated"]

_VERDICT, _NAME = 10, 22  # widths of columns


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report.

    Attributes:
        name: the thing checked, such as "cuda:0 copies".
        verdict: "slow" works, but `cure` would make it faster; "untested" is neither good nor bad.
        figure: the finding, or the reason that it is untested.
        cure: the remedy, or nothing.
        how: "measured" on the real thing, "simulated" on a substitute, or nothing if that does not matter.
        values: the figures for programs; each name ends in the unit.
    """

    name: str
    verdict: CheckVerdict
    figure: str
    cure: str = ""
    how: How = ""
    values: Mapping[str, float] = {}


def describe(result: CheckResult) -> str:
    """Return the line of a result, with the remedy in a line below."""
    figure = f"{result.how}: {result.figure}" if result.how else result.figure
    figure = escaped(" ".join(figure.splitlines()))  # a driver's message may have several
    line = f"  {result.verdict:<{_VERDICT}}{result.name:<{_NAME}}{figure}"
    return f"{line}\n{'':{2 + _VERDICT + _NAME}}-> {escaped(result.cure)}" if result.cure else line


def summary(results: Iterable[CheckResult]) -> str:
    """Return the last line: the number of each verdict, with the names of those that are not ok."""
    names = collections.defaultdict(list)
    for result in results:
        names[result.verdict].append(result.name)
    parts = [f"{len(names['ok'])} ok"]
    for verdict in ("slow", "failed", "untested"):
        found = names[verdict]
        parts.append(f"{len(found)} {verdict}" + (f" ({', '.join(found)})" if found else ""))
    return ", ".join(parts)
