"""The index of cached blocks, as trees, and of blocks that are being written. Pure.

The blocks of a group form a tree below `Group.root`: a block's parent is the previous block of the prompt. The block of
a suffix group hangs on the block with the same hash in the full group of its namespace, because it is useless without
that; without such a group, on its own root. Only leaves are evicted, so every cached block stays reachable. An account
(the blocks that one engine stored in one group) lists its evictable leaves, in no order: the one to evict is found in a
sample of them. A touch only sets the block's own tick.

A tick is a time, a pace and a class. Its two lowest bits are the class: 0, 1 or 2 for a block that was requested once,
twice or more often. The next seven are the pace, the time between its last two requests: 0 if that is unknown, else one
of PACES. The other bits are the time of the last use, in units of 2^-20 s after FIRST_TICK, increased if necessary so
that no two uses have the same time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter, is_

import msgspec

from kvcache_proto.region import pages_of
from kvcache_proto.types import GroupSpec, Verdict
from kvcache_server.core.checksums import Checksums
from kvcache_server.core.limits import STEP

HIDDEN = -1  # `queued`: WRITING, or READY below a block that is not visible
UNQUEUED = 0  # `queued`: visible, and not among the leaves of its account
GONE = -1  # `pins`: removed, but possibly still referred to
CLASSES, CLASS_MASK, OFTEN = 3, 3, 2  # OFTEN is the class of blocks requested more than twice
PACE_SHIFT, MOST_PACE = 2, 127
PACE_MASK = MOST_PACE << PACE_SHIFT
NEXT_TICK = 1 << 9  # the smallest difference between two times, in ticks
TICK_MASK = NEXT_TICK - 1  # of class and pace
TICKS_PER_SECOND = NEXT_TICK << 20
FIRST_TICK = 3 << 58  # the tick at 0 s; those of older releases are smaller
EVICT_FIRST = NEXT_TICK  # the tick of a block that is evicted before all others
PACES_PER_DOUBLING = 4
PACES = [0.0, *(2 ** (at / PACES_PER_DOUBLING - 4) for at in range(MOST_PACE))]  # in seconds
PACE_BEGINS = [
    int(TICKS_PER_SECOND * pace / 2 ** (0.5 / PACES_PER_DOUBLING)) for pace in PACES[1:]
]  # the shortest time that each is for
_DESCENTS = 16  # most levels that a walk descends before a visit


class Block(msgspec.Struct, gc=False, eq=False):
    """One cached block. There may be millions, so it has no GC header, and siblings are linked to each other.

    `queued` is the block's position among the leaves of its account, from 1 on; UNQUEUED if it is not among them,
    HIDDEN if it is not visible yet.
    """

    queued: int
    tick: int
    hash: bytes
    ref: bytes
    account: Account
    parent: Block | None = None
    child: Block | None = None
    next: Block | None = None
    prev: Block | None = None
    pins: int = 0
    held: int = 0  # engines whose devices have it: see eviction/holders.py

    @property
    def generation(self) -> int:
        """The generation of its row; 0 for a root."""
        return int.from_bytes(self.ref[8:16], "little")

    @property
    def visible(self) -> bool:
        return self.queued >= UNQUEUED

    @property
    def is_found(self) -> bool:
        """Whether lookups find it. An invalidated block may be visible nevertheless, because it is being read."""
        return self.account.group.visible.get(self.hash) is self

    def link(self, parent: Block) -> None:
        """Become the first child of `parent`."""
        self.parent, self.prev, self.next = parent, None, parent.child
        if parent.child is not None:
            parent.child.prev = self
        elif parent.queued > UNQUEUED:
            parent.account.take(parent)
        parent.child = self

    def unlink(self) -> None:
        """Leave the parent, and keep the parent's other children linked."""
        if self.prev is not None:
            self.prev.next = self.next
        elif self.parent is not None:
            self.parent.child = self.next
        if self.next is not None:
            self.next.prev = self.prev
        self.parent = self.prev = self.next = None

    def children(self) -> Iterator[Block]:
        child = self.child
        while child is not None:
            following = child.next
            yield child
            child = following

    def ancestors(self) -> Iterator[Block]:
        """Yield this block and its ancestors, except the root."""
        block = self
        while block.parent is not None:
            yield block
            block = block.parent

    def subtree(self) -> list[Block]:
        """Return this block and its descendants, parents before children."""
        found = [self]
        for each in found:
            found.extend(each.children())
        return found


def later(one: int, other: int) -> int:
    """Return the tick of a block with the tick `one` whose last child, with the tick `other`, is gone: the later time,
    the higher class, and the shortest known pace: a request for the child was one for the block, too."""
    cls, its, pace = one & CLASS_MASK, other & CLASS_MASK, one & PACE_MASK
    if its and one != EVICT_FIRST:
        pace = min(filter(None, (pace, other & PACE_MASK, pace_of(abs(one - other)))), default=0)
    last = one if one > other else other  # faster than max()
    return last & ~TICK_MASK | (pace or other & PACE_MASK) | (cls if cls > its else its)


def pace_of(apart: int) -> int:
    """Return the pace, as in a tick, of requests that are `apart` ticks apart; 0 if they belong together."""
    return bisect_right(PACE_BEGINS, apart) << PACE_SHIFT


class BottomUp:
    """A walk over a block and its descendants, children before parents. The tree may change between two slices."""

    __slots__ = ("_down", "_path")

    def __init__(self, top: Block) -> None:
        self._path = [top]
        self._down = True  # whether to visit the children of the path's last block before the block itself

    def go_on(self, visit: Callable[[Block], bool]) -> bool:
        """Visit at most STEP blocks; return True if more are left.

        `visit` may remove the block, and returns True if its children must be visited again. A block that stays may be
        visited twice.
        """
        path = self._path
        for _ in range(STEP):
            for _ in range(_DESCENTS):
                at = path[-1]
                if len(path) > 1 and (at.pins == GONE or at.parent is not path[-2]):
                    path.pop()  # it was removed in the meantime: examine its parent's children again
                    self._down = True
                elif self._down and at.child is not None:
                    path.append(at.child)
                else:
                    break
            else:
                continue
            following = at.next if len(path) > 1 else None
            self._down = visit(at)
            if not self._down:
                path.pop()
                if following is not None:
                    path.append(following)
                    self._down = True
            if not path:
                return False
        return True


@dataclass(eq=False, slots=True)
class Share:
    """The share of one engine in one namespace, all groups together: its blocks, and its bounds.

    Of the blocks requested once, `returned` were requested again, and `expected` would have been at the rate of all
    engines; `factor` is the resulting factor of their worth.
    """

    engine: str
    namespace: int
    bytes: int = 0
    ceiling: int = 0  # 0: none
    floor: float = 0.0  # bytes that are not evicted for blocks of other shares
    live: bool = True
    device: int = 0  # its bit in `Block.held`; 0 if it does not report what its device evicts
    returned: float = 0.0
    expected: float = 0.0
    factor: float = 1.0


class Account:
    """The blocks that one engine stored in one group, as a part of its share of the pool. `leaves` are those that may
    be evicted, in no order. Some may be pinned: they leave when they are looked at, and enter again when no longer."""

    __slots__ = ("engine", "group", "leaves", "share")

    def __init__(self, share: Share, group: Group) -> None:
        self.engine = share.engine
        self.share = share
        self.group = group
        self.leaves: list[Block] = []

    def enter(self, block: Block) -> None:
        """Add `block` to the leaves if it may be evicted and is not among them yet."""
        if block.queued == UNQUEUED and block.child is None and not block.pins and block.parent is not None:
            self.leaves.append(block)
            block.queued = len(self.leaves)

    def take(self, block: Block) -> None:
        """Remove `block` from the leaves."""
        last, at = self.leaves.pop(), block.queued
        if last is not block:
            self.leaves[at - 1], last.queued = last, at
        block.queued = UNQUEUED


TAG_BYTES = 5


def tag(namespace: int, group: int) -> bytes:
    """Return the suffix that makes a hash of the group unique within the daemon."""
    return namespace.to_bytes(4, "little") + bytes([group])


def namespace_of(name: bytes) -> int:
    """Return the number of the namespace in the tag at the end of the name."""
    return int.from_bytes(name[-TAG_BYTES:-1], "little")


class Group:
    """The cached blocks of one KV cache group of a namespace, by hash.

    Attributes: a block takes `pages` pages, or `allocated_bytes`. `above` is the group that contains the parents of its
    blocks; another one if it `is_suffix`. `suffixes` are the groups whose blocks an engine needs, too, to continue
    after blocks of this one; only the first group of a namespace has any. `severed` counts hidden blocks that may have
    `visible` ones below them, which lookups must not find.
    """

    __slots__ = (
        *("above", "allocated_bytes", "hash_bytes", "is_suffix", "leaf_is_useless", "namespace", "number", "pages"),
        *("pending", "read_blocks", "root", "saved_blocks", "severed", "spec", "sum_offsets"),
        *("tag", "suffixes", "visible"),
    )

    def __init__(
        self, namespace: int, number: int, spec: GroupSpec, hash_bytes: int, page_bytes: int, above: Group | None = None
    ) -> None:
        self.above = above or self
        self.is_suffix = above is not None
        self.suffixes: list[Group] = []
        self.leaf_is_useless = False  # to continue after it, an engine would need blocks of suffix groups below it
        self.namespace = namespace
        self.number = number
        self.tag = tag(namespace, number)
        self.spec = spec
        self.hash_bytes = hash_bytes
        self.pages = pages_of(spec.block_bytes, page_bytes)
        self.allocated_bytes = self.pages * page_bytes
        self.sum_offsets = Checksums.offsets(spec)
        self.read_blocks = self.saved_blocks = self.severed = 0
        self.visible: dict[bytes, Block] = {}
        self.pending: dict[bytes, Grant] = {}
        self.root = Block(UNQUEUED, 0, b"", b"", Account(Share("", self.namespace), self))

    def forget(self) -> None:
        """Drop the references that form cycles: the garbage collector does not find cycles through blocks."""
        del self.root, self.above
        self.suffixes = []

    def prefix(self, hashes: Sequence[bytes]) -> list[Block]:
        """Return the blocks of the longest visible prefix. O(hits)."""
        found: list[Block] = []
        try:
            # At the first miss, which raises KeyError, extend() stops, and keeps the blocks before it.
            found.extend(map(self.visible.__getitem__, hashes))
        except KeyError:
            if not self.severed:
                return found
        return found if not self.severed else self._connected(found)

    def _connected(self, found: list[Block]) -> list[Block]:
        """Return the part of `found` before the first block that is not below the one before it."""
        parents = map(attrgetter("parent"), found)
        fits = list(map(is_, parents, [self.above.root, *found]))
        return found if all(fits) else found[: fits.index(False)]

    def has_soon(self, name: bytes) -> bool:
        """Whether a block is visible or pending."""
        return name in self.visible or name in self.pending

    def pending_after(self, hashes: Sequence[bytes], hits: int) -> int:
        """Return the number of blocks after the first `hits` that are visible or pending without a gap."""
        if not self.pending or hits == len(hashes):
            return 0
        end = hits
        while end < len(hashes) and (hashes[end] in self.pending or hashes[end] in self.visible):
            end += 1
        return end - hits

    def show(self, block: Block, waiting: list[Block]) -> None:
        """Make a READY block with a visible parent visible; add its READY children to `waiting`."""
        pending = self.pending
        del pending[block.hash]
        self.visible[block.hash] = block
        block.queued = UNQUEUED
        child = block.child
        if child is None:
            block.account.enter(block)
        while child is not None:
            group = child.account.group
            if (pending if group is self else group.pending)[child.hash].ready:
                waiting.append(child)
            child = child.next

    def remove(self, block: Block) -> bool:
        """Remove a block without children; return True if lookups found it.

        Its parent inherits its last use or, if no engine can still use the parent, is evicted first.
        """
        found = self.visible.get(block.hash) is block
        if found:
            del self.visible[block.hash]
        parent = block.parent
        block.unlink()
        block.pins = GONE
        if block.queued > UNQUEUED:
            block.account.take(block)
        if parent is not None and parent is not self.root:
            useless = self.above.leaf_is_useless and parent.child is None and not self.above.is_proof(parent)
            parent.tick = EVICT_FIRST if useless else later(parent.tick, block.tick)
            parent.held |= block.held
            parent.account.enter(parent)
        return found

    def can_continue(self, block: Block) -> bool:
        """Whether suffix groups have the blocks that an engine needs to continue after `block`, judged by the last STEP
        blocks."""
        for suffix in self.suffixes:
            blocks = 0 if suffix.spec.chunk_blocks else min(suffix.spec.window_blocks, STEP)
            for above in islice(block.ancestors(), blocks):
                if above.hash not in suffix.visible and above.hash not in suffix.pending:
                    return False
        return True

    def is_proof(self, block: Block) -> bool:
        """Whether an engine could continue after the parent of `block`, and needs `block` to follow it for that."""
        above = block.parent
        return self.spec.needs_next_block and above is not None and above is not self.root and self.can_continue(above)

    @staticmethod
    def is_evictable(block: Block) -> bool:
        """Whether the block may be evicted: it has no children and no pins."""
        return not block.pins and block.child is None and block.visible and block.parent is not None

    def reaches(self, parent: Block) -> bool:
        """Whether lookups find a child of `parent` once it is READY."""
        return self.above.visible.get(parent.hash) is parent or parent is self.root


class Grant(msgspec.Struct, gc=False, eq=False):
    """One WRITING block of a reservation, its settled shards, and the outcome.

        pending --- last shard settles ---> ready          all committed, and not superseded
                                      +---> given back     `verdict` says why

    `row` is the byte offset of its row, `settled` a bit set of shards. `verdict` is None, or the reason that the block
    cannot become visible. `tainted_until` is the end of the quarantine after a dead writer.
    """

    block: Block
    row: int
    reservation: Reservation
    settled: int = 0
    ready: bool = False
    verdict: Verdict | None = None
    tainted_until: float = 0.0

    @property
    def is_settled(self) -> bool:
        return self.settled == self.reservation.all_shards


@dataclass(eq=False, slots=True)
class Reservation:
    """The grants of one Reserve request. `writers[shard]` is the session that may write that shard.

    `writers_number` stands for `writers` in rows. `declined` counts blocks worth less than each block in the pool.
    """

    id: int
    namespace: int
    owner: int
    writers: tuple[int, ...]
    writers_number: int
    created: float
    declined: int = 0
    grants: list[Grant] = field(default_factory=list)
    unsettled: int = 0
    all_shards: int = 0

    def __post_init__(self) -> None:
        self.all_shards = (1 << len(self.writers)) - 1

    @property
    def state(self) -> str:
        """The state, as in states.RESERVATION."""
        return "open" if self.unsettled else "settled"
