"""Pipeline parallelism: stages have different layers, and the scheduler sees only those of the first one."""

from __future__ import annotations

from typing import Any

import pytest

BLOCK = 32
STAGES = (2, 1)  # of three layers


@pytest.fixture(params=[1, 2], ids=["one rank a stage", "two ranks a stage"])
def staged(engines: Any, request: pytest.FixtureRequest) -> Any:
    options = {"stages": STAGES, "tensor_parallel_size": request.param}
    return lambda name, **more: engines(name, **options | more)


def test_a_second_engine_loads_what_all_stages_have_saved(staged: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Its first request, too, although its ranks join the namespace no earlier than with the first step."""
    tokens = prompt(5 * BLOCK + 7)
    for name, loaded in (("one", 0), ("two", 5 * BLOCK)):
        engine = staged(name)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()
    assert {tuple(runner.received) for runner in engine.runners} == {("r0",)}


def test_other_splits_share_nothing(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens, sizes = prompt(5 * BLOCK), []
    for number, stages in enumerate(((), STAGES, (1, 2), (1, 1, 1))):
        engine = engines(f"e{number}", stages=stages)
        for name in ("first", "second"):
            assert engine.generate(tokens, 2, name) == sim.expected(tokens, 2)
            idle()
            assert engine.reset()
        assert engine.prefills == {"first": (len(tokens), 0, 0), "second": (0, 0, len(tokens))}
        sizes.append(engine.workers[0]._namespace.spec.groups[0].shards)
    assert sizes == [(3 * sim.PAGE,), (2 * sim.PAGE, sim.PAGE), (sim.PAGE, 2 * sim.PAGE), (sim.PAGE,) * 3]


def test_requests_run_together_in_a_pipeline(staged: Any, sim: Any, prompt: Any, idle: Any, runner: str) -> None:
    """With asynchronous scheduling as far as vLLM has it for stages."""
    prompts = {f"r{number}": prompt(number * BLOCK + 5) for number in range(1, 7)}
    for name in ("one", "two"):
        engine = staged(name, blocks=40, max_num_batched_tokens=96, async_scheduling=runner == "v2")
        engine.generate_all(prompts, 40)
        assert engine.outputs == {each: sim.expected(tokens, 40) for each, tokens in prompts.items()}
        idle()
    assert engine.received, "how much depends on when the daemon answers"


def test_a_reset_of_the_connector(staged: Any, sim: Any, prompt: Any, idle: Any, until: Any) -> None:
    """All stages go on in another namespace. Until the daemon knows that, nothing is saved."""
    tokens = prompt(5 * BLOCK + 7)
    one = staged("one")
    one.generate(tokens)
    idle()
    assert one.reset(connector=True)

    def found() -> int:
        name = f"r{len(one.outputs)}"
        assert one.generate(tokens, name=name) == sim.expected(tokens, 1)
        idle()
        assert one.reset()
        computed, _, loaded = one.prefills[name]
        assert computed + loaded == len(tokens)
        return int(loaded)

    assert not found()
    until(lambda: found() == 5 * BLOCK, "the blocks in the other namespace")


def test_stages_of_several_groups(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    tokens = prompt(5 * BLOCK + 7)
    for name, loaded in (("one", 0), ("two", 5 * BLOCK)):
        engine = engines(name, specs=_gemma(sim, "fwwfww"), stages=(3, 3), blocks=96)
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


def test_a_stage_without_a_layer_of_a_group(engines: Any, sim: Any, prompt: Any, lines: list[str]) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    tokens = prompt(5 * BLOCK + 7)
    engine = engines("one", specs=_gemma(sim, "fffwww"), stages=(3, 3), blocks=96)
    assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
    (said,) = (line for line in lines if "runs without" in line)
    assert said.endswith("a pipeline stage has no layer of a KV cache group that another stage has layers of")


def test_beside_another_connector(engines: Any, sim: Any, prompt: Any, lines: list[str], tmp_path: Any) -> None:
    """It would get our ranks' word, and ends the engine then."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    tokens = prompt(5 * BLOCK + 7)
    engine = engines("one", beside=[example], stages=STAGES, disable_hybrid_kv_cache_manager=True)
    assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
    (said,) = (line for line in lines if "runs without" in line)
    assert "no such word from rank 0" in said


def test_an_engine_without_a_daemon_runs(staged: Any, sim: Any, prompt: Any, tmp_path: Any) -> None:
    engine = staged("one", endpoint=f"ipc://{tmp_path}/nobody.sock")
    tokens = prompt(3 * BLOCK)
    assert engine.generate(tokens, 3) == sim.expected(tokens, 3)


def _gemma(sim: Any, kinds: str) -> dict[str, Any]:
    """Return layers of full attention ("f") and with windows ("w"), in this order."""
    made = [sim.full(1), sim.windows(1, 2 * BLOCK)]
    return {f"model.layers.{n}.attn": next(iter(made["fw".index(kind)].values())) for n, kind in enumerate(kinds)}
