"""Checks of replies before anything is computed from them. Pure: `holds` asks the region.

A daemon that answers nonsense is as unhealthy as one that is silent, and more dangerous: addresses are computed from
slot references. Each function returns the fault of a reply, or "" if there is none.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcache_proto.messages import Acquired, Reserved, Settled
from kvcache_proto.types import REF_BYTES, SUM_BYTES, Refusal, Verdict

Holds = Callable[[bytes], bool]  # whether each reference is to a block's bytes inside the region

_GRANTED = bytes([Refusal.GRANTED])
_REFUSALS = bytes(Refusal)
_VERDICTS = bytes(Verdict)


def wrong_lookup(reply: Acquired, asked: int, tails: int, pin: bool, shards: int, holds: Holds, slots: int) -> str:
    """Check the answer to a lookup of `asked` hashes and `tails`: it has references to `slots` slots of `shards`
    shards."""
    if not 0 <= reply.tail <= tails or (reply.tail and not reply.hits):
        return f"tail {reply.tail} of {tails}, {reply.hits} hits"
    hits = reply.hits - bool(reply.tail)
    if not 0 <= hits <= asked or not 0 <= reply.pending <= asked - hits or not 0 <= reply.withheld <= asked - hits:
        return f"{hits} hits, {reply.pending} pending, {reply.withheld} withheld of {asked} hashes"
    if not 0 <= reply.coming <= asked - hits or reply.eta_ms < (reply.coming > 0):
        return f"{reply.coming} blocks coming in {reply.eta_ms} ms, after {hits} hits of {asked} hashes"
    if reply.divergence and not hits + reply.withheld < reply.divergence <= asked:
        return f"a divergence after {reply.divergence} of {asked} hashes"
    if (reply.lease > 0) != bool(pin and reply.hits):
        return f"lease {reply.lease} for {reply.hits} hits"
    if len(reply.sums) not in (0, slots * shards * SUM_BYTES):
        return f"{len(reply.sums)} bytes of checksums for {slots} slots of {shards} shards"
    return _wrong_slots(reply.slots, slots, holds)


def wrong_reservation(reply: Reserved, asked: int, holds: Holds) -> str:
    """Check the answer to a reservation of `asked` hashes."""
    answers = reply.answers
    if len(answers) != asked or answers.strip(_REFUSALS):
        return f"{len(answers)} answers for {asked} hashes, or unknown ones among them"
    granted = answers.count(_GRANTED)
    if (reply.reservation > 0) != bool(granted):
        return f"reservation {reply.reservation} of {granted} blocks"
    return _wrong_slots(reply.slots, granted, holds)


def wrong_settlement(reply: Settled) -> str:
    """Check the answer to a settlement."""
    return "an unknown verdict" if reply.verdicts.strip(_VERDICTS) else ""


def _wrong_slots(slots: bytes, count: int, holds: Holds) -> str:
    if len(slots) != count * REF_BYTES:
        return f"{len(slots)} bytes of references to {count} slots"
    return "" if holds(slots) else "slots outside of the region"
