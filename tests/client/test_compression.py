"""The stored form of bfloat16 KV: every value comes back, and no block is larger than expected."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_client import compression
from kvcache_client.compression import PIECE_BYTES, UNIT_BYTES, compress, decompress, pieces_of, place, stored_bytes

Values = npt.NDArray[np.uint16]
SIZES = (4096, 4160, PIECE_BYTES, PIECE_BYTES + UNIT_BYTES, 3 * PIECE_BYTES, 70 * PIECE_BYTES + 18_432)


def lost(stored: compression.Blocks, raw_bytes: int) -> list[bool]:
    found: list[bool] = stored[:, : pieces_of(raw_bytes)].any(axis=1).tolist()
    return found


def gaussian(draw: np.random.Generator, *shape: int) -> Values:
    return (draw.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("size", SIZES)
def test_blocks_of_usual_values_take_77_percent(size: int) -> None:
    raw = gaussian(np.random.default_rng(size), 5, size // 2).view(np.uint8)
    stored = compress(raw)
    assert stored.shape == (5, stored_bytes(size)) and not any(lost(stored, size))
    assert stored_bytes(size) <= (0.77 if size % PIECE_BYTES == 0 else 0.78) * size
    assert np.array_equal(decompress(stored, size), raw)


def test_parts_of_a_block_that_begin_and_end_with_a_piece() -> None:
    size = 2 * PIECE_BYTES + 640
    raw = gaussian(np.random.default_rng(3), 2, size // 2).view(np.uint8)
    stored = compress(raw)
    for begin, end in ((0, PIECE_BYTES), (PIECE_BYTES, 2 * PIECE_BYTES), (PIECE_BYTES, size), (2 * PIECE_BYTES, size)):
        part = stored[:, place(size, begin) if begin else 0 : place(size, end)]
        assert np.array_equal(decompress(part, size, begin, end), raw[:, begin:end])


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_every_value_there_is_comes_back(sign: int) -> None:
    """NaN with any payload, infinities, subnormals and zeros, a few among usual values."""
    values = gaussian(np.random.default_rng(5), 512, PIECE_BYTES // 2)
    values[:, ::128] = np.arange(1 << 15, dtype=np.uint16).reshape(512, -1) | sign
    raw = values.view(np.uint8)
    stored = compress(raw)
    assert not any(lost(stored, PIECE_BYTES))
    assert np.array_equal(decompress(stored, PIECE_BYTES), raw)


@pytest.mark.parametrize("exponents", [1, 15, 16, 256])
def test_up_to_fifteen_exponents_need_no_escapes(exponents: int) -> None:
    draw = np.random.default_rng(exponents)
    chosen = draw.choice(256, exponents, replace=False).astype(np.uint16)
    values = draw.choice(chosen, (3, PIECE_BYTES // 2)) << 7 | draw.integers(0, 0x80, (3, PIECE_BYTES // 2), np.uint16)
    stored = compress(values.astype(np.uint16).view(np.uint8))
    assert lost(stored, PIECE_BYTES) == [exponents > 15] * 3
    if exponents <= 15:
        assert np.array_equal(decompress(stored, PIECE_BYTES).view(np.uint16), values)


@pytest.mark.parametrize("size", SIZES)
def test_as_many_escapes_as_fit_and_one_more(size: int) -> None:
    values = np.full((2, size // 2), 0x3F80, np.uint16)
    for number in range(pieces_of(size)):
        piece = values[:, number * PIECE_BYTES // 2 : (number + 1) * PIECE_BYTES // 2]
        most = compression.form(piece.shape[1]).escapes
        piece[:, 1:15] = np.arange(14) << 7  # the other exponents of the book, twice each
        piece[:, 15:29] = piece[:, 1:15]
        for row, count in enumerate((most, most + 1)):
            piece[row, -count:] = 0x4000 | (np.arange(count) % 90) << 7
            piece[row, -1] = 0x7F80
    raw = values.view(np.uint8)
    stored = compress(raw)
    assert lost(stored, size) == [False, True]
    good = [row for row, bad in enumerate(lost(stored, size)) if not bad]
    assert good and np.array_equal(decompress(stored, size)[good], raw[good])


@given(st.integers(0, PIECE_BYTES // 2), st.integers(0, 1 << 32), st.sampled_from(SIZES))
def test_any_bytes_come_back_or_are_reported(some: int, seed: int, size: int) -> None:
    """Noise at `some` places of a block among usual values."""
    draw = np.random.default_rng(seed)
    values = gaussian(draw, 2, size // 2)
    values[0, draw.integers(0, size // 2, some)] = draw.integers(0, 1 << 16, some, np.uint16)
    stored = compress(values.view(np.uint8))
    back, bad = decompress(stored, size).view(np.uint16), lost(stored, size)
    assert bad[0] or np.array_equal(back[0], values[0])
    assert not bad[1] and np.array_equal(back[1], values[1])


def test_equal_blocks_are_stored_equally() -> None:
    raw = np.repeat(gaussian(np.random.default_rng(1), 1, 40_960).view(np.uint8), 3, axis=0)
    stored = compress(raw)
    assert (stored == stored[0]).all()


def test_sizes_that_are_not_compressed() -> None:
    assert not compression.unsupported_reason(4096)
    assert "at least 4096" in compression.unsupported_reason(4032)
    assert "multiple of 64" in compression.unsupported_reason(4100)


def test_the_form_is_that_of_its_version() -> None:
    """Regions and tiers outlive releases: whoever changes these bytes changes CODEC, too."""
    numbers = np.arange(3 * PIECE_BYTES // 2 + 320, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (numbers >> 48 & 0x83FF | 0x3C00).astype(np.uint16)
    values[::100] = (numbers[::100] >> 40).astype(np.uint16)
    stored = compress(values.view(np.uint8)[None])
    assert (stored.shape, lost(stored, 2 * values.size)) == ((1, 38_304), [False])
    assert hashlib.sha256(stored.tobytes()).hexdigest()[:16] == "7460c48f6ff05e80"


def test_corrupt_positions_are_ignored() -> None:
    values = gaussian(np.random.default_rng(2), 1, PIECE_BYTES // 2)
    values[:, ::128] = 0x7F80 | np.arange(64) & 0x7F
    stored, of = compress(values.view(np.uint8)), compression.form(PIECE_BYTES // 2)
    at = place(PIECE_BYTES, 0)
    assert stored[0, at + of.book + 15]
    stored[0, at + of.positions : at + of.bytes] = 0xFF
    assert decompress(stored, PIECE_BYTES).shape == (1, PIECE_BYTES)
