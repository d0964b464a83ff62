"""What a cached block is worth, learned from how soon blocks were requested again. Pure.

Blocks have three classes, by how often they were requested: once, twice, more often. For each class and age,
`Worths.table` has the expected hits per block and second if the block is kept for the best possible time: a Gittins
index. Its input is a hazard per class and bin of age, estimated as in a life table: the blocks requested again as a
fraction of those at risk; blocks not requested again yet are at risk up to their present age.

A class or bin with little evidence is close to the estimate for all classes, and that to a hazard of 0.3 / (1 + age)
per second. With that hazard only, a block is worth less the older it is, as in LRU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from kvcache_server.core.index import CLASS_MASK, CLASSES, TICKS_PER_SECOND, Share

BINS = 44  # of age, two for each doubling: the last one begins after a month
PRIOR_HAZARD = 0.3 * (math.sqrt(2) - 1)  # per bin: the same for all bins, because they widen with age
PRIOR_BLOCKS = 20  # imaginary blocks per class and bin that behave as in the more general estimate
MOST_COUNTED = 1 << 16  # outcomes; then all counts are halved
FACTOR_PRIOR = 50  # expected and actual returns that every share starts with
FACTOR_IGNORED = 2  # shares whose blocks return up to this much more or less often than others are treated alike
FACTOR_ONE_OFF = 1 / 4  # shares with a lower factor are streams of prompts that no client repeats
LIKELY = 0.5  # of the blocks
ENOUGH = 50  # blocks that must reach an age to tell how many return by then
FACTOR_COUNTED = 1000  # expected returns of a share; then its counts are halved
WIDTHS = [2 ** ((at + 1) / 2) - 2 ** (at / 2) for at in range(BINS)]  # seconds
BIN_BEGINS = [math.ceil((2 ** (at / 2) - 1) * TICKS_PER_SECOND) for at in range(BINS)]  # ages in ticks
_SLICE = 1024  # blocks per slice
_LAST, _SECONDS = BINS - 1, 1 / TICKS_PER_SECOND


def bin_of(age: int) -> int:
    """Return the bin of an age in ticks."""
    return min(int(2 * math.log2(1 + age * _SECONDS)), _LAST) if age > 0 else 0


def one_off(share: Share, cls: int) -> bool:
    """Whether a block of class `cls` is taken for one that is not requested again, and is evicted first even by age.

    An engine that reads a long stream would otherwise leave other engines only their floors while eviction is by age.
    """
    return cls == 0 and share.factor < FACTOR_ONE_OFF


def likely(worths: Worths, share: Share) -> bool:
    """Whether most blocks of a share that were requested once will be requested again.

    It follows from the figure for all shares together, and from how far this one differs.
    """
    return share.factor >= 1 and worths.returning * share.factor > LIKELY


def gittins(hazards: Sequence[float]) -> list[float]:
    """Return the worth of a block in each bin, from the probability that it is requested again within each bin.

    It is the greatest ratio of expected hits to expected time until the hit, over all ages up to which the block could
    be kept. O(bins): a bin is joined with those after it as long as they are worth more.
    """
    count = len(hazards)
    hits, time, left, following = [0.0] * count, [0.0] * count, [0.0] * count, [0] * count
    for at in range(count - 1, -1, -1):
        p = hazards[at]
        n, d, s, after = p, WIDTHS[at] * (1 - p / 2), 1 - p, at + 1
        while after < count and hits[after] * d > n * time[after]:
            n += s * hits[after]
            d += s * time[after]
            s *= left[after]
            after = following[after]
        hits[at], time[at], left[at], following[at] = n, d, s, after
    return [n / d for n, d in zip(hits, time, strict=True)]


class Refresh:
    """The rest of `watched`, blocks whose outcome is open at tick `now`, each with its tick and its share; and the
    numbers of those counted already: per class and bin and, if requested once, per share and bin."""

    def __init__(self, watched: list[tuple[int, Share]], now: int) -> None:
        self.watched, self.now = watched, now
        self.still = [0.0] * (CLASSES * BINS)
        self.once: Counter[tuple[Share, int]] = Counter()


class Worths:
    """The evidence, and the table made from it. Lists have one entry per class and bin: `cls * BINS + bin`.

    `returning` is the fraction of blocks requested once that are requested again, by the ages seen; at first 0.
    """

    def __init__(self) -> None:
        self.again = [0.0] * (CLASSES * BINS)  # blocks requested again at that age
        self.never = [0.0] * (CLASSES * BINS)  # blocks given up at that age
        self.counted = 0.0
        self._tabulate([0.0] * (CLASSES * BINS))

    def returned(self, tick: int, now: int, share: Share) -> None:
        """Count a block of `share` as requested again."""
        at = (tick & CLASS_MASK) * BINS + bin_of(now - tick)
        self.again[at] += 1
        self._count()
        if at < BINS:
            share.returned += 1
            self._expect(share, at)

    def given_up(self, tick: int, now: int, share: Share) -> None:
        """Count a block of `share` that is no longer watched, because it was not requested again for too long."""
        at = (tick & CLASS_MASK) * BINS + bin_of(now - tick)
        self.never[at] += 1
        self._count()
        if at < BINS:
            self._expect(share, at)

    def _expect(self, share: Share, at: int) -> None:
        share.expected += self._expected[at]
        if share.expected > FACTOR_COUNTED:
            share.expected /= 2
            share.returned /= 2

    def _count(self) -> None:
        self.counted += 1
        if self.counted > MOST_COUNTED:
            self.counted /= 2
            self.again = [each / 2 for each in self.again]
            self.never = [each / 2 for each in self.never]

    def refresh(self, refresh: Refresh) -> bool:
        """Count some more of the blocks whose outcome is still open; with the last of them, make the table from the
        evidence, and return True."""
        still, once, now = refresh.still, refresh.once, refresh.now
        for tick, share in refresh.watched[:_SLICE]:
            at = (tick & CLASS_MASK) * BINS + bin_of(now - tick)
            still[at] += 1
            if at < BINS:
                once[share, at] += 1
        del refresh.watched[:_SLICE]
        if refresh.watched:
            return False
        self._tabulate(still)
        expected: dict[Share, float] = {}
        for (share, at), count in once.items():
            expected[share] = expected.get(share, share.expected) + count * self._expected[at]
        for share, total in expected.items():
            share.factor = _factor(share.returned, total)
        return True

    def _tabulate(self, still: Sequence[float]) -> None:
        risks = [self._at_risk(still, cls) for cls in range(CLASSES)]
        common = []
        for at in range(BINS):
            back, reached = sum(self.again[at::BINS]), sum(each[at] for each in risks)
            common.append((back + PRIOR_BLOCKS * PRIOR_HAZARD) / (reached + PRIOR_BLOCKS))
        self.table: list[float] = []
        for cls, risk in enumerate(risks):
            again = self.again[cls * BINS : (cls + 1) * BINS]
            hazards = [
                (returned + PRIOR_BLOCKS * base) / (those + PRIOR_BLOCKS)
                for returned, those, base in zip(again, risk, common, strict=True)
            ]
            self.table += gittins(hazards)
            if cls == 0:
                self._expected = _accumulate(hazards)
                self.returning = _returning(again, risk)

    def _at_risk(self, still: Sequence[float], cls: int) -> list[float]:
        """Return the number of blocks of the class that reached each bin; those that are in it now count half."""
        risk, reached = [0.0] * BINS, 0.0
        for at in range(BINS - 1, -1, -1):
            here = cls * BINS + at
            reached += self.again[here] + self.never[here] + still[here]
            risk[at] = reached - still[here] / 2
        return risk


def _returning(again: Sequence[float], risk: Sequence[float]) -> float:
    """Return the fraction of the blocks that is requested again, up to the age that enough of them have reached."""
    left = 1.0
    for back, those in zip(again, risk, strict=True):
        if those < ENOUGH:
            break
        left *= 1 - back / those
    return 1 - left


def _accumulate(hazards: Sequence[float]) -> list[float]:
    """Return the expected number of returns of a block by the middle of each bin."""
    total, found = 0.0, []
    for hazard in hazards:
        found.append(total + hazard / 2)
        total += hazard
    return found


def _factor(returned: float, expected: float) -> float:
    """Return the factor by which a block of a share that was requested once is worth more than in the table.

    Differences that may be chance are ignored: engines that share their prompts would evict each other's blocks.
    """
    factor = (returned + FACTOR_PRIOR) / (expected + FACTOR_PRIOR)
    if factor < 1 / FACTOR_IGNORED:
        return factor * FACTOR_IGNORED
    return max(1.0, factor / FACTOR_IGNORED)
