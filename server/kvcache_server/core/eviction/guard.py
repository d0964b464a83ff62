"""Two small caches of a sample of the blocks: one evicts by worth, one by age. Pure.

They show which is better for the present requests. As long as that is age, the pool evicts by age: the worths may have
been learned from requests that have changed since, or from too few of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import random

from kvcache_server.core.eviction.worth import Worths, one_off
from kvcache_server.core.index import CLASS_MASK, Share

SLACK = 0.95
SAMPLE, KEPT = 8, 16
PROMPTS = 6  # by which one must lead before the pool switches to it: most prompts hit, or miss, as a whole
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
        self._by_worth: dict[bytes, list[Any]] = {}  # tick, pace, share, position in `_names`
        self._names: list[bytes] = []
        self._random = random.Random(1)
        self._least: list[tuple[float, int, bytes]] = []
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
            entry[:2] = tick, share
        elif self._make_room(tick, now, share):
            self._by_worth[name] = [tick, share, len(self._names)]
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
        """Evict blocks of a sample that are worth least; return False if that is the new block."""
        names, entries, worth, draw = self._names, self._by_worth, self._worths.worth, self._random.random
        while len(names) >= self._slots:
            for _ in range(SAMPLE):
                name = names[int(draw() * len(names))]
                its, owner, _ = entries[name]
                self._least.append((worth(its, now, owner), its, name))
            self._least.sort()
            del self._least[KEPT:]
            victim = b""
            while self._least:
                least, its, victim = self._least[0]
                entry = entries.get(victim)
                if entry is not None and entry[0] == its:
                    break
                del self._least[0]
            else:
                continue
            if worth(tick, now, share) < least:
                return False
            del self._least[0]
            self._drop(victim)
        return True

    def _drop(self, name: bytes) -> None:
        at, last = self._by_worth.pop(name)[2], self._names.pop()
        if last != name:
            self._names[at] = last
            self._by_worth[last][2] = at

    def forget(self, shares: Collection[Share]) -> None:
        """Drop the blocks of shares that are gone."""
        for name in [name for name, share in self._by_age.items() if share in shares]:
            self._drop_by_age(name)
        for name in [name for name, entry in self._by_worth.items() if entry[1] in shares]:
            self._drop(name)
