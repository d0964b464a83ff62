"""The reports of tiers about the blocks that a lookup missed, to explain why it had few hits. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvcache_server.miss_report import TierRun


class Inquiry(msgspec.Struct, gc=False):
    """A question to a tier for the blocks of a chain that it has, and the outcome. Times are in seconds.

    It is `answered` once the tier has reported that it has only the first `found` of the `asked` blocks. Of these,
    `brought` ones are in the region, and `lost` ones will not come; the last change was `at`. `off` is the reason that
    the tier was turned off before that; `writes_off`, that it could not be written to when it answered. `then` is the
    inquiry to the next tier for the remaining blocks.
    """

    tier: str = ""
    asked: int = 0
    answered: bool = False
    found: int = 0
    brought: int = 0
    lost: int = 0
    at: float = 0.0
    off: str = ""
    writes_off: str = ""
    then: Inquiry | None = None


class Said(msgspec.Struct, gc=False, frozen=True):
    """A tier's report about `blocks` blocks of a lookup, from number `first` on; or, if still open, see `inquiry`."""

    tier: str
    cause: str  # as long as the inquiry has no result: a key of TIERS in commands/why.py
    first: int
    blocks: int
    why: str = ""
    inquiry: Inquiry | None = None

    def told(self, at: float) -> Iterator[TierRun]:
        """Yield the facts, by runs of blocks; `at` is the time of the lookup."""
        if self.inquiry is not None and self.cause == "asked":
            yield from _asked(self.inquiry, self.first, self.blocks, at)
        elif self.inquiry is not None:
            yield _came(self.inquiry, self.first, self.blocks, at, self.cause)
        else:
            yield _facts(self.tier, self.cause, self.first, self.blocks, self.why)


def absent(writes_off: str) -> str:
    """Return the cause for blocks that a tier does not have; `writes_off` is the reason if it cannot be written to."""
    return "not_written" if writes_off else "absent"


def _asked(inquiry: Inquiry, first: int, blocks: int, at: float) -> Iterator[TierRun]:
    if not inquiry.answered:
        yield _facts(inquiry.tier, "off" if inquiry.off else "asked", first, blocks, inquiry.off)
        return
    there = min(inquiry.found, blocks)
    if there:
        yield _came(inquiry, first, there, at, "coming")
    if there < blocks:
        cause = absent(inquiry.writes_off)
        yield _facts(inquiry.tier, cause, first + there, blocks - there, inquiry.writes_off)
        if inquiry.then is not None:
            yield from _asked(inquiry.then, first + there, blocks - there, at)


def _came(inquiry: Inquiry, first: int, blocks: int, at: float, cause: str) -> TierRun:
    if inquiry.brought + inquiry.lost >= inquiry.found:
        cause = "lost" if inquiry.lost else "late"
    elif inquiry.off:
        return _facts(inquiry.tier, "off", first, blocks, inquiry.off)
    facts = _facts(inquiry.tier, cause, first, blocks)
    if cause in ("lost", "late"):
        facts.found, facts.brought = inquiry.found, inquiry.brought
        facts.after_s = round(max(inquiry.at - at, 0.0), 3)
    return facts


def _facts(tier: str, cause: str, first: int, blocks: int, why: str = "") -> TierRun:
    return TierRun(tier, cause, first, first + blocks - 1, why)
