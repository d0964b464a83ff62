"""Stores that answer as no store should: a share of all answers, and with the mark `long` all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("hostile_redis.py")


@pytest.mark.parametrize("share", [0.01, pytest.param(1.0, marks=pytest.mark.long)])
def test_hostile_redis(share: float) -> None:
    """In a process of its own, whose peak of memory is that of the tier and of the server beside it."""
    found = subprocess.run([sys.executable, str(PROGRAM), str(share)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    figures = json.loads(found.stdout)
    assert figures["tried"] > 20 and not figures["wrong_bytes"] and figures["peak_mib"] < 200, figures
    assert "Traceback" not in found.stderr and len(found.stderr) < 100_000
