"""Pure: loads that ranks with the same KV share. Each copies some chunks of a load from the region, and takes the rest
from the devices of the others, its peers, once these have copied them.

All ranks carry out the same plans, so that a load has the same key and the same chunks in each. Nobody waits for a peer
for long: what it does not have in time comes from the region.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

PATIENCE = 1.0  # seconds without news, after a rank's own part, for which it waits for a peer
MOST_EARLY = 1024  # loads of which peers may tell before they begin here
NOT_SHARED = -1  # in place of a chunk: the peer copies nothing of this load for others

Key = tuple[int, int]  # the number of the plan, and the index of the load in it


class Tell(NamedTuple):
    """Tell all peers that a chunk is on this rank's device."""

    key: Key
    chunk: int


class Pull(NamedTuple):
    """Copy a chunk from a peer's device; then call `pulled`."""

    key: Key
    peer: int
    chunk: int


class Fill(NamedTuple):
    """Copy chunks of a peer from the region; then call `filled`."""

    key: Key
    peer: int
    chunks: tuple[int, ...]


class End(NamedTuple):
    """The load has ended; `error` is the reason that not all bytes were copied."""

    key: Key
    error: str


Action = Tell | Pull | Fill | End


@dataclass(slots=True)
class _Load:
    own: int  # chunks that have not landed
    missing: dict[int, set[int]]  # of each peer
    deadline: float
    begun: bool = False  # a chunk of its own has landed: so the blocks are free of what ran before
    there: dict[int, set[int]] = field(default_factory=dict)  # chunks that peers have, until it has begun
    running: int = 0  # copies of peers' chunks
    error: str = ""

    @property
    def ended(self) -> bool:
        return not (self.own or self.running or any(self.missing.values()))


class Exchange:
    """The loads of one rank. Each call returns what is to be done now, in this order."""

    def __init__(self) -> None:
        self._loads: dict[Key, _Load] = {}
        self._early: dict[Key, list[tuple[int, int]]] = {}  # of loads that have not begun here: peers, and chunks
        self._newest: Key = (0, -1)
        self._late: set[int] = set()  # peers that were waited for in vain, and have not been heard of since

    def begin(self, key: Key, own: int, of_peers: Mapping[int, Collection[int]], now: float) -> list[Action]:
        """Begin a load with `own` chunks, at least one, and those of each peer. Keys ascend."""
        load = self._loads[key] = _Load(own, {peer: set(chunks) for peer, chunks in of_peers.items()}, now + PATIENCE)
        self._skip_to(key)
        found: list[Action] = []
        for peer in self._late & load.missing.keys():
            found += self._give_up(key, load, peer)
        for peer, chunk in self._early.pop(key, ()):
            found += self._heard(key, load, peer, chunk)
        return found

    def decline(self, key: Key) -> list[Action]:
        """Take no part in a load that the others may share."""
        self._skip_to(key)
        self._early.pop(key, None)
        return [Tell(key, NOT_SHARED)]

    def landed(self, key: Key, chunk: int, error: str, now: float) -> list[Action]:
        """Note the end of a copy of this rank's own chunk from the region."""
        load = self._loads[key]
        load.own -= 1
        load.deadline = now + PATIENCE
        load.error = load.error or error
        found: list[Action] = [Tell(key, NOT_SHARED if error else chunk)]
        if not load.begun:
            load.begun = True
            for peer, chunks in load.there.items():
                found += [self._pull(key, load, peer, each) for each in sorted(chunks & load.missing[peer])]
            load.there.clear()
        return found + self._end(key, load)

    def told(self, peer: int, key: Key, chunk: int, now: float) -> list[Action]:
        """Note that a chunk is on a peer's device."""
        self._late.discard(peer)
        load = self._loads.get(key)
        if load is not None:
            load.deadline = now + PATIENCE
            return self._heard(key, load, peer, chunk) + self._end(key, load)
        if key > self._newest and (key in self._early or len(self._early) < MOST_EARLY):
            self._early.setdefault(key, []).append((peer, chunk))
        return []

    def pulled(self, key: Key, peer: int, chunk: int, error: str) -> list[Action]:
        """Note the end of a `Pull`. After an error, the peer's chunks come from the region."""
        load = self._loads[key]
        load.running -= 1
        if not error:
            return self._end(key, load)
        load.missing[peer].add(chunk)
        return self._give_up(key, load, peer)

    def filled(self, key: Key, error: str) -> list[Action]:
        """Note the end of a `Fill`."""
        load = self._loads[key]
        load.running -= 1
        load.error = load.error or error
        return self._end(key, load)

    def gone(self, peer: int) -> list[Action]:
        """Note that nothing more can be heard of a peer, or read from it."""
        return [action for key, load in [*self._loads.items()] for action in self._give_up(key, load, peer)]

    def expire(self, now: float) -> list[Action]:
        """Give up peers that have been waited for too long."""
        found: list[Action] = []
        for key, load in [*self._loads.items()]:
            if load.own or now < load.deadline:
                continue
            for peer in [peer for peer, chunks in load.missing.items() if chunks]:
                self._late.add(peer)
                found += self._give_up(key, load, peer)
        return found

    def deadline(self) -> float | None:
        """Return the time of the next `expire`, None if nobody is waited for."""
        times = [load.deadline for load in self._loads.values() if not load.own and any(load.missing.values())]
        return min(times, default=None)

    def _skip_to(self, key: Key) -> None:
        self._newest = key
        for old in [each for each in self._early if each < key]:
            del self._early[old]

    def _heard(self, key: Key, load: _Load, peer: int, chunk: int) -> list[Action]:
        if chunk == NOT_SHARED:
            return self._give_up(key, load, peer)
        if chunk not in load.missing.get(peer, ()):
            return []
        if load.begun:
            return [self._pull(key, load, peer, chunk)]
        load.there.setdefault(peer, set()).add(chunk)
        return []

    def _pull(self, key: Key, load: _Load, peer: int, chunk: int) -> Pull:
        load.missing[peer].remove(chunk)
        load.running += 1
        return Pull(key, peer, chunk)

    def _give_up(self, key: Key, load: _Load, peer: int) -> list[Action]:
        chunks, load.missing[peer] = load.missing.get(peer, set()), set()
        if not chunks:
            return []
        load.running += 1
        return [Fill(key, peer, tuple(sorted(chunks)))]

    def _end(self, key: Key, load: _Load) -> list[Action]:
        if not load.ended:
            return []
        del self._loads[key]
        return [End(key, load.error)]
