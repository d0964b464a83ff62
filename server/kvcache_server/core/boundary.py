"""Where an engine may continue: the longest prefix for which each group has the blocks that it needs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcache_proto.types import GroupSpec
from kvcache_server.core.index import Block, Group
from kvcache_server.core.limits import LOOK


def boundary(tails: Sequence[Group], hashes: Sequence[bytes], most: int, start: int) -> tuple[int, list[Block]]:
    """Return the largest number of blocks, at most `most`, after which an engine may continue, and the tails' blocks
    that it needs for that, tail after tail in prompt order.

    It has the first `start` blocks itself. Returns 0 and no blocks if there is no number above `start`, or if one of
    the blocks hangs on a hidden one and has not been removed yet.
    """
    while most > start:
        found = _blocks(tails, hashes, most, start)
        if found is not None and tails[0].above.severed and not all(map(_is_reachable, found)):
            return 0, []
        if found is not None:
            return most, found
        most = last_end([(tail.spec, tail.visible.__contains__) for tail in tails], hashes, most, start)
    return 0, []


def _is_reachable(block: Block) -> bool:
    return block.parent is not None and block.account.group.reaches(block.parent)


def _blocks(tails: Sequence[Group], hashes: Sequence[bytes], end: int, start: int) -> list[Block] | None:
    """Return the blocks of `tails` that an engine needs to continue after `end` blocks, None if one is missing."""
    found: list[Block] = []
    try:
        for tail in tails:
            first = max(start, end - tail.spec.needed(end))
            found += map(tail.visible.__getitem__, hashes[first:end])
    except KeyError:
        return None
    return found


def last_end(
    tails: Sequence[tuple[GroupSpec, Callable[[bytes], bool]]], hashes: Sequence[bytes], most: int, start: int
) -> int:
    """Return the largest number of blocks, at most `most`, for which `tails` have the blocks needed; at least `start`.

    Each tail is given as its spec and a test for its blocks. Returns `start` if the search takes long because the
    blocks have more gaps than any engine leaves behind.
    """
    have = [bytes(map(has, hashes[start:most])) for _, has in tails]
    end, before, looks = most, most + 1, 0
    while end < before:
        before = end
        for (spec, _), flags in zip(tails, have, strict=True):
            while (lower := _lower(spec, flags, end, start)) < end:
                end = lower
                looks += 1
                if looks == LOOK:
                    return start
    return end


def _lower(spec: GroupSpec, flags: bytes, end: int, start: int) -> int:
    """Return `end` if one tail has the blocks needed to continue after `end` blocks, else a lower number to try next.

    `flags[at]` is whether the tail has block `start + at`. No number in between would do.
    """
    inside = end - start
    missing = flags.rfind(0, 0, inside)
    if missing < inside - min(spec.needed(end), inside):
        return end
    lower = start + missing
    if missing and spec.needed(lower) and not flags[missing - 1]:
        last = flags.rfind(1, 0, missing)  # skips all missing blocks before it
        lower = max(start + last + 1, lower - lower % spec.period if spec.period else start)
    return lower
