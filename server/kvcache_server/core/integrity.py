"""The invariants of the cache's state, checked. Pure.

`check_integrity` checks everything at once, including sums over all blocks; a million blocks take some seconds. `audit`
checks one part after the other while requests are served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcache_proto.region import DOOMED, READY, WRITING, row_of
from kvcache_proto.types import SUFFIX, BlockRef
from kvcache_server.core.cache import Cache
from kvcache_server.core.index import GONE, HIDDEN, UNQUEUED, Block, Group, Reservation, Share
from kvcache_server.core.limits import STEP
from kvcache_server.core.pins import Lease
from kvcache_server.core.retention import MOST, MOST_OF_ONE, NAMES, NAMES_OF_ONE
from kvcache_server.slices import Steps

_FEW = 10_000  # microseconds that the whole check may take while requests wait


def check_integrity(cache: Cache) -> None:
    """Raise AssertionError, naming what is broken, unless all invariants hold. O(blocks)."""
    _check_counts(cache)
    cache.eviction.due.check()
    holders = cache.registry.holders()
    leases = [lease for session in holders for lease in session.leases.values()]
    _check_leases(leases)
    pins = Counter(id(block) for lease in (*leases, *_check_retentions(cache)) for block in lease.blocks)
    for engine in cache.engines.values():
        engine.pins.check([lease for each in holders if each.engine is engine for lease in each.leases.values()])
        _check_reservations(engine.reservations.values())
        assert all(each.unsettled for each in engine.reservations.values()), "a reservation that is settled"
        written = sum(_unsettled_bytes(each) for each in engine.reservations.values())
        assert engine.writing == written, f"engine {engine.name} writes {engine.writing}, not {written}"
    for page in range(cache.pool.geometry.pages):
        _check_page(cache, page)
    living: dict[int, Block] = {}
    for namespace in cache.namespaces.values():
        for group in namespace.groups:
            _check_group(cache, group, pins, living)
    _check_all_pages(cache, living)


def audit(cache: Cache) -> Steps[None]:
    """Check the state, one part after the other, while requests are served. Raises AssertionError, naming what is
    broken, unless each part is consistent when it is checked."""
    _check_counts(cache)
    sessions = cache.registry.holders()
    reservations = [each for engine in cache.engines.values() for each in engine.reservations.values()]
    while sessions:
        yield
        _check_leases(sessions.pop().leases.values())
    while reservations:
        yield
        _check_reservations(reservations[-STEP:])
        del reservations[-STEP:]
    for page in range(cache.pool.geometry.pages):
        if page % STEP == 0:
            yield
        _check_page(cache, page)


def takes_long(cache: Cache) -> bool:
    """Whether `check_integrity` would take longer than a request may."""
    blocks = sum(len(group.visible) for namespace in cache.namespaces.values() for group in namespace.groups)
    blocks += sum(len(index) for _, index in cache.invalidation.cleared) + len(cache.invalidation.kept)
    return 8 * blocks + cache.pool.geometry.pages // 8 > _FEW


# Checks of one part.


def _check_counts(cache: Cache) -> None:
    pool, quarantine = cache.pool, cache.pool.quarantine.bytes
    assert pool.used == quarantine + cache.used, "pages without account"
    written = sum(engine.writing for engine in cache.engines.values())
    assert pool.busy * pool.geometry.page_bytes == quarantine + written, "a miscount of busy pages"
    for each in cache.retentions.all():
        for block in each.lease.blocks if each.lease is not None else ():
            assert block.visible and block.pins > 0, "retains what is hidden"


def _check_leases(leases: Iterable[Lease]) -> None:
    for lease in leases:
        for block in lease.blocks:
            assert block.visible and block.pins > 0, "a lease on a block that is not visible"


def _check_reservations(reservations: Iterable[Reservation]) -> None:
    for each in reservations:
        assert each.unsettled == sum(not grant.is_settled for grant in each.grants), "a miscount of grants"


def _check_page(cache: Cache, page: int) -> None:
    block, row = cache.pool.blocks[page], cache.rows.read_row(row_of(page))
    if block is None:
        assert row is None, "a row without a block"
    elif block.parent is None or block.pins == GONE:
        assert row is not None and row.state == DOOMED, "pages that nothing can free"
    else:
        assert cache.pool.page(block) == page, "a block that lives elsewhere"
        _check_block(cache, block)
        if row is None:
            assert block.visible and not block.is_found, "a block that the next daemon would lose"
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
    assert parent.pins != GONE or id(parent) in cache.reservations.orphaned, "a block below one that is gone"
    assert (parent.child if block.prev is None else block.prev.next) is block, "a block that its parent does not know"
    assert block.next is None or block.next.prev is block, "a block that its parent does not know"
    if block.visible:
        assert parent.visible, "a visible block below one that is not: no lookup can reach it"
        assert block.child is not None or block.pins or block.queued > UNQUEUED, "a leaf that nothing would evict"
    else:
        grant = group.pending[block.hash]
        assert block.queued == HIDDEN and grant.block is block and grant.verdict is None, (
            "a block that waits for nothing"
        )
        assert grant.ready == grant.is_settled, "a block that is whole and not READY"


# Checks of everything.


def _unsettled_bytes(reservation: Reservation) -> int:
    return sum(each.block.account.group.allocated_bytes for each in reservation.grants if not each.is_settled)


def _check_retentions(cache: Cache) -> list[Lease]:
    """Check retained and pinned blocks, and return the leases that hold them."""
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
            assert (held is None) == (each.group.spec.kind == SUFFIX), "a retention without a block of its full group"
            assert held is None or held.hash == each.names[each.held - 1], "retains another block than it names"
            assert all(block.visible for block in each.lease.blocks), "retains what is hidden"
            assert retentions.doubted or each.sound, "retains what is invalidated"
    return leases


def _check_group(cache: Cache, group: Group, pins: Counter[int], living: dict[int, Block]) -> None:
    assert not group.visible.keys() & group.pending.keys(), "a hash both visible and pending"
    roots = (group.above.root, *cache.reservations.orphaned.values())
    tree = [each for root in roots for each in root.subtree()[1:] if each.account.group is group]
    invalidated = [block for block in tree if block.visible and not block.is_found]
    blocks = [*group.visible.values(), *(grant.block for grant in group.pending.values()), *invalidated]
    assert len(tree) == len(blocks) and {id(b) for b in tree} == {id(b) for b in blocks}, "the tree is not the index"
    about_to_be_shown = {id(block) for block in cache.reservations.showing}
    queued = {id(block) for account in cache.eviction.fair_share.accounts for block in account.leaves}
    for block in blocks:
        living[id(block)] = block
        assert block.pins == pins[id(block)], f"{block.pins} pins, {pins[id(block)]} leases"
        assert block.parent is not None
        if block.visible:
            below = [each for each in block.children() if each.is_found]
            assert block.is_found or not below or group.above.severed, "found below what is invalidated"
            assert (block.queued > UNQUEUED) == (id(block) in queued)
            assert block.queued > UNQUEUED or not group.is_evictable(block), "a leaf that can never be evicted"
        else:
            found = group.pending[block.hash].ready and group.reaches(block.parent)
            assert not found or id(block) in about_to_be_shown, "READY below a visible parent, yet hidden"


def _check_all_pages(cache: Cache, living: dict[int, Block]) -> None:
    pool = cache.pool
    writing: dict[int, Block] = {}
    held: dict[Share, int] = {}
    for engine in cache.engines.values():
        for reservation in engine.reservations.values():
            for grant in reservation.grants:
                if not grant.is_settled:
                    writing[id(grant.block)] = grant.block
                    if id(grant.block) not in living:
                        assert grant.verdict is not None and grant.block.pins == GONE
                        share = grant.block.account.share
                        held[share] = held.get(share, 0) + grant.block.account.group.allocated_bytes
    quarantined = {id(block) for block in pool.quarantine.blocks()}
    cleared = {id(block) for _, index in cache.invalidation.cleared for block in index.values()}
    owners = bytearray(pool.ready) + b"\1" * (pool.geometry.pages - pool.ready)
    busy = 0
    for page, block in enumerate(pool.blocks):
        if block is None:
            continue
        row, runs = cache.rows.read_row(row_of(page)), pool.runs_of(block)
        assert runs[0][0] == pool.page(block) == page, "a block on other pages"
        for first, count in runs:
            assert not any(owners[first : first + count]), "a page with two blocks"
            owners[first : first + count] = b"\1" * count
        pages = sum(count for _, count in runs)
        if id(block) in quarantined or id(block) in writing:
            busy += pages
        else:
            assert id(block) in living, "a block that nothing can free"
            if block.visible and not block.is_found:
                # The next daemon learns of cleared blocks from the state file.
                assert row is None or id(block) in cleared, "an invalidated block that the next daemon would find"
        if id(block) in living:
            assert pages == block.account.group.pages, "a block of another size"
            if row is not None:
                found = tuple(cache.rows.runs(BlockRef.unpack(block.ref), pages))
                assert found == runs, "runs that readers do not find"
            share = block.account.share
            held[share] = held.get(share, 0) + block.account.group.allocated_bytes
    assert busy == pool.busy, f"{pool.busy} pages are busy, {busy} are found"
    _check_free(cache, owners)
    for share in cache.eviction.fair_share.shares:
        assert share.bytes == held.get(share, 0), "a share that does not add up"
    for account in cache.eviction.fair_share.accounts:
        assert all(block.queued == at for at, block in enumerate(account.leaves, 1)), "leaves in other places"
        assert all(block.pins != GONE and block.child is None for block in account.leaves), "gone, or not a leaf"


def _check_free(cache: Cache, owners: bytearray) -> None:
    """Check that the pages without an owner are free, and no others."""
    pool, last = cache.pool, -1
    for page, count in sorted(pool.free.runs()):
        assert page > last, "free runs that were not merged"
        assert not any(owners[page : page + count]), "a free page with a block"
        owners[page : page + count] = b"\1" * count
        last = page + count
    assert all(owners), "a page that is lost"
    assert pool.free.pages == sum(count for _, count in pool.free.runs()), "a miscount of free pages"
