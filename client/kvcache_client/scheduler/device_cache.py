"""The cached blocks on the engine's device, and what is saved when the device is about to evict them. Pure.

With eager saves, full blocks are saved at once. As long as a device has a block, the daemon may need the room of its
copy for other blocks: when the device is about to evict the block, the daemon is told, and it gets the block again if
it has no copy any more. With lazy saves, blocks are saved only then.

A block is saved together with all blocks above it, without which it would be useless. With lazy saves, a block that was
found on the device twice is saved at once: a prefix that is always in use is never evicted, and other engines would
never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.cache import Counts
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.requests import RequestState
from kvcache_client.scheduler.views import EngineFacts, plain

HITS = 2  # on the device, after which a block is saved although it is not about to be evicted


@dataclass(slots=True)
class _Use:
    """The last use of the blocks of a request, in seconds. `kept`: the daemon was told that the device has them."""

    at: float
    kept: bool = False


@dataclass(slots=True)
class _Held:
    """A cached block in the device's `blocks`, which have these `hashes`; `above` is the one before it.

    `done`: the daemon knows what it needs to know when the device evicts it. `source`, for events: the request, and the
    number of the block in its chain.
    """

    key: bytes
    above: bytes | None
    blocks: Sequence[int]
    hashes: Sequence[bytes]
    use: _Use
    done: bool
    hits: int
    source: tuple[RequestState, int] | None = None


@dataclass(slots=True)
class Due:
    """A chain of cached blocks that is to be saved, below the block `parent`, in device `blocks`.

    `source` is the request of the last one, and that one's number in its chain. The last `leaving` of them are about to
    be evicted; `idle` seconds ago the last one was used, and `found` requests have found it on the device.
    """

    keys: list[bytes]
    parent: bytes | None
    blocks: list[int]
    source: tuple[RequestState, int] | None
    leaving: int = 0
    idle: float = 0.0
    found: int = 0


class Eager:
    """Full blocks are saved at once, and nothing is known of the device."""

    reports = False  # whether the daemon learns what the device has

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the chains that have become unused on the device since the last call, by their last blocks, and the
        blocks that it has evicted in the meantime without being saved again."""
        return [], []

    def hold(self, state: RequestState, first: int, end: int) -> bool:
        """Note that the device has the cached blocks of a request from `first` to `end`; return whether they wait."""
        return False

    def found(self, state: RequestState, tokens: int) -> None:
        """Note that a request begins with `tokens` tokens on the device, and that the daemon has its `saved` blocks."""

    def given(self, blocks: Iterable[int]) -> None:
        """Note device blocks that get other content in the step that is being planned."""

    def due(self) -> Sequence[Due]:
        """Return the chains that are to be saved now."""
        return ()

    def ending(self, state: RequestState) -> None:
        """Note that a request gives its device blocks back."""

    def forget(self) -> None:
        """The device's cache was reset."""


class DeviceCache(Eager):
    """The device's cache in an engine with one group of full attention."""

    def __init__(
        self,
        group: FullAttention,
        engine: EngineFacts,
        counters: Counts,
        clock: Callable[[], float],
        lazy: bool,
        reports: bool,
        events: bool = False,
    ) -> None:
        """`lazy`: blocks are saved only when they are about to be evicted. `reports`: the daemon learns of all of
        these. `events`: requests are kept for the events of blocks that are saved after their end.
        """
        assert engine.evicted_next is not None
        self.reports = reports
        self._group, self._evicted_next, self._hash_of = group, engine.evicted_next, engine.hash_of
        # Twice the blocks that a step may evict: a save takes a step.
        self._ahead = 2 * engine.step_tokens // engine.block_tokens
        self._counters, self._clock, self._lazy, self._events = counters, clock, lazy, events
        self._held: dict[bytes, _Held] = {}
        self._keys: dict[int, bytes] = {}  # by device block
        self._uses: dict[str, _Use] = {}  # by request that has its device blocks
        self._hot: list[bytes] = []
        self._ending: list[bytes] = []  # last block of requests that still have their device blocks
        self._kept: list[bytes] = []
        self._evicted: list[bytes] = []
        self._given = 0  # device blocks since the last call of `evicted_next`

    def hold(self, state: RequestState, first: int, end: int, saved: bool = False, found: int = 0) -> bool:
        request, width = state.request, self._group.columns(0)
        keys, hashes = self._group.keys(request.hashes), plain(request.hashes)
        use = self._uses.setdefault(state.id, _Use(0.0))
        use.at, done = self._clock(), saved and not self.reports
        for slot in range(first, end):
            key = keys[slot]
            if (held := self._held.get(key)) is not None:
                if held.done and not self.reports:
                    continue
                held.hits += found
                if held.hits >= HITS and self._lazy and not held.done:
                    self._hot.append(key)
            blocks = self._group.slot_blocks(state.tables, slot, slot + 1)
            if held is None or held.blocks != blocks:
                if held is not None:
                    self._drop(key)
                if len(blocks) < width:
                    break
                theirs, above = hashes[slot * width : (slot + 1) * width], keys[slot - 1] if slot else None
                hits = held.hits if held is not None else 0
                held = self._held[key] = _Held(key, above, blocks, theirs, use, done, hits)
                self._keys.update(dict.fromkeys(blocks, key))
            held.use, held.done = use, done
            if self._events:
                held.source = state, slot
        return self._lazy

    def found(self, state: RequestState, tokens: int) -> None:
        end = tokens // self._group.slot_tokens
        saved = min(end, state.progress.saved)
        self.hold(state, 0, saved, saved=True, found=1)
        self.hold(state, saved, end, found=1)

    def given(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._given += 1
            if (key := self._keys.get(block)) is not None:
                held = self._held[key]
                if not held.done:
                    if self._lazy:
                        self._counters.add("saves_missed")
                    if held.use.kept:
                        self._counters.add("evictions_missed")
                        self._evicted.append(key)
                        self._keep(self._held.get(held.above or b""))
                self._drop(key)

    def due(self) -> list[Due]:
        wanted = [key for key in self._hot if key in self._held and self._holds(self._held[key])]
        leaving = dict.fromkeys(key for key in self._ending if key in self._held)
        self._hot, self._ending = [], []
        if 4 * self._given >= self._ahead:
            self._given = 0
            found = (self._keys.get(block) for block in self._evicted_next(self._ahead))
            leaving.update(dict.fromkeys(key for key in found if key is not None and self._is_due(self._held[key])))
        chains = []
        for key in (*wanted, *leaving):
            held = self._held[key]
            if not held.done:  # not in the chain of an earlier one
                chains.append(self._chain(held, leaving))
        return chains

    def ending(self, state: RequestState) -> None:
        use, saved = self._uses.pop(state.id, None), state.progress.saved
        if use is None or not saved:
            return
        use.at, last = self._clock(), self._group.keys(state.request.hashes)[saved - 1]
        # If few device blocks are free, the next request gets these at once.
        if sum(1 for _ in self._evicted_next(self._ahead)) < self._ahead:
            if self._lazy:
                self._ending.append(last)
        elif self.reports:
            use.kept = True
            self._kept.append(last)

    def changes(self) -> tuple[list[bytes], list[bytes]]:
        changes = self._kept, self._evicted
        self._kept, self._evicted = [], []
        return changes

    def _keep(self, held: _Held | None) -> None:
        """Report a block as the last one of a chain that the device keeps, if it does."""
        if held is not None and held.use.kept and not held.done:
            self._kept.append(held.key)

    def _is_due(self, held: _Held) -> bool:
        return not held.done and (self._lazy or held.use.kept)

    def forget(self) -> None:
        kept = {key for key, held in self._held.items() if held.use.kept}
        self._evicted = list(kept - {self._held[key].above for key in kept})
        self._held.clear()
        self._keys.clear()
        self._uses.clear()
        self._hot.clear()
        self._ending.clear()
        self._kept.clear()

    def _chain(self, last: _Held, leaving: dict[bytes, None]) -> Due:
        """Return a block and all above it, as far as they are on the device: the daemon knows which of them it has."""
        chain, left, goes = [last], 0, True
        while (above := self._held.get(chain[-1].above or b"")) is not None and self._holds(above):
            chain.append(above)
        for held in chain:
            if goes and held.key not in leaving:
                self._keep(held)
            goes = goes and held.key in leaving
            left += goes
            held.done = held.done or goes or not self.reports
        chain.reverse()
        blocks = [block for held in chain for block in held.blocks]
        keys, idle = [held.key for held in chain], self._clock() - last.use.at
        return Due(keys, chain[0].above, blocks, last.source, left if self.reports else 0, idle, last.hits)

    def _holds(self, held: _Held) -> bool:
        """Whether the engine still has a block that may be in use: another connector may load into its memory, which
        vLLM does not report before the request is computed."""
        return all(self._hash_of(block) == each for block, each in zip(held.blocks, held.hashes, strict=True))

    def _drop(self, key: bytes) -> None:
        for block in self._held.pop(key).blocks:
            self._keys.pop(block, None)
