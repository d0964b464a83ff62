"""What the cache says of itself: the figures of `status`, and the check of all that must always hold. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvcache_proto.counts import OTHER
from kvcache_proto.region import DOOMED, FREE, READY, WRITING
from kvcache_server.core.grants import Reservation
from kvcache_server.core.index import GONE, HIDDEN, SPARE, UNQUEUED, Block, Group
from kvcache_server.core.sessions import Namespace
from kvcache_server.core.slices import LOOK, STEP, Steps, finish

if TYPE_CHECKING:
    from kvcache_server.core.cache import Cache

# A report is one frame: past so many characters, namespaces are told of without their identities, and of the engines of
# a namespace only those that hold most of it by name.
MOST_IDENTITY = 1 << 20
MOST_ENGINES = 64


def stats(cache: Cache, now: float) -> Steps[dict[str, Any]]:
    """Return pool, namespaces, sessions, refusals by reason, and counters.

    O(namespaces, accounts, sessions, grants, extents), in slices: what changes meanwhile is told of as it is when its
    turn comes.
    """
    survey, quarantined = (yield from cache.pool.surveying()), cache.writing.quarantine.bytes
    groups = [group for namespace in cache.namespaces.values() for group in namespace.groups]
    writing = hidden = 0
    for group in groups:
        pending = list(group.pending.values())
        for at in range(0, len(pending), LOOK):
            ready = sum(grant.ready for grant in pending[at : at + LOOK])
            hidden += ready
            writing += len(pending[at : at + LOOK]) - ready
            yield
    pool = {
        "region_id": cache.geometry.region_id.hex(),
        "bytes": cache.pool.capacity,
        "wanted_bytes": cache.wanted or cache.pool.capacity,
        "given_back_bytes": len(cache.pool.retired) * cache.pool.extent_bytes,
        "used_bytes": cache.shares.used,
        "extents": cache.geometry.extents,
        "extent_bytes": cache.geometry.extent_bytes,
        "uncut_extents": cache.pool.uncut,
        "blocks": sum(len(group.visible) for group in groups),
        "blocks_writing": writing,
        "blocks_hidden": hidden,
        "slots_quarantined": len(cache.writing.quarantine),
        "pinned_bytes": sum(engine.pins.bytes for engine in cache.engines.values()),
        # These five are the whole pool: the last is what rows and the ends of extents take.
        "ready_bytes": survey.used - survey.busy,
        "writing_bytes": survey.busy - quarantined,
        "quarantined_bytes": quarantined,
        "free_bytes": survey.free,
        "overhead_bytes": cache.pool.capacity - survey.used - survey.free,
        "largest_free_bytes": survey.largest,
        "leases": sum(len(session.leases) for session in cache.sessions.values()),
        "reservations": sum(len(engine.reservations) for engine in cache.engines.values()),
        "residence": cache.room.ages.residence.figures(),
    }
    return {
        "pool": pool,
        "namespaces": (yield from _namespaces(cache)),
        "sessions": (yield from _sessions(cache, now)),
        "away": (yield from _away(cache)),
        "life": cache.life,
        "grace": cache.room.frozen,
        "evictions": dict(cache.room.evictions),
        "evicted_unread": cache.room.evicted_unread,
        "refusals": dict(cache.refusals),
        "told": dict(cache.told),
        "counters": {**cache.counters, "blocks_evicted": cache.room.evictions.total()},
    }


def _namespaces(cache: Cache) -> Steps[list[dict[str, Any]]]:
    engines: dict[int, Counter[str]] = {number: Counter() for number in cache.namespaces}  # bytes of each, by namespace
    for at, account in enumerate(list(cache.shares.accounts), 1):
        engines.setdefault(account.group.namespace, Counter())[account.engine] += account.bytes
        if at % LOOK == 0:
            yield
    found: list[dict[str, Any]] = []
    said = 0
    for namespace in list(cache.namespaces.values()):
        said += sum(map(len, [*namespace.spec.identity, *namespace.spec.identity.values()]))
        found.append(_namespace(namespace, engines.get(namespace.number, Counter()), said <= MOST_IDENTITY))
        if len(found) % STEP == 0:
            yield
    return found


def _namespace(namespace: Namespace, engines: Counter[str], with_identity: bool) -> dict[str, Any]:
    named = dict(engines.most_common(MOST_ENGINES))
    if len(named) < len(engines):
        named[OTHER] = named.get(OTHER, 0) + engines.total() - sum(named.values())
    return {
        "id": namespace.id,
        "model": namespace.spec.model,
        "identity": namespace.spec.identity if with_identity else {},
        "block_tokens": [group.spec.block_tokens for group in namespace.groups],
        "block_bytes": [group.spec.block_bytes for group in namespace.groups],
        "overhead": round(namespace.fit.overhead, 4),
        "better_extent_bytes": namespace.fit.better_extent,
        "lookups": namespace.lookups,
        "requested_blocks": namespace.requested_blocks,
        "hit_blocks": sum(group.hit_blocks for group in namespace.groups),
        "hit_bytes": sum(group.hit_blocks * group.spec.block_bytes for group in namespace.groups),
        "lost_blocks": sum(group.ghosts.lost.missed_blocks for group in namespace.groups),
        "saved_blocks": sum(group.saved_blocks for group in namespace.groups),
        "saved_bytes": sum(group.saved_blocks * group.spec.block_bytes for group in namespace.groups),
        "blocks": sum(len(group.visible) for group in namespace.groups),
        "bytes": engines.total(),
        "engines": named,
    }


def _sessions(cache: Cache, now: float) -> Steps[list[dict[str, Any]]]:
    owned = yield from _reservations(cache, lambda reservation: (reservation.owner,))
    found: list[dict[str, Any]] = []
    for session in list(cache.sessions.values()):
        found.append(
            {
                "id": session.id,
                "engine": session.engine.name,
                "label": session.label,
                "age_s": round(now - session.opened, 1),
                "leases": len(session.leases),
                "reservations": owned[session.id],
                "namespaces": {namespace.id: list(shards) for namespace, shards in session.attached.values()},
                "breaker": "unknown" if session.breaker is None else session.breaker.name.lower(),
                "counts": dict(session.counts),
            }
        )
        if len(found) % STEP == 0:
            yield
    return found


def _away(cache: Cache) -> Steps[list[dict[str, Any]]]:
    written = yield from _reservations(cache, lambda reservation: set(reservation.writers))
    return [
        {"id": number, "engine": engine.name, "reservations": written[number]}
        for number, engine in cache.absent.items()
    ]


def _reservations(cache: Cache, whose: Callable[[Reservation], Iterable[int]]) -> Steps[Counter[int]]:
    """Return how many reservations each session has, one for each that `whose` names."""
    found: Counter[int] = Counter()
    looks = 0
    for engine in list(cache.engines.values()):
        for reservation in list(engine.reservations.values()):
            found.update(whose(reservation))
            looks += 1
            if looks % LOOK == 0:
                yield
    return found


def check_integrity(cache: Cache) -> None:
    """Raise AssertionError, naming what is broken, unless all that must always hold does. O(blocks)."""
    pins: dict[int, int] = {}
    for session in cache.sessions.values():
        for lease in session.leases.values():
            pins[id(lease.block)] = pins.get(id(lease.block), 0) + 1
            assert lease.block.visible and lease.block.pins > 0, "a lease on a block that is not visible"
    for block in cache.writing.held.values():
        if block.pins != GONE:
            pins[id(block)] = pins.get(id(block), 0) + 1
    for engine in cache.engines.values():
        engine.pins.check([lease for session in engine.sessions.values() for lease in session.leases.values()])
        written = sum(each.unsettled * each.group.slot_bytes for each in engine.reservations.values())
        assert engine.writing == written, f"engine {engine.name} writes {engine.writing}, not {written}"
    living: dict[int, Block] = {}
    for namespace in cache.namespaces.values():
        for group in namespace.groups:
            _check_group(cache, group, pins, living)
    _check_slots(cache, living)


def _check_group(cache: Cache, group: Group, pins: dict[int, int], living: dict[int, Block]) -> None:
    assert not group.visible.keys() & group.pending.keys(), "a hash both visible and pending"
    tree = group.root.subtree()[1:]
    distrusted = [block for block in tree if block.visible and not group.trusts(block)]
    blocks = [*group.visible.values(), *(grant.block for grant in group.pending.values()), *distrusted]
    assert len(tree) == len(blocks) and {id(b) for b in tree} == {id(b) for b in blocks}, "the tree is not the index"
    about_to_be_shown = {id(block) for _, waiting in cache.writing.showing for block in waiting}
    about_to_be_forgotten = {id(block) for waiting in cache.distrusting for block in waiting}
    queued = {id(block) for account in cache.shares.accounts for block in account.standing()}
    for block in blocks:
        living[id(block)] = block
        parent = block.parent
        assert parent is not None
        assert block.pins == pins.get(id(block), 0), f"{block.pins} pins, {pins.get(id(block), 0)} leases"
        if block.visible:
            below = [each for each in block.children() if group.trusts(each) and id(each) not in about_to_be_forgotten]
            assert group.trusts(block) or not below, "found below what is distrusted"
            assert parent.visible, "visible below what is not: nobody can reach it"
            evictable = block.child is None and not block.pins
            assert not evictable or block.queued > UNQUEUED, "a leaf that nothing would evict"
            assert (block.queued > UNQUEUED) == (id(block) in queued)
        else:
            grant = group.pending[block.hash]
            assert block.queued == HIDDEN and grant.block is block and grant.fate is None
            found = grant.ready and group.reaches(parent) and id(block) not in about_to_be_shown
            assert not found, "READY below a visible parent, yet hidden"
            assert grant.ready == grant.whole


def _check_slots(cache: Cache, living: dict[int, Block]) -> None:
    writing: dict[tuple[int, int], bool] = {}
    accounts: dict[int, int] = {}
    for engine in cache.engines.values():
        for reservation in engine.reservations.values():
            assert reservation.unsettled == sum(not grant.whole for grant in reservation.grants) > 0
            for grant in reservation.grants:
                if not grant.whole:
                    writing[(grant.extent.index, grant.slot)] = True
                    if id(grant.block) not in living:
                        assert grant.fate is not None and grant.block.pins == GONE
                        accounts[id(grant.block.account)] = (
                            accounts.get(id(grant.block.account), 0) + grant.extent.slot_bytes
                        )
    quarantined = {(extent.index, slot) for extent, slot in cache.writing.quarantine.slots()}
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
                accounts[id(block.account)] = accounts.get(id(block.account), 0) + extent.slot_bytes
        assert busy == extent.busy, f"extent {extent.index}: busy {extent.busy}, {busy} slots are"
        assert extent.used == len(extent.blocks) - len(vacant) and len(vacant) == len(extent.vacant)
    empty = {index: extent for index, extent in cache.pool.extents.items() if not extent.used}
    assert cache.pool.empty == empty, "extents that are empty, or not, and nobody knows"
    survey, quarantine = finish(cache.pool.surveying()), cache.writing.quarantine.bytes
    assert survey.used == quarantine + cache.shares.used, "slots without account"
    assert survey.busy >= quarantine and survey.used + survey.free <= cache.pool.capacity, "a pool that does not add up"
    for account in cache.shares.accounts:
        stale = sum(block.pins == GONE for block in account.standing())
        assert account.stale == stale, "an order of blocks that have gone"
        assert account.clearing or stale <= SPARE + len(account.standing()) - stale, "an order that nobody sweeps"
        assert account.bytes == accounts.get(id(account), 0), "an account that does not add up"
