"""`kvcache-server demo`, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache_tools import demo_model


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "kvcache_server", "demo", *arguments]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long  # two engines more
def test_random_weights(tmp_path: Path) -> None:
    said = run(tmp_path, "--toy", "--prompts", "1", "--tokens", "400")
    assert "a small random Llama in float32 needs about" in said
    rows = re.findall(r"^([AB]) .* (\d+) of (\d+) blocks +yes ", said, re.MULTILINE)
    assert rows == [("A", "6", "6"), ("B", "6", "6")], said


@pytest.mark.long
def test_answers_in_text(tmp_path: Path) -> None:
    if demo_model.packaged() is None:
        pytest.skip(f"no model: {demo_model.INSTALL}")
    said = run(tmp_path)
    _, _, table = said.partition("\n\n")
    assert re.findall(r"^(\d) .* 1,792 of 1,792 +yes$", table, re.MULTILINE) == ["1", "2", "3"], said
    assert "The license does not grant permission to use the trademarks" in said
    (model,) = (tmp_path / "kvcache-server").iterdir()
    assert f"in {model}" in said
