"""What becomes of blocks that hold other bytes than were stored: nobody finds them again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvcache_proto.errors import BadArgument, UnknownHandle
from kvcache_proto.messages import Distrust, Distrusted
from kvcache_proto.region import FREE
from kvcache_proto.types import MAX_HASHES, REF_BYTES, Finding, SlotRef, Verdict
from kvcache_server.core.index import GONE, Block
from kvcache_server.core.sessions import Session
from kvcache_server.core.slices import STEP, Steps

if TYPE_CHECKING:
    from kvcache_server.core.cache import Cache

_COUNTERS = {Finding.CORRUPT: "blocks_corrupt", Finding.DIFFERENT: "canary_mismatches"}


def distrust(cache: Cache, session: Session, request: Distrust) -> Steps[Distrusted]:
    """Forget the blocks that `request` names, with all below them, and say who stored them.

    Raises UnknownHandle for another region, BadArgument for what names no slots, shard or finding.
    """
    if request.region != cache.geometry.region_id:
        raise UnknownHandle("the slots belong to another region")
    if len(request.slots) % REF_BYTES or len(request.slots) > MAX_HASHES * REF_BYTES:
        raise BadArgument(f"{len(request.slots)} bytes of slot references: {REF_BYTES} each, at most {MAX_HASHES}")
    if request.finding not in list(Finding):
        raise BadArgument(f"finding {request.finding}: one of {', '.join(str(int(each)) for each in Finding)}")
    finding, forgotten = Finding(request.finding), 0
    writers: list[tuple[str, int]] = []
    crews = {number: crew for crew, number in cache.writing.crews.items()}
    for at in range(0, len(request.slots), REF_BYTES):
        if at and at % (STEP * REF_BYTES) == 0:
            yield
        block = cache.pool.find(SlotRef.unpack(request.slots[at : at + REF_BYTES]))
        if block is None or not block.visible or block.account.group.namespace not in session.attached:
            cache.counters["distrusts_unknown"] += 1
            writers.append(("", 0))
            continue
        writers.append(_writer(cache, crews, block, request.shard))
        if block.account.group.trusts(block):  # else somebody else was faster
            cache.counters[_COUNTERS[finding]] += 1
            forgotten += yield from _forget(cache, block, finding.name.lower())
    return Distrusted(request.id, forgotten, writers)


def _writer(cache: Cache, crews: Mapping[int, Sequence[int]], block: Block, shard: int) -> tuple[str, int]:
    """Return the engine, and the session that wrote the shard; where that has ended, the one that reserved."""
    row = cache.rows.read_row(cache.pool.row(*cache.pool.locate(block)))
    if row is None:
        return block.account.engine, 0
    writers = crews.get(row.body.crew, ())
    if 0 <= shard < len(writers):
        return block.account.engine, writers[shard]
    return block.account.engine, row.body.owner


def _forget(cache: Cache, top: Block, cause: str) -> Steps[int]:
    """Let no lookup find the block, nor any below it; return how many it found before.

    What is being written below it is orphaned. What is leased, or may be as long as engines of before a restart are
    awaited, stays where it is in the tree, and so keeps what is leased above it; it is the first to be evicted.

    The block goes first: the next daemon shall find none of them, and this one least of all.
    """
    group, forgotten, done = top.account.group, 0, 0
    waiting, below = [top], []
    cache.distrusting.append(waiting)
    cache.distrusts += 1
    try:
        while waiting:
            block = waiting.pop()
            if block.pins == GONE:
                continue
            done += 1
            if not block.visible:
                grant = group.pending[block.hash]
                yield from cache.writing.doom(grant)
                grant.fate = Verdict.ORPHANED
                continue
            below.append(block)
            waiting.extend(block.children())
            if group.trusts(block):
                forgotten += 1
                del group.visible[block.hash]
                cache.misses.left(block.hash + group.tag, cause)
                block.tick = 1  # before all others
                cache.rows.set_state(cache.pool.row(*cache.pool.locate(block)), FREE)
            if done % STEP == 0:
                yield
    finally:
        cache.distrusting.remove(waiting)
    for block in below[::-1]:
        if block.pins == GONE:
            continue
        parent = block.parent
        assert parent is not None
        if block.child is None and not block.pins and not cache.room.frozen:
            extent, slot = cache.pool.locate(block)
            block.unlink()
            block.account.leave(block)
            block.account.bytes -= extent.slot_bytes
            cache.pool.give_back(extent, slot)
        else:
            block.account.enter(block)
        parent.account.enter(parent)
        done += 1
        if done % STEP == 0 and block is not top:
            yield
    cache.counters["blocks_distrusted"] += forgotten
    return forgotten
