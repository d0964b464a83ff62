"""`kvcache-server doctor` with all its sections on this host."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="devices are torch's")
def test_a_complete_report(daemon: Any) -> None:
    command = [sys.executable, "-m", "kvcache_server", "doctor", "--json", "--endpoint", daemon.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    sections = json.loads(done.stdout)["sections"]
    assert list(sections) == ["host", "software", "endpoint", "devices"]
    found = {finding["name"]: finding for section in sections.values() for finding in section}
    failed = [finding for finding in found.values() if finding["verdict"] == "failed"]
    assert done.returncode == 0, (failed, done.stderr)
    for name in ("daemon", "mapping", "cpu self-test"):
        assert found[name]["verdict"] == "ok"
    assert {"cpu copies", "cuda", "npu"} <= found.keys()
