"""Runs our CUDA kernels on a CPU: a thread of the host for each of a thread block's, one block after another."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcache_client.devices.cuda_kernels import MOST_BLOCKS, THREADS, Program, word_macros
from kvcache_client.devices.cuda_peers import SOURCE, pieces_of
from kvcache_client.devices.layout import Fragment

_BEFORE = """
#include <barrier>
#include <thread>
#include <vector>
struct Index { int x; };
static thread_local Index threadIdx;
static Index blockIdx, gridDim;
static std::barrier<>* together;
#define __global__
#define __device__ static
#define __shared__ static
#define __launch_bounds__(threads)
#define __grid_constant__
struct uint2 { unsigned int x, y; };
struct uint4 { unsigned int x, y, z, w; };
static uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
static void __syncthreads() { together->arrive_and_wait(); }
static int atomicAdd(int* at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST); }
template <typename T> static T __ldcs(const T* at) { return *at; }
template <typename T> static void __stcs(T* at, T value) { *at = value; }
"""
_RUN = """
template <typename Kernel> void run_blocks(int grid, Kernel kernel) {
    std::barrier<> barrier(THREADS);
    together = &barrier;
    gridDim.x = grid;
    for (int block = 0; block < grid; block++) {
        blockIdx.x = block;
        std::vector<std::thread> threads;
        for (int thread = 0; thread < THREADS; thread++)
            threads.emplace_back([=] {
                threadIdx.x = thread;
                kernel();
            });
        for (std::thread& each : threads) each.join();
    }
}
"""
_AFTER = (
    _RUN
    + """
extern "C" void run(bool gathers, int grid, const Piece* pieces, int per_block, const Blocks* blocks, int count,
                    char* slots, long long slot) {
    run_blocks(grid, [=] { (gathers ? gather : scatter)(pieces, per_block, *blocks, count, slots, slot); });
}
"""
)
_AFTER_PULL = (
    _RUN
    + """
extern "C" void run(int grid, const Piece* pieces, int per_block, const Blocks* blocks, int count) {
    run_blocks(grid, [=] { pull(pieces, per_block, *blocks, count); });
}
"""
)


def compiled(source: str, macros: Mapping[str, object], folder: Path) -> ctypes.CDLL:
    """Return what the host's compiler makes of `source`, in `folder`."""
    path, library = folder / "kernels.cpp", folder / "kernels.so"
    path.write_text(source)
    every = {"MOST_BLOCKS": MOST_BLOCKS, "THREADS": THREADS, **macros}
    flags = [f"-D{name}={value}" for name, value in every.items()]
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", *flags]
    subprocess.run([*command, "-o", str(library), str(path)], check=True)
    return ctypes.CDLL(str(library))


def pull(fragments: Sequence[Fragment], theirs: Sequence[int], blocks: Sequence[int], folder: Path) -> None:
    """Copy blocks from the cache of another rank, whose fragments begin at `theirs`."""
    run = compiled(_BEFORE + SOURCE + _AFTER_PULL, word_macros(fragments), folder).run
    table, numbers = np.array(pieces_of(theirs, fragments), np.int64), np.zeros(MOST_BLOCKS, np.int32)
    numbers[: len(blocks)] = blocks
    at, these = (ctypes.c_void_p(each.ctypes.data) for each in (table, numbers))
    run(3, at, len(table), these, len(blocks))


class Kernels:
    """The kernels of a program, compiled by the host's compiler in `folder`."""

    def __init__(self, program: Program, folder: Path) -> None:
        self._run = compiled(_BEFORE + program.source + _AFTER, program.macros, folder).run
        self._kept: list[npt.NDArray[np.int64]] = []
        self._tables = program.tables(self._upload)

    def _upload(self, table: npt.NDArray[np.int64]) -> int:
        self._kept.append(table)
        return int(table.ctypes.data)

    def launch(
        self, gathers: bool, blocks: Sequence[int], slots: npt.NDArray[np.uint8], section: int = 0, grid: int = 2
    ) -> None:
        """Copy a section of each block to or from `slots`, a row per block."""
        pieces, size = self._tables[section]
        table, numbers = np.array(pieces, np.int64), np.zeros(MOST_BLOCKS, np.int32)
        numbers[: len(blocks)] = blocks
        assert slots.shape == (len(blocks), size)
        pointers = (ctypes.c_void_p(each.ctypes.data) for each in (table, numbers, slots))
        at, these, into = pointers
        self._run(gathers, grid, at, len(pieces), these, len(blocks), into, ctypes.c_longlong(size))
