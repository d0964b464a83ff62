"""Invalidation of blocks that contain other bytes than were stored: lookups stop finding them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvcache_proto.errors import BadArgument, UnknownHandle
from kvcache_proto.messages import Distrust, Distrusted
from kvcache_proto.types import MAX_HASHES, REF_BYTES, BlockRef, Finding, Verdict
from kvcache_server.core.effects import Effects
from kvcache_server.core.eviction.policy import Eviction
from kvcache_server.core.index import GOES_FIRST, GONE, Block
from kvcache_server.core.lookups import Lookups
from kvcache_server.core.pool import Pool
from kvcache_server.core.reservations import Reservations
from kvcache_server.core.sessions import Session
from kvcache_server.core.slices import STEP, Steps
from kvcache_server.core.states import FORGOTTEN

_COUNTERS = {Finding.CORRUPT: "blocks_corrupt", Finding.DIFFERENT: "canary_mismatches"}


class Invalidation:
    """Forgets blocks that engines found to be wrong.

    Attributes: `waiting` are blocks that are about to be forgotten, because a block above them was.
    """

    def __init__(
        self,
        pool: Pool,
        eviction: Eviction,
        lookups: Lookups,
        reservations: Reservations,
        counters: Counter[str],
        effects: Effects,
    ) -> None:
        self.waiting: list[list[Block]] = []
        self._pool, self._rows, self._eviction = pool, pool.rows, eviction
        self._lookups, self._reservations = lookups, reservations
        self._counters, self._effects = counters, effects

    def distrust(self, session: Session, request: Distrust) -> Steps[Distrusted]:
        """Forget the blocks named in `request` and all below them, and report which engine stored them.

        Raises UnknownHandle for another region, BadArgument for malformed references or an unknown finding.
        """
        if request.region != self._pool.geometry.region_id:
            raise UnknownHandle("the blocks belong to another region")
        if len(request.slots) % REF_BYTES or len(request.slots) > MAX_HASHES * REF_BYTES:
            raise BadArgument(f"{len(request.slots)} bytes of references: {REF_BYTES} each, at most {MAX_HASHES}")
        if request.finding not in list(Finding):
            raise BadArgument(f"finding {request.finding}: one of {', '.join(str(int(each)) for each in Finding)}")
        finding, forgotten = Finding(request.finding), 0
        stored_by: list[tuple[str, int]] = []
        writers = {number: writers for writers, number in self._reservations.writers.items()}
        for at in range(0, len(request.slots), REF_BYTES):
            if at and at % (STEP * REF_BYTES) == 0:
                yield
            block = self._pool.find(BlockRef.unpack(request.slots[at : at + REF_BYTES]))
            if block is None or not block.visible or block.account.group.namespace not in session.attached:
                self._counters["distrusts_unknown"] += 1
                stored_by.append(("", 0))
                continue
            stored_by.append(self._writer(writers, block, request.shard))
            if block.account.group.trusts(block):  # else it was already distrusted
                self._counters[_COUNTERS[finding]] += 1
                forgotten += yield from self._forget(block, finding.name.lower())
        return Distrusted(request.id, forgotten, stored_by)

    def _writer(self, writers: Mapping[int, Sequence[int]], block: Block, shard: int) -> tuple[str, int]:
        """Return the engine, and the session that wrote the shard; if that has ended, the session that reserved it."""
        row = self._rows.read_row(self._pool.row(block))
        if row is None:
            return block.account.engine, 0
        sessions = writers.get(row.body.writers, ())
        if 0 <= shard < len(sessions):
            return block.account.engine, sessions[shard]
        return block.account.engine, row.body.owner

    def _forget(self, top: Block, cause: str) -> Steps[int]:
        """Hide the block and all below it from lookups; return how many blocks lookups found before.

        Blocks below it that are being written are orphaned. Blocks that are leased, or that may be leased as long as
        engines have not restated their leases after a restart, stay in the tree, and so keep leased blocks above them;
        they are the first to be evicted.

        The block itself goes first: the next daemon must find none of them, and this one least of all.
        """
        forgotten = done = 0
        waiting, below = [top], []
        name = top.hash + top.account.group.tag
        self._reservations.forgetting.add(name)
        self.waiting.append(waiting)
        try:
            while waiting:
                block = waiting.pop()
                if block.pins == GONE:
                    continue
                done += 1
                group = block.account.group
                if not block.visible:
                    grant = group.pending[block.hash]
                    self._reservations.doom(grant, Verdict.ORPHANED, "orphaned")
                    continue
                below.append(block)
                waiting.extend(block.children())
                if group.trusts(block):
                    forgotten += 1
                    del group.visible[block.hash]
                    self._effects.gone(block, cause)
                    block.tick = GOES_FIRST
                    self._rows.set_state(self._pool.row(block), FORGOTTEN)
                if done % STEP == 0:
                    yield
        finally:
            self.waiting.remove(waiting)
            self._reservations.forgetting.remove(name)
        for block in below[::-1]:
            if block.pins == GONE:
                continue
            parent = block.parent
            assert parent is not None
            if block.child is None and not block.pins and not self._eviction.frozen:
                block.unlink()
                block.account.leave(block)
                block.account.share.bytes -= block.account.group.allocated_bytes
                self._pool.give_back(self._pool.vacate(block))
            else:
                block.account.enter(block)
            parent.account.enter(parent)
            done += 1
            if done % STEP == 0 and block is not top:
                yield
        self._counters["blocks_distrusted"] += forgotten
        return forgotten
