"""Which engines are served: kinds of KV cache groups, of every version."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

BLOCK = 32
pytestmark = pytest.mark.parametrize("runner", ["v1"], indirect=True)


def declined(lines: list[str]) -> list[str]:
    prefix = "this engine runs without the KV cache server: "
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def test_one_group_of_full_attention_is_served(engines: Any, prompt: Any, lines: list[str]) -> None:
    one = engines("one")
    one.generate(prompt(BLOCK))
    assert not declined(lines)
    assert "blocks of 32 tokens, 12.0 KiB in 1 shards" in "\n".join(lines)


def test_a_scheduler_and_its_ranks_have_one_namespace(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Also if ranks are processes: before 0.32, the layout of KV is known only where the model is."""
    tokens = prompt(3 * BLOCK + 1)
    one, two = (engines(name, distributed_executor_backend="mp") for name in ("one", "two"))
    for engine, loaded in ((one, 0), (two, 3 * BLOCK)):
        assert engine.generate(tokens) == sim.expected(tokens, 1)
        assert engine.prefills["r0"] == (3 * BLOCK + 1 - loaded, 0, loaded)
        idle()


@pytest.mark.parametrize("model", ["Gemma 3", "windows alone"])
def test_before_0_32_windows_are_declined(engines: Any, sim: Any, prompt: Any, lines: list[str], model: str) -> None:
    """One of their loads that fails would end the engine."""
    if sim.HAS_GROUPS:
        pytest.skip("from vLLM 0.32 on, they are served")
    one = engines("one", specs=(sim.full(1) if model == "Gemma 3" else {}) | sim.windows(2, 2 * BLOCK, first=1))
    tokens = prompt(9 * BLOCK)
    for _ in range(2):
        assert one.generate(tokens, 3) == sim.expected(tokens, 3)
    (said,) = declined(lines)
    assert said.endswith(
        "before vLLM 0.32, a load that fails ends an engine with other groups than one of full attention"
    )


def test_a_model_without_kv_cache_is_declined(engines: Any, sim: Any, prompt: Any, lines: list[str]) -> None:
    one = engines("one", specs={}, enable_prefix_caching=False)
    tokens = prompt(2 * BLOCK)
    assert one.generate(tokens) == sim.expected(tokens, 1)
    assert len(lines) == 1 and declined(lines) == ["its model has no KV cache"]


def test_states_without_boundaries_are_declined(engines: Any, sim: Any, prompt: Any, lines: list[str]) -> None:
    """Granite 4 without prefix caching: there are no states at the ends of blocks."""
    one = engines("one", specs=sim.full(1) | sim.states(2, first=1), enable_prefix_caching=False)
    tokens = prompt(9 * BLOCK)
    for _ in range(2):
        assert one.generate(tokens, 3) == sim.expected(tokens, 3)
    (said,) = declined(lines)
    assert "--mamba-cache-mode align" in said or not sim.HAS_GROUPS


def test_a_drafter_without_full_attention_is_declined(
    engines: Any, sim: Any, prompt: Any, lines: list[str], tmp_path: Any
) -> None:
    """No block shows that the one before it is right."""
    drafter = {"method": "eagle", "num_speculative_tokens": 3, "model": str(tmp_path / "model")}
    specs = sim.windows(2, 2 * BLOCK) | sim.drafter(2, window=BLOCK)
    one = engines("one", specs=specs, speculative_config=drafter, blocks=96)
    tokens = prompt(5 * BLOCK)
    assert one.generate(tokens, 9) == sim.expected(tokens, 9)
    (said,) = declined(lines)
    assert said.startswith("a drafter that reads the next token") or not sim.HAS_GROUPS


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8"},
        {"hf_overrides": {"rope_theta": 5e5}},
        {"seed": 7},  # of random weights
        {"extra": {"weights_version": "v2"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_engines_that_compute_something_else_share_nothing(
    engines: Any, sim: Any, prompt: Any, idle: Any, other: dict[str, Any]
) -> None:
    """The hashes of equal tokens are equal, all the same."""
    tokens = prompt(3 * BLOCK + 1)
    for name, options, loaded in (("one", {}, 0), ("two", other, 0), ("three", {}, 3 * BLOCK)):
        engine = engines(name, **options)
        assert engine.generate(tokens) == sim.expected(tokens, 1)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_a_random_seed_is_named(
    engines: Any, sim: Any, prompt: Any, idle: Any, lines: list[str], monkeypatch: Any, algorithm: str
) -> None:
    """Engines then share nothing. From 0.32 on, vLLM fixes the seed of cryptographic hashes."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED")
    tokens = prompt(3 * BLOCK + 1)
    fixed = algorithm == "sha256" and hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    for name in ("one", "two"):
        engine = engines(name, prefix_caching_hash_algo=algorithm)
        assert engine.generate(tokens) == sim.expected(tokens, 1)
        idle()
    assert engine.prefills["r0"][2] == (3 * BLOCK if fixed else 0)
    said = [line for line in lines if "Set PYTHONHASHSEED=0" in line]
    assert len(said) == (0 if fixed else 2), "one line for each engine"


@pytest.mark.usefixtures("runner")
def test_the_plugin_starts_nothing(daemon: Any) -> None:
    """vLLM loads it into the process of its API server, too."""
    program = """
import sys, threading
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.worker.worker_base import WorkerWrapperBase
before = {*threading.enumerate()}
from kvcache_client.engines.vllm.plugin import register_vllm_connector
register_vllm_connector()
import torch
print(len({*threading.enumerate()} - before), torch.cuda.is_initialized(), "kvcache_client.connector" in sys.modules)
connector = KVConnectorFactory.get_connector_class_by_name("KVCacheServerConnector")
print(connector.__name__, len({*threading.enumerate()} - before), torch.cuda.is_initialized())
"""
    environment = {**os.environ, "KVCACHE_ENDPOINT": daemon.endpoint, "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-2:] == ["0 False False", "KVCacheServerConnector 0 False"], ended.stderr
    assert not daemon.status()["sessions"]


def test_an_engine_without_a_daemon_runs(engines: Any, sim: Any, prompt: Any, tmp_path: Any) -> None:
    one = engines("one", endpoint=f"ipc://{tmp_path}/nobody.sock")
    tokens = prompt(3 * BLOCK)
    for _ in range(2):
        assert one.generate(tokens, 3) == sim.expected(tokens, 3)
    assert not one.received
