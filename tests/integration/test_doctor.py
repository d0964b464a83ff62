"""`kvcache-server doctor` with all its sections on this host."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.mark.long  # tests/client/devices has what it runs
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the suite's caches are torch's")
def test_a_complete_report(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")  # somebody else's business
    command = [sys.executable, "-m", "kvcache_server", "doctor", "--json", "--endpoint", daemon.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    sections = json.loads(done.stdout)["sections"]
    assert list(sections) == ["host", "software", "endpoint", "devices", "conformance"]
    found = {finding["name"]: finding for section in sections.values() for finding in section}
    failed = [finding for finding in found.values() if finding["verdict"] == "failed"]
    assert done.returncode == 0, (failed, done.stderr)
    for name in ("daemon", "mapping", "cpu self-test", "cpu suite", "common suite"):
        assert found[name]["verdict"] == "ok"
    assert found["cpu suite"]["values"]["passed"] >= 60
    assert found["cpu suite"]["values"]["failed"] == 0
    assert "cuda suite" in found
