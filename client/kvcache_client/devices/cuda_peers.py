"""Copies from the caches of other ranks, whose processes share their memory: a kernel reads it over NVLink.

A block has the same number and layout in all of them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvcache_client.devices import CopyError
from kvcache_client.devices.cuda_driver import Driver
from kvcache_client.devices.cuda_kernels import (
    COPY_WORDS,
    MOST_BLOCKS,
    PIECE,
    THREADS,
    Arguments,
    Compiler,
    Pieces,
    word_macros,
)
from kvcache_client.devices.layout import Fragment

logger = logging.getLogger("kvcache_client.devices")

SOURCE = (
    COPY_WORDS
    + """
struct Piece { const char* source; char* target; long long stride; long long bytes; };

extern "C" __global__ void __launch_bounds__(THREADS) pull(
    const Piece* pieces, int per_block, const __grid_constant__ Blocks blocks, int count) {
    for (int work = blockIdx.x; work < per_block * count; work += gridDim.x) {
        const int index = work / per_block;
        const Piece piece = pieces[work - index * per_block];
        const long long at = blocks.number[index] * piece.stride;
        copy_words((const Word*)(piece.source + at), (Word*)(piece.target + at), piece.bytes / sizeof(Word));
    }
}
"""
)
_PIECE_BYTES = 32  # of `Piece`


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """A cache that other processes may read."""

    handles: list[bytes]  # of its allocations
    fragments: list[tuple[int, int, int, int]]  # the index of an allocation, and the offset in it; stride, and bytes


class CudaPeers:
    """The caches of other ranks, for one layout of a block."""

    def __init__(
        self,
        driver: Driver,
        compiler: Compiler,
        fragments: Sequence[Fragment],
        upload: Callable[[npt.NDArray[np.int64]], int],
        grid: int,
        most: int,
    ) -> None:
        """Of at most `most` ranks. Raises CopyError."""
        self._driver, self._fragments, self._grid = driver, fragments, grid
        self._pieces = sum(-(-fragment.bytes // PIECE) for fragment in fragments)
        self._table = upload(np.zeros((most * self._pieces, _PIECE_BYTES // 8), np.int64))
        self._module = driver.load_module(compiler.compile(SOURCE, word_macros(fragments)))
        self._pull = driver.function(self._module, "pull")
        self._stream = driver.create_stream()
        self._begin, self._end = driver.create_event(timed=True), driver.create_event(timed=True)
        self._arguments: dict[int, Arguments] = {}
        self._opened: list[int] = []

    def share(self) -> bytes:
        """Return what other processes need to read this cache. Raises CopyError if they cannot, as with memory that
        vLLM's sleep mode or PyTorch's expandable segments have mapped."""
        handles: dict[int, bytes] = {}
        places = []
        for pointer, stride, size in self._fragments:
            base = self._driver.allocation_of(pointer)
            if base not in handles:
                handles[base] = self._driver.share_memory(base)
            places.append(([*handles].index(base), pointer - base, stride, size))
        return msgspec.msgpack.encode(Shared([*handles.values()], places))

    def connect(self, peers: Mapping[int, bytes]) -> None:
        """Open the caches of other ranks, by rank. Raises CopyError if they cannot be read, or have another layout."""
        self._driver.enter_thread()
        for number, (rank, shared) in enumerate(peers.items()):
            other: Shared = msgspec.msgpack.decode(shared, type=Shared)
            if [each[2:] for each in other.fragments] != [tuple(each)[1:] for each in self._fragments]:
                raise CopyError(f"rank {rank} has another layout of its KV")
            bases = [self._driver.open_memory(handle) for handle in other.handles]
            self._opened += bases
            rows = pieces_of(
                [bases[allocation] + offset for allocation, offset, *_ in other.fragments], self._fragments
            )
            table = self._table + number * self._pieces * _PIECE_BYTES
            self._write(table, np.array(rows, np.int64))
            self._arguments[rank] = Arguments(table, self._pieces, 0)

    def _write(self, address: int, rows: npt.NDArray[np.int64]) -> None:
        """On a stream of our own: the engine may be capturing a graph."""
        host = self._driver.allocate_host(rows.nbytes)
        try:
            ctypes.memmove(host, rows.ctypes.data, rows.nbytes)
            target, source, size = (np.array([value], np.uint64) for value in (address, host, rows.nbytes))
            self._driver.copy_batch(target, source, size, False, self._stream)
            self._driver.synchronize(self._stream)
        finally:
            self._driver.free_host(host)

    def pull(self, rank: int, blocks: npt.NDArray[np.int64]) -> float:
        """Copy blocks from the cache of another rank, wait for the end, and return the device's seconds. Raises
        CopyError."""
        arguments = self._arguments[rank]
        self._driver.record(self._begin, self._stream)
        for first in range(0, len(blocks), MOST_BLOCKS):
            some = blocks[first : first + MOST_BLOCKS]
            arguments.fill(some, 0)
            grid = min(self._grid, len(some) * self._pieces)
            self._driver.launch(self._pull, grid, THREADS, self._stream, arguments.addresses)
        self._driver.record(self._end, self._stream)
        self._driver.wait_host(self._end)
        return self._driver.seconds(self._begin, self._end)

    def close(self) -> None:
        self._arguments.clear()
        for base in self._opened:
            self._driver.close_memory(base)
        for event in (self._begin, self._end):
            self._driver.destroy_event(event)
        self._driver.destroy_stream(self._stream)
        self._driver.unload_module(self._module)


def pieces_of(theirs: Sequence[int], fragments: Sequence[Fragment]) -> Pieces:
    """Return what `pull` copies of a block: `theirs` are the addresses of another rank's fragments.

    Raises CopyError if they are aligned otherwise.
    """
    if any((there - mine.pointer) % 16 for there, mine in zip(theirs, fragments, strict=True)):
        raise CopyError("its KV is aligned otherwise")
    return [
        (there + begin, mine.pointer + begin, mine.stride, min(PIECE, mine.bytes - begin))
        for there, mine in zip(theirs, fragments, strict=True)
        for begin in range(0, mine.bytes, PIECE)
    ]
