"""The report as people read it. Pure."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from kvcache_proto.check_result import CheckResult
from kvcache_proto.text import escaped

_VERDICT, _NAME = 10, 22


def describe(finding: CheckResult) -> str:
    """Return the line of a finding, and the cure's below it."""
    figure = f"{finding.how}: {finding.figure}" if finding.how else finding.figure
    figure = escaped(" ".join(figure.splitlines()))  # a driver's message may have several
    line = f"  {finding.verdict:<{_VERDICT}}{finding.name:<{_NAME}}{figure}"
    return f"{line}\n{'':{2 + _VERDICT + _NAME}}-> {escaped(finding.cure)}" if finding.cure else line


def summary(findings: Iterable[CheckResult]) -> str:
    """Return the last line: how many of each verdict, the grave ones named."""
    names = collections.defaultdict(list)
    for finding in findings:
        names[finding.verdict].append(finding.name)
    parts = [f"{len(names['ok'])} ok"]
    for verdict in ("slow", "failed", "untested"):
        found = names[verdict]
        parts.append(f"{len(found)} {verdict}" + (f" ({', '.join(found)})" if found else ""))
    return ", ".join(parts)
