"""Invalidates blocks that contain other bytes than were stored, and all blocks of a namespace. Pure.

Lookups stop finding the blocks at once. The sweeper frees them: blocks in use once they are no longer used, or once
their room is needed, as they are evicted before all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

from kvcache_proto.errors import BadArgument, UnknownHandle
from kvcache_proto.messages import Invalidate, Invalidated
from kvcache_proto.types import MAX_BLOCKS, REF_BYTES, Finding, Verdict
from kvcache_server.core.effects import CLEARED, NamespaceEmptied
from kvcache_server.core.eviction.policy import Eviction
from kvcache_server.core.index import EVICT_FIRST, GONE, Block, BottomUp, Group
from kvcache_server.core.journal import NamespaceCleared
from kvcache_server.core.limits import STEP
from kvcache_server.core.pool import Pool
from kvcache_server.core.reservations import Reservations
from kvcache_server.core.sessions import Namespace, Session
from kvcache_server.core.states import FORGOTTEN
from kvcache_server.core.sweeper import Sweeper

_KEPT = 1024  # blocks looked at in one slice
_COUNTERS = {Finding.CORRUPT: "blocks_corrupt", Finding.DIFFERENT: "canary_mismatches"}


class Invalidation:
    """Attributes: `cleared` are the former indexes of groups, with their namespaces' numbers, whose blocks are to be
    removed; `kept` are hidden blocks that were in use when their turn came. `changes` counts up whenever blocks have
    been hidden; while `under_way` is not 0, more are about to be hidden.
    """

    def __init__(self, pool: Pool, eviction: Eviction, reservations: Reservations, sweeper: Sweeper) -> None:
        self.cleared: list[tuple[int, dict[bytes, Block]]] = []
        self.kept: deque[Block] = deque()
        self.changes = self.under_way = 0
        self._pool, self._rows, self._eviction = pool, pool.rows, eviction
        self._reservations, self._sweeper = reservations, sweeper
        self._effects, self._counters = sweeper.effects, sweeper.effects.counters

    def invalidate(self, session: Session, request: Invalidate) -> Invalidated:
        """Hide the blocks named in `request` and all below them, and report which engine stored them.

        The number of blocks in the reply does not include those that the sweeper has not reached.

        Raises UnknownHandle for another region, BadArgument for malformed references or an unknown finding; then
        nothing has changed.
        """
        if request.region != self._pool.geometry.region_id:
            raise UnknownHandle("the blocks belong to another region")
        if len(request.slots) % REF_BYTES or len(request.slots) > MAX_BLOCKS * REF_BYTES:
            raise BadArgument(f"{len(request.slots)} bytes of references: {REF_BYTES} each, at most {MAX_BLOCKS}")
        if request.finding not in list(Finding):
            raise BadArgument(f"finding {request.finding}: one of {', '.join(str(int(each)) for each in Finding)}")
        finding, before = Finding(request.finding), self._counters["blocks_invalidated"]
        stored_by: list[tuple[str, int]] = []
        writers = {number: writers for writers, number in self._reservations.writers.items()}
        for at in range(0, len(request.slots), REF_BYTES):
            block = self._pool.find(request.slots, at)
            if block is None or not block.visible or block.account.group.namespace not in session.attached:
                self._counters["invalidations_unknown"] += 1
                stored_by.append(("", 0))
                continue
            stored_by.append(self._writer(writers, block, request.shard))
            if block.is_found:  # else it is hidden already
                self._counters[_COUNTERS[finding]] += 1
                self._counters["blocks_invalidated"] += 1
                self._reservations.hide(block, finding.name.lower())
                # The row goes first: the next daemon must find none of them, and this one least of all.
                trunk = block.account.group.above
                trunk.severed += 1
                self.under_way += 1
                self._sweeper.add(partial(self._remove_below, trunk, BottomUp(block), finding.name.lower()))
        return Invalidated(request.id, self._counters["blocks_invalidated"] - before, stored_by)

    def _writer(self, writers: Mapping[int, Sequence[int]], block: Block, shard: int) -> tuple[str, int]:
        """Return the engine, and the session that wrote the shard or, if that has ended, the one that reserved it."""
        row = self._rows.read_row(self._pool.row(block))
        if row is None:
            return block.account.engine, 0
        sessions = writers.get(row.body.writers, ())
        if 0 <= shard < len(sessions):
            return block.account.engine, sessions[shard]
        return block.account.engine, row.body.owner

    def clear(self, namespace: Namespace) -> int:
        """Hide all blocks that are stored in the namespace; return their number.

        Blocks that are being written are kept if they are the first ones of their chains: others are of no use.
        """
        groups = [group for group in namespace.groups if group.visible]
        if not groups:
            return 0
        count = sum(len(group.visible) for group in groups)
        self._counters["blocks_cleared"] += count
        self._effects.records.append(NamespaceCleared(namespace.number, self._pool.generation))
        self._effects.changes.append(NamespaceEmptied(namespace))
        for group in groups:  # blocks that hang on those of the first group come after it, and are taken first
            self.cleared.append((namespace.number, group.visible))
            group.visible = {}
        self.changes += 1
        self._sweeper.add(self._remove_cleared)
        return count

    # In slices.

    def _remove_below(self, trunk: Group, way: BottomUp, cause: str) -> bool:
        if way.go_on(partial(self._visit, cause)):
            return True
        trunk.severed -= 1
        self.under_way -= 1
        self.changes += 1
        return False

    def _visit(self, cause: str, block: Block) -> bool:
        """Remove a block below a hidden one, or the hidden one; or let its children be visited first."""
        if block.pins == GONE:
            return False
        group = block.account.group
        if not block.visible:
            self._reservations.doom(group.pending[block.hash], Verdict.ORPHANED, "orphaned")
            return False
        below = block.child
        if below is not None and (not below.visible or below.is_found):
            return True  # it is new, or it was never visited: those that stay are hidden
        if block.is_found:
            self._counters["blocks_invalidated"] += 1
            self._reservations.hide(block, cause)
        self._remove(block)
        return False

    def _remove_cleared(self) -> bool:
        """Remove some blocks of former indexes: those shown last come first, so children before parents."""
        left = STEP
        while left > 0 and self.cleared:
            number, index = self.cleared[-1]
            while left > 0 and index:
                _, block = index.popitem()
                left -= 1
                if block.pins == GONE:
                    continue
                written = list(islice((child for child in block.children() if not child.visible), STEP))
                for child in written:
                    self._reservations.doom(child.account.group.pending[child.hash], Verdict.ORPHANED, "orphaned")
                if len(written) == STEP:  # its turn comes again
                    index[block.hash] = block
                    left = 0
                else:
                    self._effects.gone(block, CLEARED)
                    self._remove(block)
            if not index:
                self.cleared.pop()
                if all(each != number for each, _ in self.cleared):
                    self._effects.records.append(NamespaceCleared(number, 0))
        return bool(self.cleared)

    def remove_kept(self) -> bool:
        """Remove some of the hidden blocks that were in use when their turn came and no longer are; return whether
        there are probably more."""
        removed = 0
        for _ in range(min(_KEPT, len(self.kept))):
            block = self.kept.popleft()
            if block.pins == GONE:
                continue
            if self._is_in_use(block):
                self.kept.append(block)
                continue
            self._eviction.discard(block)
            removed += 1
            if removed == STEP:
                return True
        return False

    def _remove(self, block: Block) -> None:
        """Remove a hidden block, or keep it if it is in use."""
        block.tick = EVICT_FIRST
        if not self._is_in_use(block):
            self._eviction.discard(block)
            return
        self._rows.set_state(self._pool.row(block), FORGOTTEN)
        block.account.enter(block)
        self.kept.append(block)

    def _is_in_use(self, block: Block) -> bool:
        """Whether it must stay. Until engines have reclaimed their leases after a restart, any block may be being
        read."""
        return block.pins != 0 or block.child is not None or self._eviction.frozen
