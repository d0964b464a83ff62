"""Lazy saves, by the free queue of vLLM's own block pool; and saves of blocks that are asked for more than once."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest

BLOCK = 32
LAZY = {"save_mode": "lazy"}


def small(engines: Any, name: str, blocks: int = 32, **options: Any) -> Any:
    """Return an engine of 31 device blocks, whose steps schedule 4 blocks at most: it looks ahead by 8.

    What the engine asks of the daemon is answered before the next step: else blocks may be given away before.
    """
    engine = engines(name, blocks=blocks, max_model_len=480, max_num_batched_tokens=4 * BLOCK, extra=LAZY, **options)
    runner, session = engine.runners[0], engine.connector.own_side.session
    scheduler = engine.connector._scheduler
    forward, finished = runner._forward, scheduler.finished

    def patient_forward(step: Any) -> Any:
        session.ping()
        return forward(step)

    def patient_finished(*request: Any) -> None:
        finished(*request)
        session.ping()

    runner._forward, scheduler.finished = patient_forward, patient_finished
    return engine


def test_what_the_device_keeps_is_not_saved(engines: Any, stored: Any, prompt: Any, idle: Any) -> None:
    before = stored()
    one = small(engines, "one")
    for _ in range(2):
        one.generate(prompt(5 * BLOCK + 3))
    idle()
    assert stored() == before and "saves_missed" not in one.counters


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_the_device_evicts_is_found_on_the_host(
    engines: Any, sim: Any, prompt: Any, idle: Any, overlaps: bool
) -> None:
    one, two = small(engines, "one", async_scheduling=overlaps), engines("two")
    prompts = [prompt(7 * BLOCK + 3) for _ in range(12)]
    for tokens in prompts:
        assert one.generate(tokens) == sim.expected(tokens, 1)
    idle()
    assert not any(one.counters.get(name) for name in ("saves_missed", "saves_no_parent", "saves_given_away"))
    for tokens in prompts[:8]:
        assert two.generate(tokens) == sim.expected(tokens, 1)
    assert [two.prefills[f"r{number}"] for number in range(8)] == [(3, 0, 7 * BLOCK)] * 8
    assert one.generate(prompts[0]) == sim.expected(prompts[0], 1), "its own engine finds it, too"
    assert one.received


def test_ancestors_are_saved_first_and_together(engines: Any, stored: Any, prompt: Any, idle: Any) -> None:
    """The end of a chain is evicted before its beginning: without what is above it, it would be of no use."""
    one = small(engines, "one")
    before = stored()
    one.generate(tokens := prompt(10 * BLOCK + 3))
    one.generate(prompt(10 * BLOCK + 3))
    one.generate(prompt(5 * BLOCK + 3))
    idle()
    assert stored() >= before + 10
    two = engines("two")
    two.generate(tokens)
    assert two.prefills["r0"] == (3, 0, 10 * BLOCK)


def test_a_prefix_that_is_found_on_the_device_twice_is_saved(engines: Any, stored: Any, prompt: Any, idle: Any) -> None:
    one, two = small(engines, "one"), engines("two")
    shared = prompt(4 * BLOCK)
    for number in range(3):
        before = stored()
        one.generate([*shared, *prompt(2 * BLOCK + 5)])
        idle()
        assert stored() - before == (4 if number == 2 else 0)
    two.generate([*shared, *prompt(2 * BLOCK + 5)])
    assert two.prefills["r0"] == (2 * BLOCK + 5, 0, 4 * BLOCK)


def test_a_conversation_is_saved_as_far_as_it_is_evicted(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one = small(engines, "one")
    said: dict[int, list[int]] = {number: [] for number in range(7)}
    for _ in range(4):
        for number, before in said.items():
            tokens = [*before, *prompt(2 * BLOCK)]
            answer = one.generate(tokens, 4)
            assert answer == sim.expected(tokens, 4)
            said[number] = [*tokens, *answer]
            idle()
    assert one.received and not one.counters.get("saves_no_parent")


def test_requests_that_run_together_on_little_memory(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one = small(engines, "one", max_num_seqs=4)
    prompts = {f"p{number}": prompt((number % 5 + 3) * BLOCK + 5) for number in range(12)}
    for _ in range(2):
        one.generate_all(prompts, 3)
        assert {name: one.outputs[name] for name in prompts} == {
            name: sim.expected(tokens, 3) for name, tokens in prompts.items()
        }
        one.outputs.clear()
        idle()
    assert one.received


def test_a_request_ends_whose_blocks_the_next_one_gets(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one, two = small(engines, "one", blocks=16), engines("two")
    prompts = {f"p{number}": prompt(12 * BLOCK + 3) for number in range(4)}
    one.generate_all(prompts, 1)
    idle()
    assert "saves_missed" not in one.counters
    for name in ("p0", "p1", "p2"):
        two.generate(prompts[name], name=name)
        assert two.prefills[name] == (3, 0, 12 * BLOCK)


def test_a_request_that_has_ended_is_let_go_before_its_blocks_are(
    engines: Any, sim: Any, prompt: Any, idle: Any
) -> None:
    """Of a prompt that is a tensor of embeddings, nothing but hashes may stay for as long as the device has them."""
    one, two = small(engines, "one", enable_prompt_embeds=True), engines("two", enable_prompt_embeds=True)
    embeddings = sim.torch.randn(7 * BLOCK + 3, 64)
    request = ref(one.add("embeddings", embeddings))
    one.run()
    one.step()
    gc.collect()
    assert request() is None
    for _ in range(6):
        one.generate(prompt(7 * BLOCK + 3))
    idle()
    two.generate(embeddings)
    assert two.prefills["r0"] == (3, 0, 7 * BLOCK)


def test_a_reset_forgets_what_was_to_be_saved(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    one = small(engines, "one")
    one.generate(tokens := prompt(7 * BLOCK + 3))
    one.update_weights()
    assert one.reset(connector=True)
    for _ in range(6):
        one.generate(prompt(7 * BLOCK + 3))
    idle()
    assert one.generate(tokens) == sim.expected(tokens, 1), "computed: of the old weights, nothing is found"
    assert not one.received


def test_windows_are_saved_eagerly(
    engines: Any, sim: Any, stored: Any, prompt: Any, idle: Any, lines: list[str]
) -> None:
    if not sim.HAS_GROUPS:
        pytest.skip("before 0.32, engines with windows are declined")
    before = stored()
    one = engines("one", specs=sim.full(1) | sim.windows(2, 3 * BLOCK, first=1), extra=LAZY)
    assert [line for line in lines if "save_mode: lazy needs" in line]
    one.generate(prompt(7 * BLOCK + 3))
    idle()
    assert stored() > before


def test_without_vllm_s_own_prefix_cache_blocks_are_saved_eagerly(
    engines: Any, sim: Any, stored: Any, prompt: Any, idle: Any, lines: list[str]
) -> None:
    """It is what says which blocks are evicted next, and what they hold."""
    before = stored()
    one = engines("one", blocks=16, max_model_len=480, enable_prefix_caching=False, extra=LAZY)
    assert len([line for line in lines if "save_mode: lazy needs vLLM's own prefix cache" in line]) == 1
    first, second = prompt(7 * BLOCK + 3), prompt(7 * BLOCK + 3)
    for tokens in (first, second):
        one.generate(tokens)
        idle()
    assert stored() - before == 14
    assert one.generate(first, name="again") == sim.expected(first, 1)
    assert one.prefills["again"] == (3, 0, 7 * BLOCK)


def test_blocks_are_saved_once_enough_requests_have_asked_for_them(
    engines: Any, stored: Any, prompt: Any, idle: Any
) -> None:
    one = engines("one", extra={"min_hits": 2})
    shared = prompt(4 * BLOCK)
    before = stored()
    one.generate([*shared, *prompt(2 * BLOCK + 3)])
    idle()
    assert stored() == before
    one.generate([*shared, *prompt(2 * BLOCK + 3)], 2 * BLOCK)
    idle()
    assert stored() == before + 4
