"""Files that not even root may change."""

from __future__ import annotations

import array
import fcntl
import os
from pathlib import Path

import pytest


def immutable(path: Path, on: bool) -> None:
    """chattr +i, -i."""
    get, put, bit = 0x80086601, 0x40086602, 0x10
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flags = array.array("l", [0])
        fcntl.ioctl(descriptor, get, flags)
        flags[0] = flags[0] | bit if on else flags[0] & ~bit
        fcntl.ioctl(descriptor, put, flags)
    except OSError as error:
        pytest.skip(f"no file can be made immutable here: {error}")
    finally:
        os.close(descriptor)
