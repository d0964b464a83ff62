"""Two small caches of a sample of the blocks: one evicts by worth, one by age. Pure.

They show which is better for the present requests. As long as that is age, the pool evicts by age: the worths may have
been learned from requests that have changed since, or from too few of them.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection

from kvcache_server.core.eviction.worth import Worths, one_off
from kvcache_server.core.index import CLASS_MASK, Share

PROMPTS = 6  # by which one must lead before the pool switches to it: most prompts hit, or miss, as a whole
SLACK = 0.95  # hits by age are counted for less: in the pool, too, victims come from samples
SAMPLE, KEPT = 24, 8  # random blocks that are looked at together, and candidates kept of those before
LOOKS = 8  # blocks that need room, until the next sample
_SMOOTH = 256  # lookups over which the mean size of prompts is taken


class Guard:
    """Attributes: `by_age` is whether age is better, `switches` is how often that has changed.

    The `lead` is the number of hits by which age is ahead, never below 0 or above PROMPTS prompts. `by_age` changes
    when it reaches the other end. So old gains do not excuse present losses.
    """

    def __init__(self, worths: Worths, slots: int) -> None:
        self._worths = worths
        self._by_age: OrderedDict[bytes, Share] = OrderedDict()
        self._once: dict[Share, OrderedDict[bytes, None]] = {}  # blocks in it that were requested once
        self._by_worth: dict[bytes, tuple[int, Share, int]] = {}  # each with its tick and its position in `_names`
        self._names: list[bytes] = []  # in no order
        self._candidates: list[tuple[float, int, bytes]] = []  # worth and tick when looked at; worth least last
        self._left = 0  # blocks that need room, until the next sample
        self._random = random.Random(1)
        self.by_age = False
        self.lead = 0.0
        self._prompt = 1.0  # sampled blocks per lookup
        self.switches = 0
        self.resize(slots)

    def resize(self, slots: int) -> None:
        """Let each cache have `slots` slots; the sample may be another one from now on."""
        self._slots = slots

    def note_prompt(self, blocks: float) -> None:
        """Note the number of blocks of the sample that a lookup asked for, on average."""
        self._prompt += (blocks - self._prompt) / _SMOOTH

    def asked(self, name: bytes, tick: int, now: int, share: Share) -> None:
        """Look a block up in both caches, and store it if it is not there; see Monitor.asked."""
        old = self._drop_by_age(name)
        self._by_age[name] = share
        if not tick & CLASS_MASK:
            self._once.setdefault(share, OrderedDict())[name] = None
        while len(self._by_age) > self._slots:
            self._drop_by_age(self._oldest())
        entry = self._by_worth.get(name)
        if entry is not None:
            self._by_worth[name] = tick, share, entry[2]
        elif self._make_room(tick, now, share):
            self._by_worth[name] = tick, share, len(self._names)
            self._names.append(name)
        most = PROMPTS * self._prompt
        self.lead = min(max(self.lead + old * SLACK - (entry is not None), 0.0), most)
        if self.lead == (0.0 if self.by_age else most):
            self.by_age = not self.by_age
            self.switches += 1

    def _drop_by_age(self, name: bytes) -> bool:
        """Remove the block from the cache by age; return whether it was there."""
        share = self._by_age.pop(name, None)
        if share is not None and share in self._once:
            self._once[share].pop(name, None)
            if not self._once[share]:
                del self._once[share]
        return share is not None

    def _oldest(self) -> bytes:
        """Return the block that is evicted next in the cache by age."""
        for share, names in self._once.items():
            if one_off(share, 0):
                return next(iter(names))
        return next(iter(self._by_age))

    def _make_room(self, tick: int, now: int, share: Share) -> bool:
        """Evict the candidates that are worth least; return False if that is the new block."""
        entries, candidates = self._by_worth, self._candidates
        self._left -= 1
        while len(entries) >= self._slots:
            if not candidates or self._left < 0:
                self._look(now)
            least, last, name = candidates[-1]
            if name in entries and entries[name][0] == last:
                if self._worths.worth(tick, now, share) < least:
                    return False
                self._drop(name)
            del candidates[-1]  # or it was requested again, or evicted
        return True

    def _look(self, now: int) -> None:
        """Look at some other blocks, and again at the candidates."""
        self._left, entries, worth = LOOKS, self._by_worth, self._worths.worth
        names = {name for _, _, name in self._candidates if name in entries}
        names.update(self._random.choices(self._names, k=SAMPLE))
        found = []
        for name in names:
            tick, share, _ = entries[name]
            found.append((worth(tick, now, share), tick, name))
        self._candidates[:] = sorted(found, reverse=True)[-KEPT:]

    def _drop(self, name: bytes) -> None:
        at, last = self._by_worth.pop(name)[2], self._names.pop()
        if last != name:
            self._names[at] = last
            self._by_worth[last] = *self._by_worth[last][:2], at

    def forget(self, shares: Collection[Share]) -> None:
        """Drop the blocks of shares that are gone."""
        for name in [name for name, share in self._by_age.items() if share in shares]:
            self._drop_by_age(name)
        for name in [name for name, entry in self._by_worth.items() if entry[1] in shares]:
            self._drop(name)
