"""What becomes of blocks that hold other bytes than were stored: nobody finds them again. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcache_proto.errors import BadArgument, UnknownHandle
from kvcache_proto.messages import Distrust, Distrusted
from kvcache_proto.region import FREE
from kvcache_proto.types import MAX_HASHES, REF_BYTES, Finding, Verdict, unpack_refs
from kvcache_server.index import Block
from kvcache_server.sessions import Session

if TYPE_CHECKING:
    from kvcache_server.cache import Cache

_COUNTERS = {Finding.CORRUPT: "blocks_corrupt", Finding.DIFFERENT: "canary_mismatches"}


def distrust(cache: Cache, session: Session, request: Distrust) -> Distrusted:
    """Forget the blocks that `request` names, with all below them, and say who stored them.

    Raises UnknownHandle for another region, BadArgument for what names no slots, shard or finding.
    """
    if request.region != cache.geometry.region_id:
        raise UnknownHandle("the slots belong to another region")
    if len(request.slots) % REF_BYTES or len(request.slots) > MAX_HASHES * REF_BYTES:
        raise BadArgument(f"{len(request.slots)} bytes of slot references: {REF_BYTES} each, at most {MAX_HASHES}")
    if request.finding not in list(Finding):
        raise BadArgument(f"finding {request.finding}: one of {', '.join(str(int(each)) for each in Finding)}")
    forgotten, writers = 0, []
    for ref in unpack_refs(request.slots):
        block = cache.pool.find(ref)
        if block is None or not block.visible or block.account.group.namespace not in session.attached:
            cache.counters["distrusts_unknown"] += 1
            writers.append(("", 0))
            continue
        writers.append(_writer(cache, block, request.shard))
        if block.account.group.trusts(block):  # else somebody else was faster
            cache.counters[_COUNTERS[Finding(request.finding)]] += 1
            forgotten += _forget(cache, block, Finding(request.finding).name.lower())
    return Distrusted(request.id, forgotten, writers)


def _writer(cache: Cache, block: Block, shard: int) -> tuple[str, int]:
    """Return the engine, and the session that wrote the shard; where that has ended, the one that reserved."""
    row = cache.rows.read_row(cache.pool.row(*cache.pool.locate(block)))
    if row is None:
        return block.account.engine, 0
    for writers, crew in cache.writing.crews.items():
        if crew == row.body.crew and 0 <= shard < len(writers):
            return block.account.engine, writers[shard]
    return block.account.engine, row.body.owner


def _forget(cache: Cache, block: Block, cause: str) -> int:
    """Let no lookup find the block, nor any below it; return how many it found before.

    What is being written below it is orphaned. What is leased, or may be as long as engines of before a restart are
    awaited, stays where it is in the tree, and so keeps what is leased above it; it is the first to be evicted.
    """
    group, parent = block.account.group, block.parent
    assert parent is not None
    for each in block.subtree():
        if not each.visible and each.parent is not None and each.parent.visible:
            grant = group.pending[each.hash]
            cache.writing.doom(grant)
            grant.fate = Verdict.ORPHANED
    below = block.subtree()
    forgotten = [each for each in below if group.trusts(each)]
    for each in forgotten:  # the block first: the next daemon shall find none of them, and this one least of all
        del group.visible[each.hash]
        cache.misses.left(each.hash + group.tag, cause)
        each.tick = 1  # before all others
        cache.rows.set_state(cache.pool.row(*cache.pool.locate(each)), FREE)
    for each in below[::-1]:
        if each.child is None and not each.pins and not cache.room.frozen:
            extent, slot = cache.pool.locate(each)
            each.unlink()
            each.account.leave(each)
            each.account.bytes -= extent.slot_bytes
            cache.pool.give_back(extent, slot)
        else:
            each.account.enter(each)
    parent.account.enter(parent)
    cache.counters["blocks_distrusted"] += len(forgotten)
    return len(forgotten)
