"""Sizes and thresholds of copies: measured, and overridable by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvcache_proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tuning:
    """Measured on an H200 by tests/bench/device_copies.py.

    Attributes:
        stage_bytes: KVCACHE_COPY_STAGE_MIB, device memory of each of the four staging buffers, and page-locked memory
            of each bounce buffer. 16 MiB lose 0.4 % of the rate, 8 MiB 1.2 %.
        staged_below: KVCACHE_COPY_STAGED_BELOW_KIB, fragments from this size on go directly: at 2 MiB they lose 1 to 2
            % of the rate. 0 stages nothing.
        bursts: KVCACHE_COPY_BURST, thread blocks per multiprocessor that gather and scatter use.
        register_chunk: KVCACHE_REGISTER_CHUNK_MIB, bytes that are page-locked at once when an engine already serves; no
            copy crosses the end of such a piece.
        npu_register: KVCACHE_NPU_REGISTER, 1 page-locks the region for an NPU on old kernels, too.
        compress_on_cpu: KVCACHE_COPY_COMPRESS_ON_CPU, 1 lets engines on a CPU compress, at 0.1 GB/s.
    """

    stage_bytes: int = 32 << 20
    staged_below: int = 4 << 20
    bursts: int = 4
    register_chunk: int = 16 << 20
    npu_register: int = 0
    compress_on_cpu: int = 0


def read_tuning(environ: Mapping[str, str] = os.environ, normal: Tuning = Tuning()) -> Tuning:  # noqa: B008
    """Return the values from the environment, and the rest from `normal`.

    Raises ConfigError, naming the variable and its bounds.
    """
    return Tuning(
        _read(environ, "KVCACHE_COPY_STAGE_MIB", normal.stage_bytes, 1 << 20, 1, 1024),
        _read(environ, "KVCACHE_COPY_STAGED_BELOW_KIB", normal.staged_below, 1 << 10, 0, 1 << 20),
        _read(environ, "KVCACHE_COPY_BURST", normal.bursts, 1, 1, 1024),
        _read(environ, "KVCACHE_REGISTER_CHUNK_MIB", normal.register_chunk, 1 << 20, 1, 1 << 20),
        _read(environ, "KVCACHE_NPU_REGISTER", normal.npu_register, 1, 0, 1),
        _read(environ, "KVCACHE_COPY_COMPRESS_ON_CPU", normal.compress_on_cpu, 1, 0, 1),
    )


def _read(environ: Mapping[str, str], name: str, normal: int, unit: int, low: int, high: int) -> int:
    text = environ.get(name)
    if text is None:
        return normal
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not low <= value <= high:
        raise ConfigError(f"{name}={text!r}: a whole number from {low} to {high}")
    return value * unit
