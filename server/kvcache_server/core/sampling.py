"""Sampling by hashes whose bytes clients choose. Pure.

Clients choose the bytes of block hashes, so these bytes are not random: in counters, for example, most bits are equal.
Python's hash() of them is no better if PYTHONHASHSEED is set. So a lot is drawn with a key that only the daemon knows.
A hash always draws the same lot: a block is either in the sample or not, regardless of how often it is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

LARGE_POOL = 1 << 15  # blocks; in larger pools, not every eviction is remembered
LARGE_POOL_EVERY = 32  # but one in this many

Draw = Callable[[bytes], int]


def sampled_every(slots: int) -> int:
    """Return how many evictions each remembered one stands for, in a pool of `slots`."""
    return 1 if slots <= LARGE_POOL else LARGE_POOL_EVERY


def keyed_draw(secret: bytes) -> Draw:
    """Return a function that maps a hash to its lot: 64 bits, unpredictable without `secret`. 0.5 us per call."""
    keyed = hashlib.blake2b(key=secret, digest_size=8)

    def draw(block_hash: bytes) -> int:
        state = keyed.copy()  # half the time of making a new one
        state.update(block_hash)
        return int.from_bytes(state.digest(), "little")

    return draw
