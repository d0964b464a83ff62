"""KV events: what vLLM publishes of its own blocks, and what it publishes of those that it could load from the host."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest

BLOCK = 32


@pytest.fixture
def publishing(engines: Any) -> Any:
    """`publishing(name, **options)` makes an engine that publishes KV events."""
    from vllm.config.kv_events import KVEventsConfig

    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return lambda name, **options: engines(name, kv_events_config=config, **options)


def of(events: list[Any], medium: str) -> list[Any]:
    return [event for event in events if getattr(event, "medium", None) == medium]


def follow(engine: Any, medium: str = "CPU") -> dict[Any, list[int]]:
    """Return what a router that follows the events knows: by block, all tokens up to its end."""
    known: dict[Any, list[int]] = {}
    for event in of(engine.published, medium):
        if type(event).__name__ == "BlockRemoved":
            for name in event.block_hashes:
                del known[name]
            continue
        assert event.block_size == BLOCK and len(event.token_ids) == BLOCK * len(event.block_hashes)
        above = known[event.parent_block_hash] if event.parent_block_hash is not None else []
        for at, name in enumerate(event.block_hashes):
            assert name not in known, "stored twice"
            above = known[name] = above + list(event.token_ids[at * BLOCK : (at + 1) * BLOCK])
    return known


def described(engine: Any, medium: str) -> dict[Any, dict[str, Any]]:
    """Return what the events say of each block, by KV cache group and hash, but for the medium.

    Only of groups that keep all blocks: others' events have tokens of more blocks than they name.
    """
    known: dict[Any, dict[str, Any]] = {}
    for event in of(engine.published, medium):
        if type(event).__name__ != "BlockStored" or event.kv_cache_spec_sliding_window:
            continue
        facts = {name: getattr(event, name) for name in event.__struct_fields__ if name != "medium"}
        names, tokens, keys = (facts.pop(name) for name in ("block_hashes", "token_ids", "extra_keys"))
        for at, name in enumerate(names):
            some = tokens[at * event.block_size : (at + 1) * event.block_size]
            known[event.group_idx, name] = facts | {"tokens": some, "extra_keys": keys and keys[at]}
            facts |= {"parent_block_hash": name}
    return known


def promised(engine: Any, request: Any) -> int:
    """Return how many tokens of a request are on the host, by the blocks that events name."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    known = follow(engine)
    names = [maybe_convert_block_hash(name) for name in request.block_hashes]
    return BLOCK * sum(1 for _ in itertools.takewhile(known.__contains__, names))


def prefixes(tokens: list[int]) -> list[list[int]]:
    return [tokens[: end + BLOCK] for end in range(0, len(tokens) // BLOCK * BLOCK, BLOCK)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_saved_and_found_is_published(publishing: Any, sim: Any, prompt: Any, idle: Any, ranks: int) -> None:
    """While several requests run, in chunks, and generate."""
    prompts = {f"{at}": prompt(2 * BLOCK + 31 * at) for at in range(5)}
    options = {"tensor_parallel_size": ranks, "max_num_batched_tokens": 70}
    one, two = publishing("one", **options), publishing("two", **options)
    for name, tokens in prompts.items():
        one.add(name, tokens, 50)
    one.run()
    one.step()
    idle()
    for at in range(2):  # verdicts come with a step, and events with the one after
        one.generate(prompt(9), name=f"later {at}")
    whole = [tokens + sim.expected(tokens, 49) for tokens in prompts.values()]
    assert sorted(follow(one).values()) == sorted(prefix for tokens in whole for prefix in prefixes(tokens))
    longest = whole[-1]
    two.generate(longest, 2)
    found = sorted(follow(two).values())
    assert found == sorted(prefixes(longest[: (len(longest) - 1) // BLOCK * BLOCK])), "what the lookup has found"


def test_what_is_saved_after_its_request_has_ended_is_published(publishing: Any, prompt: Any, idle: Any) -> None:
    one = publishing("one", max_num_batched_tokens=4 * BLOCK, extra={"save_mode": "lazy"})
    shared = prompt(4 * BLOCK)
    for _ in range(3):  # the third request finds the shared blocks for the second time: those of the first are saved
        one.generate([*shared, *prompt(BLOCK + 5)])
        idle()
    for at in range(2):
        one.generate(prompt(9), name=f"later {at}")
    assert sorted(follow(one).values()) == sorted(prefixes(shared))


def test_what_vllm_publishes_of_the_device_is_as_without_us(publishing: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Loaded blocks are published as computed ones are, once they have come."""
    prompts = {f"{at}": prompt(2 * BLOCK + 31 * at) for at in range(5)}
    engines = publishing("none", endpoint=None), publishing("one"), publishing("two")
    published = []
    for engine in engines:
        for name, tokens in prompts.items():
            engine.generate(tokens, 40, name)
            if engine is not engines[0]:
                idle()
        published.append(follow(engine, "GPU"))
    assert engines[2].received
    assert published[0] == published[1] == published[2]


def test_a_reset_of_the_connector_removes_all(publishing: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens = prompt(4 * BLOCK)
    one = publishing("one")
    for name in ("first", "again"):
        one.generate(tokens, 3, name)
        idle()
    assert len(follow(one)) == 4
    assert one.reset(connector=True)
    one.generate(prompt(5), name="last")
    assert not follow(one)


@pytest.mark.parametrize("shared", [1, 3, 4, 5, 7])
def test_what_is_published_can_be_loaded(
    publishing: Any, sim: Any, prompt: Any, idle: Any, lines: list[str], shared: int
) -> None:
    """However many tokens prompts have in common: cached blocks are no larger than those that events name."""
    one = publishing("one", extra={"block_size": 4 * BLOCK})
    assert sum("block_size 128 is not used" in line for line in lines) == 1
    tokens = prompt(9 * BLOCK)
    one.generate(tokens)
    idle()
    for at in range(200):  # what the ranks report comes with later steps
        if len(follow(one)) < 9:
            one.generate(prompt(9), name=f"later {at}")
    assert one.reset()
    request = one.add("second", prompt(9 * BLOCK, tokens[: shared * BLOCK]), 1)
    expected = promised(one, request)
    assert expected == shared * BLOCK
    one.run()
    one.step()
    assert one.prefills["second"][2] == expected


def test_cached_blocks_are_small_only_for_events(publishing: Any, engines: Any, sim: Any, lines: list[str]) -> None:
    sizes = []
    for make in (publishing, engines):
        sizes.append(make("one", extra={"block_size": 0}).connector._scheduler._group.slot_tokens)
    assert sizes == [BLOCK, 4 * BLOCK]
    assert not any("is not used" in line for line in lines)


@pytest.mark.parametrize("what", ["tokens", "salt", "adapter", "embeddings", "session"])
def test_a_block_on_the_host_is_described_as_on_the_device(
    publishing: Any, sim: Any, prompt: Any, idle: Any, tmp_path: Any, what: str
) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    if what == "session" and "session_id" not in inspect.signature(Request).parameters:
        pytest.skip("before vLLM 0.32, events name no session")
    folder = str(sim.write_adapter(tmp_path / "adapter", "one"))
    options, facts = {
        "tokens": ({}, {}),
        "salt": ({}, {"cache_salt": "tenant"}),
        "adapter": ({"enable_lora": True}, {"lora_request": LoRARequest("x", 7, folder)}),
        "embeddings": ({"enable_prompt_embeds": True}, {}),
        "session": ({}, {"session_id": "s"}),
    }[what]
    one, two = publishing("one", **options), publishing("two", **options)
    tokens: Any = prompt(4 * BLOCK + 9)
    if what == "embeddings":
        tokens = sim.torch.tensor(tokens, dtype=sim.torch.bfloat16).view(-1, 1).repeat(1, 16)
    one.generate(tokens, 2 * BLOCK, **facts)
    idle()
    for at in range(2):
        one.generate(prompt(9), name=f"later {at}")
    two.generate(tokens, 2 * BLOCK, **facts)
    for engine, blocks in ((one, 6), (two, 4)):
        host, device = described(engine, "CPU"), described(engine, "GPU")
        assert len(host) == blocks
        assert host == {name: device[name] for name in host}


@pytest.mark.parametrize("name", ["one size", "two sizes", "two full groups"])
def test_blocks_of_several_groups_are_described_as_on_the_device(
    publishing: Any, sim: Any, prompt: Any, idle: Any, name: str
) -> None:
    """Of blocks of two sizes, the smaller ones are those of full attention."""
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    specs = {
        "one size": sim.full(1) | sim.windows(2, 2 * BLOCK, 1),
        "two sizes": sim.full(1) | sim.windows(2, 2 * BLOCK, 1, dtype=sim.torch.bfloat16),
        "two full groups": sim.full(4) | sim.windows(2, 2 * BLOCK, 4),
    }[name]
    one, tokens = publishing("one", specs=specs, blocks=128), prompt(8 * BLOCK + 9)
    one.generate(tokens)
    idle()
    for at in range(2):
        one.generate(prompt(9), name=f"later {at}")
    host, device = described(one, "CPU"), described(one, "GPU")
    assert len(host) == (16 if name == "two full groups" else 8)
    assert host == {name: device[name] for name in host}
    assert one.reset(connector=True)
    one.generate(prompt(5), name="last")
    removed = [event for event in of(one.published, "CPU") if type(event).__name__ == "BlockRemoved"]
    assert {(event.group_idx, name) for event in removed for name in event.block_hashes} == host.keys()
