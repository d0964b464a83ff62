"""Hits that end within a block: with `--prefix-match-unit`, vLLM keeps the states where prompts end."""

from __future__ import annotations

from typing import Any

import pytest

BLOCK, UNIT = 128, 32


@pytest.fixture
def model(sim: Any) -> Any:
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    return sim.full(2, BLOCK) | sim.states(3, 2, "align", block=BLOCK)


@pytest.fixture
def fine(engines: Any, model: Any) -> Any:
    """`fine(name, **options)` makes an engine whose blocks have four units."""

    def make(name: str, **options: Any) -> Any:
        extra = {"block_size": 0, "verify": "all"} | options.pop("extra", {})
        options = {"specs": model, "block_size": BLOCK, "prefix_match_unit": UNIT, "blocks": 64} | options
        return engines(name, mamba_cache_mode="align", extra=extra, **options)

    return make


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("tokens", [UNIT + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + UNIT, 5 * BLOCK + 2 * UNIT + 9])
def test_a_second_engine_continues_where_a_prompt_ends(
    fine: Any, sim: Any, prompt: Any, idle: Any, tokens: int, is_async: bool
) -> None:
    one, two = (fine(name, async_scheduling=is_async) for name in ("one", "two"))
    asked = prompt(tokens)
    hit = (tokens - 1) // UNIT * UNIT
    for engine, loaded in ((one, 0), (two, hit)):
        assert engine.generate(asked, 9) == sim.expected(asked, 9)
        assert engine.prefills["r0"] == (tokens - loaded, 0, loaded)
        idle()


def test_another_end_of_a_unit_is_another_block(fine: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """A tail is named by its last unit: a prompt that differs there finds the whole blocks before it."""
    one, two = fine("one"), fine("two")
    asked = prompt(2 * BLOCK + 3 * UNIT + 5)
    one.generate(asked, 3)
    idle()
    end = 2 * BLOCK + 3 * UNIT
    for at, (shared, hit) in enumerate(((end - 1, 2 * BLOCK), (end, end))):
        other = prompt(4 * BLOCK, asked[:shared])
        assert two.reset()
        assert two.generate(other, 3) == sim.expected(other, 3)
        assert two.prefills[f"r{at}"] == (len(other) - hit, 0, hit)
        idle()


@pytest.mark.parametrize("grows", [50, 120])
def test_turns_of_a_conversation_find_as_much_as_on_the_device(
    fine: Any, sim: Any, prompt: Any, idle: Any, grows: int
) -> None:
    """Each turn is asked of another engine than the last one, and of one with vLLM's own cache alone."""
    alone, others = fine("alone", endpoint=None), [fine("one"), fine("two")]
    asked = prompt(3 * BLOCK + 7)
    for turn in range(5):
        answer = sim.expected(asked, 9)
        other = others[turn % 2]
        assert other.reset()
        for engine in (alone, other):
            assert engine.generate(asked, 9) == answer
        idle()
        ours, device = other.prefills[f"r{turn // 2}"], alone.prefills[f"r{turn}"]
        assert ours == (device[0], 0, device[1])
        asked = prompt(len(asked) + 9 + grows, [*asked, *answer])


def test_a_lost_tail_is_computed(fine: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one, two = fine("one"), fine("two")
    asked = prompt(2 * BLOCK + UNIT + 1)
    one.generate(asked, 3)
    idle()
    with two.held_copies(fail=True):
        two.add("failed", asked, 3)
        for _ in range(3):
            two.step()
    two.run(lambda: "failed" in two.finished)
    assert two.outputs["failed"] == sim.expected(asked, 3)
    assert two.counters["loads_failed"] == 1


def test_a_request_is_aborted_while_its_tail_loads(fine: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one, two = fine("one"), fine("two")
    asked = prompt(2 * BLOCK + UNIT + 1)
    one.generate(asked, 3)
    idle()
    with two.held_copies():
        two.add("aborted", asked, 3)
        two.step()
        two.abort("aborted")
        two.step()
    two.finish()
    assert two.generate(asked, 3) == sim.expected(asked, 3)


@pytest.mark.parametrize("name", ["Qwen3-Next with MTP", "Qwen3-Next with Eagle"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_drafter_s_tail_proves_the_next_unit(
    fine: Any, sim: Any, prompt: Any, idle: Any, tmp_path: Any, is_async: bool, name: str
) -> None:
    """The drafter's KV of its last token depends on the token after it."""
    drafter = {"method": "eagle", "num_speculative_tokens": 3, "model": str(tmp_path / "model")}
    specs = sim.full(1, BLOCK) | sim.states(3, 1, "align", 3, block=BLOCK) | sim.drafter(4, BLOCK)
    facts = {"specs": specs, "speculative_config": drafter, "mtp": "MTP" in name, "async_scheduling": is_async}
    one, two = fine("one", **facts), fine("two", **facts)
    for at, units in enumerate((3, 4, 5, 8, 9, 11)):
        asked = prompt(units * UNIT + 5)
        one.generate(asked, 5)
        idle()
        hit = (units - 1) * UNIT
        assert two.generate(asked, 5) == sim.expected(asked, 5)
        assert two.prefills[f"r{2 * at}"] == (len(asked) - hit, 0, hit)
        idle()
        assert two.reset()
        other = prompt(len(asked), asked[:hit])
        assert two.generate(other, 5) == sim.expected(other, 5)
        assert two.prefills[f"r{2 * at + 1}"][2] < hit
        idle()
        assert two.reset()


def test_two_ranks(fine: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one, two = (fine(name, tensor_parallel_size=2) for name in ("one", "two"))
    asked = prompt(2 * BLOCK + 2 * UNIT + 3)
    for engine, hit in ((one, 0), (two, len(asked) - 3)):
        assert engine.generate(asked, 3) == sim.expected(asked, 3)
        assert engine.prefills["r0"] == (len(asked) - hit, 0, hit)
        idle()
