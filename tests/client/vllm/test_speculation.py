"""Drafted tokens. The KV of Eagle and MTP depends on the next token: the last block of a hit is computed again."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

BLOCK = 32


@pytest.fixture
def speculating(engines: Any, sim: Any, tmp_path: Any) -> Any:
    """`speculating(name, method, **options)` makes an engine whose model has a drafter."""

    def make(name: str, method: str = "eagle", **options: Any) -> Any:
        drafter = {"method": method, "num_speculative_tokens": 3} | options.pop("drafter", {})
        drafter |= {"prompt_lookup_max": 2} if method == "ngram" else {"model": str(tmp_path / "model")}
        specs = sim.full(3) | (sim.drafter(3) if method == "eagle" else {})
        return engines(name, specs=specs, speculative_config=drafter, **options)

    return make


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_last_block_of_a_hit_is_computed_again(
    speculating: Any, sim: Any, prompt: Any, idle: Any, is_async: bool
) -> None:
    """Another token after a block is another KV of the drafter in its last place."""
    shared = prompt(5 * BLOCK)
    one, two = (speculating(name, async_scheduling=is_async) for name in ("one", "two"))
    for engine, hit in ((one, 0), (two, 4 * BLOCK)):
        tokens = prompt(5 * BLOCK + 7, shared)
        assert engine.generate(tokens, 2 * BLOCK) == sim.expected(tokens, 2 * BLOCK)
        assert engine.prefills["r0"] == (len(tokens) - hit, 0, hit)
        idle()
    assert two.computed > 7, "drafts that were not kept were computed as well"


def test_a_drafter_without_kv_costs_no_block(speculating: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(5 * BLOCK + 7)
    one, two = (speculating(name, "ngram") for name in ("one", "two"))
    for engine, hit in ((one, 0), (two, 5 * BLOCK)):
        assert engine.generate(tokens, 2 * BLOCK) == sim.expected(tokens, 2 * BLOCK)
        assert engine.prefills["r0"] == (len(tokens) - hit, 0, hit)
        idle()


def test_vllm_may_be_told_to_keep_the_last_block(speculating: Any, sim: Any, prompt: Any, idle: Any) -> None:
    from vllm.config import SpeculativeConfig

    if not hasattr(SpeculativeConfig, "disable_eagle_block_drop"):
        pytest.skip("before 0.32, vLLM has no `disable_eagle_block_drop`")
    tokens = prompt(5 * BLOCK + 7)
    one, two = (speculating(name, drafter={"disable_eagle_block_drop": True}) for name in ("one", "two"))
    for engine, hit in ((one, 0), (two, 5 * BLOCK)):
        assert engine.generate(tokens, 2 * BLOCK) == sim.expected(tokens, 2 * BLOCK)
        assert engine.prefills["r0"] == (len(tokens) - hit, 0, hit)
        idle()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_is_generated_from_drafts_is_found(
    speculating: Any, sim: Any, prompt: Any, idle: Any, is_async: bool
) -> None:
    """Only tokens that were kept are hashed: a block with a draft in it that was not kept is never saved."""
    tokens = prompt(2 * BLOCK + 5)
    one, two = (speculating(name, async_scheduling=is_async) for name in ("one", "two"))
    one.generate(tokens, 5 * BLOCK)
    idle()
    follow_up = prompt(8 * BLOCK, [*tokens, *sim.expected(tokens, 5 * BLOCK)])
    assert two.generate(follow_up, 5) == sim.expected(follow_up, 5)
    assert two.prefills["r0"] == (len(follow_up) - 6 * BLOCK, 0, 6 * BLOCK)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_drafts_in_chunks_and_on_little_memory(
    speculating: Any, sim: Any, prompt: Any, idle: Any, is_async: bool
) -> None:
    prompts = {str(at): prompt(2 * BLOCK + 31 * at) for at in range(6)}
    options = {"async_scheduling": is_async, "blocks": 30, "max_model_len": 800, "max_num_batched_tokens": 90}
    for engine in (speculating("one", **options), speculating("two", **options)):
        engine.generate_all(prompts, 50)
        assert engine.outputs == {name: sim.expected(tokens, 50) for name, tokens in prompts.items()}
        idle()
    assert engine.received


def write_weights(folder: Path, data: bytes) -> None:
    """Write a file of safetensors with one tensor."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_other_weights_at_the_same_path_are_another_namespace(
    engines: Any, sim: Any, prompt: Any, idle: Any, tmp_path: Path, whose: str
) -> None:
    folders = {name: tmp_path / name for name in ("target", "drafter")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(sim.MODEL))
        write_weights(folder, b"one" * 1000)
    drafter = {"method": "eagle", "model": str(folders["drafter"]), "num_speculative_tokens": 2}
    options = {"specs": sim.full() | sim.drafter(3), "load_format": "auto", "speculative_config": drafter}
    tokens, found = prompt(6 * BLOCK + 1), []
    for number, weights in enumerate((b"one", b"one", b"two")):
        write_weights(folders[whose], weights * 1000)
        engine = engines(f"engine {number}", model=str(folders["target"]), **options)
        engine.generate(tokens)
        found.append((engine.connector._scheduler._membership.namespace.spec.id, engine.prefills["r0"][2]))
        idle()
    (first, _), (same, loaded), (other, stale) = found
    assert first == same and loaded
    assert first != other and not stale
