"""When full blocks are saved: at once, or lazily. Pure.

Lazily, a block is saved when the engine is about to give its device memory away, together with all blocks above it,
without which it would be useless. A block that was found on the device twice is saved at once: a prefix that is always
in use is never evicted, and other engines would never see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvcache_client.scheduler.cache import Counts
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.requests import RequestState
from kvcache_client.scheduler.views import plain

HITS = 2  # on the device, after which a block is saved although it is not about to be evicted


@dataclass(slots=True)
class _Held:
    """Cached block `slot` of a request, in device `blocks`; `saved`: the daemon has it, or was asked to save it."""

    state: RequestState
    slot: int
    blocks: Sequence[int]
    saved: bool
    hits: int = 0


@dataclass(slots=True)
class Due:
    """The cached blocks of a request from `first` to `end`, which are to be saved, in device `blocks`."""

    state: RequestState
    first: int
    end: int
    blocks: list[int]


class Eager:
    """Full blocks are saved at once."""

    def hold(self, state: RequestState, first: int, end: int) -> bool:
        """Note that the device has the cached blocks of a request from `first` to `end`; return whether they wait."""
        return False

    def found(self, state: RequestState, tokens: int) -> None:
        """Note that a request begins with `tokens` tokens on the device, and that the daemon has its `saved` blocks."""

    def given(self, blocks: Iterable[int]) -> None:
        """Note device blocks that get other content in the step that is being planned."""

    def due(self) -> Sequence[Due]:
        """Return the blocks that are to be saved now; they count as saved from now on."""
        return ()

    def ending(self, state: RequestState) -> None:
        """Note that a request gives its device blocks back."""

    def forget(self) -> None:
        """The weights have changed."""


class Lazy(Eager):
    """The lazy saves of one engine with full attention."""

    def __init__(
        self,
        group: FullAttention,
        ahead: int,
        evicted_next: Callable[[int], Iterable[int]],
        hash_of: Callable[[int], bytes],
        counters: Counts,
    ) -> None:
        """Look at the `ahead` device blocks that the engine gives away next; the callbacks are those of EngineFacts."""
        self._group, self._ahead, self._evicted_next, self._hash_of = group, ahead, evicted_next, hash_of
        self._counters = counters
        self._held: dict[bytes, _Held] = {}
        self._keys: dict[int, bytes] = {}  # by device block
        self._hot: list[bytes] = []
        self._ending: list[bytes] = []  # last block of requests that still have their device blocks
        self._given = 0  # device blocks since the last call of `evicted_next`

    def hold(self, state: RequestState, first: int, end: int, saved: bool = False) -> bool:
        keys, width = self._group.keys(state.request.hashes), self._group.columns(0)
        for slot in range(first, end):
            key, hits = keys[slot], 0
            if (held := self._held.get(key)) is not None:
                if held.saved:
                    continue
                hits = held.hits
                self._drop(key)
            blocks = self._group.slot_blocks(state.tables, slot, slot + 1)
            if len(blocks) < width:
                break
            self._held[key] = _Held(state, slot, blocks, saved, hits)
            self._keys.update(dict.fromkeys(blocks, key))
        return True

    def found(self, state: RequestState, tokens: int) -> None:
        end = tokens // self._group.slot_tokens
        self.hold(state, 0, min(end, state.progress.saved), saved=True)
        for key in self._group.keys(state.request.hashes)[:end]:
            if (held := self._held.get(key)) is not None:
                held.hits += 1
                if held.hits >= HITS and not held.saved:
                    self._hot.append(key)

    def given(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._given += 1
            if (key := self._keys.get(block)) is not None:
                self._counters.add("saves_missed", int(not self._held[key].saved))
                self._drop(key)

    def due(self) -> list[Due]:
        wanted = [key for key in self._hot if key in self._held and self._holds(self._held[key])] + self._ending
        self._hot, self._ending = [], []
        if 4 * self._given >= self._ahead:
            self._given = 0
            wanted += [key for block in self._evicted_next(self._ahead) if (key := self._keys.get(block)) is not None]
        found = []
        for key in wanted:
            held = self._held.get(key)
            if held is not None and not held.saved:  # not in the chain of an earlier one
                found.append(self._chain(held))
        return found

    def ending(self, state: RequestState) -> None:
        # If few device blocks are free, the next request gets these at once.
        if state.progress.saved and sum(1 for _ in self._evicted_next(self._ahead)) < self._ahead:
            self._ending.append(self._group.keys(state.request.hashes)[state.progress.saved - 1])

    def forget(self) -> None:
        self._held.clear()
        self._keys.clear()
        self._hot.clear()
        self._ending.clear()

    def _chain(self, last: _Held) -> Due:
        """Return a block and all above it, as far as they are on the device: the daemon knows which of them it has."""
        keys = self._group.keys(last.state.request.hashes)
        above: list[_Held] = []
        for slot in range(last.slot, -1, -1):
            held = self._held.get(keys[slot])
            if held is None or (held is not last and not self._holds(held)):
                break
            held.saved = True
            above.append(held)
        above.reverse()
        blocks = [block for held in above for block in held.blocks]
        return Due(last.state, last.slot + 1 - len(above), last.slot + 1, blocks)

    def _holds(self, held: _Held) -> bool:
        """Whether the engine still has a block that may be in use: another connector may load into its memory, which
        vLLM does not report before the request is computed."""
        width = self._group.columns(0)
        hashes = plain(held.state.request.hashes)[held.slot * width : (held.slot + 1) * width]
        return all(self._hash_of(block) == each for block, each in zip(held.blocks, hashes, strict=True))

    def _drop(self, key: bytes) -> None:
        for block in self._held.pop(key).blocks:
            self._keys.pop(block, None)
