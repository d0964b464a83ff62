"""What a cached block is worth, learned from how soon blocks were requested again. Pure.

Blocks have three classes, by how often they were requested: once, twice, more often. A block that was requested again
also has a pace, the time between its last two requests. Two life tables predict when a block returns: one by its age,
the other by its age in multiples of its pace. A block that returned every ten seconds, for example, is overdue after a
minute; one that returned every hour is not.

A life table has a hazard per class and bin of age: the blocks requested again as a fraction of those at risk; blocks
not requested again yet are at risk up to their present age. A class or bin with little evidence is close to the
estimate for all classes, and that to a hazard of 0.3 / (1 + age) per unit of time, with which a block is worth less the
older it is, as in LRU. The worth is a Gittins index: the expected hits per block and second if the block is kept for
the best possible time.

The worths from both tables are mixed. For each class, the weight of the one by pace depends on how much better it
predicted what became of watched blocks lately, as the mean difference of the logarithms of the likelihoods.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import log2

import numpy as np
from numpy.typing import NDArray

from kvcache_server.core.index import (
    CLASS_MASK,
    CLASSES,
    MOST_PACE,
    PACE_SHIFT,
    PACES,
    PACES_PER_DOUBLING,
    TICKS_PER_SECOND,
    Share,
)

# Ages at which bins begin, and the end of the last one: in seconds, two per doubling, up to a month; and in paces.
AGES = [2 ** (at / 2) - 1 for at in range(45)]
RATIOS = [
    *(at / 8 for at in range(9)),
    *(1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0),
]
PRIOR_HAZARD = 0.3  # divided by 1 + age, per unit of time
MOST_HAZARD = 0.95  # per bin
PRIOR_BLOCKS = 20  # imaginary blocks per class and bin that behave as in the more general estimate
MOST_COUNTED = 1 << 16  # outcomes; then all counts are halved
SMOOTHED, FIRST_SMOOTHED = 2000, 50  # outcomes over which the lead of a life table is taken, at last and at first
SHARPNESS, MOST_LEAD = 20, 5.0  # of the mixing: how soon the better table is followed; and the most of one outcome
FACTOR_PRIOR = 50  # expected and actual returns that every share starts with
FACTOR_IGNORED = 2  # shares whose blocks return up to this much more or less often than others are treated alike
FACTOR_ONE_OFF = 1 / 4  # shares with a lower factor are streams of prompts that no client repeats
FACTOR_COUNTED = 1000  # expected returns of a share; then its counts are halved
LIKELY = 0.5  # of the blocks
ENOUGH = 50  # blocks that must reach an age to tell how many return by then
# Worths are computed at ages in steps, some per doubling. So the steps of age and ratio differ by a number per pace.
_STEPS = 2 * PACES_PER_DOUBLING
_SHORT = TICKS_PER_SECOND >> 6  # the first step
_OFFSET = _STEPS * (_SHORT.bit_length() - 1) - 1
_AGE_STEPS = _STEPS * 36
_SHIFTS = [2 * (len(PACES) - 1 - at) for at in range(len(PACES))]  # from steps of the age to those of the ratio
_AGES = 2 ** ((np.arange(_AGE_STEPS) - 0.5) / _STEPS) * _SHORT / TICKS_PER_SECOND  # in seconds, amid the steps
_RATIOS = 2 ** ((np.arange(_AGE_STEPS + _SHIFTS[1]) - 0.5) / _STEPS) * _SHORT / TICKS_PER_SECOND / PACES[-1]
_SECONDS = 1 / TICKS_PER_SECOND
_PACES = np.array(PACES)


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


def gittins(hazards: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return the worth of a block in each bin, from the probability that it is requested again within each bin, and the
    bins' widths.

    It is the greatest ratio of expected hits to expected time until the hit, over all ages up to which the block could
    be kept. O(bins): a bin is joined with those after it as long as they are worth more.
    """
    count = len(hazards)
    hits, time, left, following = [0.0] * count, [0.0] * count, [0.0] * count, [0] * count
    for at in range(count - 1, -1, -1):
        p = hazards[at]
        n, d, s, after = p, widths[at] * (1 - p / 2), 1 - p, at + 1
        while after < count and hits[after] * d > n * time[after]:
            n += s * hits[after]
            d += s * time[after]
            s *= left[after]
            after = following[after]
        hits[at], time[at], left[at], following[at] = n, d, s, after
    return [n / d for n, d in zip(hits, time, strict=True)]


class LifeTable:
    """How soon the blocks of each class return, in bins of age that begin at `begins[:-1]`, in some unit of time.

    Attributes: `again` and `never` count the blocks that were requested again, and given up, in each bin: of class
    `cls`, at `cls * bins + bin`. By class and bin, `hazards` are the probabilities of a return within the bin,
    `returns` and `stays` the logarithms of the density of a return, and of the probability of none before the bin.
    """

    def __init__(self, begins: Sequence[float]) -> None:
        self.bins = len(begins) - 1
        self._begins, self._edges = begins, np.array(begins)
        self._widths = [end - begin for begin, end in pairwise(begins)]
        self._spans = [math.log((1 + end) / (1 + begin)) for begin, end in pairwise(begins)]
        self.again, self.never = [0.0] * (CLASSES * self.bins), [0.0] * (CLASSES * self.bins)
        self.tabulate([0.0] * (CLASSES * self.bins))

    def bin(self, age: float) -> int:
        return min(bisect_right(self._begins, age), self.bins) - 1

    def still(self, classes: NDArray[np.int64], ages: NDArray[np.float64]) -> tuple[NDArray[np.int64], list[float]]:
        """Return the bins of blocks whose outcome is open, and how many there are per class and bin."""
        bins = np.minimum(np.searchsorted(self._edges, ages, "right"), self.bins) - 1
        counts: list[float] = np.bincount(classes * self.bins + bins, minlength=CLASSES * self.bins).tolist()
        return bins, counts

    def halve(self) -> None:
        self.again = [each / 2 for each in self.again]
        self.never = [each / 2 for each in self.never]

    def tabulate(self, still: Sequence[float]) -> None:
        """Make the table from the evidence; `still` are blocks whose outcome is open, per class and bin."""
        bins, self.risks = self.bins, [self._at_risk(still, cls) for cls in range(CLASSES)]
        common: list[float] = []
        rate = PRIOR_HAZARD
        for at, span in enumerate(self._spans):
            back, reached = sum(self.again[at::bins]), sum(risk[at] for risk in self.risks)
            common.append(min((back + PRIOR_BLOCKS * rate * span) / (reached + PRIOR_BLOCKS), MOST_HAZARD))
            rate = min(PRIOR_HAZARD, common[-1] / span)  # ages that few blocks have reached are like those before
        self.hazards, self.returns, self.stays, self._worths = [], [], [], []
        for cls, risk in enumerate(self.risks):
            again = self.again[cls * bins : (cls + 1) * bins]
            hazards = [
                (back + PRIOR_BLOCKS * base) / (those + PRIOR_BLOCKS)
                for back, those, base in zip(again, risk, common, strict=True)
            ]
            stays = [0.0, *accumulate(math.log1p(-hazard) for hazard in hazards)][:-1]
            densities = zip(stays, hazards, self._widths, strict=True)
            worths = gittins(hazards, self._widths)
            self.hazards.append(hazards)
            self.returns.append([stay + math.log(hazard / width) for stay, hazard, width in densities])
            self.stays.append(stays)
            self._worths.append([*worths, worths[-1]])

    def _at_risk(self, still: Sequence[float], cls: int) -> list[float]:
        """Return the number of blocks of the class that reached each bin; those that are in it now count half."""
        risk, reached = [0.0] * self.bins, 0.0
        for at in range(self.bins - 1, -1, -1):
            here = cls * self.bins + at
            reached += self.again[here] + self.never[here] + still[here]
            risk[at] = reached - still[here] / 2
        return risk

    def worths(self, cls: int, ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the worth of blocks of the class at `ages`, in hits per unit of time."""
        return np.interp(ages, self._begins, self._worths[cls])


class Worths:
    """Attributes: `weights` are those of the prediction by pace, per class. `returning` is the fraction of blocks
    requested once that are requested again, by the ages seen; at first 0. `returns` is how many watched blocks have
    been requested again."""

    def __init__(self) -> None:
        self._by_age, self._by_pace = LifeTable(AGES), LifeTable(RATIOS)
        self.weights = [0.0] * CLASSES
        self._leads = [0.0] * CLASSES  # of the prediction by pace: the mean of its log-likelihood less the other's
        self._compared = [0] * CLASSES  # outcomes
        self._counted = 0.0
        self.returns = 0
        self.refresh((), (), 0)

    def worth(self, tick: int, now: int, share: Share) -> float:
        """Return the worth at tick `now` of a block of `share` with that tick."""
        cls, pace, age = tick & CLASS_MASK, tick >> PACE_SHIFT & MOST_PACE, now - tick
        at = int(_STEPS * log2(age)) - _OFFSET if age > _SHORT else 0
        if pace:
            worth = self._if_paced[cls][at] + self._of_pace[cls][at + _SHIFTS[pace]] / PACES[pace]
        else:
            worth = self._of_age[cls][at]
        return worth if cls else worth * share.factor

    def returned(self, tick: int, now: int, share: Share) -> None:
        """Count a block of `share` as requested again."""
        at = self._count(tick, now, True)
        self.returns += 1
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
        """Count an outcome in both tables, and which of them predicted it better; return the bin by age."""
        cls, age, pace = tick & CLASS_MASK, max(now - tick, 0) * _SECONDS, PACES[tick >> PACE_SHIFT & MOST_PACE]
        by_age, by_pace = self._by_age, self._by_pace
        at = by_age.bin(age)
        (by_age.again if again else by_age.never)[cls * by_age.bins + at] += 1
        if pace:
            ratio = by_pace.bin(age / pace)
            (by_pace.again if again else by_pace.never)[cls * by_pace.bins + ratio] += 1
            if again:
                lead = by_pace.returns[cls][ratio] - math.log(pace) - by_age.returns[cls][at]
            else:
                lead = by_pace.stays[cls][ratio] - by_age.stays[cls][at]
            self._compared[cls] += 1
            over = min(self._compared[cls] + FIRST_SMOOTHED, SMOOTHED)
            self._leads[cls] += (max(-MOST_LEAD, min(MOST_LEAD, lead)) - self._leads[cls]) / over
        self._counted += 1
        if self._counted > MOST_COUNTED:
            self._counted /= 2
            by_age.halve()
            by_pace.halve()
        return at

    def refresh(self, last: Sequence[int], shares: Sequence[Share], now: int) -> None:
        """Make the tables from the evidence. `last` and `shares` are the ticks and shares of watched blocks whose
        outcome is open at tick `now`. 3 ms for 8,192 blocks.
        """
        ticks = np.array(last, np.int64)
        ages, classes = np.maximum(now - ticks, 0) * _SECONDS, ticks & CLASS_MASK
        bins, still = self._by_age.still(classes, ages)
        self._by_age.tabulate(still)
        paces = _PACES[ticks >> PACE_SHIFT & MOST_PACE]
        paced = paces > 0
        _, still = self._by_pace.still(classes[paced], ages[paced] / paces[paced])
        self._by_pace.tabulate(still)
        self.weights = [1 / (1 + math.exp(-SHARPNESS * lead)) for lead in self._leads]
        self._of_age: list[list[float]] = []  # worths by class and step; of blocks without a pace
        self._if_paced: list[list[float]] = []  # the part by age of the others' worth
        self._of_pace: list[list[float]] = []  # the part by pace, in hits per pace
        for cls, weight in enumerate(self.weights):
            worths = self._by_age.worths(cls, _AGES)
            self._of_age.append(worths.tolist())
            self._if_paced.append(((1 - weight) * worths).tolist())
            self._of_pace.append((weight * self._by_pace.worths(cls, _RATIOS)).tolist())
        self.returning = _returning(self._by_age.again[: self._by_age.bins], self._by_age.risks[0])
        self._expected = _accumulate(self._by_age.hazards[0])
        self._set_factors(shares, np.where(classes == 0, np.array(self._expected)[bins], 0.0))

    @staticmethod
    def _set_factors(shares: Sequence[Share], expected: NDArray[np.float64]) -> None:
        """Set the factors of the shares of watched blocks; `expected` are each one's returns up to now."""
        numbers = {share: number for number, share in enumerate(dict.fromkeys(shares))}
        more = np.bincount(np.fromiter(map(numbers.__getitem__, shares), np.int64, len(shares)), expected, len(numbers))
        for share, total in zip(numbers, more.tolist(), strict=True):
            share.factor = _factor(share.returned, share.expected + total)


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
