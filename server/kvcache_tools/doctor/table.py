"""The report as text. Pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from kvcache_proto.text import escaped
from kvcache_tools.doctor.check_result import CheckResult

_VERDICT, _NAME = 10, 22


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
