"""Pure: whether KV that was computed again matches the cached KV.

The same tokens give the same KV up to noise: sums are taken in another order when a prompt is split differently, or
computed beside others. Errors in a cached block look different, and each rule detects one kind:

    everywhere   old weights, a wrong adapter: the whole block is off by more than its dtype explains
    in a piece   a foreign or a torn block: somewhere nothing matches
    a spike      a flipped bit: one value is far off among neighbours that match

A token that is routed to another expert causes strong noise, but in few tokens and spread over their values: not a
spike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

PIECE = 4096  # values
WINDOW = 64  # adjacent values, mostly of one token and head
CALM = 1 / 32  # of the spike: half of its neighbors are off by less
_CHUNK = 1 << 20  # values compared at a time


class Format(NamedTuple):
    """How values lie in memory, and how far they may be off."""

    name: str
    bytes: int  # per value
    # Of a block's norm: at least four times the effect of other chunks on a dense model of 32 layers, as measured by
    # tests/bench/noise.py.
    limit: float
    spike: float = 0.5  # of a value, or of its neighbors' root mean square if that is larger: several of its steps
    piece: float = 0.6  # of a piece's norm; foreign values are off by 1 or more


FORMATS = {
    each.name: each
    for each in (
        Format("float32", 4, 0.01),  # computed as TensorFloat-32, perhaps
        Format("float16", 2, 0.03),
        Format("bfloat16", 2, 0.1),
        Format("float8_e4m3fn", 1, 0.2),
        Format("float8_e5m2", 1, 0.3, 0.9),
    )
}
# vLLM's names for an 8-bit KV cache, which lies in tensors of plain bytes.
_BYTES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def find_format(dtypes: set[str], kv_dtype: str, experts: bool = False) -> Format | None:
    """Return the format of a cache whose tensors are of `dtypes`, None if noise and faults cannot be distinguished.

    `kv_dtype` is the engine's name for the cache's dtype. In a model with `experts` the last bits sometimes decide
    which expert computes a token, and the layers above see the difference.
    """
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    name = _BYTES.get(kv_dtype, "") if dtype in ("uint8", "int8") else dtype
    form = FORMATS.get(name)
    if form is None or not experts:
        return form
    # At least twice the values seen with random weights in the routers. A channel that is large everywhere is off by
    # much more than its neighbors, so that only a very large deviation counts as a spike.
    return form._replace(limit=0.6, piece=0.9, spike=16.0)


def difference(stored: memoryview, computed: memoryview, form: Format) -> str:
    """Describe the difference beyond noise of `stored` and `computed`, bytes of one shard each; "" if there is none.

    NaN in both counts as equal: memory that was never written may hold anything.
    """
    if stored == computed:
        return ""
    off = norm = 0.0
    step = _CHUNK * form.bytes
    for begin in range(0, len(stored), step):
        ours, theirs = (_values(each[begin : begin + step], form) for each in (stored, computed))
        finite = np.isfinite(theirs)
        if not np.array_equal(np.isfinite(ours), finite):
            return "a value is not finite"
        if not finite.all():
            ours, theirs = np.where(finite, ours, 0), np.where(finite, theirs, 0)
        # Wide: the square of a value with a flipped exponent is beyond 32 bits.
        squares = _squares(error := np.abs(ours.astype(np.float64) - theirs)), _squares(theirs)
        if (worst := _ratios(*squares).max()) > form.piece:
            return f"a piece is off by {worst:.0%}"
        if _spikes(error, theirs, form.spike):
            return "a value is far off among neighbours that match"
        off, norm = off + float(squares[0].sum()), norm + float(squares[1].sum())
    whole = np.sqrt(off / norm) if norm else np.inf
    return f"the block is off by {whole:.1%}" if whole > form.limit else ""


def _spikes(error: npt.NDArray[np.float64], values: Floats, far: float) -> bool:
    off, beside = _blocks(error, WINDOW), _blocks(values, WINDOW)
    usual = np.sqrt(np.square(beside, dtype=np.float64).mean(axis=1, keepdims=True))
    spike = off > far * np.maximum(np.abs(beside), usual)
    rows = spike.any(axis=1)
    if not rows.any():
        return False
    off, spike = off[rows], spike[rows]
    calm = np.median(off, axis=1, keepdims=True) < CALM * off
    return bool((spike & calm).any())


def _blocks(values: npt.NDArray[np.floating], size: int) -> npt.NDArray[np.floating]:
    """Return rows of `size`, zeros behind the last values."""
    rows = -(-values.size // size)
    if values.size == rows * size:
        return values.reshape(rows, size)
    padded = np.zeros(rows * size, values.dtype)
    padded[: values.size] = values
    return padded.reshape(rows, size)


def _squares(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return the sum of the squares of each piece."""
    pieces: npt.NDArray[np.float64] = np.square(_blocks(values, PIECE), dtype=np.float64).sum(axis=1)
    return pieces


def _ratios(off: npt.NDArray[np.float64], norm: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the relative errors of pieces: infinite if values other than 0 are compared with zeros."""
    beside = np.where(norm > 0, norm, 1)
    ratios: npt.NDArray[np.float64] = np.sqrt(np.where(norm > 0, off / beside, np.where(off > 0, np.inf, 0)))
    return ratios


def _values(data: memoryview, form: Format) -> Floats:
    if form.name == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if form.bytes == 1:
        return _TABLES[form.name][np.frombuffer(data, np.uint8)]
    return np.frombuffer(data, form.name).astype(np.float32)


def _table(exponent_bits: int, mantissa_bits: int, infinite: bool) -> Floats:
    """Return the values of all 256 bytes of an 8-bit float; without infinities, only the last one is NaN."""
    bits = np.arange(256)
    mantissa, exponent = bits & ((1 << mantissa_bits) - 1), (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    last = exponent == (1 << exponent_bits) - 1
    if infinite:
        value = np.where(last, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where(last & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    return np.where(bits & 128, -value, value).astype(np.float32)


_TABLES = {"float8_e4m3fn": _table(4, 3, False), "float8_e5m2": _table(5, 2, True)}
