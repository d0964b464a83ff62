"""Gather and scatter within device memory: scattered fragments on one side, whole slots on the other.

The kernels never touch host memory: a kernel that writes it keeps the model's own writes waiting. They run in short
bursts over the whole device, since a kernel that occupies a few processors for long delays every launch of the model
that needs them all.
"""

from __future__ import annotations

import ctypes
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache_client.devices import CopyError
from kvcache_client.devices.cuda_driver import Driver
from kvcache_client.devices.layout import Fragment, Section
from kvcache_client.devices.runtime import Handle

MOST_BLOCKS = 512  # of one launch: their numbers travel with the launch's arguments, 4 KiB in all
PIECE = 16384  # bytes that one thread block copies at a time
THREADS = 256
_PIECE_BYTES = 32  # of `Piece` below

COPY_WORDS = """
struct Blocks { int number[MOST_BLOCKS]; };

// By a thread block.
__device__ void copy_words(const Word* source, Word* target, int words) {
    for (int first = threadIdx.x; first < words; first += UNROLL * THREADS) {
        Word held[UNROLL];
        #pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (first + i * THREADS < words) held[i] = __ldcs(source + first + i * THREADS);
        #pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (first + i * THREADS < words) __stcs(target + first + i * THREADS, held[i]);
    }
}
"""
_SOURCE = """
struct Piece { char* pointer; long long stride; long long offset; long long bytes; };

template <bool GATHER>
__device__ void copy(const Piece* pieces, int per_block, const Blocks& blocks, int count, char* slots, long long slot) {
    for (int work = blockIdx.x; work < per_block * count; work += gridDim.x) {
        const int index = work / per_block;
        const Piece piece = pieces[work - index * per_block];
        Word* at = (Word*)(piece.pointer + blocks.number[index] * piece.stride);
        Word* in_slot = (Word*)(slots + index * slot + piece.offset);
        copy_words(GATHER ? at : in_slot, GATHER ? in_slot : at, piece.bytes / sizeof(Word));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gather(
    const Piece* pieces, int per_block, const __grid_constant__ Blocks blocks, int count, char* slots, long long slot) {
    copy<true>(pieces, per_block, blocks, count, slots, slot);
}

extern "C" __global__ void __launch_bounds__(THREADS) scatter(
    const Piece* pieces, int per_block, const __grid_constant__ Blocks blocks, int count, char* slots, long long slot) {
    copy<false>(pieces, per_block, blocks, count, slots, slot);
}
"""
_WORDS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}


class Compiler(NamedTuple):
    """The NVRTC of the engine's runtime, and the device's architecture, such as 90."""

    nvrtc: ctypes.CDLL
    architecture: int

    def compile(self, source: str, macros: Mapping[str, object]) -> bytes:
        """Return machine code. Raises CopyError with the compiler's log."""
        every = {"MOST_BLOCKS": MOST_BLOCKS, "THREADS": THREADS, **macros}
        options = [f"--define-macro={name}={value}" for name, value in every.items()]
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        create = self.nvrtc.nvrtcCreateProgram
        self._check(create(ctypes.byref(program), source.encode(), b"copies.cu", 0, None, None))
        try:
            flags = [option.encode() for option in (f"--gpu-architecture=sm_{self.architecture}", *options)]
            failed = self.nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            if failed:
                self._check(self.nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
                log = ctypes.create_string_buffer(size.value)
                self._check(self.nvrtc.nvrtcGetProgramLog(program, log))
                raise CopyError(f"NVRTC: {log.value.decode(errors='replace')}")
            self._check(self.nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            image = ctypes.create_string_buffer(size.value)
            self._check(self.nvrtc.nvrtcGetCUBIN(program, image))
            return image.raw
        finally:
            self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _check(self, result: int) -> None:
        if result:
            raise CopyError(f"NVRTC: error {result}")


def find_compiler(candidates: Sequence[str], architecture: int) -> Compiler:
    """Return the first of the libraries that has NVRTC. Raises CopyError if none does."""
    for candidate in candidates:
        try:
            library = ctypes.CDLL(candidate)
            library.nvrtcGetCUBIN  # noqa: B018  # a library that only depends on NVRTC works as well
        except (OSError, AttributeError):
            continue
        return Compiler(library, architecture)
    raise CopyError(f"no NVRTC in {', '.join(candidates)}")


Pieces = list[tuple[int, int, int, int]]  # rows of a table, of four words each
Upload = Callable[[npt.NDArray[np.int64]], int]  # puts a table into device memory and returns its address


class Program(ABC):
    """The kernels `gather` and `scatter`, and the places of a block's fragments for them."""

    source: str
    macros: dict[str, object]

    @abstractmethod
    def tables(self, upload: Upload) -> list[tuple[Pieces, int]]:
        """Return the pieces of each section, and its bytes in a slot."""


class Copying(Program):
    """Copies the fragments of a block as they are."""

    source = COPY_WORDS + _SOURCE

    def __init__(self, sections: Sequence[Section]) -> None:
        self._sections = sections
        self.macros = word_macros([fragment for section in sections for fragment in section.fragments])

    def tables(self, upload: Upload) -> list[tuple[Pieces, int]]:
        found = []
        for section in self._sections:
            pieces, offset = [], 0
            for fragment in section.fragments:
                for begin in range(0, fragment.bytes, PIECE):
                    size = min(PIECE, fragment.bytes - begin)
                    pieces.append((fragment.pointer + begin, fragment.stride, offset + begin, size))
                offset += fragment.bytes
            found.append((pieces, section.bytes))
        return found


class CudaPacker:
    """Moves blocks of one cache by the kernels of a program."""

    most = MOST_BLOCKS

    def __init__(
        self, driver: Driver, compiler: Compiler, program: Program, upload: Upload, most_thread_blocks: int
    ) -> None:
        """Raises CopyError."""
        self._driver, self._grid = driver, most_thread_blocks
        image = compiler.compile(program.source, program.macros)
        self._module = driver.load_module(image)
        self._gather, self._scatter = (driver.function(self._module, name) for name in ("gather", "scatter"))
        tables = program.tables(upload)
        table = upload(np.array([piece for pieces, _ in tables for piece in pieces], np.int64))
        self._arguments = []
        for pieces, size in tables:
            self._arguments.append(Arguments(table, len(pieces), size))
            table += len(pieces) * _PIECE_BYTES

    def launch(
        self, gather: bool, blocks: npt.NDArray[np.int64], buffer: int, stream: Handle, section: int = 0
    ) -> None:
        """Queue the copy of a section of each block to (`gather`) or from `buffer`, where they are consecutive."""
        arguments = self._arguments[section]
        with arguments.lock:
            arguments.fill(blocks, buffer)
            grid = min(self._grid, len(blocks) * arguments.pieces)
            self._driver.launch(self._gather if gather else self._scatter, grid, THREADS, stream, arguments.addresses)

    def close(self) -> None:
        self._driver.unload_module(self._module)


class Arguments:
    """The arguments of a launch, in C's memory: the driver reads them before the launch returns."""

    def __init__(self, table: int, pieces: int, size: int) -> None:
        """`table` is the address of the first of `pieces` pieces, which have `size` bytes together."""
        self.lock, self.pieces = threading.Lock(), pieces
        self._blocks = np.zeros(MOST_BLOCKS, np.int32)
        self._count, self._buffer = ctypes.c_int(), ctypes.c_uint64()
        self._fixed = (ctypes.c_uint64(table), ctypes.c_int(pieces), ctypes.c_longlong(size))
        first, number, stride = (ctypes.addressof(value) for value in self._fixed)
        count, buffer = ctypes.addressof(self._count), ctypes.addressof(self._buffer)
        self.addresses = (ctypes.c_void_p * 6)(first, number, self._blocks.ctypes.data, count, buffer, stride)

    def fill(self, blocks: npt.NDArray[np.int64], buffer: int) -> None:
        self._blocks[: len(blocks)] = blocks
        self._count.value, self._buffer.value = len(blocks), buffer


def word_macros(fragments: Sequence[Fragment]) -> dict[str, object]:
    """Return what `COPY_WORDS` is compiled with: its word is the largest one, up to 16 bytes, at whose multiples all
    fragments begin, here and in a slot, and end."""
    numbers = (number for fragment in fragments for number in fragment)
    return {"UNROLL": 4, "Word": _WORDS[math.gcd(16, *numbers)]}
