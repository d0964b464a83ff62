"""kv_connector_extra_config: what is taken, what is explained, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_client.settings import ConnectorSettings, blocks_per_slot, parse_settings
from kvcache_proto.errors import ConfigError


def test_nothing_given_is_the_defaults() -> None:
    assert parse_settings({}) == (ConnectorSettings(), [])


def test_every_field_can_be_given() -> None:
    given = {
        "endpoint": "ipc:///x/kv.sock",
        "block_size": 64,
        "num_cpu_blocks": 1000,
        "deadline_ms": 20,
        "save": "prompt",
        "save_mode": "lazy",
        "device_aware": "off",
        "min_hits": 2,
        "checkpoint_tokens": 0,
        "drain_ms": 0,
        "share_tp": True,
        "weights_version": "step-12",
        "on_reset": "step-13",
        "gate": "off",
        "overlap": "off",
        "compress": "off",
        "peer_loads": "off",
        "multimodal": "off",
        "verify": "all",
        "canary_every": 100,
        "kv_load_failure_policy": "fail",
        "server_uids": ("kvcache", 995),
    }
    assert set(given) == set(ConnectorSettings.__struct_fields__)
    settings, notes = parse_settings(given)
    assert not notes
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize(
    ("key", "hint"), [("endpont", "endpoint"), ("blocksize", "block_size"), ("deadline", "deadline_ms")]
)
def test_an_unknown_key_names_the_close_match(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean '{hint}'"):
        parse_settings({key: 1})


def test_an_unknown_key_like_none_names_them_all() -> None:
    with pytest.raises(ConfigError, match="unknown key 'zzz'; known are endpoint, block_size"):
        parse_settings({"zzz": 1})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("cpu_bytes_to_use", "kvcache-server serve --size"),
        ("spec_name", "leave it out"),
        ("spec_module_path", "leave it out"),
        ("offload_prompt_only", "`save: prompt`"),
        ("lmcache.mp.host", "leave it out"),
    ],
)
def test_a_key_of_another_connector_is_answered_with_what_replaces_it(key: str, said: str) -> None:
    settings, notes = parse_settings({key: 1})
    assert settings == ConnectorSettings()
    assert len(notes) == 1
    assert notes[0].startswith(f"{key} is a setting of another connector")
    assert said in notes[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"save": "none"}, "save 'none': one of all, prompt"),
        ({"verify": "some"}, "verify 'some': one of off, sample, all"),
        ({"canary_every": -1}, "canary_every -1 is negative"),
        ({"deadline_ms": 0}, "deadline_ms 0"),
        ({"deadline_ms": "soon"}, "deadline_ms"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks -1 is negative"),
        ({"block_size": 1.5}, "block_size"),
        ({"endpoint": 7}, "endpoint"),
        ({"kv_load_failure_policy": "shrug"}, "one of recompute, fail"),
    ],
)
def test_a_bad_value_names_its_key(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_settings(given)


def test_block_size_is_a_multiple_of_the_engines() -> None:
    assert [blocks_per_slot(ConnectorSettings(), size) for size in (16, 32, 48, 128, 256)] == [8, 4, 3, 1, 1]
    assert blocks_per_slot(ConnectorSettings(block_size=32), 32) == 1
    assert blocks_per_slot(ConnectorSettings(block_size=128), 32) == 4
    with pytest.raises(ConfigError, match="block_size 48: a multiple of the engine's 32"):
        blocks_per_slot(ConnectorSettings(block_size=48), 32)
