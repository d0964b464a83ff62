"""How the bytes of a block travel between the cache and page-locked host memory: straight, or by way of a stage.

Every batch of copies has a price a piece, so that small fragments take the stage: a kernel moves them between the cache
and a buffer in device memory, where blocks lie as slots do, and one batch moves whole slots, the next buffer's kernel
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache_client.devices.runtime import Addresses, Handle, Runtime
from kvcache_client.devices.spans import Spans, join
from kvcache_client.layout import Fragment

Blocks = npt.NDArray[np.int64]
Cut = Callable[[Spans], Spans]
_PIECES = 4096  # of one straight batch


class Path(Protocol):
    """One direction.

    Attributes:
        cache: the stream that touches the engine's blocks.
        host: the stream that touches host memory.
        most: blocks that `move` takes at once.
    """

    cache: Handle
    host: Handle
    most: int

    def move(self, blocks: Blocks, places: Addresses, cut: Cut) -> None:
        """Queue the copy of each block from or to its slot at the host address `places[i]`."""

    def close(self) -> None: ...


class Straight:
    """Each fragment by itself."""

    def __init__(self, runtime: Runtime, fragments: Sequence[Fragment], saves: bool) -> None:
        self._runtime, self._saves = runtime, saves
        self._pointers = np.array([f.pointer for f in fragments], np.uint64)
        self._strides = np.array([f.stride for f in fragments], np.uint64)
        self._sizes = np.array([f.bytes for f in fragments], np.uint64)
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self.most = max(1, _PIECES // len(fragments))
        self.cache = self.host = runtime.create_stream()

    def move(self, blocks: Blocks, places: Addresses, cut: Cut) -> None:
        device = (self._pointers + blocks.astype(np.uint64)[:, None] * self._strides).ravel()
        host = (places[:, None] + self._offsets).ravel()
        _copy(self._runtime, cut(join(Spans(device, host, np.tile(self._sizes, len(blocks))))), self._saves, self.host)

    def close(self) -> None:
        self._runtime.destroy_stream(self.host)


class Packer(Protocol):
    """Moves blocks within device memory."""

    most: int

    def launch(self, gather: bool, blocks: Blocks, buffer: int, stream: Handle) -> None:
        """Queue the copy of each block to (`gather`) or from its place in `buffer`, one slot after the other."""


class Staged:
    """Buffers in turn: while the kernel fills one, another's slots are copied; for loads the other way round."""

    def __init__(
        self, runtime: Runtime, packer: Packer, buffers: Sequence[int], buffer_bytes: int, slot: int, saves: bool
    ) -> None:
        """`buffers` are addresses in device memory, `slot` the bytes of a block."""
        self._runtime, self._packer, self._saves = runtime, packer, saves
        self._buffers = [(buffer, runtime.create_event(), runtime.create_event()) for buffer in buffers]
        self._turn = 0
        self._slot = np.uint64(slot)
        self.most = min(buffer_bytes // slot, packer.most)
        self.cache, self.host = runtime.create_stream(), runtime.create_stream()

    def move(self, blocks: Blocks, places: Addresses, cut: Cut) -> None:
        buffer, full, free = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        runtime = self._runtime
        inside = np.uint64(buffer) + np.arange(len(blocks), dtype=np.uint64) * self._slot
        spans = cut(join(Spans(inside, places, np.full(len(blocks), self._slot))))
        into, out_of = (self.cache, self.host) if self._saves else (self.host, self.cache)
        runtime.wait(into, free)
        if self._saves:
            self._packer.launch(True, blocks, buffer, into)
        else:
            _copy(runtime, spans, False, into)
        runtime.record(full, into)
        runtime.wait(out_of, full)
        if self._saves:
            _copy(runtime, spans, True, out_of)
        else:
            self._packer.launch(False, blocks, buffer, out_of)
        runtime.record(free, out_of)

    def close(self) -> None:
        for _, full, free in self._buffers:
            self._runtime.destroy_event(full)
            self._runtime.destroy_event(free)
        self._runtime.destroy_stream(self.cache)
        self._runtime.destroy_stream(self.host)


def _copy(runtime: Runtime, spans: Spans, saves: bool, stream: Handle) -> None:
    targets, sources = (spans.host, spans.device) if saves else (spans.device, spans.host)
    runtime.copy_batch(targets, sources, spans.sizes, saves, stream)
