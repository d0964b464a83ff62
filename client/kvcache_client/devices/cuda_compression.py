"""Gather and scatter that compress: between raw blocks in the cache and stored blocks in a buffer of device memory.

A thread block takes one piece of a block at a time, which it reads once into registers. See `compression` for the form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvcache_client import compression
from kvcache_client.devices import CopyError
from kvcache_client.devices.cuda_kernels import Pieces, Program, Upload
from kvcache_client.devices.layout import Section

_WORD = 16  # bytes that a thread takes at a time: 8 values

SOURCE = """
struct Segment { char* pointer; long long stride; };  // SEGMENT words of every block
struct Piece { const Segment* segments; long long first; long long offset; long long words; };
struct Blocks { int number[MOST_BLOCKS]; };

const int WORDS = PIECE_WORDS / THREADS;  // of a thread

// The place of a word, by its number in a piece of a block.
__device__ uint4* place(const Piece& piece, int block, long long word) {
    word += piece.first;
    const Segment segment = piece.segments[word / SEGMENT];
    return (uint4*)(segment.pointer + block * segment.stride) + word % SEGMENT;
}

__device__ unsigned int low(unsigned int value) { return (value >> 8 & 0x80) | (value & 0x7f); }
__device__ unsigned int exponent(unsigned int value) { return value >> 7 & 0xff; }
__device__ unsigned int raw(unsigned int low, unsigned int exponent) {
    return (low & 0x80) << 8 | exponent << 7 | (low & 0x7f);
}
__device__ int most_escapes(int values) { return (MOST_ESCAPES * values + 8 * PIECE_WORDS - 1) / (8 * PIECE_WORDS); }
__device__ int aligned(int size) { return (size + 15) / 16 * 16; }

extern "C" __global__ void __launch_bounds__(THREADS) gather(
    const Piece* pieces, int per_block, const __grid_constant__ Blocks blocks, int count, char* slots, long long slot) {
    __shared__ int counts[256];
    __shared__ unsigned int code_of[256];
    __shared__ unsigned char book[16];
    __shared__ int found;
    __shared__ unsigned short position[MOST_ESCAPES];
    __shared__ unsigned char escaped[MOST_ESCAPES];
    const int thread = threadIdx.x;
    for (int work = blockIdx.x; work < per_block * count; work += gridDim.x) {
        const int index = work / per_block, number = work - index * per_block;
        const Piece piece = pieces[number];
        const int words = piece.words, values = 8 * words, most = most_escapes(values);
        char* stored = slots + index * slot + piece.offset;

        counts[thread] = 0;
        if (thread < 16) book[thread] = 0;
        if (thread == 0) found = 0;
        __syncthreads();
        uint4 held[WORDS];
        #pragma unroll
        for (int i = 0; i < WORDS; i++)
            if (thread + i * THREADS < words)
                held[i] = __ldcs(place(piece, blocks.number[index], thread + i * THREADS));
        #pragma unroll
        for (int i = 0; i < WORDS; i++)
            if (thread + i * THREADS < words) {
                const unsigned int pairs[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
                #pragma unroll
                for (int j = 0; j < 4; j++) {
                    atomicAdd(&counts[exponent(pairs[j])], 1);
                    atomicAdd(&counts[exponent(pairs[j] >> 16)], 1);
                }
            }
        __syncthreads();

        const int mine = counts[thread];
        int rank = 0;
        if (mine)
            for (int other = 0; other < 256; other++)
                rank += counts[other] > mine || (counts[other] == mine && other < thread);
        code_of[thread] = rank < 15 ? rank : 15;
        if (mine && rank < 15) book[rank] = thread;
        __syncthreads();

        #pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const int word = thread + i * THREADS;
            if (word >= words) continue;
            const unsigned int pairs[4] = {held[i].x, held[i].y, held[i].z, held[i].w};
            unsigned int lows[2] = {0, 0}, codes = 0;
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                const unsigned int value = pairs[j / 2] >> 16 * (j % 2), code = code_of[exponent(value)];
                lows[j / 4] |= low(value) << 8 * (j % 4);
                codes |= code << 4 * j;
                if (code == 15) {
                    const int at = atomicAdd(&found, 1);
                    if (at < most) {
                        position[at] = 8 * word + j;
                        escaped[at] = exponent(value);
                    }
                }
            }
            ((uint2*)stored)[word] = make_uint2(lows[0], lows[1]);
            ((unsigned int*)(stored + values))[word] = codes;
        }
        __syncthreads();

        unsigned char* list = (unsigned char*)stored + values + values / 2;
        unsigned char* exponents = list + 16;
        unsigned short* positions = (unsigned short*)(exponents + most + most % 2);
        const int kept = found > most ? 0 : found;
        if (thread < 16) list[thread] = thread < 15 ? book[thread] : found > most ? TOO_MANY : found;
        if (thread < most) {
            int at = thread;  // behind the escapes are zeros
            if (thread < kept) {
                at = 0;
                for (int other = 0; other < kept; other++) at += position[other] < position[thread];
            }
            exponents[at] = thread < kept ? escaped[thread] : 0;
            positions[at] = thread < kept ? position[thread] : 0;
        }
        if (thread == 0 && most % 2) exponents[most] = 0;
        unsigned char* end = (unsigned char*)(positions + most);
        if (thread < aligned(end - list) - (end - list)) end[thread] = 0;
        char* header = slots + index * slot;
        if (thread == 0) header[number] = found > most;
        if (number == 0 && thread < aligned(per_block) - per_block) header[per_block + thread] = 0;
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) scatter(
    const Piece* pieces, int per_block, const __grid_constant__ Blocks blocks, int count, char* slots, long long slot) {
    __shared__ unsigned int book[16];
    const int thread = threadIdx.x;
    for (int work = blockIdx.x; work < per_block * count; work += gridDim.x) {
        const int index = work / per_block;
        const Piece piece = pieces[work - index * per_block];
        const int words = piece.words, values = 8 * words, most = most_escapes(values), block = blocks.number[index];
        const char* stored = slots + index * slot + piece.offset;
        const unsigned char* list = (const unsigned char*)stored + values + values / 2;
        if (thread < 16) book[thread] = list[thread];
        uint2 lows[WORDS];
        unsigned int codes[WORDS];
        #pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const int word = thread + i * THREADS;
            if (word >= words) continue;
            lows[i] = __ldcs((const uint2*)stored + word);
            codes[i] = __ldcs((const unsigned int*)(stored + values) + word);
        }
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const int word = thread + i * THREADS;
            if (word >= words) continue;
            unsigned int pairs[4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const unsigned int both = (j < 2 ? lows[i].x : lows[i].y) >> 16 * (j % 2), two = codes[i] >> 8 * j;
                pairs[j] = raw(both, book[two & 15]) | raw(both >> 8, book[two >> 4 & 15]) << 16;
            }
            __stcs(place(piece, block, word), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        }
        __syncthreads();
        const unsigned char* exponents = list + 16;
        const unsigned short* positions = (const unsigned short*)(exponents + most + most % 2);
        if (thread < most && thread < book[15] && positions[thread] < values) {
            const int at = positions[thread];
            unsigned short* values_of = (unsigned short*)place(piece, block, at / 8);
            values_of[at % 8] = raw((unsigned char)stored[at], exponents[thread]);
        }
        __syncthreads();
    }
}
"""


class Compressing(Program):
    """`sections` are as stored; the first one is the whole block."""

    source = SOURCE

    def __init__(self, sections: Sequence[Section]) -> None:
        """Raises CopyError for fragments that cannot be divided into words."""
        self._sections = sections
        whole = sections[0].fragments
        odd = math.gcd(_WORD, *(number for fragment in whole for number in fragment))
        if odd < _WORD:
            raise CopyError(f"KV fragments begin and end at multiples of {odd} bytes, not of {_WORD}")
        segment = math.gcd(compression.PIECE_BYTES, *(fragment.bytes for fragment in whole))
        self._segments = [
            (fragment.pointer + begin, fragment.stride)
            for fragment in whole
            for begin in range(0, fragment.bytes, segment)
        ]
        self.macros = {
            "PIECE_WORDS": compression.PIECE_BYTES // _WORD,
            "SEGMENT": segment // _WORD,
            "MOST_ESCAPES": compression.MOST_ESCAPES,
            "TOO_MANY": compression.TOO_MANY,
        }

    def tables(self, upload: Upload) -> list[tuple[Pieces, int]]:
        segments = upload(np.array(self._segments, np.int64))
        size, found, at = sum(fragment.bytes for fragment in self._sections[0].fragments), [], 0
        for number, section in enumerate(self._sections):
            raw = sum(fragment.bytes for fragment in section.fragments)
            begins = range(at, at + raw, compression.PIECE_BYTES)
            rows = [
                (
                    segments,
                    begin // _WORD,
                    compression.place(size, begin) - section.begin,
                    min(compression.PIECE_BYTES, at + raw - begin) // _WORD,
                )
                for begin in begins
            ]
            found.append((rows, section.bytes))
            at = at + raw if number else 0
        return found
