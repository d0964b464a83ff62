"""Which of many hashes are in a sample, where their bytes are the clients' choice. Pure.

Clients choose the bytes of block hashes, so these bytes are not random: in counters, say, most bits are equal. Python's
own hash() of them is no better where PYTHONHASHSEED is set. So a lot is drawn with a key that only the daemon knows.
One hash always draws the same lot, so that a block is in the sample or not, however often it comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

LARGE_POOL = 1 << 15  # blocks, from which on not every eviction is remembered
LARGE_POOL_EVERY = 32  # but one in so many

Draw = Callable[[bytes], int]


def sampled_every(slots: int) -> int:
    """Return how many evictions each remembered one stands for, in a pool of so many slots."""
    return 1 if slots <= LARGE_POOL else LARGE_POOL_EVERY


def keyed_draw(secret: bytes) -> Draw:
    """Return a function that gives each hash its lot: 64 bits that nobody can tell without `secret`. 0.5 us a call."""
    keyed = hashlib.blake2b(key=secret, digest_size=8)

    def draw(block_hash: bytes) -> int:
        state = keyed.copy()  # takes half as long as making a new one
        state.update(block_hash)
        return int.from_bytes(state.digest(), "little")

    return draw
