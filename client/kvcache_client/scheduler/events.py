"""What one engine may load from the daemon, as far as it has seen: its own saves, and what its lookups found. Pure.

Events name blocks of the engine's, several to a cached block, with their tokens: what a router that follows the
engine's own blocks can match. Only what can be taken back is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.views import RequestView
from kvcache_client.step_plan import Heard
from kvcache_proto.types import Verdict

REMEMBERED = 1 << 16  # cached blocks; what is beyond is taken back, though the daemon may have it yet
SHIPPED = 1 << 13  # blocks that are being saved; of more, the oldest ones' answers were lost with their daemon
WAITING = 1 << 12  # blocks that are not visible for want of their parent; what is beyond is told by a lookup, if ever


@dataclass(slots=True)
class Stored:
    """A run of the engine's blocks, each the child of the one before it, is there."""

    parent: bytes | None
    hashes: list[bytes]
    tokens: list[int]


@dataclass(slots=True)
class Removed:
    """These blocks of the engine's are there no more."""

    hashes: list[bytes]


class EngineEvents:
    """What has changed; `take` hands it out."""

    def __init__(self, group: FullAttention) -> None:
        self._group = group
        self._new: list[Stored | Removed] = []
        self._there: dict[bytes, bytes] = {}  # a cached block's hash -> those of the engine's blocks in it, joined
        self._shipped: dict[tuple[bytes, int, int], Stored] = {}  # being saved, each one cached block
        self._hidden: dict[bytes, list[Stored]] = {}  # whole, by the parent that is not
        self._waiting = 0  # blocks in it

    def take(self) -> list[Stored | Removed]:
        """Return what has happened since the last call, in its order."""
        new, self._new = self._new, []
        return new

    def shipped(self, region: bytes, reservation: int, position: int, request: RequestView, slot: int) -> None:
        """Note that ranks were told to save the cached block `slot` of the request."""
        self._shipped[region, reservation, position] = self._piece(request, slot)
        if len(self._shipped) > SHIPPED:
            del self._shipped[next(iter(self._shipped))]

    def settled(self, heard: Heard) -> None:
        """Take the verdicts of one rank; only with the last one's a block is seen, or will not be."""
        for position, verdict in zip(heard.positions, heard.verdicts, strict=False):
            if verdict == Verdict.PARTIAL:
                continue
            shipped = self._shipped.pop((heard.region, heard.reservation, position), None)
            if shipped is None:
                continue
            if verdict == Verdict.VISIBLE:
                self._stored(shipped)
            elif verdict == Verdict.HIDDEN and shipped.parent is not None:
                self._hidden.setdefault(shipped.parent, []).append(shipped)
                self._waiting += 1
                while self._waiting > WAITING:  # the parent's writer died, perhaps
                    self._awaited(next(iter(self._hidden)))

    def looked_up(self, request: RequestView, hits: int, asked: int) -> None:
        """Note that of the first `asked` cached blocks of the request, the first `hits` are there, and no others."""
        for slot, name in enumerate(self._group.keys(request.hashes)[:asked]):
            if slot < hits:
                if name not in self._there:
                    self._stored(self._piece(request, slot))
            elif name in self._there:
                self._remove([name])

    def reset(self) -> None:
        """The engine has left for another namespace: nothing of this one is there for it."""
        self._shipped.clear()
        self._hidden.clear()
        self._waiting = 0
        self._remove(list(self._there))

    def _piece(self, request: RequestView, slot: int) -> Stored:
        first, end = slot * self._group.blocks_per_slot, (slot + 1) * self._group.blocks_per_slot
        tokens = self._group.block_tokens
        return Stored(
            request.hashes[first - 1] if first else None,
            list(request.hashes[first:end]),
            list(request.token_ids[first * tokens : end * tokens]),
        )

    def _awaited(self, parent: bytes) -> list[Stored]:
        """Return what waits for that parent, which it does no more."""
        pieces = self._hidden.pop(parent, [])
        self._waiting -= len(pieces)
        return pieces

    def _stored(self, piece: Stored) -> None:
        waiting = [piece]  # a chain of hidden blocks may be longer than calls go deep
        while waiting:
            piece = waiting.pop()
            name = piece.hashes[-1]
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
