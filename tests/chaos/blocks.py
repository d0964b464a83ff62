"""Blocks in the mapped region: written so that reads that come too early are detected, read as the protocol says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from payload import POISON, Bytes, difference, expected

from kvcache_client import GroupSpec, NamespaceSpec
from kvcache_client.session.region import Region

# What engines of the run attach to. Two sizes trade pages, and one is written by two ranks or by one process.
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
    group = spec.groups[0]
    places = _places(region, packed, group)
    memory, copies = _memory(region), []
    for number, place in enumerate(places):
        if number == len(places) // 2:
            midway()
        copies.append(memory[place])
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
    for number, (block, place) in enumerate(zip(hashes, _places(region, packed, group), strict=True)):
        for shard in shards:
            begin, size = group.shard_offset(shard), group.shards[shard]
            memory[place[begin : begin + size]] = POISON
            wanted = expected(spec.id, block, shard, size)
            memory[place[begin : begin + size // 2]] = wanted[: size // 2]
            if number == len(hashes) // 2 and shard == shards[-1]:
                midway()
            memory[place[begin + size // 2 : begin + size]] = wanted[size // 2 :]


def _places(region: Region, packed: bytes, group: GroupSpec) -> list[npt.NDArray[np.int64]]:
    """For each block, where each of its bytes lies."""
    return [
        np.concatenate([_offset(region, view) + np.arange(len(view)) for view in views])
        for views in region.views(packed, group.block_bytes, 0, group.block_bytes)
    ]


def _offset(region: Region, view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) - region.address


def _memory(region: Region) -> Bytes:
    return np.frombuffer(region.buffer, dtype=np.uint8)
