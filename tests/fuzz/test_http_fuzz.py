"""The HTTP API against its own description: schemathesis sends allowed and forbidden requests to a real daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvcache_proto import messages as m
from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_server.admin_client import AdminClient

EXAMPLES = int(os.environ.get("KVCACHE_HTTP_EXAMPLES", "10"))  # of each kind of request; 300 make 6,000 calls in all
SPEC = NamespaceSpec("llama", (GroupSpec(16, 4096),), {"dtype": "bfloat16", "ключ": "значение"})


def answers(address: str) -> Counter[str]:
    with urllib.request.urlopen(f"{address}/api/v1/status", timeout=20) as response:
        return Counter(json.load(response)["daemon"]["http"]["answers"])


@pytest.mark.timeout(300 + 3 * EXAMPLES)
@pytest.mark.parametrize("with_token", [True, False], ids=["with the token", "without"])
def test_every_answer_matches_the_description(start_daemon: Any, tmp_path: Path, with_token: bool) -> None:
    daemon = start_daemon(http="127.0.0.1:0")
    address = daemon.status()["daemon"]["http"]["address"]
    token = ["--header", f"Authorization: Bearer {(daemon.folder / 'kv.token').read_text().strip()}"]
    with AdminClient(daemon.endpoint, "rank 0", engine="qwen") as engine:
        engine.ask(m.Attach(0, b"", SPEC, (0,)))
        command = [Path(sys.executable).with_name("schemathesis"), "run", f"{address}/openapi.json", "--no-color"]
        limits = ["--max-examples", str(EXAMPLES), "--seed", "1", "--request-timeout", "60", "--workers", "1"]
        limits += ["--suppress-health-check", "all"]  # how long it takes is no finding: the host may be busy
        ran = subprocess.run(
            [*command, *limits, *(token if with_token else [])],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = answers(address)
    print(f"{sum(found.values()):,} answers: {dict(found)}")
    assert sum(found.values()) >= 7 * EXAMPLES, found  # a request that cannot vary is made less often
    assert not [status for status in found if status.startswith("5")], found
    assert daemon.status()["daemon"]["errors"] == {}
    if not with_token:
        status = daemon.status()
        assert found["401"] >= EXAMPLES
        assert (status["daemon"]["integrity"]["checks"], status["daemon"]["log_level"]) == (0, "info")
        assert "cleared" not in daemon.log
