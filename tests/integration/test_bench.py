"""`kvcache-server bench` runs, and its figures are those of what it says it measures."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_small_bench() -> None:
    command = [sys.executable, "-m", "kvcache_server", "bench", "--json", "--blocks", "30000", "--rounds", "4"]
    done = subprocess.run([*command, "--seconds", "0.5"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["blocks_indexed"] >= 30_000
    assert figures["blocks_evicted"] > 0
    assert [row["hashes"] for row in figures["lookups"]] == [64, 1024]
    assert all(0.5 < row["hit_ratio"] < 0.9 for row in figures["lookups"])
    assert figures["acquires_per_second"] > 0
    assert set(figures["commit_us_per_block"]) == {"3000", str(figures["blocks_indexed"]), "evicting"}
