"""Other connectors beside ours: vLLM's MultiConnector, and vLLM's own offloading."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_proto.errors import ConfigError

BLOCK = 32


@pytest.fixture
def several(engines: Any, tmp_path: Any) -> Any:
    """`several(name, folder)` makes an engine with vLLM's ExampleConnector, which keeps KV in a folder, before ours."""

    def make(name: str, folder: str, **options: Any) -> Any:
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / folder)},
        }
        return engines(name, beside=[example], disable_hybrid_kv_cache_manager=True, **options)

    return make


def test_what_both_have_is_loaded_once(several: Any, unleased: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """The first connector with a hit loads. Ours gives back what it has found, and saves what it has not."""
    tokens = prompt(5 * BLOCK + 3)
    one, two = several("one", "a"), several("two", "a")
    for engine, hit in ((one, 0), (two, 5 * BLOCK)):
        engine.add("r", tokens, 3)
        engine.step()
        unleased()
        engine.run()
        assert engine.outputs["r"] == sim.expected(tokens, 3)
        assert engine.prefills["r"] == (len(tokens) - hit, 0, hit)
        engine.step()
        idle()
    assert one.counters["saved_bytes"] == 5 * 3 * sim.PAGE
    assert not two.received and not two.counters.get("saved_bytes") and not two.counters.get("loaded_bytes")


def test_what_only_ours_has_is_loaded_from_it(several: Any, engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(5 * BLOCK + 3)
    alone, beside, again = engines("alone"), several("beside", "a"), several("again", "a")
    alone.generate(tokens, 3)
    idle()
    longer = prompt(7 * BLOCK, tokens)
    for engine, name, hit in ((beside, "ours", 5 * BLOCK), (again, "theirs", 6 * BLOCK)):
        assert engine.generate(longer, 3, name) == sim.expected(longer, 3)
        assert engine.prefills[name] == (len(longer) - hit, 0, hit)
        idle()
    assert (beside.received, again.received) == (["ours"], [])


def test_blocks_that_another_connector_has_loaded_are_saved(
    several: Any, engines: Any, daemon: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    tokens = prompt(5 * BLOCK + 3)
    several("first", "a", endpoint=f"{daemon.endpoint}.nobody").generate(tokens)
    second, alone = several("second", "a"), engines("alone")
    assert second.generate(tokens, 3) == sim.expected(tokens, 3)
    assert second.prefills["r0"] == (3, 0, 5 * BLOCK)
    idle()
    assert alone.generate(tokens, 3) == sim.expected(tokens, 3)
    assert alone.received == ["r0"]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_load_fails_beside_another_connector(
    several: Any, engines: Any, sim: Any, prompt: Any, idle: Any, spoil: Any, policy: str
) -> None:
    """MultiConnector gives each connector a copy of the configuration: what counts is the policy of its own."""
    tokens = prompt(5 * BLOCK + 3)
    alone = engines("alone", extra={"verify": "all"})
    two = several("two", "a", extra={"verify": "all"}, transfer={"kv_load_failure_policy": policy})
    alone.generate(tokens)
    idle()
    spoil(alone, tokens, block=2)
    two.add("r", tokens, 3)
    two.run()
    assert two.counters["loads_failed"] == 1
    assert two.outputs["r"] == ([] if policy == "fail" else sim.expected(tokens, 3))


def test_requests_of_both_run_together(several: Any, engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    shared = prompt(4 * BLOCK)
    prompts = {f"{at}": prompt(4 * BLOCK + 17 * at + 1, shared) for at in range(8)}
    options = {"blocks": 40, "max_num_batched_tokens": 1000}
    for engine in (several("one", "a", **options), engines("two", **options), several("three", "b", **options)):
        engine.generate_all(prompts, 30)
        assert engine.outputs == {name: sim.expected(tokens, 30) for name, tokens in prompts.items()}
        idle()
    assert engine.received


@pytest.mark.parametrize("backend", ["native", "lmcache"])
def test_kv_offloading_size_beside_ours_is_explained(engines: Any, backend: str) -> None:
    """vLLM replaces the connector, and looks for its own one in our module."""
    with pytest.raises(ConfigError, match="--kv-offloading-size and KVCacheServerConnector exclude each other"):
        engines("one", kv_offloading_size=1.0, kv_offloading_backend=backend)
