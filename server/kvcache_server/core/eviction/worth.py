"""What a cached block is worth, learned from how soon blocks were requested again. Pure.

Blocks have three classes, by how often they were requested: once, twice, more often. For each class and age,
`Worths.table` has the expected hits per block and second if the block is kept for the best possible time: a Gittins
index. Its input is a hazard per class and bin of age, estimated as in a life table: the blocks requested again as a
fraction of those at risk; blocks not requested again yet are at risk up to their present age.

A class or bin with little evidence is close to the estimate for all classes, and that to a hazard of 0.3 / (1 + age)
per second. With that hazard only, a block is worth less the older it is, as in LRU.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache_server.core.index import CLASS_MASK, CLASSES, PACE_MASK, PACES, TICKS_PER_SECOND, Share

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


# Ages in multiples of the time between the last two requests, at which bins begin.
RATIOS = [*(at / 8 for at in range(9)), 1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0]
BEGINS = [2 ** (at / 2) - 1 for at in range(BINS + 1)]  # seconds
SHARP, SMOOTH = 20, 0.0005  # how soon the better prediction is followed, and over how many outcomes


class Curve:
    """How soon the blocks of each class return, in bins of age that begin at `begins`, in some unit."""

    def __init__(self, begins: Sequence[float]) -> None:
        self.begins, self.count, self._edges = begins, len(begins) - 1, np.array(begins)
        self.widths = [after - at for at, after in itertools.pairwise(begins)]
        size = CLASSES * self.count
        self.again, self.never = [0.0] * size, [0.0] * size
        self.tabulate([0.0] * size)

    def bin_of(self, age: float) -> int:
        return max(min(bisect_right(self.begins, age) - 1, self.count - 1), 0)

    def bins_of(self, ages: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.clip(np.searchsorted(self._edges, ages, "right") - 1, 0, self.count - 1)

    def halve(self) -> None:
        self.again = [each / 2 for each in self.again]
        self.never = [each / 2 for each in self.never]

    def tabulate(self, still: Sequence[float]) -> None:
        n = self.count
        risks = []
        for cls in range(CLASSES):
            risk, reached = [0.0] * n, 0.0
            for at in range(n - 1, -1, -1):
                here = cls * n + at
                reached += self.again[here] + self.never[here] + still[here]
                risk[at] = reached - still[here] / 2
            risks.append(risk)
        common: list[float] = []
        rate = 0.3
        for at in range(n):
            span = math.log((1 + self.begins[at + 1]) / (1 + self.begins[at]))
            back, reached = sum(self.again[at::n]), sum(each[at] for each in risks)
            common.append(min((back + PRIOR_BLOCKS * rate * span) / (reached + PRIOR_BLOCKS), 0.95))
            rate = min(0.3, common[-1] / span)  # ages that few blocks have reached are like those before
        self.table: list[list[float]] = []
        self.hazards = []
        self.returns, self.stays = [], []  # logarithms of the density of a return, and of the probability of none yet
        for cls, risk in enumerate(risks):
            again = self.again[cls * n : (cls + 1) * n]
            hazards = [(back + PRIOR_BLOCKS * base) / (those + PRIOR_BLOCKS) for back, those, base in zip(again, risk, common, strict=True)]
            worths = gittins(hazards, self.widths)
            self.table.append([*worths, worths[-1]])
            self.hazards.append(hazards)
            stays = [0.0, *itertools.accumulate(math.log1p(-hazard) for hazard in hazards)][:-1]
            self.stays.append(stays)
            self.returns.append([s + math.log(h / w) for s, h, w in zip(stays, hazards, self.widths, strict=True)])
        self.risks = risks

    def worth(self, cls: int, age: float) -> float:
        at = bisect_right(self.begins, age) - 1
        if at >= self.count:
            return self.table[cls][-1]
        table = self.table[cls]
        worth = table[at]
        return worth + (table[at + 1] - worth) * (age - self.begins[at]) / self.widths[at]


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


def gittins(hazards: Sequence[float], WIDTHS: Sequence[float] = WIDTHS) -> list[float]:
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
    """The rest of `watched`, blocks whose outcome is open at tick `now`, each with its tick, pace and share; and the
    numbers of those counted already."""

    def __init__(self, watched: list[tuple[int, Share]], now: int) -> None:
        self.watched, self.now = watched, now


class Worths:
    """`returning` is the fraction of blocks requested once that are requested again, by the ages seen; at first 0."""

    def __init__(self) -> None:
        self.by_age, self.by_pace = Curve(BEGINS), Curve(RATIOS)
        self.weights = [0.0] * CLASSES  # of the worth by pace
        self._leads, self._compared = [0.0] * CLASSES, [0] * CLASSES
        self.counted = 0.0
        self._tabulate([0.0] * (CLASSES * BINS), [0.0] * (CLASSES * (len(RATIOS) - 1)))

    def worth(self, tick: int, now: int, share: Share) -> float:
        cls, age = tick & CLASS_MASK, (now - tick) * _SECONDS if now > tick else 0.0
        weight, pace = self.weights[cls], tick & PACE_MASK
        if not pace or weight < 0.01:
            worth = self.by_age.worth(cls, age)
        else:
            seconds = PACES[pace >> 2]
            worth = self.by_pace.worth(cls, age / seconds) / seconds
            if weight < 0.99:
                worth = weight * worth + (1 - weight) * self.by_age.worth(cls, age)
        return worth if cls else worth * share.factor

    def returned(self, tick: int, now: int, share: Share) -> None:
        """Count a block of `share` as requested again."""
        at = self._count(tick, now, True)
        if not tick & CLASS_MASK:
            share.returned += 1
            self._expect(share, at)

    def given_up(self, tick: int, now: int, share: Share) -> None:
        """Count a block of `share` that is no longer watched, because it was not requested again for too long."""
        at = self._count(tick, now, False)
        if not tick & CLASS_MASK:
            self._expect(share, at)

    def _expect(self, share: Share, at: int) -> None:
        share.expected += self._expected[at]
        if share.expected > FACTOR_COUNTED:
            share.expected /= 2
            share.returned /= 2

    def _count(self, tick: int, now: int, again: bool) -> int:
        cls, age = tick & CLASS_MASK, max(now - tick, 0) * _SECONDS
        one, other = self.by_age, self.by_pace
        at = one.bin_of(age)
        (one.again if again else one.never)[cls * BINS + at] += 1
        pace = (tick & PACE_MASK) >> 2
        if pace:
            seconds = PACES[pace]
            ratio = other.bin_of(age / seconds)
            (other.again if again else other.never)[cls * other.count + ratio] += 1
            if again:
                lead = other.returns[cls][ratio] - math.log(seconds) - one.returns[cls][at]
            else:
                lead = other.stays[cls][ratio] - one.stays[cls][at]
            self._compared[cls] += 1
            self._leads[cls] += max(SMOOTH, 1 / (self._compared[cls] + 50)) * (max(-5.0, min(5.0, lead)) - self._leads[cls])
        self.counted += 1
        if self.counted > MOST_COUNTED:
            self.counted /= 2
            one.halve()
            other.halve()
        return at

    def refresh(self, refresh: Refresh) -> bool:
        """Count some more of the blocks whose outcome is still open; with the last of them, make the table from the
        evidence, and return True."""
        by_age, by_pace, now = self.by_age, self.by_pace, refresh.now
        ticks = np.array([tick for tick, _ in refresh.watched], np.int64)
        ages, cls = np.maximum(now - ticks, 0) * _SECONDS, ticks & CLASS_MASK
        at = by_age.bins_of(ages)
        still = np.bincount(cls * BINS + at, minlength=CLASSES * BINS).tolist()
        paces = (ticks & PACE_MASK) >> 2
        some = paces > 0
        ratios = by_pace.bins_of(ages[some] / np.array(PACES)[paces[some]])
        still_by_pace = np.bincount(cls[some] * by_pace.count + ratios, minlength=CLASSES * by_pace.count).tolist()
        once = Counter((refresh.watched[each][1], where) for each, where in zip(np.flatnonzero(cls == 0).tolist(), at[cls == 0].tolist(), strict=True))
        self._tabulate(still, still_by_pace)
        expected: dict[Share, float] = {}
        for (share, at), count in once.items():
            expected[share] = expected.get(share, share.expected) + count * self._expected[at]
        for share, total in expected.items():
            share.factor = _factor(share.returned, total)
        return True

    def _tabulate(self, still: Sequence[float], still_by_pace: Sequence[float]) -> None:
        self.by_age.tabulate(still)
        self.by_pace.tabulate(still_by_pace)
        self._expected = _accumulate(self.by_age.hazards[0])
        self.returning = _returning(self.by_age.again[:BINS], self.by_age.risks[0])
        if self.counted:
            self.weights = [1 / (1 + math.exp(-SHARP * lead)) for lead in self._leads]


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
