"""Learns from lookups what blocks are worth. Pure.

A lookup only leaves a note, so it stays cheap for the client. Several are learned from together later: blocks that were
found go up one class, misses are counted, and the watched blocks show how soon blocks return.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate, compress, groupby, islice
from operator import attrgetter
from typing import NamedTuple

from kvcache_proto import messages as m
from kvcache_server.core.eviction.monitor import REACH, Monitor
from kvcache_server.core.eviction.sketch import Sketch, sampled
from kvcache_server.core.eviction.worth import Worths
from kvcache_server.core.index import (
    CLASS_MASK,
    CLASSES,
    EVICT_FIRST,
    GONE,
    OFTEN,
    PACE_MASK,
    TICKS_PER_SECOND,
    Account,
    Block,
    Group,
    Share,
    pace_of,
)
from kvcache_server.core.limits import LOOK
from kvcache_server.core.pool import Pool
from kvcache_server.core.sampling import Draw, KeyedHasher, split
from kvcache_server.core.sessions import Engine

_REFRESHES = 16  # of the worths, in the time in which as many blocks miss as the pool holds
_FEWEST, _REFRESHED_FOR = 128, TICKS_PER_SECOND // 4  # blocks that miss, and time, between two refreshes
_MOST_MISSES, _MOST_WATCHED = 8 * LOOK, LOOK // 2  # of one lookup: a few milliseconds
_TOGETHER, _MOST_WAITING = 32, 8 * LOOK  # lookups and blocks to learn from at once, which takes less time
_MOST_EXPECTED = 1 << 14  # blocks that missed and are about to be stored, if they were requested before
_MOST_LEFT = LOOK // 4  # evicted blocks of a group that are not in the sketch yet


class _Lookup(NamedTuple):
    """A lookup by an engine; the first block has the hash `first`.

    It keeps no decoded hash: their memory is in the processor's cache when the next request needs it.
    """

    engine: Engine
    group: Group
    first: bytes
    blocks: int  # number requested
    hits: int
    found: Sequence[Block]  # those that the engine may load; none without a full group
    suffixes: Sequence[Block]  # of other groups, that it needs with those
    before: int  # the tick of the last block of `found` before it
    missed: bytes  # the hashes of at most _MOST_MISSES blocks behind the hits, without gaps
    elsewhere: int  # how many of these, at the beginning, the engine has on its device


class Learner:
    """Attributes: `hits_by_class` counts blocks that were found, by how often they had been requested before: once,
    twice, more often. `expected` has the class, if not 0, of blocks that missed lately, by hash; it stays the same
    dict."""

    def __init__(self, pool: Pool, draw: Draw, hasher: KeyedHasher, enabled: bool = True) -> None:
        """`draw` and `hasher` decide which blocks are sampled. If it is not `enabled`, all blocks keep the class 0."""
        self._pool, self._draw, self._hasher, self._enabled = pool, draw, hasher, enabled
        self.worths = Worths()
        self.monitor = Monitor(self.worths)
        self.guard = self.monitor.guard
        self.guard.by_age = not enabled
        self.hits_by_class = [0] * CLASSES
        self.expected: dict[bytes, int] = {}
        self._sketch = Sketch(1)
        self._slots = 0  # of the pool, for which these are sized
        self._asked: list[_Lookup] = []  # the latest ones
        self._waiting = 0  # their hashes
        # The hashes and ticks of evicted blocks that are not in the sketch yet, by their group's tag.
        self._left: dict[bytes, tuple[bytearray, list[int]]] = {}
        self.wanted: dict[bytes, None] = {}  # hashes of blocks to store regardless of their worth
        self._refreshed = 0  # the tick of the last refresh
        self._missed = 0  # blocks requested and not cached since the last refresh, whether stored then or refused

    def asked(
        self,
        engine: Engine,
        group: Group,
        request: m.Acquire,
        found: Sequence[Block],
        hits: int,
        suffixes: Sequence[Block] = (),
    ) -> None:
        """Note the first lookup of a request, with `hits`, for which the engine needs the blocks `found` and those of
        `suffixes`."""
        hashes = request.hashes
        if self._enabled and hashes:
            missed = b"".join(hashes[hits : hits + _MOST_MISSES]) if hits < len(hashes) else b""
            aware = engine.shares[group.namespace].device and not group.suffixes
            elsewhere = max(request.start - hits, 0) if aware else 0
            before = found[-1].tick if found else 0
            self._asked.append(
                _Lookup(*(engine, group, hashes[0], len(hashes), hits, found, suffixes, before, missed, elsewhere))
            )
            self._waiting += len(hashes)
            if self._waiting > _MOST_WAITING or len(self._asked) >= _TOGETHER:
                self.learn()

    def learn(self) -> None:
        """Learn from the latest lookups. Called before blocks are stored.

        If they ask for the same missing blocks, that counts as one request.
        """
        latest, self._asked, self._waiting = self._asked, [], 0
        for group, lookups in groupby(latest, key=attrgetter("group")):
            first: list[_Lookup] = []
            shares: list[Share] = []
            for each in lookups:
                share = each.engine.shares.get(group.namespace)
                if share is not None:
                    first.append(each)
                    shares.append(share)
                    self.guard.note_prompt(each.blocks / self.monitor.every)
            if first:
                self._learn(group, first, shares)

    def _learn(self, group: Group, lookups: Sequence[_Lookup], shares: Sequence[Share]) -> None:
        if not self._slots:
            self._resize(self._pool.blocks_of(group.allocated_bytes), group.spec.block_tokens)
        size = group.hash_bytes
        ends = list(accumulate(len(each.missed) // size for each in lookups))
        begins = [0, *ends[:-1]]
        for each in lookups:
            if each.found:
                self._set_pace(each.found[-1], each.before)
            self._go_up(each.found)
            if each.suffixes:
                self._go_up(each.suffixes)
            self._missed += each.blocks - each.hits - each.elsewhere
        watches = not group.number  # the other groups of a namespace get the same hashes at the same time
        step, thin = self.monitor.steps(group.spec.block_tokens)
        firsts = [self._draw(each.first) % step if watches and step > 1 else 0 for each in lookups]
        if watches:
            chains = [each.found or each.suffixes[-1:] for each in lookups]
            hits = [block for chain, at in zip(chains, firsts, strict=True) for block in chain[at::step]]
            if thin > 1 and hits:
                keyed = self._hasher.of(b"".join([block.hash for block in hits]), size, group.tag)
                hits = [hits[at] for at in sampled(keyed, thin)]
            self._watch_hits(hits)
        missed = b"".join([each.missed for each in lookups])
        if not missed:
            return
        self._note_evicted()
        keyed = self._hasher.of(missed, size, group.tag)
        classes = self._sketch.ask(keyed, begins, self._pool.tick)
        self._expect(missed, size, classes)
        if watches:
            places = [
                at
                for each, first, begin, end in zip(lookups, firsts, begins, ends, strict=True)
                for at in range(begin + each.elsewhere + (first - each.hits - each.elsewhere) % step, end, step)
            ]
            if thin > 1 and places:
                places = [places[at] for at in sampled(keyed[places], thin)]
            now, asked = self._pool.tick, self.monitor.asked
            paces = [
                each.found[-1].tick & PACE_MASK if each.found and each.found[-1].child is None else 0
                for each in lookups
            ]
            for at in places[:_MOST_WATCHED]:
                name = missed[at * size : at * size + size]
                which = bisect_right(begins, at) - 1
                low = classes[at]
                tick = now | (low if low & PACE_MASK else low | paces[which])
                asked(name, tick, now, shares[which], None if name in group.pending else False)

    def _set_pace(self, block: Block, before: int) -> None:
        """Note the time between the last two requests for a block."""
        pace = pace_of(block.tick - before) if before > EVICT_FIRST and block.pins != GONE else 0
        if pace:
            block.tick = block.tick & ~PACE_MASK | pace
            self._pool.write_tick(block)

    def _go_up(self, found: Sequence[Block]) -> None:
        """Move requested blocks up one class.

        A request for a block is one for those above it, too. So these never have a lower class, and the way up ends at
        the first one of the highest class. Blocks high above inherit the class when those below are gone.
        """
        counts, often = self.hits_by_class, len(found)
        for block in found[: -LOOK - 1 : -1]:
            cls = block.tick & CLASS_MASK
            if cls >= OFTEN:
                break
            counts[cls] += 1
            often -= 1
            if block.pins != GONE and block.tick != EVICT_FIRST:
                block.tick = block.tick - cls | cls + 1  # as in Pool.place
                self._pool.write_tick(block)
        counts[OFTEN] += often

    def _watch_hits(self, found: Sequence[Block]) -> None:
        now, monitor = self._pool.tick, self.monitor
        for block in found[-_MOST_WATCHED:]:
            monitor.asked(block.hash, now | block.tick & CLASS_MASK, now, block.account.share, True)

    def _expect(self, missed: bytes, size: int, classes: Sequence[int]) -> None:
        """Remember the classes of blocks that will probably be stored soon."""
        expected = self.expected
        again = list(compress(range(len(classes)), classes))
        if not again:
            return
        expected.update(zip(split(missed, size, again), [classes[at] for at in again], strict=True))
        if len(expected) > _MOST_EXPECTED:
            for name in list(islice(expected, _MOST_EXPECTED // 2)):
                del expected[name]

    def want(self, names: Sequence[bytes]) -> None:
        """Remember blocks that are to be kept once they are stored."""
        if len(self.wanted) > _MOST_EXPECTED:
            self.wanted.clear()
        self.wanted.update(dict.fromkeys(names))

    def recall(self, group: Group, names: Sequence[bytes]) -> dict[bytes, int]:
        """Return the classes, if not 0, of blocks that are about to be stored again, by hash."""
        if not names or not self._slots:
            return {}
        self._note_evicted()
        classes = self._sketch.recall(self._hasher.of(b"".join(names), group.hash_bytes, group.tag))
        return dict(zip(names, classes, strict=True))

    def evicted(self, block: Block) -> None:
        """Remember the class and the last use of a block that is evicted."""
        if self._enabled and block.tick != EVICT_FIRST:
            tag = block.account.group.above.tag  # lookups have only the hashes of these
            hashes, ticks = self._left.get(tag) or self._left.setdefault(tag, (bytearray(), []))
            hashes += block.hash
            ticks.append(block.tick)
            if len(ticks) >= _MOST_LEFT:
                self._note_evicted()

    def _note_evicted(self) -> None:
        for tag, (hashes, ticks) in self._left.items():
            self._sketch.put(self._hasher.of(hashes, len(hashes) // len(ticks), tag), ticks)
        self._left.clear()

    def _resize(self, slots: int, block_tokens: int) -> None:
        self._slots = slots = max(slots, 1)
        self.monitor.resize(slots, block_tokens)
        self._sketch = Sketch(REACH * slots)

    @property
    def due(self) -> bool:
        """Whether `refresh` should be called."""
        if self._missed < max(self._slots // _REFRESHES, _FEWEST):
            return False
        return self._pool.tick - self._refreshed >= _REFRESHED_FOR

    def refresh(self, accounts: Collection[Account]) -> None:
        """Update the worths from the evidence. `accounts` are those that share the pool."""
        self._missed, self._refreshed = 0, self._pool.tick
        groups = {account.group for account in accounts if not account.group.is_suffix}
        blocks = sum(len(group.visible) for group in groups)
        used = sum(share.bytes for share in {account.share for account in accounts})
        slots = self._pool.blocks_of(used // max(blocks, 1))
        if used * 2 > self._pool.capacity and not self._slots <= 2 * slots <= 4 * self._slots:
            most = max(groups, key=lambda group: len(group.visible))
            self._resize(slots, most.spec.block_tokens)  # other blocks have come
        self.monitor.refresh(self._pool.tick)

    def forget_shares(self, shares: Collection[Share]) -> None:
        """Drop references to shares that are gone."""
        self.learn()
        self.monitor.forget(shares)
