"""LoRA adapters in real engines: no block is used for another content, and no token differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_state import BLOCK, wait_idle
from safetensors.numpy import save_file

pytestmark = pytest.mark.long  # tests/client/vllm has it with all schedulers

RANK = 8
OPTIONS = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": RANK}
LAYERS, HIDDEN, KV = 4, 128, 64  # as conftest.py's model has them
MODULES = {"q_proj": HIDDEN, "k_proj": KV, "v_proj": KV, "o_proj": HIDDEN}


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter with random weights; files that are there are replaced."""
    draw = np.random.default_rng(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, size in MODULES.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = draw.normal(0, 0.3, (RANK, HIDDEN)).astype(np.float32)
            weights[f"{name}.lora_B.weight"] = draw.normal(0, 0.3, (size, RANK)).astype(np.float32)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES), "bias": "none"}
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "new")
    (folder / "new").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def daemon(start_module_daemon: Any) -> Any:
    return start_module_daemon(size="64MiB")


@pytest.fixture(scope="module")
def start(engines: Any, daemon: Any) -> Any:
    return lambda name: engines(name, daemon.endpoint, **OPTIONS)


@pytest.fixture(scope="module")
def one(start: Any) -> Any:
    return start("one")


@pytest.fixture(scope="module")
def two(start: Any, one: Any) -> Any:
    return start("two")


@pytest.fixture(scope="module")
def plain(engines: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`plain(prompt, seed)` is what an engine without the connector answers; it never saw the adapter before."""
    engine, number = engines("plain", **OPTIONS), 0

    def ask(prompt: list[int], seed: int | None = None) -> Any:
        nonlocal number
        number += 1
        facts: dict[str, Any] = {}
        if seed is not None:
            folder = write_adapter(tmp_path_factory.mktemp("plain") / "adapter", seed)
            facts["lora"] = [f"plain {number}", number, str(folder)]
        return engine.generate(prompt, **facts)

    return ask


def load(engine: Any, *adapter: Any) -> dict[str, list[Any]]:
    """Have it loaded, and its files read: whoever comes before that is left alone."""
    engine.ask("load", lora=list(adapter))
    for _ in range(2):
        engine.generate([1, 2, 3], lora=list(adapter))
    return {"lora": list(adapter)}


def hits(daemon: Any) -> tuple[int, int, int]:
    """Requested, hit and present blocks, once nothing is being saved."""
    (namespace,) = wait_idle(daemon)["namespaces"]
    return namespace["requested_blocks"], namespace["hit_blocks"], namespace["blocks"]


def counted(daemon: Any, before: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(hits(daemon), before, strict=True))


def test_two_adapters_of_one_name_and_a_rewritten_folder(
    start: Any, one: Any, two: Any, plain: Any, daemon: Any, prompt: Any, tmp_path: Path
) -> None:
    asked, later = prompt(5 * BLOCK + 7), prompt(4 * BLOCK + 9)
    folder = write_adapter(tmp_path / "adapter", 1)
    adapter = "x", 1, str(folder)
    old, new = plain(asked, 1), plain(asked, 2)
    assert len({str(answer) for answer in (old, new, plain(asked))}) == 3

    before, with_adapter = hits(daemon), load(one, *adapter)
    assert one.generate(asked, **with_adapter) == old
    assert counted(daemon, before) == (5, 0, 5)
    before = hits(daemon)
    assert two.generate(asked, **load(two, *adapter)) == old
    assert counted(daemon, before) == (5, 5, 0)
    before = hits(daemon)
    assert two.generate(asked) == plain(asked)
    assert counted(daemon, before) == (5, 0, 5), "without the adapter"

    write_adapter(folder, 2)
    before, three = hits(daemon), start("three")
    assert three.generate(asked, **load(three, *adapter)) == new
    assert counted(daemon, before) == (5, 0, 5), "of another engine with the same name and path"

    # The first engine has the old weights still, and the new ones once another adapter took its place.
    before = hits(daemon)
    assert one.generate(later, **with_adapter) == plain(later, 1)
    other = write_adapter(tmp_path / "other", 3)
    assert one.generate(asked, **load(one, "other", 2, str(other))) == plain(asked, 3)
    assert counted(daemon, before) == (5, 0, 5), "of the other one only"
    one.ask("reset")
    before = hits(daemon)
    assert one.generate(later, **with_adapter) == plain(later, 2)
    assert counted(daemon, before) == (0, 0, 0)
    assert "blocks of the LoRA adapter" in one.log
