"""Which engine is which, and what becomes of an engine when one of its ranks cannot take part."""

from __future__ import annotations

from typing import Any

import pytest
from cache_state import BLOCK

pytestmark = pytest.mark.long  # engines more


def named(daemon: Any) -> dict[str, list[str]]:
    """The engines that are there, and the labels of their sessions."""
    found: dict[str, list[str]] = {}
    for session in daemon.status()["sessions"]:
        if session["engine"] != "kvcache-server test":
            found.setdefault(session["engine"], []).append(session["label"])
    return {engine: sorted(labels) for engine, labels in found.items() if "scheduler" in labels or "rank 0" in labels}


def test_a_second_connector_of_ours_in_one_engine_does_nothing(
    engines: Any, daemon: Any, prompt: Any, reference: Any
) -> None:
    ours = {
        "kv_connector": "KVCacheServerConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvcache_client.connector",
        "kv_connector_extra_config": {
            "endpoint": daemon.endpoint,
            "deadline_ms": 5000,
            "block_size": BLOCK,
            "gate": "off",
        },
    }
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [ours, ours]}}
    engine = engines("several", connector=several)
    assert list(named(daemon).values()) == [["rank 0", "scheduler"]]
    asked = prompt(4 * BLOCK + 3)
    for _ in range(2):
        assert engine.generate(asked) == reference([asked])
        daemon.wait_status(lambda s: s["pool"]["blocks"] == 4, "the blocks")
        engine.ask("reset")
    assert daemon.status()["counters"]["blocks_hit"] == 4
    assert engine.log.count("a second KVCacheServerConnector") == 1


def test_a_rank_that_cannot_copy_declines_its_engine_with_one_line(
    engines: Any, daemon: Any, prompt: Any, reference: Any
) -> None:
    engine = engines("halved", daemon.endpoint, module="rank_without_copies", tensor_parallel_size=2)
    daemon.wait_status(lambda s: len(named(daemon)) == 1, "its scheduler and its other rank")
    engine.generate(prompt(2 * BLOCK + 3))  # with its first step the scheduler hears of it
    before = daemon.status()
    prompts = [prompt(4 * BLOCK + 3 + number) for number in range(4)]
    assert engine.generate(*prompts, max_tokens=40) == reference(prompts, max_tokens=40)
    after = daemon.status()
    assert after["counters"].get("blocks_requested", 0) == before["counters"].get("blocks_requested", 0)
    assert after["daemon"]["errors"] == before["daemon"]["errors"]
    assert sum(before["daemon"]["errors"].values()) <= 3
    line = "this engine runs without the KV cache server: rank 1 takes no part: byte 7 of block 0 came back wrong"
    assert engine.log.count(line) == 1
