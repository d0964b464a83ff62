"""Lookups, and the leases on what they find. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcache_proto import messages as m
from kvcache_proto.errors import NotPermitted
from kvcache_proto.types import REF_BYTES, SlotRef, check_hashes
from kvcache_server.core.checksums import Checksums
from kvcache_server.core.eviction.policy import Eviction
from kvcache_server.core.index import GONE, Block, Group, Holds
from kvcache_server.core.limits import Limits
from kvcache_server.core.pool import Pool
from kvcache_server.core.sessions import Namespace, Session
from kvcache_server.core.slices import LOOK, STEP, Steps, begin

MOST_RESTATED = 1 << 17  # blocks examined per restate


class Lookups:
    """Answers lookups, and pins what they found. `last` is the number of the last lease."""

    def __init__(
        self,
        pool: Pool,
        eviction: Eviction,
        holds: Holds,
        limits: Limits,
        counters: Counter[str],
        refusals: Counter[str],
    ) -> None:
        self.last = 0
        self._retracted = 0  # how often blocks were invalidated
        self.checksums: Checksums | None = None  # set if there is a file for them
        self._pool, self._eviction, self._holds = pool, eviction, holds
        self._counters, self._refusals = counters, refusals
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        self._max_leases = limits.max_leases
        self._quota = int(limits.pin_quota * self._pool.capacity)

    # Lookups.

    def acquire(self, session: Session, request: m.Acquire, now: float) -> m.Acquired | Steps[m.Acquired]:
        """Answer with the longest visible prefix, under a lease if `request.pin`.

        Raises UnknownHandle, BadArgument; then nothing has changed.
        """
        namespace, group = session.group(request.namespace, request.group)
        hashes = request.hashes
        if len(hashes) > LOOK:
            return begin(self._acquire_long(session, request, namespace, group))
        return self._answer(session, request, namespace, group, group.prefix(hashes))

    def _acquire_long(
        self, session: Session, request: m.Acquire, namespace: Namespace, group: Group
    ) -> Steps[m.Acquired]:
        found = yield from self._long_prefix(session, group, request.hashes)
        return self._answer(session, request, namespace, group, found)

    def _long_prefix(self, session: Session, group: Group, hashes: Sequence[bytes]) -> Steps[list[Block]]:
        """Return the blocks of the longest visible prefix, found in slices.

        Between two slices the last block found is pinned, which keeps the blocks above it. If blocks are distrusted in
        the meantime, the search starts over, because they may be among those found.

        Raises BadArgument for too many hashes or a wrong length, UnknownHandle if the session leaves in the meantime.
        """
        check_hashes(hashes, group.hash_bytes)
        yield
        session.check_connected()
        found: list[Block] = []
        retracted = self._retracted
        while True:
            piece = group.prefix(hashes[len(found) : len(found) + LOOK])
            found += piece
            if len(piece) < LOOK or len(found) == len(hashes):
                return found
            with self._holds.hold(session, found[-1]):
                yield
            session.check_connected()
            if self._retracted != retracted:
                found, retracted = [], self._retracted

    def start_over(self) -> None:
        """Make lookups in progress start over: blocks that they have found may be wrong."""
        self._retracted += 1

    def _answer(
        self, session: Session, request: m.Acquire, namespace: Namespace, group: Group, found: list[Block]
    ) -> m.Acquired:
        hashes = request.hashes
        hits = len(found)
        if hits < len(hashes):
            missed = hashes[hits:]
            if len(hashes) <= LOOK:  # longer ones are checked already
                check_hashes(missed, group.hash_bytes)
            self._eviction.missed(group, missed)
        engine = session.engine
        namespace.lookups += 1
        namespace.requested_blocks += len(hashes)
        self._counters["blocks_requested"] += len(hashes)
        if hits and engine.writers[request.namespace] is None:
            # A rank that has not mapped the region could not load the blocks that its scheduler is offered.
            self._counters["ranks_missing"] += 1
            hits = 0
        pending = group.pending_after(hashes, hits) if hits == len(found) else 0
        if not hits:
            return m.Acquired(request.id, 0, 0, pending, b"")
        lease = withheld = 0
        if request.pin:
            if len(session.leases) >= self._max_leases:
                self._refusals["leases"] += hits
                return m.Acquired(request.id, 0, 0, 0, b"", hits)
            size, cover = hits * group.slot_bytes, 0
            if engine.pins.bytes + size > self._quota:
                affordable, size, cover = engine.pins.fit(found, self._quota)
                withheld = hits - affordable
                if withheld:
                    self._refusals["quota"] += withheld
                    hits, pending = affordable, 0
                if not hits:
                    return m.Acquired(request.id, 0, 0, 0, b"", withheld)
            self.last = lease = self.last + 1
            session.pin(lease, found[hits - 1], size, cover)
        if hits < len(found):
            del found[hits:]
        self._pool.read(found[-1])
        found[-1].account.hit_bytes += hits * group.slot_bytes
        group.hit_blocks += hits
        self._counters["blocks_hit"] += hits
        slots = b"".join([block.ref for block in found])
        sums = self.checksums.read(slots, group.sum_offsets) if request.verify and self.checksums else b""
        return m.Acquired(request.id, lease, hits, pending, slots, withheld, sums)

    def release(self, session: Session, request: m.Release, now: float) -> None:
        """End the session's leases named in `request`; count unknown ones."""
        unknown = 0
        for lease in request.leases:
            if lease in session.leases:
                session.unpin(lease)
            else:
                unknown += 1
        if unknown:
            self._counters["releases_unknown"] += unknown

    # After a restart.

    def begin_to_restate(self, session: Session) -> None:
        """Raise NotPermitted if the session has nothing to restate; then nothing has changed."""
        if not session.may_restate:
            raise NotPermitted(f"session {session.id} has nothing to restate: it has not resumed since it last did")
        session.may_restate = False

    def restate(self, session: Session, request: m.Restate) -> Steps[list[int]]:
        """Restore the leases that a resumed session reports to hold; return the numbers of those that are lost.

        The limits of new leases apply: leases beyond `max_leases` or the pin quota are lost, as are leases whose blocks
        are gone.
        """
        session.check_connected()
        lost = []
        chains = _Chains(self._holds)
        there = [lease for each in session.engine.sessions.values() for lease in each.leases.values()]
        for done, lease in enumerate(there, 1):
            if done % STEP == 0:
                yield
            if lease.block.pins != GONE:  # otherwise it has ended in the meantime
                yield from chains.add(lease.block, 1 << 62)
        for done, (number, ref) in enumerate(request.leases, 1):
            if done % STEP == 0:
                yield
            session.check_connected()
            block = self._pool.find(SlotRef.unpack(ref)) if len(ref) == REF_BYTES else None
            taken = any(number in each.leases for each in session.engine.sessions.values())
            if block is None or not block.visible or taken or not 0 < number <= self.last:
                lost.append(number)
                continue
            may_pin = len(session.leases) < self._max_leases
            length = (yield from chains.add(block, self._quota)) if may_pin else 0
            session.check_connected()
            if not length:
                lost.append(number)
                self._counters["leases_over_limits"] += 1
                continue
            session.pin(number, block, length * block.account.group.slot_bytes)
            self._counters["leases_restated"] += 1
        self._counters["leases_lost"] += len(lost)
        return lost


class _Chains:
    """The distinct blocks that leases pin together, to find out how much more may be pinned."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._lengths: dict[int, int] = {}  # of the chain that ends in a block, by the block's id()
        self._counted: list[Block] = []  # those blocks: while they are referenced here, no other has their id()
        self._bytes, self._left = 0, MOST_RESTATED
        self._looks = 0

    def add(self, block: Block, quota: int) -> Steps[int]:
        """Count the chain that ends in `block` and return its length. If the total exceeds `quota` bytes, return 0 and
        do not count it.

        The block is pinned in the meantime, which keeps the blocks above it.
        """
        with self._holds.hold(self, block):
            return (yield from self._add(block, quota))

    def _add(self, block: Block, quota: int) -> Steps[int]:
        size, length = block.account.group.slot_bytes, 0
        new: list[Block] = []
        for each in block.ancestors():
            length = self._lengths.get(id(each), 0)
            if length:
                break
            new.append(each)
            if len(new) > self._left or self._bytes + len(new) * size > quota:
                self._left -= len(new)
                return 0
            self._looks += 1
            if self._looks % LOOK == 0:
                yield
        self._left -= len(new)
        self._bytes += len(new) * size
        total = length + len(new)
        while new:
            length += 1
            self._counted.append(new.pop())
            self._lengths[id(self._counted[-1])] = length
            self._looks += 1
            if self._looks % LOOK == 0:
                yield
        return total
