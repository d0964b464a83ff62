"""Pure: the stored form of bfloat16 KV, in 77 % of its bytes and without loss.

The exponents of KV are few: their 8 bits have 2.7 bits of entropy. A piece of a block has a byte with sign and mantissa
for each value, a code of 4 bits for the exponent, and its code book: the 15 most frequent exponents. The sixteenth code
is an escape: the exponent is in a list behind the book, with the value's position. This list is bounded, so that all
blocks have one size; a block with more escapes cannot be stored.

    block   a byte for each piece, 1 if it has too many escapes; zeros to a multiple of 16; the pieces
    piece   of n values: n bytes of sign and mantissa; n / 2 bytes with two codes each, the even value's in the low
            half; the exponents of the codes 0 to 14; the number of escapes; their exponents, with room for as many as
            there may be, and for an even number; their positions, ascending, two bytes each; zeros to a multiple of 16
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]  # a row per block

CODEC = "bfloat16 in 12 bits, version 1"  # the form and its version, in the identity of a namespace
PIECE_BYTES = 16384  # raw bytes of a piece; the last one of a block may be shorter
UNIT_BYTES = 64  # raw bytes of a block are a multiple of this
LEAST_BYTES = 4096  # raw bytes of a block, below which its bookkeeping takes what the codes save
ESCAPE = 15
MOST_ESCAPES = 96  # of a whole piece: 1.2 % of its values. The worst of a real model's had 0.8 %
TOO_MANY = 255  # in place of the number of escapes
_AT_ONCE = 64  # pieces of a block that are handled together here


class Form(NamedTuple):
    """A stored piece of `values` values: the offsets of its parts, and its bytes."""

    values: int
    codes: int
    book: int
    exponents: int
    positions: int
    escapes: int  # most that it holds
    bytes: int


@lru_cache(maxsize=64)
def form(values: int) -> Form:
    """Return the form of a piece."""
    escapes = -(-MOST_ESCAPES * 2 * values // PIECE_BYTES)
    book = values + values // 2
    positions = book + 16 + escapes + escapes % 2
    return Form(values, values, book, book + 16, positions, escapes, _aligned(positions + 2 * escapes))


def unsupported_reason(raw_bytes: int) -> str:
    """Return the reason that blocks of this size are not compressed, "" if they can be."""
    if raw_bytes < LEAST_BYTES or raw_bytes % UNIT_BYTES:
        return f"blocks of {raw_bytes} bytes: at least {LEAST_BYTES}, and a multiple of {UNIT_BYTES}"
    return ""


def pieces_of(raw_bytes: int) -> int:
    return -(-raw_bytes // PIECE_BYTES)


def header_bytes(raw_bytes: int) -> int:
    """Return the bytes before the first piece of a stored block."""
    return _aligned(pieces_of(raw_bytes))


def place(raw_bytes: int, begin: int) -> int:
    """Return the offset in a stored block of the piece whose raw bytes begin at `begin`; at its end, its size."""
    whole, rest = divmod(begin, PIECE_BYTES)
    last = form(rest // 2).bytes if rest else 0
    return header_bytes(raw_bytes) + whole * form(PIECE_BYTES // 2).bytes + last


def stored_bytes(raw_bytes: int) -> int:
    """Return the bytes of a stored block."""
    return place(raw_bytes, raw_bytes)


def compress(raw: Blocks) -> Blocks:
    """Return the stored form of blocks. A block with too many escapes is lost, which its header says."""
    count, size = raw.shape
    stored = np.zeros((count, stored_bytes(size)), np.uint8)
    for first, number, of in _alike(size, 0, size):
        begin, at = first * PIECE_BYTES, place(size, first * PIECE_BYTES)
        values = np.ascontiguousarray(raw[:, begin : begin + 2 * number * of.values]).view(np.uint16)
        pieces = _compress(values.reshape(-1, of.values), of)
        stored[:, at : at + number * of.bytes] = pieces.reshape(count, -1)
        stored[:, first : first + number] = (pieces[:, of.book + ESCAPE] == TOO_MANY).reshape(count, -1)
    return stored


def _alike(raw_bytes: int, begin: int, end: int) -> Iterator[tuple[int, int, Form]]:
    """Yield runs of equal pieces from raw byte `begin` to `end`: the first one's number, how many, and their form."""
    first, whole, rest = begin // PIECE_BYTES, end // PIECE_BYTES, raw_bytes % PIECE_BYTES
    for number in range(first, whole, _AT_ONCE):
        yield number, min(_AT_ONCE, whole - number), form(PIECE_BYTES // 2)
    if rest and end == raw_bytes:
        yield whole, 1, form(rest // 2)


def _compress(values: npt.NDArray[np.uint16], of: Form) -> Blocks:
    stored = np.zeros((len(values), of.bytes), np.uint8)
    exponents = (values >> 7 & 0xFF).astype(np.uint8)
    stored[:, : of.codes] = (values >> 8 & 0x80 | values & 0x7F).astype(np.uint8)
    counts = _counts(exponents)
    book = np.argsort(-counts, axis=1, kind="stable")[:, :ESCAPE]
    code_of = np.full(counts.shape, ESCAPE, np.uint8)
    np.put_along_axis(code_of, book, np.arange(ESCAPE, dtype=np.uint8)[None], axis=1)
    used = np.take_along_axis(counts, book, axis=1) > 0
    stored[:, of.book : of.book + ESCAPE] = np.where(used, book, 0)
    codes = np.take_along_axis(code_of, exponents, axis=1)
    stored[:, of.codes : of.book] = codes[:, ::2] | codes[:, 1::2] << 4
    escaped = codes == ESCAPE
    numbers = escaped.sum(axis=1)
    stored[:, of.book + ESCAPE] = np.where(numbers > of.escapes, TOO_MANY, numbers)
    for row in np.flatnonzero((numbers > 0) & (numbers <= of.escapes)):
        (some,) = escaped[row].nonzero()
        stored[row, of.exponents : of.exponents + len(some)] = exponents[row, some]
        stored[row, of.positions : of.positions + 2 * len(some)] = some.astype("<u2").view(np.uint8)
    return stored


def _counts(exponents: Blocks) -> npt.NDArray[np.int64]:
    """Return how often each of the 256 exponents occurs in each row."""
    rows = np.arange(len(exponents), dtype=np.int64)[:, None] << 8
    return np.bincount((rows + exponents).ravel(), minlength=len(exponents) << 8).reshape(-1, 256)


def decompress(stored: Blocks, raw_bytes: int, begin: int = 0, end: int | None = None) -> Blocks:
    """Return the raw bytes `begin` to `end` of blocks of `raw_bytes`, which begin and end with a piece.

    `stored` are the bytes of these pieces; with `begin` 0, also the header before them.
    """
    end = raw_bytes if end is None else end
    raw = np.empty((len(stored), end - begin), np.uint8)
    base = place(raw_bytes, begin) if begin else 0
    for first, number, of in _alike(raw_bytes, begin, end):
        at, into = place(raw_bytes, first * PIECE_BYTES) - base, first * PIECE_BYTES - begin
        pieces = stored[:, at : at + number * of.bytes].reshape(-1, of.bytes)
        raw[:, into : into + 2 * number * of.values] = _decompress(pieces, of).reshape(len(stored), -1)
    return raw


def _decompress(pieces: Blocks, of: Form) -> Blocks:
    pairs = pieces[:, of.codes : of.book]
    codes = np.empty((len(pieces), of.values), np.uint8)
    codes[:, ::2], codes[:, 1::2] = pairs & 15, pairs >> 4
    book = pieces[:, of.book : of.book + ESCAPE + 1]
    exponents = np.take_along_axis(book, codes, axis=1)
    for row in book[:, ESCAPE].nonzero()[0]:
        number = min(int(book[row, ESCAPE]), of.escapes)
        some = pieces[row, of.positions : of.positions + 2 * number].copy().view("<u2")
        inside = some < of.values  # others are in blocks that are corrupt
        exponents[row, some[inside]] = pieces[row, of.exponents : of.exponents + number][inside]
    low = pieces[:, : of.codes].astype(np.uint16)
    return ((low & 0x80) << 8 | exponents.astype(np.uint16) << 7 | low & 0x7F).view(np.uint8)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16
