"""Pure: checksums of the shards of blocks, taken by their writers and compared by their readers.

A checksum is XXH3 of a shard's bytes as they lie in the region. 0 means none, so a checksum of 0 is stored as 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvcache_proto.types import SUM_BYTES

SAMPLE = 16  # `sample` verifies one block in this many


def chosen(mode: str, hashes: Sequence[bytes], region_id: bytes) -> list[int]:
    """Return the positions of the `hashes` whose blocks in the region `mode` (off, sample, all) verifies.

    The hash and the region's random id decide: writers and readers choose the same blocks without communicating, and
    hashes that are, for example, counters are sampled as well as digests.
    """
    if mode == "off":
        return []
    if mode == "all":
        return list(range(len(hashes)))
    draw, seed = xxhash.xxh3_64_intdigest, int.from_bytes(region_id[:8], "little")
    return [number for number, each in enumerate(hashes) if not draw(each, seed) % SAMPLE]


def pick_sums(mode: str, hashes: Sequence[bytes], packed: bytes, shards: int, region_id: bytes) -> bytes:
    """Return the checksums in `packed`, `shards` per hash, with none for blocks that `mode` leaves out.

    b"" if there is nothing to verify.
    """
    if not packed or mode == "off":
        return b""
    if mode == "all":
        return packed if packed.strip(b"\0") else b""
    width = shards * SUM_BYTES
    picked = bytearray(len(packed))
    for number in chosen(mode, hashes[: len(packed) // width], region_id):
        picked[number * width : (number + 1) * width] = packed[number * width : (number + 1) * width]
    return bytes(picked) if picked.strip(b"\0") else b""


def sums_of_shard(packed: bytes, shard: int, shards: int) -> npt.NDArray[np.uint64]:
    """Return the checksum of one shard of every block in `packed`, which has `shards` checksums per block."""
    return np.frombuffer(packed, "<u8").reshape(-1, shards)[:, shard]


def sum_up(shards: Iterable[Iterable[memoryview]]) -> npt.NDArray[np.uint64]:
    """Return the checksum of each shard, given as the views of its bytes. Releases the GIL if they are large."""
    # A state, not the one-shot call, which kept the GIL before xxhash 4.0.
    state = xxhash.xxh3_64()
    found = []
    for views in shards:
        state.reset()
        for view in views:
            state.update(view)
        found.append(state.intdigest() or 1)
    return np.array(found, np.uint64)


def pack_sums(positions: int, summed: Sequence[int], sums: npt.NDArray[np.uint64]) -> bytes:
    """Return the checksums of `positions` blocks; those at `summed` have the checksums `sums`, in order.

    `sums` has one per block, or a row with one per shard.
    """
    if len(summed) == positions:
        return sums.astype("<u8").tobytes()
    packed = np.zeros((positions, *sums.shape[1:]), "<u8")
    packed[list(summed)] = sums
    return packed.tobytes()
