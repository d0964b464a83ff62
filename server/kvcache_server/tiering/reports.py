"""The reports of tiers about the blocks that a lookup missed, to explain why it had few hits. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvcache_server.miss_report import TierRun


class Inquiry(msgspec.Struct, gc=False):
    """A question to a tier, which blocks of a chain it has, and the outcome. Times are in seconds.

    `answered` is set once the tier has reported that it has only the first `found` of the `asked` blocks. Of these,
    `brought` blocks are in the region and `lost` ones will not arrive; `at` is the time of the last change. `off` is
    the reason that the tier was turned off meanwhile; `writes_off` is the reason that nothing could be written to it
    when it answered. `then` is the inquiry to the next tier for the remaining blocks.
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


class TierReport(msgspec.Struct, gc=False, frozen=True):
    """A tier's report about `blocks` blocks of a lookup, from number `first` on; `inquiry` has the later outcome."""

    tier: str
    cause: str  # a key of TIERS in commands/why.py, valid until the inquiry has a result
    first: int
    blocks: int
    why: str = ""
    inquiry: Inquiry | None = None

    def tier_runs(self, at: float) -> Iterator[TierRun]:
        """Yield the facts, by runs of blocks; `at` is the time of the lookup, in seconds."""
        if self.inquiry is not None and self.cause == "asked":
            yield from _asked(self.inquiry, self.first, self.blocks, at)
        elif self.inquiry is not None:
            yield _fetched(self.inquiry, self.first, self.blocks, at, self.cause)
        else:
            yield _facts(self.tier, self.cause, self.first, self.blocks, self.why)


def absent(writes_off: str) -> str:
    """Return the cause for blocks that a tier lacks; `writes_off` is the reason that it stores nothing, or ""."""
    return "not_written" if writes_off else "absent"


def _asked(inquiry: Inquiry, first: int, blocks: int, at: float) -> Iterator[TierRun]:
    if not inquiry.answered:
        yield _facts(inquiry.tier, "off" if inquiry.off else "asked", first, blocks, inquiry.off)
        return
    found = min(inquiry.found, blocks)
    if found:
        yield _fetched(inquiry, first, found, at, "coming")
    if found < blocks:
        cause = absent(inquiry.writes_off)
        yield _facts(inquiry.tier, cause, first + found, blocks - found, inquiry.writes_off)
        if inquiry.then is not None:
            yield from _asked(inquiry.then, first + found, blocks - found, at)


def _fetched(inquiry: Inquiry, first: int, blocks: int, at: float, cause: str) -> TierRun:
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
