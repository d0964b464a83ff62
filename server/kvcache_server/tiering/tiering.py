"""All tiers of one cache: lookups tell it what they miss and find, and tiers' sessions ask it for work. Pure.

    a lookup misses -> Look -> the tier has the first blocks -> Bring, part after part -> the tier reserves and settles
    a block is found again, or stored -> WriteOut under a lease -> the tier has it

A tier's reservations are like everybody's. What it has not brought when it leaves is not brought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, NotPermitted, Unavailable
from kvcache_proto.types import FULL, SUM_BYTES
from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import Change, SessionGone, Shown
from kvcache_server.core.index import Block, Group
from kvcache_server.core.sessions import Session
from kvcache_server.core.slices import LOOK
from kvcache_server.tiering.tier import LATE, LATE_LEAST, Looking, Tier, Writing

SHARE = 20  # of the pool, one part may be on its way from a tier, and one to it
MOST_TIERS = 8
MOST_NAMES = 64  # of tiers, whose counts go on
HANGING = 60.0  # seconds without a request from a tier that works: one with nothing to do asks twice a second
MOST_JOBS = 64  # looks in one answer
MOST_BATCH = 1 << 30  # bytes


class Tiering:
    """`requests` are the types of requests that it answers. A daemon without tiers never calls any other method."""

    requests = frozenset({m.Work, m.Worked})

    def __init__(self, cache: Cache, user: int) -> None:
        """Only sessions of `user` may be tiers."""
        self._cache, self._user = cache, user
        self._tiers: dict[int, Tier] = {}  # by session, in the order in which they are asked
        self._numbers = count(1)
        self._counts: dict[str, Counter[str]] = {}  # by the tiers' names: they go on when a tier comes back

    # What happens in the cache.

    def looked_up(
        self, session: Session, group: Group, hashes: Sequence[bytes], chain: Sequence[Block], pending: int, now: float
    ) -> tuple[int, int]:
        """Note a lookup of `hashes` that found `chain`, and return for its answer `coming` and `eta_ms`."""
        if session.id in self._tiers:
            return 0, 0
        if chain:
            self._found_again(chain)
        hits = len(chain)
        if hits == len(hashes):
            return 0, 0
        return self._missed(session, group, hashes, hits, hits + pending, now)

    def _found_again(self, chain: Sequence[Block]) -> None:
        for tier in self._tiers.values():
            if tier.on and not tier.has(chain[-1]):
                lacking = []
                for block in chain[: -LOOK - 1 : -1]:
                    if tier.has(block):
                        break
                    lacking.append(block)
                tier.store(lacking[::-1])

    def _missed(
        self, session: Session, group: Group, hashes: Sequence[bytes], hits: int, begin: int, now: float
    ) -> tuple[int, int]:
        first = hashes[hits] + group.tag
        waits = 0.0
        for tier in self._tiers.values():
            if not tier.on:
                continue
            fetch = tier.coming.get(first)
            if fetch is not None:
                if now > fetch.late:
                    return 0, 0
                end = hits + 1
                while end < len(hashes) and hashes[end] + group.tag in tier.coming:
                    end += 1
                return end - hits, max(1, round((fetch.due - now) * 1000))
            if begin == len(hashes):
                continue  # others are writing all that is missing
            name = hashes[begin]
            if not tier.knows(group, name, now):
                parent = hashes[begin - 1] if begin else None
                tier.ask(Looking(session.engine.name, group, parent, list(hashes[begin:]), now))
            asked = tier.asked.get(name + group.tag)
            if asked is not None:
                if now < asked + LATE * 2 * tier.latency + LATE_LEAST:
                    waits = max(asked + 2 * tier.latency - now, 1e-3)
                break  # the next tier is asked for what this one does not have
        return 0, round(waits * 1000)

    def follow(self, changes: Iterable[Change]) -> None:
        """Take up changes that the core has reported."""
        if not self._tiers:
            return
        for change in changes:
            match change:
                case Shown():
                    self._stored(change.blocks)
                case SessionGone() if change.session in self._tiers:
                    self._turn_off(self._tiers[change.session], "gone")
                    del self._tiers[change.session]
                    self._listen()
                case _:
                    pass

    def _stored(self, blocks: Sequence[Block]) -> None:
        for tier in self._tiers.values():
            name = tier.session.engine.name
            for block in blocks:
                if block.account.engine == name:
                    tier.mark(block)
            if tier.policy == m.THROUGH and tier.on:
                lacking = [block for block in blocks if not tier.has(block) and block.parent is not None]
                for group in {block.account.group for block in lacking}:
                    if not group.tails and group.spec.kind == FULL:  # lookups ask tiers for no others
                        tier.store([block for block in lacking if block.account.group is group])

    # Requests.

    def begin(self, session: int, request: Any, now: float) -> None:
        """Take a request of a session. Raises NotPermitted, BadArgument; then nothing has changed."""
        if isinstance(request, m.Work):
            self._enlist(self._cache.sessions[session], request, now)
        elif session in self._tiers:
            self._worked(self._tiers[session], request, now)
        else:
            self._cache.counters["jobs_unknown"] += 1

    def _enlist(self, session: Session, request: m.Work, now: float) -> None:
        if session.user != self._user:
            raise NotPermitted(f"a tier's process must run as the daemon's user, {self._user}, not as {session.user}")
        if request.writes not in m.WRITE_POLICIES:
            raise BadArgument(f"writes {request.writes!r}: one of {', '.join(m.WRITE_POLICIES)}")
        if not 0 < request.batch_bytes <= MOST_BATCH:
            raise BadArgument(f"batch_bytes {request.batch_bytes}: 1 to {MOST_BATCH}")
        tier = self._tiers.get(session.id)
        if tier is None or tier.session is not session:
            for each in self._tiers.values():
                if each.name == request.tier and each.session.connected and each.session.id != session.id:
                    raise Unavailable(f"another tier is called {each.name!r}")
            former = tier
            if former is not None:  # it has resumed: what it was doing is void
                self._turn_off(former, "resumed")
            if len(self._tiers) - (former is not None) >= MOST_TIERS:
                raise NotPermitted(f"{MOST_TIERS} tiers: there can be no more")
            tier = Tier(session, request.tier, request.batch_bytes, request.writes)
            if len(self._counts) < MOST_NAMES:
                tier.counts = self._counts.setdefault(tier.name, tier.counts)
            self._tiers[session.id] = tier
            session.engine.brings = True
            self._listen()
        tier.off, tier.asked_at = "", now

    def _worked(self, tier: Tier, request: m.Worked, now: float) -> None:
        unknown = 0
        for number, flags in request.found:
            found = tier.found(number, flags, now)
            if found is None:
                unknown += 1
            else:
                self._ask_next(tier, *found, now)
        for number, flags in request.brought:
            unknown += not tier.brought(number, flags, now)
        for number, flags in request.written:
            writing = tier.writing.pop(number, None)
            if writing is None:
                unknown += 1
                continue
            tier.stored(writing, flags, now)
            self._end_lease(tier, writing.lease)
        self._cache.counters["jobs_unknown"] += unknown
        if request.off:
            self._turn_off(tier, request.off)

    def _ask_next(self, tier: Tier, looking: Looking, blocks: int, now: float) -> None:
        """Ask the tiers after this one for what it does not have."""
        if blocks == len(looking.hashes):
            return
        rest = looking.hashes[blocks:]
        parent = looking.hashes[blocks - 1] if blocks else looking.parent
        tiers = list(self._tiers.values())
        for other in tiers[tiers.index(tier) + 1 :]:
            if other.on and not other.knows(looking.group, rest[0], now):
                other.ask(Looking(looking.engine, looking.group, parent, rest, now))
                return

    # Jobs.

    def jobs(self, session: int, number: int, now: float) -> m.Jobs | None:
        """Return jobs for a tier that waits for some, as the answer to its request `number`; None if there are none."""
        tier = self._tiers.get(session)
        if tier is None or not tier.on or not (tier.looks or tier.fetches or tier.writes):
            return None
        jobs = m.Jobs(number)
        specs: dict[int, Any] = {}
        while tier.looks and len(jobs.looks) < MOST_JOBS:
            looking = tier.looks.popleft()
            namespace = self._namespace(looking.group)
            if namespace is None:
                del tier.asked[looking.hashes[0] + looking.group.tag]
                continue
            job = next(self._numbers)
            tier.looking[job] = looking
            specs[namespace.number] = namespace
            jobs.looks.append(m.Look(job, namespace.id, looking.group.number, looking.hashes))
        budget = max(self._cache.pool.capacity // SHARE, tier.batch_bytes)
        while tier.in_flight < budget and (part := tier.next_part(tier.batch_bytes, now)) is not None:
            fetch = part.fetch
            job = next(self._numbers)
            tier.parts[job] = part
            namespace = self._namespace(fetch.group)
            if namespace is None:
                tier.brought(job, b"", now)
                continue
            specs[namespace.number] = namespace
            parent = fetch.hashes[part.begin - 1] if part.begin else fetch.parent
            hashes = fetch.hashes[part.begin : part.end]
            jobs.brings.append(m.Bring(job, namespace.id, fetch.group.number, parent, hashes))
        while tier.writes and tier.written_in_flight < budget:
            if (write := self._write_out(tier, specs)) is not None:
                jobs.writes.append(write)
        if not (jobs.looks or jobs.brings or jobs.writes):
            return None
        jobs.specs = [each.spec for number, each in specs.items() if number not in tier.session.attached]
        return jobs

    def _write_out(self, tier: Tier, specs: dict[int, Any]) -> m.WriteOut | None:
        batch = tier.next_batch()
        if not batch:
            return None
        group = batch[0].account.group
        namespace = self._namespace(group)
        if namespace is None:
            return None
        specs[namespace.number] = namespace
        lookups = self._cache.lookups
        lookups.last += 1
        lease, job = lookups.last, next(self._numbers)
        tier.session.pin(lease, None, 0, 0, batch)
        tier.writing[job] = Writing(lease, batch)
        tier.written_in_flight += len(batch) * group.slot_bytes
        slots = b"".join([block.ref for block in batch])
        sums = lookups.checksums.read(slots, group.sum_offsets) if lookups.checksums else b""
        sums = sums or bytes(len(batch) * len(group.spec.shards) * SUM_BYTES)
        return m.WriteOut(job, namespace.id, group.number, [block.hash for block in batch], slots, sums)

    def hanging(self, now: float) -> list[str]:
        """Return the names of connected tiers that ask for no work any more, and turn those off."""
        found = [tier for tier in self._tiers.values() if tier.on and now - tier.asked_at > HANGING]
        for tier in found:
            self._turn_off(tier, "hanging")
        return [tier.name for tier in found]

    def undo(self, session: int) -> None:
        """Take all jobs of a tier back: an answer with some could not be sent."""
        tier = self._tiers.get(session)
        if tier is not None:
            self._turn_off(tier, "disconnected")

    def _namespace(self, group: Group) -> Any:
        namespace = self._cache.namespaces.get(group.namespace)
        return namespace if namespace is not None and namespace.groups[group.number] is group else None

    def _turn_off(self, tier: Tier, why: str) -> None:
        for lease in tier.turn_off(why):
            self._end_lease(tier, lease)

    @staticmethod
    def _end_lease(tier: Tier, lease: int) -> None:
        if lease in tier.session.leases:  # else its session has left, or resumed
            tier.session.unpin(lease)

    def _listen(self) -> None:
        self._cache.lookups.tiers = self if self._tiers else None

    def report(self) -> list[dict[str, object]]:
        """Return figures of each tier for `status`."""
        return [tier.report() for tier in self._tiers.values()]
