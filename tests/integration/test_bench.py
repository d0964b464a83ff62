"""`kvcache-server bench` runs and measures what it claims."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import remove_regions


def test_a_small_bench() -> None:
    command = [sys.executable, "-m", "kvcache_server", "bench", "--json", "--blocks", "30000", "--rounds", "4"]
    done = subprocess.run([*command, "--seconds", "0.5"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["blocks_indexed"] >= 30_000
    assert figures["blocks_evicted"] > 0
    assert [row["hashes"] for row in figures["lookups"]] == [64, 1024]
    assert all(0.4 < row["hit_ratio"] < 0.9 for row in figures["lookups"])
    assert figures["acquires_per_second"] > 0
    assert set(figures["commit_us_per_block"]) == {"3000", str(figures["blocks_indexed"]), "evicting"}


@pytest.mark.parametrize(("command", "started"), [(["bench"], "["), (["demo", "--toy"], "daemon at")])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_terminated_commands_leave_nothing_behind(
    command: list[str], started: str, signum: signal.Signals, short_folder: Path
) -> None:
    """Neither processes nor files, when a service manager, `timeout` or a closed terminal ends them."""
    environment = os.environ | {"TMPDIR": str(short_folder)}
    with subprocess.Popen(
        # Whoever runs the tests under nohup has their processes ignore SIGHUP.
        ["env", "--default-signal=HUP", sys.executable, "-m", "kvcache_server", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        before = list(itertools.takewhile(lambda line: started not in line, process.stdout))
        assert list(short_folder.iterdir()), before
        (folder,) = short_folder.iterdir()
        process.send_signal(signum)
        assert process.wait(60) == 128 + signum
        said = process.stdout.read()  # ends with the last process that has it open
    assert "Traceback" not in said
    assert not folder.exists() and not list(short_folder.iterdir())
    assert remove_regions("/dev/shm", str(folder / "kvcache.sock")) == 0, "nothing was left"
