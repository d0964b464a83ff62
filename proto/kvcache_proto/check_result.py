"""What a check of a host found. The daemon's command line prints it; checks on the engine's side send it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

CheckVerdict = Literal["ok", "slow", "failed", "untested"]
How = Literal["", "measured", "simulated"]


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report.

    Attributes:
        name: what was checked, such as "cuda:0 copies".
        verdict: "slow" works, at a price that `cure` avoids; "untested" is neither good nor bad.
        figure: what was found; why not, where it is untested.
        cure: what helps, or nothing.
        how: "measured" on the part itself, "simulated" on what stands for it, nothing where that is no question.
        values: the figures for programs; the unit ends each name.
    """

    name: str
    verdict: CheckVerdict
    figure: str
    cure: str = ""
    how: How = ""
    values: Mapping[str, float] = {}
