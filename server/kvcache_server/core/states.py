"""The states of slots, shards, reservations and leases, as tables. Pure.

The code takes the states of slots' rows from these tables, tests compare real transitions with them, and `make drawing`
draws them in CONTRIBUTING.md.
"""

from __future__ import annotations

from typing import NamedTuple

from kvcache_proto import region


class Step(NamedTuple):
    """In state `before`, `event` leads to state `after`; `when` describes the event."""

    before: str
    event: str
    after: str
    when: str


# The states as stored in the slot's row. The block of a DOOMED slot will never be visible, but its writers may still
# write.
SLOT = (
    Step("FREE", "granted", "WRITING", "a reservation gets the slot"),
    Step("WRITING", "committed", "READY", "every shard is committed"),
    Step("WRITING", "doomed", "DOOMED", "a shard failed, the parent is gone, or another writer superseded the block"),
    Step("READY", "forgotten", "FREE", "the block is evicted, cleared, found wrong, or can never be visible"),
    Step("DOOMED", "settled", "FREE", "every shard is settled, and the quarantine of dead writers is over"),
)

SHARD = (
    Step("pending", "commit", "committed", "its writer has written it"),
    Step("pending", "fail", "failed", "its writer could not write it"),
    Step("pending", "skip", "never_started", "its writer or the reserving session reports that it was never written"),
    Step("pending", "death", "dead", "its writer's process has ended; the slot goes into quarantine"),
)

RESERVATION = (Step("open", "settle", "settled", "the last shard of its last slot is settled"),)

LEASE = (
    Step("held", "release", "released", "the session releases it, ends, or stays away for too long"),
    Step("held", "reclaim", "held", "the session has resumed, and reports that it still holds the lease"),
    Step("held", "lose", "lost", "the session reclaims it, but the block is gone or the quota is exhausted"),
)

TABLES = {"slot": SLOT, "shard": SHARD, "reservation": RESERVATION, "lease": LEASE}


def _row_state_after(before: str, event: str) -> int:
    (after,) = (step.after for step in SLOT if (step.before, step.event) == (before, event))
    return int(getattr(region, after))


COMMITTED = _row_state_after("WRITING", "committed")
DOOMED = _row_state_after("WRITING", "doomed")
FORGOTTEN = _row_state_after("READY", "forgotten")
