"""What a session that has come back says it holds: believed once, within the limits of a session that asks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_proto.errors import NotPermitted, UnknownHandle
from kvcache_proto.messages import Restate, Restated
from kvcache_proto.types import REF_BYTES, SlotRef
from kvcache_server.core.index import GONE, Block
from kvcache_server.core.sessions import Session
from kvcache_server.core.slices import LOOK, STEP, Steps

if TYPE_CHECKING:
    from kvcache_server.core.cache import Cache

MOST_BLOCKS = 1 << 17  # looked at for one restate


def restate(cache: Cache, session: Session, request: Restate, now: float) -> Steps[Restated]:
    """Take back what a session that has resumed holds: its leases, and of its reservations those it has heard of.

    It is believed once, and given no more than it could have asked for: leases beyond `max_leases` and the pin quota
    are lost, as those are whose blocks are gone. Raises NotPermitted for a session that has nothing to restate; nothing
    has changed then.
    """
    if not session.may_restate:
        raise NotPermitted(f"session {session.id} has nothing to restate: it has not resumed since it last did")
    session.may_restate = False
    for reservation in list(session.engine.reservations.values()):
        if reservation.owner == session.id and reservation.id > request.heard:
            cache.counters["reservations_unheard"] += 1
            yield from cache.writing.abandon(reservation, now + cache.limits.quarantine)
            yield
    _check_here(session)
    lost = []
    pinned = _Pinned(cache)
    there = [lease for each in session.engine.sessions.values() for lease in each.leases.values()]
    for done, lease in enumerate(there, 1):
        if done % STEP == 0:
            yield
        if lease.block.pins != GONE:  # else it has ended meanwhile
            yield from pinned.add(lease.block, 1 << 62)
    for done, (number, ref) in enumerate(request.leases, 1):
        if done % STEP == 0:
            yield
        _check_here(session)
        block = cache.pool.find(SlotRef.unpack(ref)) if len(ref) == REF_BYTES else None
        taken = any(number in each.leases for each in session.engine.sessions.values())
        if block is None or not block.visible or taken or not 0 < number <= cache.last_lease:
            lost.append(number)
            continue
        room = len(session.leases) < cache.limits.max_leases
        length = (yield from pinned.add(block, cache.pin_quota)) if room else 0
        _check_here(session)
        if not length:
            lost.append(number)
            cache.counters["leases_over_limits"] += 1
            continue
        cache.pin(session, number, block, length * block.account.group.slot_bytes)
        cache.counters["leases_restated"] += 1
    cache.counters["leases_lost"] += len(lost)
    cache.awaited.discard(session.id)
    return Restated(request.id, lost)


def _check_here(session: Session) -> None:
    if not session.here:
        raise UnknownHandle(f"session {session.id} has left")


class _Pinned:
    """The distinct blocks that leases pin together: what may still be pinned beside them is known after one walk."""

    def __init__(self, cache: Cache) -> None:
        self._held = cache.writing.held
        self._lengths: dict[int, int] = {}  # of the chain that ends in a block, by the block's identity
        self._counted: list[Block] = []  # those blocks: as long as they are held here, no other has their identities
        self._bytes, self._left = 0, MOST_BLOCKS
        self._looks = 0

    def add(self, block: Block, quota: int) -> Steps[int]:
        """Count the chain that ends in `block` and return its length; 0, uncounted, where all exceed `quota` bytes.

        The block is pinned meanwhile, and keeps those above it.
        """
        block.pins += 1
        self._held[self] = block
        try:
            return (yield from self._add(block, quota))
        finally:
            del self._held[self]
            block.unpin()

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
