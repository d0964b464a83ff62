"""The blocks that one engine may load from the daemon, as far as it knows: its own saves and its lookups' hits. Pure.

Events name blocks of the engine, with their tokens, so that a router that follows the engine's own blocks can match
them. A cached block is one block of the engine, so that each can be loaded by itself. It is several only if the
engine's KV cache groups have blocks of different sizes: then no hit ends between these, not even in device memory.
Nothing is reported as stored that cannot be reported as removed later.
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


@dataclass(slots=True)
class Removed:
    """These blocks of the engine cannot be loaded any more."""

    hashes: list[bytes]


class EngineEvents:
    """Collects the changes; `take` returns them."""

    def __init__(self, group: FullAttention, describe: Describe) -> None:
        self._group, self._describe = group, describe
        self._new: list[Stored | Removed] = []
        self._there: dict[bytes, tuple[bytes, ...]] = {}  # by cached block: the engine's hashes in it
        self._shipped: dict[tuple[bytes, int, int], Stored] = {}  # being saved, each one cached block
        self._hidden: dict[bytes, list[Stored]] = {}  # whole, by the parent that is not known to be whole
        self._coming: set[bytes] = set()  # hashes of the cached blocks in _shipped and _hidden
        self._waiting = 0  # blocks in _hidden

    def take(self) -> list[Stored | Removed]:
        """Return the changes since the last call, in order."""
        new, self._new = self._new, []
        return new

    def shipped(self, region: bytes, reservation: int, position: int, request: RequestView, slot: int) -> None:
        """Note that the ranks are to save the cached block `slot` of the request."""
        piece = self._shipped[region, reservation, position] = self._piece(request, slot, slot + 1)
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
            if verdict == Verdict.VISIBLE and shipped.parent not in self._coming:
                self._stored(shipped)
            elif verdict in (Verdict.VISIBLE, Verdict.HIDDEN) and shipped.parent is not None:
                self._hidden.setdefault(shipped.parent, []).append(shipped)
                self._waiting += 1
                while self._waiting > WAITING:  # the parent's writer died, perhaps
                    self._forget(self._awaited(next(iter(self._hidden))))
            else:
                self._forget([shipped])

    def looked_up(self, request: RequestView, hits: int, asked: int) -> None:
        """Note that of the first `asked` cached blocks of the request only the first `hits` are cached."""
        names = self._group.keys(plain(request.hashes))[:asked]
        for is_known, run in groupby(range(hits), lambda slot: names[slot] in self._there):
            slots = list(run)
            if not is_known:
                self._stored(self._piece(request, slots[0], slots[-1] + 1))
        self._remove([name for name in names[hits:] if name in self._there])

    def reset(self) -> None:
        """The engine has moved to another namespace: it can load nothing of this one any more."""
        self._shipped.clear()
        self._coming.clear()
        self._hidden.clear()
        self._waiting = 0
        self._remove(list(self._there))

    def _piece(self, request: RequestView, first: int, end: int) -> Stored:
        """Return the cached blocks of a request from `first` to `end`."""
        per_slot, slot_tokens, hashes = self._group.blocks_per_slot, self._group.slot_tokens, plain(request.hashes)
        parent = hashes[first * per_slot - 1] if first else None
        tokens = list(request.token_ids[first * slot_tokens : end * slot_tokens])
        said, blocks = self._describe(request, first * slot_tokens, end * slot_tokens)
        return Stored(parent, list(hashes[first * per_slot : end * per_slot]), tokens, said, blocks)

    def _awaited(self, parent: bytes) -> list[Stored]:
        """Return the blocks that wait for that parent, and forget that they wait."""
        pieces = self._hidden.pop(parent, [])
        self._waiting -= len(pieces)
        return pieces

    def _forget(self, pieces: Sequence[Stored]) -> None:
        """Blocks that were being saved are lost."""
        self._coming.difference_update(piece.hashes[-1] for piece in pieces)

    def _stored(self, piece: Stored) -> None:
        per_slot, waiting = self._group.blocks_per_slot, [piece]  # not recursive: a chain of hidden blocks may be long
        while waiting:
            piece = waiting.pop()
            names = self._group.keys(piece.hashes)
            self._coming.difference_update(names)
            if names[0] not in self._there:
                for at, name in enumerate(names):
                    self._there[name] = tuple(piece.hashes[at * per_slot : (at + 1) * per_slot])
                self._report(piece)
                self._remove(list(islice(self._there, max(0, len(self._there) - REMEMBERED))))
            for name in names:
                waiting += self._awaited(name)

    def _report(self, piece: Stored) -> None:
        last = self._new[-1] if self._new else None
        if isinstance(last, Stored) and (piece.parent, piece.request) == (last.hashes[-1], last.request):
            last.hashes += piece.hashes
            last.tokens += piece.tokens
            last.blocks += piece.blocks
        else:
            self._new.append(piece)

    def _remove(self, names: Sequence[bytes]) -> None:
        hashes = [each for name in names for each in self._there.pop(name)]
        last = self._new[-1] if self._new else None
        if isinstance(last, Removed):
            last.hashes += hashes
        elif hashes:
            self._new.append(Removed(hashes))
