"""Watches a sample of the requested blocks, cached or not: when they are requested again, and what two small caches
would have found. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection

from kvcache_server.core.eviction.guard import Guard
from kvcache_server.core.eviction.worth import Worths
from kvcache_server.core.index import PACE_MASK, Share, pace_of

WATCHED, FEWEST = 8192, 1024  # blocks, at most and if possible at least
STRIDE = 128  # tokens of a prompt between two blocks that may be watched
SPACING = 2048  # tokens, if possible, that each watched block stands for
RECENT = 1 << 14  # requests that are kept
REACH = 4  # capacities of the pool that the watched blocks stand for


class Monitor:
    """`every` is a power of two: one block in `every` is watched, by its depth and keyed hash.

    Of these blocks, the pool has room for `slots`. `requests` are the latest RECENT requests for them: the tick, the
    hash, and whether the block was cached.
    """

    def __init__(self, worths: Worths) -> None:
        self._worths = worths
        self._watched: OrderedDict[bytes, tuple[int, Share]] = OrderedDict()
        self.guard = Guard(worths, 1)
        self.requests: deque[tuple[int, bytes, bool]] = deque(maxlen=RECENT)
        self.resize(1, 1)

    def resize(self, slots: int, block_tokens: int) -> None:
        """Watch blocks of a pool with `slots` slots, most of them with `block_tokens` tokens."""
        self.requests.clear()  # other blocks are watched now
        self.every = 1
        while self._next_is_enough(slots, block_tokens):
            self.every *= 2
        self._room = max(REACH * slots // self.every, 1)
        self.slots = max(slots // self.every, 1)
        self.guard.resize(self.slots)

    def _next_is_enough(self, slots: int, block_tokens: int) -> bool:
        """Whether twice as many blocks per watched one are still few enough."""
        watched = REACH * slots // (2 * self.every)
        return watched >= WATCHED // 2 or (watched >= FEWEST and 2 * self.every * block_tokens <= SPACING)

    def steps(self, block_tokens: int) -> tuple[int, int]:
        """Return the distance between candidates, in blocks of a prompt, and the number of candidates per watched one;
        both are powers of two."""
        step = 1
        while step < self.every and step * block_tokens * 2 <= STRIDE:
            step *= 2
        return step, self.every // step

    def asked(self, name: bytes, tick: int, now: int, share: Share, cached: bool | None = None) -> None:
        """Note that a block of the sample was requested. `tick` has the time and its class from now on; `share` is that
        of the block or, if it is not `cached`, of the engine that asks; `cached` is None if it is being written.

        A hash that another namespace requested before belongs to that namespace: this is no repeated request.
        """
        watched = self._watched
        last = watched.get(name)
        if last is not None:
            if last[1].namespace != share.namespace:
                return
            self._worths.returned(last[0], now, last[1])
            if not tick & PACE_MASK:
                tick |= pace_of(now - last[0]) or last[0] & PACE_MASK
            watched.move_to_end(name)
        while len(watched) > self._room - (last is None) and watched:
            _, (before, owner) = watched.popitem(last=False)
            self._worths.given_up(before, now, owner)
        watched[name] = (tick, share)
        if cached is not None:
            self.requests.append((now, name, cached))
        self.guard.asked(name, tick, now, share)

    def refresh(self, now: int) -> None:
        """Update the worths from the evidence at tick `now`."""
        ticks, shares = zip(*self._watched.values(), strict=True) if self._watched else ((), ())
        self._worths.refresh(ticks, shares, now)

    def forget(self, shares: Collection[Share]) -> None:
        """Stop watching the blocks of shares that are gone."""
        for name in [name for name, (_, share) in self._watched.items() if share in shares]:
            del self._watched[name]
        self.guard.forget(shares)

    def __len__(self) -> int:
        return len(self._watched)
