"""Sizes in bytes, as people write and read them. Pure."""

from __future__ import annotations

import re

from kvcache_proto.errors import ConfigError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}IB": 1 << (10 * _power), f"{_letter}B": 1000**_power, _letter: 1 << (10 * _power)}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")
MAX_SIZE = 1 << 50


def parse_size(text: str | int) -> int:
    """Return the number of bytes that "30GiB", "512 MiB", "1.5G" or a plain number stands for.

    KiB, MiB, GiB, TiB and the bare letters count in 1024, KB, MB, GB, TB in 1000. Raises ConfigError.
    """
    match = _SIZE.fullmatch(str(text).strip())
    factor = _UNITS.get(match[2].upper()) if match else None
    if isinstance(text, bool) or match is None or factor is None:
        raise ConfigError(f"size {text!r}: a number of bytes, or one with a unit, as in 30GiB or 512MiB")
    size = round(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if size > MAX_SIZE:
        raise ConfigError(f"size {text!r}: at most {format_size(MAX_SIZE)}")
    return size


def format_size(size: float) -> str:
    """Return `size` bytes in a readable unit: 512 B, 256.0 MiB, 30.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
