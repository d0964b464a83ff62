"""The blocks that one engine may load from the daemon, as far as it knows: its own saves and its lookups' hits. Pure.

Events name blocks of the engine, with their tokens, so that a router that follows the engine's own blocks can match
them. A cached block is one block of the engine, so that each can be loaded by itself. It is several only if the
engine's KV cache groups have blocks of different sizes: then no hit ends between these, not even in device memory.
Nothing is reported as stored that cannot be reported as removed later.

Blocks of suffix groups are reported below the block of full attention with the same hash, and removed with it, or if a
lookup shows that not all blocks are cached that a hit after them would need. A router that does not distinguish groups
learns nothing wrong. Tails are not reported: a router does not know their parents, hashes within larger blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.views import Describe, RequestView, plain
from kvcache_client.step_plan import RankVerdicts
from kvcache_proto.types import Verdict

REMEMBERED = 1 << 19  # cached blocks; beyond that the oldest are reported as removed, though they may still be cached
SHIPPED = 1 << 16  # blocks that are being saved; beyond that the oldest ones' answers count as lost
WAITING = 1 << 15  # blocks whose parent is not visible; beyond that a lookup may report them later


@dataclass(slots=True)
class Stored:
    """A chain of cached blocks, each the child of the one before it, can be loaded."""

    parent: bytes | None  # hash of the engine's block above them; None for a root
    hashes: list[bytes]  # the engine's own hashes of its blocks in them
    tokens: list[int]  # of all these blocks
    request: Any  # the engine's description of the request that saved or found them
    blocks: list[Any]  # its descriptions of the blocks, in order
    group: int = 0


@dataclass(slots=True)
class Removed:
    """These blocks of the engine cannot be loaded any more."""

    hashes: list[bytes]  # the engine's own, of all its blocks in the cached ones
    group: int = 0


class EngineEvents:
    """Collects the changes; `take` returns them."""

    def __init__(self, group: FullAttention, describe: Describe) -> None:
        self._group, self._describe = group, describe
        self._new: list[Stored | Removed] = []
        groups = int(group.has_full) + len(group.suffixes)
        # By group and cached block: the engine's hashes in it.
        self._there: list[dict[bytes, tuple[bytes, ...]]] = [{} for _ in range(groups)]
        self._shipped: dict[tuple[bytes, int, int], Stored] = {}  # being saved, each one cached block
        self._hidden: dict[bytes, list[Stored]] = {}  # whole, by the block above that is not known to be whole
        self._coming: set[bytes] = set()  # hashes of the cached blocks of full attention in _shipped and _hidden
        self._waiting = 0  # blocks in _hidden

    def take(self) -> list[Stored | Removed]:
        """Return the changes since the last call, in order."""
        new, self._new = self._new, []
        return new

    def shipped(
        self, region: bytes, reservation: int, position: int, request: RequestView, slot: int, group: int = 0
    ) -> None:
        """Note that the ranks are to save the cached block `slot` of the request in a group."""
        piece = self._shipped[region, reservation, position] = self._piece(request, slot, slot + 1, group)
        if group not in self._group.suffixes:
            self._coming.add(piece.hashes[-1])
        if len(self._shipped) > SHIPPED:
            self._forget([self._shipped.pop(next(iter(self._shipped)))])

    def settled(self, verdicts: RankVerdicts) -> None:
        """Take the verdicts of one rank; only the last rank's verdict decides whether a block is visible.

        The last rank of a parent may be another one than that of its child, so the parent's verdict may come later.
        """
        for position, verdict in zip(verdicts.positions, verdicts.verdicts, strict=False):
            place = verdicts.region, verdicts.reservation, position
            if verdict == Verdict.PARTIAL or (shipped := self._shipped.pop(place, None)) is None:
                continue
            above, is_known = shipped.parent, shipped.parent not in self._coming
            if shipped.group in self._group.suffixes:
                above = shipped.hashes[-1]
                is_known = not self._group.has_full or above in self._there[0]
            if verdict == Verdict.VISIBLE and is_known:
                self._stored(shipped)
            elif verdict in (Verdict.VISIBLE, Verdict.HIDDEN) and above is not None:
                self._hidden.setdefault(above, []).append(shipped)
                self._waiting += 1
                while self._waiting > WAITING:  # the writer of the block above died, perhaps
                    self._forget(self._awaited(next(iter(self._hidden))))
            else:
                self._forget([shipped])

    def looked_up(self, request: RequestView, hits: int, asked: int, suffixes: Sequence[range] = ()) -> None:
        """Note that of the first `asked` cached blocks of the request only the first `hits` can be loaded.

        `suffixes` are the slots found in each suffix group. If there are such groups, blocks after the hits may be
        cached.
        """
        names = self._group.keys(plain(request.hashes))[:asked]
        if self._group.has_full:
            self._found(request, names, 0, range(hits))
        for number, slots in zip(self._group.suffixes, suffixes, strict=False):
            self._found(request, names, number, slots)
        if self._group.suffixes:
            self._refute(names, hits)
        else:
            self._remove(names[hits:])

    def reset(self) -> None:
        """The engine has moved to another namespace: it can load nothing of this one any more."""
        self._shipped.clear()
        self._coming.clear()
        self._hidden.clear()
        self._waiting = 0
        for number, there in enumerate(self._there):
            self._remove(list(there), number)

    def _found(self, request: RequestView, names: Sequence[bytes], number: int, found: range) -> None:
        there = self._there[number]
        for is_known, run in groupby(found, lambda slot: names[slot] in there):
            slots = list(run)
            if not is_known:
                self._stored(self._piece(request, slots[0], slots[-1] + 1, number))

    def _refute(self, names: Sequence[bytes], hits: int) -> None:
        """Remove what promises more than `hits` of the cached blocks `names`: which block is missing is not known."""
        group, volatile = self._group, self._group.volatile
        for end in range(hits + 1, len(names) - volatile + 1):
            if group.has_full and names[end - 1 + volatile] not in self._there[0]:
                return
            counts = group.counts(end, 0)
            if all(name in self._there[n] for n in group.suffixes for name in names[end - counts[n] : end][::-1]):
                for number in group.suffixes:
                    self._remove([names[end - 1]], number)

    def _piece(self, request: RequestView, first: int, end: int, number: int = 0) -> Stored:
        """Return the cached blocks of a request from `first` to `end` in a group."""
        per_slot, slot_tokens, hashes = self._group.blocks_per_slot, self._group.slot_tokens, plain(request.hashes)
        parent = hashes[first * per_slot - 1] if first else None
        tokens = list(request.token_ids[first * slot_tokens : end * slot_tokens])
        said, blocks = self._describe(request, first * slot_tokens, end * slot_tokens, number)
        return Stored(parent, list(hashes[first * per_slot : end * per_slot]), tokens, said, blocks, number)

    def _awaited(self, above: bytes) -> list[Stored]:
        """Return the blocks that wait for the one `above`, and forget that they wait."""
        pieces = self._hidden.pop(above, [])
        self._waiting -= len(pieces)
        return pieces

    def _forget(self, pieces: Sequence[Stored]) -> None:
        """Blocks that were being saved are lost."""
        suffixes = self._group.suffixes
        self._coming.difference_update(piece.hashes[-1] for piece in pieces if piece.group not in suffixes)

    def _stored(self, piece: Stored) -> None:
        per_slot, waiting = self._group.blocks_per_slot, [piece]  # not recursive: a chain of hidden blocks may be long
        while waiting:
            piece = waiting.pop()
            names, there = self._group.keys(piece.hashes), self._there[piece.group]
            if names[0] not in there:
                for at, name in enumerate(names):
                    there[name] = tuple(piece.hashes[at * per_slot : (at + 1) * per_slot])
                self._report(piece)
                self._remove(list(islice(there, max(0, len(there) - REMEMBERED))), piece.group)
            if piece.group not in self._group.suffixes:
                self._coming.difference_update(names)
                for name in names:
                    waiting += self._awaited(name)

    def _report(self, piece: Stored) -> None:
        last = self._new[-1] if self._new else None
        above = piece.group, piece.parent, piece.request
        if isinstance(last, Stored) and (last.group, last.hashes[-1], last.request) == above:
            last.hashes += piece.hashes
            last.tokens += piece.tokens
            last.blocks += piece.blocks
        else:
            self._new.append(piece)

    def _remove(self, names: Sequence[bytes], number: int = 0) -> None:
        """Report as removed those cached blocks of a group that are there; without full attention, none is useful."""
        there = self._there[number]
        if number not in self._group.suffixes:
            for suffix in self._group.suffixes:
                self._remove(names, suffix)
        hashes = [each for name in names for each in there.pop(name, ())]
        last = self._new[-1] if self._new else None
        if isinstance(last, Removed) and last.group == number:
            last.hashes += hashes
        elif hashes:
            self._new.append(Removed(hashes, number))
