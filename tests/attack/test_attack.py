"""Attackers beside an honest engine, for seconds; `run.py` does the same for any time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attack.run import attack, describe

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")

RUN = Path(__file__).with_name("run.py")


def test_attackers_beside_an_honest_engine(short_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = attack(short_folder, seconds=16, seed=int(os.environ.get("ATTACK_SEED", "1")), life=8)
    with capsys.disabled():
        print("\n" + describe(result))
    assert result.lives == 2
    assert result.victim["blocks_right"] > 1000
    assert sum(count for what, count in result.attacks.items() if what.endswith("done")) > 20
    sizes = result.sizes[len(result.sizes) // 3 :]
    assert max(sizes) < 200 << 20  # 64 MiB of unfinished frames, 1 MiB of replies and what one request takes, each


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("unshare"), reason="no unshare here")
def test_attackers_on_a_file_system_without_access_control_lists(short_folder: Path) -> None:
    """On ramfs every user can connect: only the door and the request socket refuse."""
    command = [sys.executable, str(RUN), "--seconds", "10", "--dir", str(short_folder)]
    mounted = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t ramfs -o mode=755 ramfs "$0" && exec "$@"',
        str(short_folder),
    ]
    probe = subprocess.run([*mounted, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no file system can be mounted here: {probe.stderr.strip()}")
    found = subprocess.run([*mounted, *command], capture_output=True, text=True, check=False, timeout=200)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "PermissionError" not in found.stdout, "the kernel kept them away"
    assert "take_all_sessions: not_permitted" in found.stdout
