"""What one engine may load from the daemon, as far as it has seen: its own saves, and what its lookups found. Pure.

Events name blocks of the engine's, several to a cached block, with their tokens: what a router that follows the
engine's own blocks can match. Only what can be taken back is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcache_client.plan import slot_hashes
from kvcache_proto.types import Verdict

REMEMBERED = 1 << 16  # cached blocks; what is beyond is taken back, though the daemon may have it yet


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


@dataclass(frozen=True, slots=True)
class Heard:
    """What a rank heard when it settled its shards of a reservation: a verdict a position."""

    region: bytes
    reservation: int
    positions: list[int]
    verdicts: list[int]


class Events:
    """The scheduler's side; `take` hands out what is new."""

    def __init__(self, engine_block: int, blocks_per_slot: int) -> None:
        self._block, self._per_slot = engine_block, blocks_per_slot
        self._new: list[Stored | Removed] = []
        self._there: dict[bytes, bytes] = {}  # a cached block's hash -> those of the engine's blocks in it, joined
        # What is being saved: a request, and which of its cached blocks, from the root on.
        self._shipped: dict[tuple[bytes, int, int], tuple[Any, int]] = {}
        self._hidden: dict[bytes, list[tuple[Any, int]]] = {}  # whole, by the parent that is not

    def take(self) -> list[Stored | Removed]:
        """Return what has happened since the last call, in its order."""
        new, self._new = self._new, []
        return new

    def shipped(self, region: bytes, reservation: int, position: int, request: Any, slot: int) -> None:
        """Note that ranks were told to save the cached block `slot` of the request."""
        self._shipped[region, reservation, position] = request, slot
        if len(self._shipped) > REMEMBERED:  # those whose answer was lost with their daemon
            del self._shipped[next(iter(self._shipped))]

    def settled(self, heard: Heard) -> None:
        """Take the verdicts of one rank; only with the last one's a block is seen, or will not be."""
        for position, verdict in zip(heard.positions, heard.verdicts, strict=False):
            if verdict == Verdict.PARTIAL:
                continue
            shipped = self._shipped.pop((heard.region, heard.reservation, position), None)
            if shipped is None:
                continue
            request, slot = shipped
            if verdict == Verdict.VISIBLE:
                self._stored(request, slot)
            elif verdict == Verdict.HIDDEN:
                parent = slot_hashes(request.block_hashes, self._per_slot)[slot - 1]
                self._hidden.setdefault(parent, []).append(shipped)
                if len(self._hidden) > REMEMBERED:
                    del self._hidden[next(iter(self._hidden))]

    def looked_up(self, request: Any, hits: int, asked: int) -> None:
        """Note that of the first `asked` cached blocks of the request, the first `hits` are there, and no others."""
        for slot, name in enumerate(slot_hashes(request.block_hashes, self._per_slot)[:asked]):
            if slot < hits:
                if name not in self._there:
                    self._stored(request, slot)
            elif name in self._there:
                self._remove([name])

    def reset(self) -> None:
        """The engine has left for another namespace: nothing of this one is there for it."""
        self._shipped.clear()
        self._hidden.clear()
        self._remove(list(self._there))

    def _stored(self, request: Any, slot: int) -> None:
        waiting = [(request, slot)]  # a chain of hidden blocks may be longer than calls go deep
        while waiting:
            request, slot = waiting.pop()
            first, end = slot * self._per_slot, (slot + 1) * self._per_slot
            hashes: Sequence[bytes] = request.block_hashes[first:end]
            if hashes[-1] not in self._there:
                self._there[hashes[-1]] = b"".join(hashes)
                tokens = list(request.all_token_ids[first * self._block : end * self._block])
                parent = request.block_hashes[first - 1] if first else None
                last = self._new[-1] if self._new else None
                if isinstance(last, Stored) and parent == last.hashes[-1]:
                    last.hashes += hashes
                    last.tokens += tokens
                else:
                    self._new.append(Stored(parent, list(hashes), tokens))
                if len(self._there) > REMEMBERED:
                    self._remove([next(iter(self._there))])
            waiting += self._hidden.pop(hashes[-1], ())

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
