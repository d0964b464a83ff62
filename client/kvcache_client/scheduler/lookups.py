"""Lookups of requests, their results, and the leases on these until a load takes them. Pure: the time is an argument.

A lookup is repeated if it did not find all blocks and is not recent. All lookups of one schedule share one deadline.
"""

from __future__ import annotations

import math

from kvcache_client.scheduler.cache import CacheNamespace, Counts
from kvcache_client.scheduler.events import EngineEvents
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.loads import Loads
from kvcache_client.scheduler.notes import Notes
from kvcache_client.scheduler.queue import Queue
from kvcache_client.scheduler.requests import LookupResult, RequestState
from kvcache_client.session.checksums import pick_sums
from kvcache_proto.errors import KVCacheError
from kvcache_proto.types import Resume

PENDING_WAIT = 0.05  # seconds that a request waits, once, for blocks that are being written
PRODUCER_WAIT = 1.0  # the same in an engine that leaves prompts to others: blocks being written are being handed over
TIER_WAIT = 2.0  # the same, in all, for blocks from a tier, while the time to compute them is unknown
LEAST_WAIT = 0.002  # seconds between two lookups of a request that waits for a tier
QUOTA_WAIT = 0.25  # seconds that it waits, in all, for running loads to free some of the engine's pin quota
STALLED = 1 << 10  # blocks that are remembered because requests waited for them in vain
MAX_AGE = 0.1  # seconds after which a lookup that did not find all blocks is repeated
IDLE_SCHEDULES = 2  # schedules after which a lease that no load has taken is given back


class Lookups:
    """`spent` are the seconds that lookups took in this schedule; `holding` are requests whose lookup holds a lease;
    `queue` has the requests that were not looked up yet."""

    def __init__(
        self,
        group: FullAttention,
        shards: int,
        verify: str,
        counters: Counts,
        notes: Notes,
        events: EngineEvents | None = None,
        saves: bool = True,
    ) -> None:
        """`verify` selects the blocks of a hit to verify, each of `shards` shards; `saves`: the engine saves, too."""
        self.spent = 0.0
        self._saves = saves
        self._group, self._shards, self._verify = group, shards, verify
        self._counters, self._notes, self._events = counters, notes, events
        self.holding: dict[str, RequestState] = {}
        self.queue = Queue(group, counters)
        self._stalled: dict[bytes, float] = {}  # seconds that a block may be waited for after a vain wait

    def known(self, state: RequestState, limit: int, start: int, now: float) -> LookupResult | None:
        """Return the result of the last lookup, None if `limit` cached blocks have to be looked up. The engine has the
        first `start` blocks of its own."""
        lookup = state.lookup
        if lookup is None or (lookup.hits and not lookup.lease.id):  # its lease was given back
            return None
        if self._group.suffixes and (lookup.hits > limit or lookup.had > start // self._group.blocks_per_slot):
            return None
        if lookup.tail > self._group.farthest(state.request):
            return None
        return None if lookup.hits < min(limit, lookup.wanted) and now - lookup.at > MAX_AGE else lookup

    def ask(self, state: RequestState, namespace: CacheNamespace, limit: int, start: int, now: float) -> LookupResult:
        """Look up the first `limit` cached blocks of a request; there is an answer whatever the daemon does.

        The engine has the first `start` blocks of its own.
        """
        request, waited, state.waits.put_off = state.request, state.waits.put_off, False
        self.forget(state)
        self.queue.looked_up(request.id)
        keys = self._group.keys(request.hashes)[: limit + self._group.volatile]
        on_device = start // self._group.blocks_per_slot
        had = on_device if self._group.suffixes else 0
        resume = Resume(on_device, *self._group.tails(request))
        try:
            lease = namespace.acquire(
                keys,
                verify=self._verify != "off",
                request=request.id,
                tokens=request.prompt_tokens,
                salted=request.salted,
                resume=resume,
            )
        except KVCacheError as error:
            self._counters.warn("lookups_refused", f"lookups are refused: {error}")
            self._notes.note(state, "refused", now)
            lease = namespace.acquire(())
        whole, tail = lease.hits, max(0, lease.tail - 1)
        if tail:
            whole -= 1
            keys = [*keys[:whole], resume.tails[tail]]
        if lease.failed:
            self._notes.note(state, "deadline" if namespace.attached else "down", now)
        else:
            state.progress.saved = lease.hits + lease.pending if lease.pending else whole
            if self._stalled:
                for name in keys[: lease.hits if lease.pending else lease.hits + 1]:  # the writer moved on, or is gone
                    self._stalled.pop(name, None)
            if not state.tables[0]:  # else it was preempted, and leaves the chain that it has saved itself
                state.progress.divergence = lease.divergence
            if self._events is not None and not lease.withheld:
                counts = self._group.counts(lease.hits, had)
                found = [range(lease.hits - counts[number], whole) for number in self._group.suffixes]
                # With suffix groups, blocks after the hits may be on their way.
                asked = whole if found and lease.pending else len(keys)
                self._events.looked_up(request, whole, asked, found)
            if waited and self._group.usable(lease.hits) == len(keys) - self._group.volatile:
                self._notes.note(state, "came", now)
        names = self._group.references(keys, lease.hits, had) if lease.sums else ()
        sums = pick_sums(self._verify, names, lease.sums, self._shards, lease.region_id)
        awaited = keys[lease.hits] if lease.pending and lease.hits < len(keys) else b""
        state.lookup = LookupResult(
            lease, limit, self._group.usable(whole), now, sums=sums, had=had, tail=tail, awaited=awaited
        )
        if lease.id:
            self.holding[state.id] = state
        return state.lookup

    def worth_waiting(
        self, state: RequestState, lookup: LookupResult, start: int, loads: Loads, patience: float, now: float
    ) -> bool:
        """Return True if a request that computes from device block `start` on is to wait and be looked up again.

        It waits for running `loads` to free some of the engine's pin quota, or for blocks that are being written, at
        most `patience` seconds from now on. While the first of these blocks does not come, each wait for it is shorter.
        """
        lease, waits = lookup.lease, state.waits
        if lease.withheld and len(loads):
            # Running loads give their slots back soon; computing cached blocks takes longer.
            waits.quota_until = waits.quota_until or now + min(QUOTA_WAIT, patience)
            if now < waits.quota_until:
                waits.loads_to_end = loads.ended + 1
                self._counters.add("lookups_waited_for_quota")
                return True
        if not lease.pending or (lease.hits + lease.pending) * self._group.blocks_per_slot <= start:
            return False
        if not waits.pending_until:
            longest = self._stalled.get(lookup.awaited, PENDING_WAIT if self._saves else PRODUCER_WAIT)
            wait = min(longest, patience)
            waits.pending_until, waits.pending = now + wait, (lookup.awaited, longest - wait / 2)
            if not patience:
                self._counters.add("waits_declined_slow")
        if now < waits.pending_until:
            return True
        name, left = waits.pending
        if name == lookup.awaited:
            self._stalled[name] = min(left, self._stalled.get(name, left))
            if len(self._stalled) > STALLED:
                del self._stalled[next(iter(self._stalled))]
        return False

    def waits_for_tier(self, state: RequestState, lookup: LookupResult, patience: float, now: float) -> bool:
        """Return True if a request is to wait for blocks from a tier, which take `patience` seconds to compute.

        It is not looked up again before `state.waits.tier_until`, and waits no longer than `patience` in all.
        """
        eta, waits = lookup.lease.eta, state.waits
        waits.tier_asked = waits.tier_asked or now
        if now + eta > waits.tier_asked + (TIER_WAIT if patience == math.inf else patience):
            self._counters.add("waits_declined_slow")
            return False
        self._counters.add("lookups_waited_for_tier", int(now == waits.tier_asked))
        waits.tier_until = now + max(eta, LEAST_WAIT)
        return True

    def take(self, state: RequestState) -> LookupResult | None:
        """Hand the result over to a load, with its lease; None if no lease is held."""
        lookup, state.lookup = state.lookup, None
        self.holding.pop(state.id, None)
        return lookup if lookup is not None and lookup.lease.id else None

    def forget(self, state: RequestState) -> None:
        """Give the lease back, and forget the result."""
        self.release(state)
        state.lookup = None

    def release(self, state: RequestState) -> None:
        if state.lookup is not None and state.lookup.lease.id:
            state.lookup.lease.release()
            self.holding.pop(state.id, None)

    def give_back_idle(self, step: int) -> None:
        """Give back leases that were not offered to the engine in the last schedules before `step`."""
        for state in list(self.holding.values()):
            if state.lookup is None or step - state.lookup.offered > IDLE_SCHEDULES:
                self._counters.add("leases_given_back")
                self.forget(state)
