"""Models with several KV cache groups, or windows alone: what is needed at a boundary is saved, found and loaded."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

BLOCK = 32
WINDOWS = ("Gemma 3", "gpt-oss", "two windows", "a small window", "windows alone")
STATES = ("Granite 4", "windows and states", "states alone")
MODELS = WINDOWS + STATES


@pytest.fixture
def model(sim: Any) -> Any:
    """`model(name)` returns the layers of a model like that one. vLLM makes three groups of Gemma 3's."""
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    return lambda name: {
        "Gemma 3": lambda: sim.full(1) | sim.windows(2, 2 * BLOCK, 1),
        "gpt-oss": lambda: sim.full(2) | sim.windows(2, BLOCK, 2),
        "two windows": lambda: sim.full(1) | sim.windows(1, 2 * BLOCK + 1, 1) | sim.windows(1, 4 * BLOCK, 2),
        "a small window": lambda: sim.full(1, BLOCK) | sim.windows(1, 20, 1),
        "windows alone": lambda: sim.windows(3, 3 * BLOCK),
        "Granite 4": lambda: sim.full(1) | sim.states(2, 1, "align"),
        "windows and states": lambda: sim.full(1) | sim.windows(1, 2 * BLOCK, 1) | sim.states(1, 2, "align"),
        "states alone": lambda: sim.states(3, 0, "align"),
    }[name]()


@pytest.fixture
def pair(engines: Any, model: Any) -> Any:
    """`pair(name, **options)` makes two engines with that model."""

    def make(name: str, **options: Any) -> Any:
        options = {"blocks": 96} | options
        if name in STATES:
            options |= {"mamba_cache_mode": "align"}
        return tuple(engines(each, specs=model(name), **options) for each in ("one", "two"))

    return make


def slowly(engine: Any, tokens: list[int], max_tokens: int) -> Any:
    """Generate in steps that are long enough for the daemon to answer what each of them has asked.

    vLLM gives the blocks behind a window away at once.
    """
    engine.add("slow", tokens, max_tokens)
    while engine.step():
        engine.scheduler.connector.own_side.session.ping()  # a session's requests are answered in order
    engine.step()
    return engine.outputs["slow"]


@pytest.mark.parametrize(
    ("name", "slot"), [*((name, BLOCK) for name in MODELS), *((name, 2 * BLOCK) for name in WINDOWS)]
)
def test_a_second_engine_continues_where_a_prompt_ends(
    pair: Any, sim: Any, prompt: Any, idle: Any, name: str, slot: int
) -> None:
    one, two = pair(name, extra={"block_size": slot, "verify": "all"})
    tokens = prompt(9 * BLOCK + 5)
    hit = len(tokens) // slot * slot
    for engine, loaded in ((one, 0), (two, hit)):
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()
    assert two.received == ["r0"]
    assert not any(layer.pages[0].any() for layer in two.runners[0].layers.values()), "vLLM's null block is written"


@pytest.mark.parametrize("name", ["Gemma 3", "windows alone"])
def test_a_prompt_that_ends_with_a_block_is_found_again(pair: Any, sim: Any, prompt: Any, idle: Any, name: str) -> None:
    """Its last token is computed again, so that its last block is not loaded; for a longer prompt it is."""
    one, two = pair(name)
    tokens = prompt(6 * BLOCK)
    one.generate(tokens)
    idle()
    assert two.generate(tokens, 2) == sim.expected(tokens, 2)
    assert two.prefills["r0"] == (BLOCK, 0, 5 * BLOCK)
    longer = prompt(8 * BLOCK, tokens)
    assert two.reset()
    assert two.generate(longer, 2) == sim.expected(longer, 2)
    assert two.prefills["r1"] == (2 * BLOCK, 0, 6 * BLOCK)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", WINDOWS)
def test_what_is_generated_is_found(pair: Any, sim: Any, prompt: Any, idle: Any, name: str, is_async: bool) -> None:
    """At each block of it: vLLM does not keep the window until it is known where the request ends."""
    one, two = pair(name, async_scheduling=is_async)
    tokens = prompt(2 * BLOCK + 9)
    assert slowly(one, tokens, 5 * BLOCK) == sim.expected(tokens, 5 * BLOCK)
    idle()
    whole = [*tokens, *sim.expected(tokens, 5 * BLOCK)]
    for at, shared in enumerate((len(whole), 5 * BLOCK + 3)):
        assert two.reset()
        follow_up = prompt(9 * BLOCK + 1, whole[:shared])
        assert two.generate(follow_up, 3) == sim.expected(follow_up, 3)
        hit = shared // BLOCK * BLOCK
        assert two.prefills[f"r{at}"] == (len(follow_up) - hit, 0, hit)


@pytest.mark.parametrize("name", ["Gemma 3", "windows alone"])
def test_prompts_that_begin_alike_continue_at_a_checkpoint(
    pair: Any, sim: Any, prompt: Any, idle: Any, name: str
) -> None:
    """In the middle of a prompt, a window is only saved there."""
    one, two = pair(name, extra={"checkpoint_tokens": 6 * BLOCK})
    tokens = prompt(20 * BLOCK)
    one.generate(tokens)
    idle()
    for at, (shared, hit) in enumerate(((5 * BLOCK, 0), (8 * BLOCK, 6 * BLOCK), (13 * BLOCK + 7, 12 * BLOCK))):
        assert two.reset()
        other = prompt(20 * BLOCK, tokens[:shared])
        assert two.generate(other) == sim.expected(other, 1)
        assert two.prefills[f"r{at}"] == (len(other) - hit, 0, hit)
        idle()


@pytest.mark.parametrize("name", [name for name in WINDOWS if name != "windows alone"])
def test_the_third_prompt_that_begins_alike_continues_where_the_second_parted(
    pair: Any, sim: Any, prompt: Any, idle: Any, name: str
) -> None:
    """The second one finds the blocks of full attention there, and saves the window when it comes by."""
    one, two = pair(name, extra={"checkpoint_tokens": 0, "verify": "all"})
    shared = prompt(9 * BLOCK + 5)
    for engine, hit in ((one, 0), (two, 0), (one, 9 * BLOCK)):
        assert engine.reset()
        tokens = prompt(16 * BLOCK, shared)
        engine.outputs.clear()
        engine.prefills.clear()
        assert slowly(engine, tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["slow"] == (len(tokens) - hit, 0, hit)
        idle()


@pytest.mark.parametrize("name", ["Gemma 3", "windows alone", *STATES])
def test_what_the_engine_has_of_its_own_is_not_loaded(pair: Any, sim: Any, prompt: Any, idle: Any, name: str) -> None:
    one, two = pair(name)
    tokens = prompt(12 * BLOCK + 3)
    one.generate(tokens)
    idle()
    begin = tokens[: 9 * BLOCK + 1]
    assert two.generate(begin) == sim.expected(begin, 1)
    before = two.counters.get("loaded_bytes", 0)
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r1"] == (3, 9 * BLOCK, 3 * BLOCK)
    assert two.counters["loaded_bytes"] > before


@pytest.fixture
def answer_in_turn(sim: Any, prompt: Any, idle: Any) -> Callable[[Any, Any], None]:
    """`answer_in_turn(one, two)` has each engine answer prompts together, some of which begin alike; the second one
    loads."""

    def answer(one: Any, two: Any) -> None:
        shared = prompt(4 * BLOCK + 1)
        prompts = {str(at): prompt(5 * BLOCK + 23 * at, shared if at % 2 else ()) for at in range(6)}
        for engine in (one, two, one):
            engine.outputs.clear()
            engine.generate_all(prompts, 70)
            assert engine.outputs == {name: sim.expected(tokens, 70) for name, tokens in prompts.items()}
            idle()
            assert engine.reset()
        assert two.received

    return answer


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_windows_given_away_and_preemption(pair: Any, answer_in_turn: Any, name: str, is_async: bool) -> None:
    """Blocks behind a window go to other requests while the request runs, and all of them where memory is short."""
    options = {"blocks": 40, "max_model_len": 480, "max_num_batched_tokens": 96, "async_scheduling": is_async}
    one, two = pair(name, **options, extra={"checkpoint_tokens": 4 * BLOCK})
    answer_in_turn(one, two)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_given_to_others_while_they_are_saved(pair: Any, prompt: Any, one_by_one: Any, name: str) -> None:
    """Each prompt takes blocks of the one before it, whose save has just begun, or is not yet answered."""
    prompts = [prompt(20 * BLOCK + at) for at in range(20)]
    one, two = pair(name, blocks=60, max_model_len=800, max_num_seqs=1)
    one_by_one((one, two), prompts)
    assert two.received


@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_are_given_to_others_before_the_daemon_answers(
    pair: Any, daemon: Any, sim: Any, prompt: Any, idle: Any, name: str
) -> None:
    """What is answered too late is not saved: another request has the blocks behind the window by then."""
    first, second = prompt(9 * BLOCK + 1), prompt(9 * BLOCK)
    options = {"blocks": 60, "max_model_len": 800, "max_num_batched_tokens": 10 * BLOCK}
    one, two = pair(name, **options, extra={"checkpoint_tokens": BLOCK})
    one.add("first", first, 12 * BLOCK)
    one.step()
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(2):
            one.step()
        one.add("second", second, 3 * BLOCK)
        one.run(lambda: "second" in one.finished)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert "first" not in one.finished
    one.run()
    one.step()
    assert one.outputs["first"] == sim.expected(first, 12 * BLOCK)
    idle()
    for blocks in range(1, 10):
        assert two.reset()
        other = prompt(14 * BLOCK, first[: blocks * BLOCK])
        assert two.generate(other) == sim.expected(other, 1)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("name", ["Gemma 3", "windows alone"])
def test_a_load_that_fails(pair: Any, sim: Any, prompt: Any, idle: Any, spoil: Any, name: str, policy: str) -> None:
    """It fails as a whole: before a wrong block there is none of the window that attention would read."""
    one, two = pair(name, extra={"verify": "all", "kv_load_failure_policy": policy})
    tokens = prompt(9 * BLOCK + 5)
    one.generate(tokens)
    idle()
    spoil(one, tokens, block=8)
    two.add("r", tokens, 3)
    two.run()
    two.step()
    assert two.received == ["r"] and two.counters["loads_failed"] == two.counters["blocks_corrupt"] == 1
    if policy == "fail":
        assert two.finished == {"r": "error"} and not two.outputs["r"]
        return
    assert two.outputs["r"] == sim.expected(tokens, 3)
    assert two.prefills["r"] == (len(tokens), 0, 0)
    idle()
    assert two.reset()
    assert two.generate(tokens, 3, "again") == sim.expected(tokens, 3)
    assert two.prefills["again"] == (5, 0, 9 * BLOCK), "the wrong block was forgotten, and has come again"


@pytest.mark.parametrize("blocks", range(6))
@pytest.mark.parametrize("name", ["Gemma 3", "a small window", "windows alone", *STATES])
def test_vllm_takes_fewer_tokens_than_it_is_offered(
    pair: Any, unleased: Any, sim: Any, prompt: Any, idle: Any, take: Any, name: str, blocks: int
) -> None:
    """It then continues at another boundary, for which nothing was leased, perhaps: such a load fails."""
    one, two = pair(name)
    tokens = prompt(5 * BLOCK + 3)
    one.generate(tokens)
    idle()
    offers = take(two, blocks * BLOCK)
    two.add("r", tokens, 2)
    two.step()
    assert offers == [(5 * BLOCK, True)]
    two.run()
    assert two.outputs["r"] == sim.expected(tokens, 2)
    unleased()
    failed = 0 < blocks < 5
    assert two.counters.get("loads_of_another_boundary", 0) == int(failed)
    if not failed:
        assert two.prefills["r"] == (len(tokens) - blocks * BLOCK, 0, blocks * BLOCK)


@pytest.mark.parametrize("name", ["Gemma 3", "windows alone", *STATES])
def test_a_request_is_aborted_while_it_loads(pair: Any, sim: Any, prompt: Any, idle: Any, name: str) -> None:
    one, two = pair(name)
    tokens = prompt(12 * BLOCK)
    one.generate(tokens)
    idle()
    two.delay(0.05)
    two.add("r", tokens, 4)
    two.step()
    two.abort("r")
    two.run()
    assert two.received == ["r"]
    assert two.generate(tokens, 2, "again") == sim.expected(tokens, 2)


@pytest.mark.parametrize("name", ["Gemma 3", "windows alone", *STATES])
def test_two_ranks(pair: Any, sim: Any, prompt: Any, idle: Any, name: str) -> None:
    one, two = pair(name, tensor_parallel_size=2, distributed_executor_backend="mp")
    tokens = prompt(9 * BLOCK + 5)
    for engine, loaded in ((one, 0), (two, 9 * BLOCK)):
        assert engine.generate(tokens, 3) == sim.expected(tokens, 3)
        assert engine.prefills["r0"] == (len(tokens) - loaded, 0, loaded)
        idle()


@pytest.mark.parametrize("name", STATES)
def test_states_that_vllm_retains_are_found(pair: Any, sim: Any, prompt: Any, idle: Any, name: str) -> None:
    """At the ends of chunks, and of blocks that are generated, where vLLM is told to retain them."""
    one, two = pair(
        name,
        prefix_cache_retention_interval=2 * BLOCK,
        max_num_batched_tokens=4 * BLOCK,
        extra={"checkpoint_tokens": 2 * BLOCK},
    )
    tokens = prompt(9 * BLOCK + 5)
    assert slowly(one, tokens, 4 * BLOCK) == sim.expected(tokens, 4 * BLOCK)
    idle()
    whole = [*tokens, *sim.expected(tokens, 4 * BLOCK)]
    for at, (shared, hit) in enumerate(
        ((6 * BLOCK, 4 * BLOCK), (10 * BLOCK + 5, 10 * BLOCK), (len(whole), 12 * BLOCK))
    ):
        assert two.reset()
        other = prompt(15 * BLOCK, whole[:shared])
        assert two.generate(other, 3) == sim.expected(other, 3)
        assert two.prefills[f"r{at}"] == (len(other) - hit, 0, hit)


# With a drafter that reads the next token: the KV of a block's last token depends on the block after it.

WINDOWS_DRAFTED = ("Gemma 3 with Eagle", "gpt-oss with Eagle", "Eagle with a window", "MTP with a window")
STATES_DRAFTED = ("Qwen3-Next with MTP", "Qwen3-Next with Eagle")
DRAFTED = WINDOWS_DRAFTED + STATES_DRAFTED


@pytest.fixture
def drafted(sim: Any, engines: Any, tmp_path: Any) -> Any:
    """`drafted(name, **options)` makes two engines with that model and its drafter."""
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    layers = {
        "Gemma 3 with Eagle": lambda: sim.full(1) | sim.windows(2, 2 * BLOCK, 1) | sim.drafter(3),
        "gpt-oss with Eagle": lambda: sim.full(1) | sim.windows(2, BLOCK, 1) | sim.drafter(3),
        "Eagle with a window": lambda: sim.full(1) | sim.windows(1, 2 * BLOCK, 1) | sim.drafter(2, window=2 * BLOCK),
        "MTP with a window": lambda: sim.full(2) | sim.windows(1, BLOCK, 2) | sim.drafter(3, window=3 * BLOCK),
        "Qwen3-Next with MTP": lambda: sim.full(1) | sim.states(3, 1, "align", 3) | sim.drafter(4),
        "Qwen3-Next with Eagle": lambda: sim.full(1) | sim.states(3, 1, "align", 3) | sim.drafter(4),
    }

    def make(name: str, **options: Any) -> Any:
        drafter = {"method": "eagle", "num_speculative_tokens": 3, "model": str(tmp_path / "model")}
        drafter |= options.pop("drafter", {})
        options = {"blocks": 96, "speculative_config": drafter, "mtp": "MTP" in name} | options
        if name in STATES_DRAFTED:
            options |= {"mamba_cache_mode": "align"}
        return tuple(engines(each, specs=layers[name](), **options) for each in ("one", "two"))

    return make


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", DRAFTED)
def test_a_drafter_has_the_last_block_of_a_hit_computed_again(
    drafted: Any, sim: Any, prompt: Any, idle: Any, name: str, is_async: bool
) -> None:
    """Another token after a block is another KV of the drafter in its last place."""
    extra = {"checkpoint_tokens": BLOCK, "verify": "all"}
    retained = {"prefix_cache_retention_interval": BLOCK, "max_num_batched_tokens": BLOCK + 8}
    one, two = drafted(name, async_scheduling=is_async, extra=extra, **retained)
    shared = prompt(6 * BLOCK)
    for engine, hit in ((one, 0), (two, 5 * BLOCK)):
        tokens = prompt(8 * BLOCK + 7, shared)
        assert slowly(engine, tokens, 5) == sim.expected(tokens, 5)
        assert engine.prefills["slow"] == (len(tokens) - hit, 0, hit)
        idle()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", [name for name in DRAFTED if name not in STATES_DRAFTED])
def test_with_a_drafter_prompts_part_one_block_earlier(
    drafted: Any, sim: Any, prompt: Any, idle: Any, name: str, is_async: bool
) -> None:
    extra = {"checkpoint_tokens": 0, "verify": "all"}
    one, two = drafted(name, async_scheduling=is_async, extra=extra)
    shared = prompt(9 * BLOCK + 5)
    for engine, hit in ((one, 0), (two, 0), (one, 8 * BLOCK)):
        assert engine.reset()
        engine.outputs.clear()
        engine.prefills.clear()
        tokens = prompt(13 * BLOCK + 7, shared)
        assert slowly(engine, tokens, 5) == sim.expected(tokens, 5)
        assert engine.prefills["slow"] == (len(tokens) - hit, 0, hit)
        idle()


@pytest.mark.parametrize("rest", [0, 1, 5])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", DRAFTED)
def test_a_prompt_is_found_again_up_to_the_block_before_its_last(
    drafted: Any, sim: Any, prompt: Any, idle: Any, name: str, is_async: bool, rest: int
) -> None:
    one, two = drafted(name, async_scheduling=is_async, extra={"checkpoint_tokens": 0, "verify": "all"})
    tokens = prompt(8 * BLOCK + rest)
    for engine, hit in ((one, 0), (two, 7 * BLOCK)):
        assert engine.generate(tokens, 40) == sim.expected(tokens, 40)
        assert engine.prefills["r0"] == (len(tokens) - hit, 0, hit)
        idle()
    assert two.received == ["r0"]


def test_vllm_may_be_told_to_keep_the_last_block(drafted: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Engines that are told so share no blocks with others."""
    pairs = [drafted("Gemma 3 with Eagle", drafter={"disable_eagle_block_drop": keeps}) for keeps in (True, False)]
    tokens = prompt(8 * BLOCK + 5)
    for pair, found in zip(pairs, (8 * BLOCK, 7 * BLOCK), strict=True):
        for engine, hit in zip(pair, (0, found), strict=True):
            assert engine.generate(tokens, 5) == sim.expected(tokens, 5)
            assert engine.prefills["r0"] == (len(tokens) - hit, 0, hit)
            idle()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", WINDOWS_DRAFTED)
def test_what_is_generated_from_drafts_is_found(
    drafted: Any, sim: Any, prompt: Any, idle: Any, name: str, is_async: bool
) -> None:
    one, two = drafted(name, async_scheduling=is_async)
    tokens = prompt(2 * BLOCK + 9)
    assert slowly(one, tokens, 5 * BLOCK) == sim.expected(tokens, 5 * BLOCK)
    idle()
    whole = [*tokens, *sim.expected(tokens, 5 * BLOCK)]
    for at, shared in enumerate((len(whole), 5 * BLOCK + 3)):
        assert two.reset()
        follow_up = prompt(9 * BLOCK + 1, whole[:shared])
        assert two.generate(follow_up, 3) == sim.expected(follow_up, 3)
        hit = shared // BLOCK * BLOCK - BLOCK
        assert two.prefills[f"r{at}"] == (len(follow_up) - hit, 0, hit)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", STATES_DRAFTED)
def test_states_among_drafts(drafted: Any, sim: Any, prompt: Any, idle: Any, name: str, is_async: bool) -> None:
    """A state at the end of a block is found, although drafts beyond it were computed, and perhaps kept."""
    one, two = drafted(name, async_scheduling=is_async, prefix_cache_retention_interval=BLOCK)
    hits = 0
    for at in range(12):
        tokens = prompt(2 * BLOCK + 9 + at)
        assert slowly(one, tokens, 4 * BLOCK) == sim.expected(tokens, 4 * BLOCK)
        idle()
        follow_up = prompt(9 * BLOCK + 1, [*tokens, *sim.expected(tokens, 4 * BLOCK)])
        assert two.generate(follow_up, 3) == sim.expected(follow_up, 3)
        hits += two.prefills[f"r{at}"][2] > 2 * BLOCK
    assert hits


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_in_chunks_and_on_little_memory(drafted: Any, answer_in_turn: Any, name: str, is_async: bool) -> None:
    options = {"blocks": 48, "max_model_len": 480, "max_num_batched_tokens": 96, "async_scheduling": is_async}
    one, two = drafted(name, **options, extra={"checkpoint_tokens": 4 * BLOCK})
    answer_in_turn(one, two)


@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_while_blocks_are_given_to_others(drafted: Any, prompt: Any, one_by_one: Any, name: str) -> None:
    prompts = [prompt(12 * BLOCK + at) for at in range(20)]
    one, two = drafted(name, blocks=64, max_model_len=480, max_num_seqs=1)
    one_by_one((one, two), prompts)
    assert two.received


@pytest.mark.parametrize("name", DRAFTED)
def test_what_a_drafting_engine_has_of_its_own_is_not_loaded(
    drafted: Any, sim: Any, prompt: Any, idle: Any, name: str
) -> None:
    one, two = drafted(name)
    tokens = prompt(12 * BLOCK + 3)
    one.generate(tokens)
    idle()
    begin = tokens[: 9 * BLOCK + 1]
    assert two.generate(begin) == sim.expected(begin, 1)
    assert two.generate(tokens, 3) == sim.expected(tokens, 3)
    assert two.prefills["r1"] == (BLOCK + 3, 8 * BLOCK, 3 * BLOCK)
