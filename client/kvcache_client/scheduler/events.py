"""What one engine may load from the daemon, as far as it knows: its own saves, and what its lookups found. Pure.

Events name blocks of the engine, with their tokens, so that a router that follows the engine's own blocks can match
them. A cached block is one of these, so that each can be loaded by itself. It is several only if the engine's KV cache
groups have blocks of different sizes: then no hit ends between these, not even in device memory. Nothing is reported as
stored that cannot be reported as removed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.content import plain
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.views import RequestView
from kvcache_client.step_plan import RankVerdicts
from kvcache_proto.types import Verdict

REMEMBERED = 1 << 19  # cached blocks; beyond that the oldest are reported as removed, though they may be there
SHIPPED = 1 << 16  # blocks that are being saved; beyond that the answers to the oldest are taken for lost
WAITING = 1 << 15  # blocks whose parent is not visible; beyond that a lookup may report them later


@dataclass(slots=True)
class Stored:
    """A chain of the engine's blocks, each the child of the one before it, can be loaded. The hashes are its own."""

    parent: bytes | None
    hashes: list[bytes]
    tokens: list[int]
    adapter: tuple[int, str] | None = None


@dataclass(slots=True)
class Removed:
    """These blocks of the engine cannot be loaded any more."""

    hashes: list[bytes]


class EngineEvents:
    """What has changed; `take` returns it."""

    def __init__(self, group: FullAttention) -> None:
        self._group = group
        self._new: list[Stored | Removed] = []
        self._there: dict[bytes, bytes] = {}  # by a cached block's hash, those of the engine's blocks in it, joined
        self._shipped: dict[tuple[bytes, int, int], Stored] = {}  # being saved, each one cached block
        self._hidden: dict[bytes, list[Stored]] = {}  # whole, by the parent that is not, as far as we know
        self._coming: set[bytes] = set()  # hashes of the cached blocks in both
        self._waiting = 0  # blocks in it

    def take(self) -> list[Stored | Removed]:
        """Return what has changed since the last call, in order."""
        new, self._new = self._new, []
        return new

    def shipped(self, region: bytes, reservation: int, position: int, request: RequestView, slot: int) -> None:
        """Note that the ranks are to save the cached block `slot` of the request."""
        piece = self._shipped[region, reservation, position] = self._piece(request, slot)
        self._coming.add(piece.hashes[-1])
        if len(self._shipped) > SHIPPED:
            self._forget([self._shipped.pop(next(iter(self._shipped)))])

    def settled(self, verdicts: RankVerdicts) -> None:
        """Take the verdicts of one rank; only the last rank's decides whether a block is visible.

        That may be another rank for a block than for its parent, whose verdict may then come later.
        """
        for position, verdict in zip(verdicts.positions, verdicts.verdicts, strict=False):
            if verdict == Verdict.PARTIAL:
                continue
            shipped = self._shipped.pop((verdicts.region, verdicts.reservation, position), None)
            if shipped is None:
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
        for slot, name in enumerate(self._group.keys(plain(request.hashes))[:asked]):
            if slot < hits:
                if name not in self._there:
                    self._stored(self._piece(request, slot))
            elif name in self._there:
                self._remove([name])

    def reset(self) -> None:
        """The engine has moved to another namespace: it can load nothing of this one any more."""
        self._shipped.clear()
        self._coming.clear()
        self._hidden.clear()
        self._waiting = 0
        self._remove(list(self._there))

    def _piece(self, request: RequestView, slot: int) -> Stored:
        first, end = slot * self._group.blocks_per_slot, (slot + 1) * self._group.blocks_per_slot
        tokens, hashes = self._group.block_tokens, plain(request.hashes)
        return Stored(
            hashes[first - 1] if first else None,
            list(hashes[first:end]),
            list(request.token_ids[first * tokens : end * tokens]),
            request.adapter,
        )

    def _awaited(self, parent: bytes) -> list[Stored]:
        """Return what waits for that parent, and forget that it waits."""
        pieces = self._hidden.pop(parent, [])
        self._waiting -= len(pieces)
        return pieces

    def _forget(self, pieces: Sequence[Stored]) -> None:
        """Take cached blocks that were being saved for lost."""
        self._coming.difference_update(piece.hashes[-1] for piece in pieces)

    def _stored(self, piece: Stored) -> None:
        waiting = [piece]  # not recursive: a chain of hidden blocks may be long
        while waiting:
            piece = waiting.pop()
            name = piece.hashes[-1]
            self._coming.discard(name)
            if name not in self._there:
                self._there[name] = b"".join(piece.hashes)
                last = self._new[-1] if self._new else None
                if isinstance(last, Stored) and piece.parent == last.hashes[-1]:
                    last.hashes += piece.hashes
                    last.tokens += piece.tokens
                else:
                    self._new.append(piece)
                if len(self._there) > REMEMBERED:
                    self._remove([next(iter(self._there))])
            waiting += self._awaited(name)

    def _remove(self, names: Sequence[bytes]) -> None:
        hashes = []
        for name in names:
            joined = self._there.pop(name)
            hashes += [joined[at : at + len(name)] for at in range(0, len(joined), len(name))]
        last = self._new[-1] if self._new else None
        if isinstance(last, Removed):
            last.hashes += hashes
        elif hashes:
            self._new.append(Removed(hashes))
