"""The invariants of the cache's state, checked. Pure.

`check_integrity` checks everything at once, including sums over all blocks; a million blocks take some seconds. `audit`
checks one part after the other, in slices, while requests are served.
"""

from __future__ import annotations

from kvcache_proto.region import DOOMED, FREE, READY, WRITING
from kvcache_proto.types import TAIL
from kvcache_server.core.cache import Cache
from kvcache_server.core.extent import Extent
from kvcache_server.core.index import CLASSES, GONE, HIDDEN, SPARE, UNQUEUED, Block, Group, Reservation, Share
from kvcache_server.core.pins import Lease
from kvcache_server.core.retention import MOST, MOST_OF_ONE, NAMES, NAMES_OF_ONE
from kvcache_server.core.slices import LOOK, STEP, Steps, finish

_FEW = 10_000  # microseconds that the whole check may take while requests wait
_SUMMED = 4 * LOOK  # slots that are added up at once, in some milliseconds


def check_integrity(cache: Cache) -> None:
    """Raise AssertionError, naming what is broken, unless all invariants hold. O(blocks)."""
    pins: dict[int, int] = {}
    holders = cache.registry.holders()
    for session in holders:
        for lease in session.leases.values():
            for block in lease.blocks:
                pins[id(block)] = pins.get(id(block), 0) + 1
                assert block.visible and block.pins > 0, "a lease on a block that is not visible"
    for lease in _check_retentions(cache):
        for block in lease.blocks:
            pins[id(block)] = pins.get(id(block), 0) + 1
    for block in cache.holds.blocks.values():
        if block.pins != GONE:
            pins[id(block)] = pins.get(id(block), 0) + 1
    for engine in cache.engines.values():
        engine.pins.check([lease for each in holders if each.engine is engine for lease in each.leases.values()])
        written = sum(_unsettled_bytes(each) for each in engine.reservations.values())
        assert engine.writing == written, f"engine {engine.name} writes {engine.writing}, not {written}"
    living: dict[int, Block] = {}
    for namespace in cache.namespaces.values():
        for group in namespace.groups:
            _check_group(cache, group, pins, living)
    _check_all_slots(cache, living)


def _unsettled_bytes(reservation: Reservation) -> int:
    return sum(grant.extent.slot_bytes for grant in reservation.grants if not grant.whole)


def _check_retentions(cache: Cache) -> list[Lease]:
    """Check what is retained and pinned, and return the leases that hold it."""
    retentions = cache.retentions
    leases: list[Lease] = []
    for owner in retentions.owners():
        mine = [each.lease for each in owner.retentions.values() if each.lease is not None]
        owner.pins.check(mine)
        leases += mine
        assert owner.names == sum(len(each.names) for each in owner.retentions.values())
        assert len(owner.retentions) <= MOST_OF_ONE and owner.names <= NAMES_OF_ONE, "more retentions than allowed"
    every = retentions.all()
    assert len(every) <= MOST and sum(len(each.names) for each in every) <= NAMES, "more retentions than allowed"
    assert {each.number: each for each in every if each.held < each.wanted} == retentions.waiting
    for each in every:
        assert (each.lease is None) == (each.held == 0) and each.held <= each.wanted <= len(each.names)
        if each.lease is not None:
            held = each.lease.block
            assert (held is None) == (each.group.spec.kind == TAIL), "a retention without a block of its full group"
            assert held is None or held.hash == each.names[each.held - 1], "retains another block than it names"
            assert all(block.visible for block in each.lease.blocks), "retains what is hidden"
            assert retentions.doubted or each.sound, "retains what is distrusted"
    return leases


def _check_group(cache: Cache, group: Group, pins: dict[int, int], living: dict[int, Block]) -> None:
    assert not group.visible.keys() & group.pending.keys(), "a hash both visible and pending"
    tree = [each for each in group.above.root.subtree()[1:] if each.account.group is group]
    distrusted = [block for block in tree if block.visible and not group.trusts(block)]
    blocks = [*group.visible.values(), *(grant.block for grant in group.pending.values()), *distrusted]
    assert len(tree) == len(blocks) and {id(b) for b in tree} == {id(b) for b in blocks}, "the tree is not the index"
    about_to_be_shown = {id(block) for waiting in cache.reservations.showing for block in waiting}
    about_to_be_forgotten = {id(block) for waiting in cache.invalidation.waiting for block in waiting}
    queued = {id(block) for account in cache.eviction.fair_share.accounts for block in account.entries()}
    for block in blocks:
        living[id(block)] = block
        parent = block.parent
        assert parent is not None
        assert block.pins == pins.get(id(block), 0), f"{block.pins} pins, {pins.get(id(block), 0)} leases"
        if block.visible:
            below = [each for each in block.children() if each.account.group.trusts(each)]
            below = [each for each in below if id(each) not in about_to_be_forgotten]
            assert group.trusts(block) or not below, "found below what is distrusted"
            assert parent.visible, "visible below what is not: nobody can reach it"
            evictable = block.child is None and not block.pins
            assert not evictable or block.queued > UNQUEUED, "a leaf that nothing would evict"
            assert (block.queued > UNQUEUED) == (id(block) in queued)
        else:
            grant = group.pending[block.hash]
            assert block.queued == HIDDEN and grant.block is block and grant.verdict is None
            found = grant.ready and group.reaches(parent) and id(block) not in about_to_be_shown
            assert not found, "READY below a visible parent, yet hidden"
            assert grant.ready == grant.whole


def _check_all_slots(cache: Cache, living: dict[int, Block]) -> None:
    writing: dict[tuple[int, int], bool] = {}
    held: dict[Share, int] = {}
    for engine in cache.engines.values():
        for reservation in engine.reservations.values():
            assert reservation.unsettled == sum(not grant.whole for grant in reservation.grants) > 0
            for grant in reservation.grants:
                if not grant.whole:
                    writing[(grant.extent.index, grant.slot)] = True
                    if id(grant.block) not in living:
                        assert grant.verdict is not None and grant.block.pins == GONE
                        share = grant.block.account.share
                        held[share] = held.get(share, 0) + grant.extent.slot_bytes
    quarantined = {(extent.index, slot) for extent, slot in cache.pool.quarantine.slots()}
    for extent in cache.pool.extents.values():
        busy, vacant = 0, set(extent.vacant)
        for slot, block in enumerate(extent.blocks):
            row, key = cache.rows.read_row(cache.pool.row(extent, slot)), (extent.index, slot)
            assert (block is None) == (slot in vacant), "a slot both vacant and lived in"
            if key in quarantined or key in writing:
                busy += 1
                assert block is not None and row is not None
                assert row.state == (DOOMED if id(block) not in living else WRITING)
            elif block is not None:
                assert id(block) in living, "a slot that nothing can free"
                if block.visible and not block.account.group.trusts(block):
                    assert row is None, "a distrusted block that the next daemon would find"
                else:
                    assert row is not None and row.state == READY and row.body.block_hash == block.hash
            else:
                assert row is None or row.state == FREE
            if block is not None and id(block) in living:
                if row is not None:
                    assert block.parent is not None and row.parent == block.parent.generation
                    body, group = row.body, block.account.group
                    assert (body.namespace, body.group) == (group.namespace, group.number)
                    assert body.engine == cache.engines[block.account.engine].number
                assert cache.pool.locate(block) == (extent, slot)
                share = block.account.share
                held[share] = held.get(share, 0) + extent.slot_bytes
        assert busy == extent.busy, f"extent {extent.index}: busy {extent.busy}, {busy} slots are"
        assert extent.used == len(extent.blocks) - len(vacant) and len(vacant) == len(extent.vacant)
    empty = {index: extent for index, extent in cache.pool.extents.items() if not extent.used}
    assert cache.pool.empty == empty, "the list of empty extents is wrong"
    survey, quarantine = finish(cache.pool.surveying()), cache.pool.quarantine.bytes
    assert survey.used == quarantine + cache.eviction.fair_share.used, "slots without account"
    assert survey.busy >= quarantine and survey.used + survey.free <= cache.pool.capacity, "a pool that does not add up"
    for share in cache.eviction.fair_share.shares:
        assert share.bytes == held.get(share, 0), "a share that does not add up"
    for account in cache.eviction.fair_share.accounts:
        stale = sum(block.pins == GONE for block in account.entries())
        assert account.stale == stale, "an order of blocks that have gone"
        assert account.clearing or stale <= CLASSES * SPARE + len(account.entries()) - stale, (
            "an order that nobody sweeps"
        )


def takes_long(cache: Cache) -> bool:
    """Whether `check_integrity` would take longer than a request may."""
    blocks = sum(len(group.visible) for namespace in cache.namespaces.values() for group in namespace.groups)
    return 8 * blocks + sum(len(extent.blocks) for extent in cache.pool.extents.values()) > _FEW


def audit(cache: Cache) -> Steps[None]:
    """Raise AssertionError, naming what is broken, unless each part is consistent when it is checked."""
    for session in cache.registry.holders():
        for lease in session.leases.values():
            for block in lease.blocks:
                assert block.visible and block.pins > 0, "a lease on a block that is not visible"
        yield
    for each in cache.retentions.all():
        for block in each.lease.blocks if each.lease is not None else ():
            assert block.visible and block.pins > 0, "retains what is hidden"
    yield
    for engine in list(cache.engines.values()):
        written = sum(_unsettled_bytes(each) for each in engine.reservations.values())
        assert engine.writing == written, f"engine {engine.name} writes {engine.writing}, not {written}"
        yield
        for reservation in list(engine.reservations.values()):
            assert reservation.unsettled == sum(not grant.whole for grant in reservation.grants), "a miscount of grants"
            yield
    survey, quarantine = finish(cache.pool.surveying()), cache.pool.quarantine.bytes
    assert survey.used == quarantine + cache.eviction.fair_share.used, "slots without account"
    for extent in list(cache.pool.extents.values()):
        yield
        if cache.pool.extents.get(extent.index) is extent:
            _check_extent(cache, extent)
        for slot in range(len(extent.blocks)):
            if slot % STEP == 0:
                yield
            if cache.pool.extents.get(extent.index) is not extent:
                break  # it was removed in the meantime
            _check_slot(cache, extent, slot)


def _check_extent(cache: Cache, extent: Extent[Block]) -> None:
    """Check an extent's sums. With too many slots, only `_check_slot` checks them, one by one."""
    blocks = extent.blocks
    if len(blocks) > _SUMMED:
        return
    states = cache.rows.states(extent.rows, len(blocks))
    busy = states.count(WRITING) + states.count(DOOMED)
    assert busy == extent.busy, f"extent {extent.index}: busy {extent.busy}, {busy} slots are"
    assert len(extent.vacant) == blocks.count(None) == len(blocks) - extent.used, "a slot both vacant and lived in"


def _check_slot(cache: Cache, extent: Extent[Block], slot: int) -> None:
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
    assert parent.pins != GONE, "a block below one that is gone"
    assert (parent.child if block.prev is None else block.prev.next) is block, "a block that its parent does not know"
    assert block.next is None or block.next.prev is block, "a block that its parent does not know"
    if block.visible:
        assert parent.visible, "visible below what is not: nobody can reach it"
        assert block.child is not None or block.pins or block.queued > UNQUEUED, "a leaf that nothing would evict"
    else:
        grant = group.pending[block.hash]
        assert block.queued == HIDDEN and grant.block is block and grant.verdict is None, (
            "a block that waits for nothing"
        )
        assert grant.ready == grant.whole, "a block that is whole and not READY"
