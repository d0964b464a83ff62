"""How the bytes of a block travel between the cache and page-locked host memory: directly, or through a stage.

Every batch of copies has a cost per piece, so that small fragments take the stage: a kernel moves them between the
cache and a buffer in device memory, where blocks lie as in slots, and one batch moves whole slots while the next
buffer's kernel runs.

A device copies in each direction with one copy engine, which stays with a stream as long as that has a copy ready: a
step of the model that needs four bytes copied waits until then. So each buffer has its own stream, whose next copy is
never ready when its last one ends, and the model's turn comes after one buffer at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache_client.address_ranges import Spans, join
from kvcache_client.devices.layout import Section
from kvcache_client.devices.runtime import Addresses, Handle, Runtime

if TYPE_CHECKING:
    from kvcache_client.devices.cuda_kernels import CudaPacker

Blocks = npt.NDArray[np.int64]
Cut = Callable[[Spans], Spans]
_PIECES = 4096  # of one direct batch


class Path(ABC):
    """One direction."""

    def __init__(self, runtime: Runtime, sections: Sequence[Section], saves: bool) -> None:
        """`sections` are the whole block, and those that it is divided into."""
        self._runtime, self.sections, self._saves = runtime, sections, saves
        self.cache = self._end = runtime.create_stream()  # one touches the engine's blocks, the other ends all work

    @abstractmethod
    def most(self, section: int) -> int:
        """Return the number of blocks that `move` takes at once."""

    @abstractmethod
    def begin(self, ready: Handle, begun: Handle) -> None:
        """Let all later work wait for the event `ready`, and record `begun` when it continues."""

    @abstractmethod
    def move(self, blocks: Blocks, places: Addresses, cut: Cut, section: int = 0) -> None:
        """Queue the copy of a section of each block from or to its slot, which begins at host address `places[i]`."""

    def record(self, event: Handle) -> None:
        """Record the end of all moves: host memory is not touched any more."""
        self._gather_ends()
        self._runtime.record(event, self._end)

    def finish(self, event: Handle) -> None:
        """The same, as `Runtime.finish`."""
        self._gather_ends()
        self._runtime.finish(event, self._end)

    def synchronize(self) -> None:
        """Wait for all moves."""
        self._gather_ends()
        self._runtime.synchronize(self._end)

    def close(self) -> None:
        for stream in {self.cache, self._end}:
            self._runtime.destroy_stream(stream)

    def _gather_ends(self) -> None:  # noqa: B027 - a path with one stream has nothing to gather
        """Let `_end` wait for all queued work: also for that of a `move` that failed midway."""

    def _copy(self, spans: Spans, stream: Handle) -> None:
        targets, sources = (spans.host, spans.device) if self._saves else (spans.device, spans.host)
        self._runtime.copy_batch(targets, sources, spans.sizes, self._saves, stream)


class _Table(NamedTuple):
    """The fragments of a section, and their offsets in the slot."""

    pointers: Addresses
    strides: Addresses
    sizes: Addresses
    offsets: Addresses

    @classmethod
    def of(cls, section: Section) -> _Table:
        pointers, strides, sizes = np.array(section.fragments, np.uint64).T.copy()
        return cls(pointers, strides, sizes, np.cumsum(sizes) - sizes + np.uint64(section.begin))


class Straight(Path):
    """Each fragment by itself."""

    def __init__(self, runtime: Runtime, sections: Sequence[Section], saves: bool) -> None:
        super().__init__(runtime, sections, saves)
        self._tables = [_Table.of(section) for section in sections]

    def most(self, section: int) -> int:
        return max(1, _PIECES // len(self.sections[section].fragments))

    def begin(self, ready: Handle, begun: Handle) -> None:
        self._runtime.wait(self.cache, ready)
        self._runtime.record(begun, self.cache)

    def move(self, blocks: Blocks, places: Addresses, cut: Cut, section: int = 0) -> None:
        pointers, strides, sizes, offsets = self._tables[section]
        device = (pointers + blocks.astype(np.uint64)[:, None] * strides).ravel()
        host = (places[:, None] + offsets).ravel()
        self._copy(cut(join(Spans(device, host, np.tile(sizes, len(blocks))))), self.cache)


class _Buffer(NamedTuple):
    """A buffer of a stage. `host` copies between it and host memory; events: it is `full`, and it is `free`."""

    address: int
    host: Handle
    full: Handle
    free: Handle


class Staged(Path):
    """Copies through buffers in turn: while the kernel fills one, another's slots are copied; for loads in reverse."""

    def __init__(
        self,
        runtime: Runtime,
        packer: CudaPacker,
        buffers: Sequence[int],
        buffer_bytes: int,
        sections: Sequence[Section],
        saves: bool,
    ) -> None:
        """`buffers` are addresses in device memory."""
        super().__init__(runtime, sections, saves)
        self._packer, self._buffer_bytes = packer, buffer_bytes
        self._buffers = [
            _Buffer(buffer, runtime.create_stream(), runtime.create_event(), runtime.create_event())
            for buffer in buffers
        ]
        self._turn = 0
        if saves:
            self._end = runtime.create_stream()
        self._ended = runtime.create_event()

    def begin(self, ready: Handle, begun: Handle) -> None:
        runtime, hosts = self._runtime, [buffer.host for buffer in self._buffers]
        streams = [self.cache] if self._saves else hosts
        for stream in streams:
            runtime.wait(stream, ready)
        if self._saves:  # of two saves to one slot, the later one stays
            self.record(self._ended)
            for host in hosts:
                runtime.wait(host, self._ended)
        runtime.record(begun, streams[self._turn % len(streams)])

    def most(self, section: int) -> int:
        return min(self._buffer_bytes // self.sections[section].bytes, self._packer.most)

    def move(self, blocks: Blocks, places: Addresses, cut: Cut, section: int = 0) -> None:
        begin, size, _ = self.sections[section]
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        runtime = self._runtime
        inside = rows(buffer.address, len(blocks), size)
        spans = cut(join(Spans(inside, places + np.uint64(begin), np.full(len(blocks), size, np.uint64))))
        into, out_of = (self.cache, buffer.host) if self._saves else (buffer.host, self.cache)
        runtime.wait(into, buffer.free)
        if self._saves:
            self._packer.launch(True, blocks, buffer.address, into, section)
        else:
            self._copy(spans, into)
        runtime.record(buffer.full, into)
        runtime.wait(out_of, buffer.full)
        if self._saves:
            self._copy(spans, out_of)
        else:
            self._packer.launch(False, blocks, buffer.address, out_of, section)
        runtime.record(buffer.free, out_of)

    def close(self) -> None:
        for buffer in self._buffers:
            self._runtime.destroy_event(buffer.full)
            self._runtime.destroy_event(buffer.free)
            self._runtime.destroy_stream(buffer.host)
        self._runtime.destroy_event(self._ended)
        super().close()

    def _gather_ends(self) -> None:
        for buffer in self._buffers:
            event = buffer.free if self._saves else buffer.full
            self._runtime.record(event, buffer.host)
            self._runtime.wait(self._end, event)


def rows(address: int, count: int, size: int) -> Addresses:
    """Return the addresses of `count` consecutive pieces of `size` bytes from `address` on."""
    return np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(size)
