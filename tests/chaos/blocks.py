"""Blocks in the mapped region: written so that reads that come too early are detected, read as the protocol says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from payload import POISON, Bytes, difference, expected

from kvcache_client import GroupSpec, NamespaceSpec
from kvcache_client.session.region import Region

# What engines of the run attach to. Two sizes trade extents, and one is written by two ranks or by one process.
SPECS = {
    "small": NamespaceSpec(model="chaos small", groups=[GroupSpec(16, 4096)]),
    "large": NamespaceSpec(model="chaos large", groups=[GroupSpec(16, 65536)]),
    "ranks": NamespaceSpec(model="chaos ranks", groups=[GroupSpec(16, (4096, 8192))]),
}


class Seen(NamedTuple):
    """Of what was read: how many shards were right, how many slots were another block's by then, what was wrong."""

    right: int
    gone: int
    wrong: list[str]


def nothing() -> None:
    """For who stops nowhere."""


def read(
    region: Region,
    spec: NamespaceSpec,
    hashes: Sequence[bytes],
    packed: bytes,
    shards: Iterable[int],
    midway: Callable[[], None] = nothing,
) -> Seen:
    """Copy the slots of `packed` out, then look at the generations, then compare what the slots still vouch for."""
    group, places = spec.groups[0], [int(offset) for offset in region.offsets(packed)]
    memory, copies = _memory(region), []
    for number, place in enumerate(places):
        if number == len(places) // 2:
            midway()
        copies.append(memory[place : place + group.block_bytes].copy())
    current = region.current(packed)
    right, wrong = 0, []
    for block, copy, good in zip(hashes, copies, current, strict=True):
        for shard in shards if good else ():
            begin = group.shard_offset(shard)
            found = copy[begin : begin + group.shards[shard]]
            wanted = expected(spec.id, block, shard, group.shards[shard])
            if np.array_equal(found, wanted):
                right += 1
            else:
                wrong.append(f"{spec.model} {block.hex()[:12]} shard {shard}: {difference(found, wanted)}")
    return Seen(right, len(places) - int(current.sum()), wrong)


def write(
    region: Region,
    spec: NamespaceSpec,
    hashes: Sequence[bytes],
    packed: bytes,
    shards: Iterable[int],
    midway: Callable[[], None] = nothing,
) -> None:
    """Fill the slots of `packed`; `midway` is called in the middle of the block in the middle."""
    group, memory, shards = spec.groups[0], _memory(region), list(shards)
    for number, (block, place) in enumerate(zip(hashes, map(int, region.offsets(packed)), strict=True)):
        for shard in shards:
            begin, size = place + group.shard_offset(shard), group.shards[shard]
            memory[begin : begin + size] = POISON
            wanted = expected(spec.id, block, shard, size)
            memory[begin : begin + size // 2] = wanted[: size // 2]
            if number == len(hashes) // 2 and shard == shards[-1]:
                midway()
            memory[begin + size // 2 : begin + size] = wanted[size // 2 :]


def _memory(region: Region) -> Bytes:
    return np.frombuffer(region.buffer, dtype=np.uint8)
