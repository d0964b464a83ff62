"""`kvcache-server prove`, as a user runs it: it tells a connector that works from those that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_configs import COMMON, MODELS

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # three engines per test
LLAMA = COMMON | MODELS["llama"]


def prove(folder: Path, module: str, config: dict[str, Any], **options: Any) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what `--json` prints."""
    (folder / "config.json").write_text(json.dumps(config))
    arguments = {"dtype": "float32", "kv_transfer_config": {"kv_connector_module_path": module}} | options
    command = [sys.executable, "-m", "kvcache_server", "prove", str(folder), "--random-weights", "--json"]
    command += ["--longest", "300", "--engine-args", json.dumps(arguments)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=800)
    finally:
        process.terminate()  # it ends its engines and its daemon
    return process.returncode, json.loads(output) if output else {"summary": errors}


def loaded(found: dict[str, Any]) -> set[str]:
    return {each["name"] for each in found["prompts"] if each["loaded"]["cached"]}


def test_equal_answers(tmp_path: Path) -> None:
    code, found = prove(tmp_path, "kvcache_client.connector", LLAMA)
    assert code == 0, found["summary"]
    rows = found["prompts"]
    assert {each["verdict_loaded"] for each in rows} == {"equal"}
    assert all(each["loaded"]["cached"] == each["loadable"] for each in rows)
    assert all(each["loaded"] == each["device"] for each in rows if each["loadable"]), "not equal to the last bit"


def test_a_connector_whose_loads_end_too_early(tmp_path: Path) -> None:
    code, found = prove(tmp_path, "hasty_connector", LLAMA)
    assert code == 1, found["summary"]
    wrong = {each["name"] for each in found["prompts"] if each["verdict_loaded"].startswith("DIFFERS")}
    assert wrong and wrong <= loaded(found)
    assert {each["verdict_saved"] for each in found["prompts"]} == {"equal"}


def test_a_connector_whose_loads_fail(tmp_path: Path) -> None:
    code, found = prove(tmp_path, "broken_connector", LLAMA)
    assert code == 8 and not loaded(found), found["summary"]


def test_a_model_that_is_declined(tmp_path: Path) -> None:
    code, found = prove(tmp_path, "kvcache_client.connector", COMMON | MODELS["mla"], attention_backend="CPU_MLA")
    assert code == 8 and "declines this engine: vLLM computes a prompt of this model without" in found["summary"], found
