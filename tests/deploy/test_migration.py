"""The migration page names every key that vLLM's own offloading reads, and nothing of ours that there is not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from kvcache_client.settings import FOREIGN, ConnectorSettings
from kvcache_server.config import TierSettings, settings

PAGE = (Path(__file__).parents[2] / "deploy" / "MIGRATION.md").read_text()
VLLM = importlib.util.find_spec("vllm")


@pytest.mark.skipif(VLLM is None or VLLM.origin is None, reason="vLLM is not here")
def test_every_key_of_vllm_is_on_the_page_and_known_to_the_connector() -> None:
    assert VLLM is not None and VLLM.origin is not None
    root = Path(VLLM.origin).parent
    files = [
        *(root / "v1" / "kv_offload").rglob("*.py"),
        *(root / "distributed" / "kv_transfer" / "kv_connector" / "v1").rglob("*offload*/*.py"),
        *(root / "distributed" / "kv_transfer" / "kv_connector" / "v1").glob("*offload*.py"),
    ]
    keys = set()
    for file in files:
        keys |= set(re.findall(r"extra_config(?:\.get\(\s*|\[)\"(\w+)\"", file.read_text()))
    assert {"cpu_bytes_to_use", "disk_path", "secondary_tiers"} <= keys
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()
    assert keys - set(FOREIGN) - set(ConnectorSettings.__struct_fields__) == set()
    assert all(f"`{name}`" in PAGE for name in ("--kv-offloading-size", "--kv-offloading-backend"))


def test_settings_of_ours_that_the_page_names_exist() -> None:
    ours = {row.name for row in settings()} | set(ConnectorSettings.__struct_fields__)
    ours |= set(TierSettings.__struct_fields__)
    answers = re.findall(r"^\|.*\| ([^|]*) \|$", PAGE.split("**Not supported**")[0], re.MULTILINE)
    named = {name for answer in answers for name in re.findall(r"^`(\w+)`", answer)}
    assert len(named) > 10
    assert named - ours == {"KVCacheServerConnector"}
