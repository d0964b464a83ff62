"""The result of a check by `kvcache-server doctor`, which prints it; checks on the engine's side send it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

CheckVerdict = Literal["ok", "slow", "failed", "untested"]
How = Literal["", "measured", "simulated"]


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
