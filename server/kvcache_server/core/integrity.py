"""What must always hold, of each part of the cache alone: looked at in slices, while others go on. Pure.

`report.check_integrity` looks at all of it at one instant, and so knows the sums over all blocks, too. That takes some
seconds for a million of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_proto.region import DOOMED, FREE, READY, WRITING
from kvcache_server.core.index import GONE, HIDDEN, UNQUEUED, Block
from kvcache_server.core.pool import Extent
from kvcache_server.core.slices import LOOK, STEP, Steps, finish

if TYPE_CHECKING:
    from kvcache_server.core.cache import Cache

_FEW = 10_000  # microseconds that the whole may take, where somebody waits meanwhile
_SUMMED = 4 * LOOK  # slots that are added up at one instant, in some milliseconds


def takes_long(cache: Cache) -> bool:
    """Whether to look at all at one instant takes longer than a request may."""
    blocks = sum(len(group.visible) for namespace in cache.namespaces.values() for group in namespace.groups)
    return 8 * blocks + sum(len(extent.blocks) for extent in cache.pool.extents.values()) > _FEW


def audit(cache: Cache) -> Steps[None]:
    """Raise AssertionError, naming what is broken, unless each part is sound when it is looked at."""
    for session in list(cache.sessions.values()):
        for lease in session.leases.values():
            assert lease.block.visible and lease.block.pins > 0, "a lease on a block that is not visible"
        yield
    for engine in list(cache.engines.values()):
        written = sum(each.unsettled * each.group.slot_bytes for each in engine.reservations.values())
        assert engine.writing == written, f"engine {engine.name} writes {engine.writing}, not {written}"
        yield
        for reservation in list(engine.reservations.values()):
            assert reservation.unsettled == sum(not grant.whole for grant in reservation.grants), "a miscount of grants"
            yield
    survey, quarantine = finish(cache.pool.surveying()), cache.writing.quarantine.bytes
    assert survey.used == quarantine + cache.shares.used, "slots without account"
    for extent in list(cache.pool.extents.values()):
        if cache.pool.extents.get(extent.index) is extent:
            yield
            _check_extent(cache, extent)
        for slot in range(len(extent.blocks)):
            if slot % STEP == 0:
                yield
            if cache.pool.extents.get(extent.index) is not extent:
                break  # it was given up meanwhile
            _check_slot(cache, extent, slot)


def _check_extent(cache: Cache, extent: Extent) -> None:
    """Look at an extent's sums. Of too many slots, each is looked at alone: see `_check_slot`."""
    blocks = extent.blocks
    if len(blocks) > _SUMMED:
        return
    states = cache.rows.states(extent.rows, len(blocks))
    busy = states.count(WRITING) + states.count(DOOMED)
    assert busy == extent.busy, f"extent {extent.index}: busy {extent.busy}, {busy} slots are"
    assert len(extent.vacant) == blocks.count(None) == len(blocks) - extent.used, "a slot both vacant and lived in"


def _check_slot(cache: Cache, extent: Extent, slot: int) -> None:
    block, row = extent.blocks[slot], cache.rows.read_row(cache.pool.row(extent, slot))
    if block is None:
        assert row is None or row.state == FREE, "a vacant slot whose row says otherwise"
    elif block.parent is None or block.pins == GONE:
        assert row is not None and row.state == DOOMED, "a slot that nothing can free"
    else:
        assert cache.pool.locate(block) == (extent, slot), "a block that lives elsewhere"
        _check_block(cache, block)
        if row is None:
            assert block.visible and not block.account.group.trusts(block), "a block that the next daemon would lose"
            return
        body, group = row.body, block.account.group
        assert row.parent == block.parent.generation and body.block_hash == block.hash, "another block's row"
        assert (body.namespace, body.group) == (group.namespace, group.number), "another group's row"
        assert body.engine == cache.engines[block.account.engine].number, "another engine's row"
        ready = block.visible or group.pending[block.hash].ready
        assert row.state == (READY if ready else WRITING), "a row that is in another state than its block"


def _check_block(cache: Cache, block: Block) -> None:
    group, parent = block.account.group, block.parent
    assert parent is not None
    assert (parent.child if block.prev is None else block.prev.next) is block, "a block that its parent does not know"
    assert block.next is None or block.next.prev is block, "a block that its parent does not know"
    if block.visible:
        assert parent.visible, "visible below what is not: nobody can reach it"
        assert block.child is not None or block.pins or block.queued > UNQUEUED, "a leaf that nothing would evict"
    else:
        grant = group.pending[block.hash]
        assert block.queued == HIDDEN and grant.block is block and grant.fate is None, "a block that waits for nothing"
        assert grant.ready == grant.whole, "a block that is whole and not READY"
