"""Making room for new blocks: which block is evicted. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

from kvcache_proto.types import MAX_GROUPS, Refusal
from kvcache_server import status
from kvcache_server.core.eviction.due import Due
from kvcache_server.core.eviction.fair_share import FairShare
from kvcache_server.core.eviction.holders import Holders
from kvcache_server.core.eviction.learner import Learner
from kvcache_server.core.eviction.ranking import Entry, Ranking
from kvcache_server.core.index import (
    CLASS_MASK,
    CLASSES,
    EVICT_FIRST,
    Account,
    Block,
    Group,
    Share,
)
from kvcache_server.core.limits import STEP, Limits
from kvcache_server.core.pool import Pool, Runs
from kvcache_server.core.sampling import Draw, KeyedHasher
from kvcache_server.core.sweeper import Sweeper
from kvcache_server.core.tiers import Tiers

# Why a block was evicted: for another block; the engine's or its namespace's ceiling; for another block, after an
# engine had reported that it is not needed again, or after its prompt had gone on by two boundaries.
EVICTED_FOR = ("room", "own_ceiling", "namespace_ceiling", "dropped", "passed")
ROOM, OWN_CEILING, NAMESPACE_CEILING, DROPPED, PASSED = EVICTED_FOR
_MOST_DROPPED = 16_384  # chains that are remembered as dropped; older ones are evicted in their turn
_LOOKED_BACK = 256  # blocks of a prompt in which its former boundaries are looked for

_PROVEN = 50  # watched blocks that must have returned before a block's age alone tells what it is worth
_MOST_EVICTED = 512  # blocks, for one reservation: some milliseconds
POLICIES = WORTH, LRU = "worth", "lru"


class Eviction:
    """Evicts the blocks that are worth least, of all accounts above their floors; see worth.py.

    A hit counts by its bytes, so the worth of a block per byte does not depend on its size.

    Attributes: `evictions` are evicted blocks by cause, `evicted_unread` those that no lookup had found;
    `evicted_by_class` those that were requested once, twice, more often; `declined` counts blocks that were not stored
    because they were worth less than those that would have been evicted.
    """

    def __init__(
        self,
        pool: Pool,
        sweeper: Sweeper,
        limits: Limits,
        draw: Draw,
        hasher: KeyedHasher,
        policy: str = WORTH,
    ) -> None:
        """`draw` and `hasher` decide which blocks are sampled. `policy` is WORTH, or LRU to evict by age only."""
        self._pool = pool
        self._sweeper, self._effects = sweeper, sweeper.effects
        self._useless: list[tuple[Block, str]] = []  # blocks to continue with, and the cause of the eviction
        self.learner = Learner(pool, draw, hasher, policy != LRU)
        self.fair_share = FairShare(pool.capacity, limits.namespace_floor)
        self.holders, self.due = Holders(), Due(pool.capacity, self.fair_share)
        self.ranking = Ranking(pool, self.fair_share, self.learner, self.holders, self.due)
        self.evictions: Counter[str] = Counter()  # blocks by cause
        self.evicted_unread = 0  # evicted blocks that no lookup had found
        self.evicted_by_class = [0] * CLASSES
        self.declined = 0
        self._dropped: OrderedDict[int, Block] = OrderedDict()  # leaves that are evicted first, by id()
        self.tiers: Tiers | None = None  # blocks that they will store are not declined, however little worth here
        self.looks = 0  # blocks over which `pass_boundaries` may still look back in this turn
        self._left = 0  # blocks that may still be evicted for this reservation
        self._page = self._pages = 0  # free pages that were set aside for this run: the first one, and their number
        self.frozen = False  # nothing is evicted while leases of an earlier epoch may not be reclaimed yet
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        ceiling = limits.namespace_ceiling
        self.fair_share.set_limits(limits.namespace_floor)
        self._namespace_ceiling = int(ceiling * self._pool.capacity) if ceiling < 1 else 0
        self.ranking.expire()

    def begin_reservation(self) -> None:
        """Learn from lookups, and if there is enough evidence, update the worths. Bound the number of blocks that one
        reservation may evict: it is one step of the daemon."""
        self._left = _MOST_EVICTED
        self.learner.learn()
        if self.learner.due:
            self.learner.refresh(self.fair_share.accounts)
            self.ranking.expire()
        self.ranking.begin_reservation()

    def figures(self) -> status.Eviction:
        """Return the order of eviction, and hits and evictions by class."""
        self.learner.learn()
        return status.Eviction(
            by_age=self.learner.guard.by_age,
            switches=self.learner.guard.switches,
            declined_blocks=self.declined,
            hit_blocks_by_class=status.ByClass(*self.learner.hits_by_class),
            evicted_blocks_by_class=status.ByClass(*self.evicted_by_class),
            due_bytes=self.due.bytes,
        )

    def set_aside(self, pages: int) -> None:
        """Set `pages` free pages in a row aside for the next blocks, if there are: one search serves them all."""
        self.give_back_rest()
        run = self._pool.free.take_run(pages) if pages <= self._pool.free.pages else None
        self._page, self._pages = run or (0, 0)

    def give_back_rest(self) -> None:
        """Free the pages that were set aside and not used."""
        if self._pages:
            self._pool.free.add(self._page, self._pages)
            self._pages = 0

    def make_room(self, account: Account, cls: int = 0, used: int = 0) -> Runs | Refusal:
        """Return free pages for a block, or QUOTA or NO_SPACE. `cls` is its class and pace, as in a tick.

        `used` is the tick of its last use if it leaves the engine's device; 0 if it stays there. CLASSES stands for a
        block that is stored regardless of its worth. NO_SPACE also means that the block is worth less than those that
        would be evicted for it; then `declined` has increased.
        """
        group, share, pool = account.group, account.share, self._pool
        size, pages = group.allocated_bytes, group.pages
        if share.ceiling and not self._below_ceiling([share], size, share.ceiling, OWN_CEILING):
            return Refusal.QUOTA
        if self._namespace_ceiling:
            shares = [each for each in self.fair_share.shares if each.namespace == share.namespace]
            if not self._below_ceiling(shares, size, self._namespace_ceiling, NAMESPACE_CEILING):
                return Refusal.QUOTA
        if self._pages >= pages:
            page = self._page
            self._page, self._pages = page + pages, self._pages - pages
            return ((page, pages),)
        runs = pool.free.take(pages)
        if runs is None and self._dropped:
            runs = self._take_dropped(pages)
        if runs is not None or self.frozen or pool.is_growing:
            return runs or Refusal.NO_SPACE
        of_use = cls == CLASSES or share.bytes < share.floor
        while self._left > 0:
            least = self.ranking.least()
            if least is not None and not of_use and self._declines(account, cls, used, least):
                return Refusal.NO_SPACE
            if least is None:
                least = self.ranking.least_of([account])  # although it has no more than its floor
            if least is None:
                return Refusal.NO_SPACE
            runs = self._evicted(self.ranking.pop(least), ROOM)
            if len(runs) == 1 and runs[0][1] == pages:
                return runs  # without a way through the free runs
            pool.give_back(runs)
            if pool.free.pages >= pages:
                return pool.free.take(pages) or Refusal.NO_SPACE
        return Refusal.NO_SPACE

    def _declines(self, account: Account, cls: int, used: int, least: Entry) -> bool:
        """Return True if a block is worth less than those to be evicted for it, and of no use to a tier; if so, count
        it.

        Of two blocks that differ only in age, the new one is taken until enough blocks have returned to know better.
        """
        _, tick, _, leaf = least
        if self.learner.worths.returns < _PROVEN and leaf.account is account and not (tick ^ cls) & CLASS_MASK:
            return False
        if self.ranking.worth_of_new(account, cls, used) >= least[0] or (
            self.tiers and self.tiers.will_store(account, cls & CLASS_MASK)
        ):
            return False
        self.declined += 1
        return True

    def forget_accounts(self, accounts: Collection[Account]) -> None:
        """Drop references to accounts that are gone."""
        self.ranking.expire()
        self.learner.forget_shares({account.share for account in accounts})

    def _evict_from(self, accounts: Sequence[Account], cause: str) -> bool:
        """Evict the block of `accounts` that is worth least; return False if none may be evicted."""
        if self.frozen:
            return False
        least = self.ranking.least_of(accounts)
        if least is not None:
            self._pool.give_back(self._evicted(self.ranking.pop(least), cause))
            return True
        return False

    def drop(self, leaf: Block) -> None:
        """Evict `leaf`, whose tick is EVICT_FIRST, before all others, and then such blocks above it."""
        leaves = self._dropped
        leaves.pop(id(leaf), None)
        leaves[id(leaf)] = leaf
        if len(leaves) > _MOST_DROPPED:
            leaves.popitem(last=False)

    def pass_boundaries(self, last: Block) -> None:
        """Drop a suffix group's blocks for a former boundary of the prompt in which it has just got the block `last`.

        A longer prompt continues at the last boundary, and one with another last part at the boundary before. So
        earlier boundaries are dropped, unless prompts part behind them.
        """
        suffix, end = last.account.group, last.parent
        if end is None or any(each.hash in suffix.pending for each in islice(end.children(), MAX_GROUPS + 1)):
            return  # it is not the last one of its window
        passed, left = 0, suffix.spec.window_blocks  # boundaries, and blocks of the window of the latest one
        for at in islice(end.ancestors(), min(_LOOKED_BACK, self.looks)):
            left -= 1
            self.looks -= 1
            if passed and _prompts_part_at(at):
                return
            if left < 0 and at.hash in suffix.visible:
                passed, left = passed + 1, suffix.spec.window_blocks - 1
                if passed == 2:
                    for each in islice(at.ancestors(), suffix.spec.window_blocks):
                        if _prompts_part_at(each):
                            return  # other prompts share the rest of the window
                        block = suffix.visible.get(each.hash)
                        if block is not None and suffix.is_evictable(block):
                            block.tick = EVICT_FIRST
                            self.drop(block)
                    return

    def _take_dropped(self, pages: int) -> Runs | None:
        """Evict dropped blocks that have not been used since, until `pages` pages are free, and return these."""
        runs = None
        while self._dropped and runs is None and self._left > 0 and not self.frozen:
            _, block = self._dropped.popitem()
            account = block.account
            if (
                block.tick == EVICT_FIRST
                and account.share.bytes > account.share.floor
                and account.group.is_evictable(block)
                and id(block) not in self.due.waiting
            ):
                parent = block.parent
                self._pool.give_back(self._evicted(block, PASSED if account.group.is_suffix else DROPPED))
                if parent is not None and parent.tick == EVICT_FIRST:
                    self.drop(parent)
                runs = self._pool.free.take(pages)
        return runs

    def _evicted(self, block: Block, cause: str) -> Runs:
        """Evict a block, and the blocks that are useless without it; return its pages, which are not in the free runs
        yet."""
        above, group = block.parent, block.account.group
        runs = self._evict(block, cause)
        if above is not None and group.above.leaf_is_useless and not self.frozen:
            last = self._evict_rest(group, above, cause) if group.is_suffix else above
            for at in (last, above) if last is not above else (above,):
                left = self._evict_useless(at, cause)
                if left is not None:
                    self._useless.append((left, cause))
                    self._sweeper.add(self._evict_some_useless)
        return runs

    def _evict_rest(self, suffix: Group, above: Block, cause: str) -> Block:
        """Evict the rest of a window that has lost its block at `above`, unless it is part of a later window.

        Return the last block on which the window hung.
        """
        rest = [above]
        for _ in range(min(suffix.spec.window_blocks, STEP)):
            children = islice(rest[-1].children(), MAX_GROUPS + 1)
            below = [child for child in children if not child.account.group.is_suffix]
            if len(below) != 1 or suffix.visible.get(below[0].hash) is None:
                break
            rest.append(below[0])
        else:
            return above
        for each in rest[1:]:
            self.evict_suffixes(each, cause)
        return rest[-1]

    def _evict_some_useless(self) -> bool:
        """Continue with the blocks that `_evict_useless` has left."""
        if self._useless and not self.frozen:
            block, cause = self._useless.pop()
            if (left := self._evict_useless(block, cause)) is not None:
                self._useless.append((left, cause))
        return bool(self._useless) and not self.frozen

    def _evict_useless(self, block: Block, cause: str) -> Block | None:
        """Evict the suffix groups' blocks that hang on a block, the block, and those above it, as far as no engine can
        use them.

        Goes up at most STEP blocks: returns the block to continue with, None if it is done.
        """
        for _ in range(STEP):
            above, group = block.parent, block.account.group
            if above is None:
                return None
            inner = any(not child.account.group.is_suffix for child in islice(block.children(), MAX_GROUPS + 1))
            if not group.can_continue(block) or (group.spec.needs_next_block and not inner):
                self.evict_suffixes(block, cause, inner)
            if not group.is_evictable(block) or group.is_proof(block):
                return None
            self._pool.give_back(self._evict(block, cause))
            block = above
        return block

    def evict_suffixes(self, above: Block, cause: str, inner: bool = False) -> None:
        """Evict the blocks of suffix groups that hang on a block. If it is an `inner` one, windows may still be part of
        later ones, and stay."""
        for suffix in above.account.group.suffixes:
            block = suffix.visible.get(above.hash)
            if (
                block is not None
                and suffix.is_evictable(block)
                and not self.frozen
                and not (inner and suffix.spec.window_blocks > 1)
            ):
                self._pool.give_back(self._evict(block, cause))

    def _evict(self, block: Block, cause: str) -> Runs:
        self._left -= 1
        found, read, runs = self._forget(block)
        if found:
            self.learner.evicted(block)
            self._effects.gone(block, cause)
            self.evictions[cause] += 1
            self.evicted_by_class[block.tick & CLASS_MASK] += 1
            if not read:
                self.evicted_unread += 1
        return runs

    def forget(self, group: Group) -> None:
        """Drop references to a removed group, whose accounts are gone already."""
        left = ((key, each) for key, each in self._dropped.items() if each.account.group is not group)
        self._dropped = OrderedDict(left)
        self.due.end_if(lambda each: each.group is group)

    def discard(self, block: Block) -> None:
        """Remove a block that is not in use and that lookups no longer find."""
        _, _, runs = self._forget(block)
        self._pool.give_back(runs)

    def _forget(self, block: Block) -> tuple[bool, int, Runs]:
        """Forget a block; return whether lookups could find it, whether one did, and its pages."""
        parent, account, pool = block.parent, block.account, self._pool
        page = pool.page(block)
        read = pool.read[page]
        before = parent.tick if parent is not None else 0
        visible = account.group.remove(block)
        if parent is not None and parent.ref and (read or parent.tick != before):
            pool.write_tick(parent, read)
        account.share.bytes -= account.group.allocated_bytes
        if self.due.waiting and parent is not None:
            self.due.gone(block, parent)
        return visible, read, pool.vacate(block, page)

    def _below_ceiling(self, shares: Sequence[Share], size: int, ceiling: int, cause: str) -> bool:
        """Evict blocks of `shares` until they have room for `size` more bytes below their `ceiling`.

        If it has been lowered, usage above it stays, but does not grow.
        """
        ceiling = max(ceiling, sum(share.bytes for share in shares))
        while sum(share.bytes for share in shares) + size > ceiling:
            mine = [account for account in self.fair_share.accounts if account.share in shares]
            if self._left <= 0 or not self._evict_from(mine, cause):
                return False
        return True


def _prompts_part_at(block: Block) -> bool:
    """Whether a block has several followers of its own group."""
    return sum(not each.account.group.is_suffix for each in islice(block.children(), MAX_GROUPS + 2)) > 1
