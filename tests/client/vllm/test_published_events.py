"""KV events: what vLLM publishes of its own blocks, and what it publishes of those that it could load from the host."""

from __future__ import annotations

import inspect
import itertools
import time
from typing import Any

import pytest

from kvcache_server.admin_client import AdminClient

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


# Several KV cache groups.

STATES = ("states", "windows and states", "states alone")
GROUPS = ("one size", "two sizes", "two full groups", "a small window", "windows alone", *STATES)


@pytest.fixture
def grouped(publishing: Any, sim: Any) -> Any:
    """`grouped(name)` makes two engines with such groups that keep windows and states after each fourth block, on the
    device, too."""
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    half = sim.torch.bfloat16
    models = {
        "one size": lambda: sim.full(1) | sim.windows(2, 2 * BLOCK, 1),
        "two sizes": lambda: sim.full(1) | sim.windows(2, 2 * BLOCK, 1, dtype=half),
        "two full groups": lambda: sim.full(4) | sim.windows(2, 2 * BLOCK, 4),
        "a small window": lambda: sim.full(1) | sim.windows(1, 20, 1) | sim.windows(1, 3 * BLOCK, 2, dtype=half),
        "windows alone": lambda: sim.windows(3, 3 * BLOCK),
        "states": lambda: sim.full(1) | sim.states(2, 1, "align"),
        "windows and states": lambda: sim.full(1) | sim.windows(1, 2 * BLOCK, 1) | sim.states(1, 2, "align"),
        "states alone": lambda: sim.states(3, 0, "align"),
    }

    def make(name: str) -> Any:
        options = {"mamba_cache_mode": "align"} if name in STATES else {}
        options |= {"prefix_cache_retention_interval": 4 * BLOCK, "max_num_batched_tokens": 4 * BLOCK}
        options |= {"specs": models[name](), "blocks": 128, "extra": {"checkpoint_tokens": 4 * BLOCK}}
        return tuple(publishing(each, **options) for each in ("one", "two"))

    return make


@pytest.fixture
def report(prompt: Any, idle: Any) -> Any:
    """`report(engine)` lets it publish what it has saved: verdicts come with a step, and events with the one after."""
    numbers = itertools.count()

    def run(engine: Any) -> None:
        scheduler, end = engine.connector._scheduler, time.monotonic() + 30
        while scheduler._saves.waiting or scheduler.events._shipped:
            assert time.monotonic() < end, "the verdicts do not come"
            engine.generate(prompt(9), name=f"report {next(numbers)}")
        engine.generate(prompt(9), name=f"report {next(numbers)}")
        idle()

    return run


def known_blocks(engine: Any) -> dict[tuple[int, Any], Any]:
    """Return the host's blocks that a router knows which follows the groups, with the event that named each.

    Several blocks of the engine are cached together if groups have blocks of different sizes, and may be in several
    cached blocks. As vLLM asks of routers, this one counts.
    """
    known: dict[tuple[int, Any], list[Any]] = {}
    sizes = {event.block_size for event in engine.published if type(event).__name__ == "BlockStored"}
    for event in of(engine.published, "CPU"):
        for name in event.block_hashes:
            if type(event).__name__ == "BlockStored":
                known.setdefault((event.group_idx, name), []).append(event)
                assert len(sizes) > 1 or len(known[event.group_idx, name]) == 1, "stored twice"
            elif len(known[event.group_idx, name]) == 1:
                del known[event.group_idx, name]
            else:
                known[event.group_idx, name].pop()
    return {place: events[0] for place, events in known.items()}


def loadable(engine: Any, request: Any) -> int:
    """Return how many tokens of a request such a router expects the engine to load."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    known, unit = known_blocks(engine), engine.scheduler.kv_cache_manager.block_pool.hash_block_size
    names = [maybe_convert_block_hash(each) for each in request.block_hashes]
    groups = {each.group_idx: each for each in engine.published if type(each).__name__ == "BlockStored"}
    step, found = max(each.block_size for each in groups.values()), 0
    for end in range(step, request.num_tokens, step):
        for number, facts in groups.items():
            size, window = facts.block_size, facts.kv_cache_spec_sliding_window
            first = max(0, end - window + 1) if window else end - size if facts.kv_cache_spec_kind == "mamba" else 0
            ends = range(first // size * size + size, end + 1, size)
            if any((number, names[at // unit - 1]) not in known for at in ends):
                break
        else:
            found = end
    return found


@pytest.mark.parametrize("salt", [None, "tenant"])
@pytest.mark.parametrize("name", GROUPS)
def test_blocks_of_several_groups_are_described_as_on_the_device(
    grouped: Any, prompt: Any, report: Any, name: str, salt: str | None
) -> None:
    """But for the tokens: on the device, events of windows and states have tokens of blocks that they do not name."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    (one, two), tokens = grouped(name), prompt(8 * BLOCK + 9)
    request = one.add("r", tokens, cache_salt=salt)
    one.run()
    report(one)
    two.generate(tokens, cache_salt=salt)
    assert loadable(one, request) == loadable(two, request) == 8 * BLOCK
    differ = {"medium", "block_hashes", "parent_block_hash", "token_ids", "extra_keys"}
    device: dict[Any, Any] = {}
    for event in of(one.published, "GPU"):
        facts = {field: getattr(event, field) for field in event.__struct_fields__ if field not in differ}
        for at, each in enumerate(event.block_hashes):
            device[event.group_idx, each] = facts | {"extra_keys": event.extra_keys[at]}
    unit = one.scheduler.kv_cache_manager.block_pool.hash_block_size
    hashes = [maybe_convert_block_hash(each) for each in request.block_hashes]
    for (group, each), event in [*known_blocks(one).items(), *known_blocks(two).items()]:
        at, size = event.block_hashes.index(each), event.block_size
        facts = {field: getattr(event, field) for field in event.__struct_fields__ if field not in differ}
        assert facts | {"extra_keys": event.extra_keys[at]} == device[group, each]
        end = (hashes.index(each) + 1) * unit
        assert event.token_ids[at * size : (at + 1) * size] == tokens[end - size : end]
        begin = end - (at + 1) * size
        assert event.parent_block_hash == (hashes[begin // unit - 1] if begin else None)
        assert len(event.token_ids) == size * len(event.block_hashes)
    assert one.reset(connector=True)
    one.generate(prompt(5), name="last")
    assert not known_blocks(one)


@pytest.mark.parametrize("name", GROUPS)
def test_a_router_that_knows_the_groups_expects_what_is_loaded(
    grouped: Any, sim: Any, daemon: Any, prompt: Any, report: Any, name: str
) -> None:
    (one, _), tokens = grouped(name), prompt(14 * BLOCK + 9)
    one.generate(tokens)
    report(one)
    hits = []
    for at, blocks in enumerate((14, 13, 9, 8, 5, 4, 2)):
        assert one.reset()
        other = prompt(18 * BLOCK, tokens[: blocks * BLOCK])
        request = one.add(f"other {at}", other)
        expected = loadable(one, request)
        one.run()
        one.step()
        assert one.prefills[f"other {at}"][2] == expected
        hits.append(expected)
        report(one)
    assert hits[0] == 14 * BLOCK and 0 < hits[4] < hits[3] <= 8 * BLOCK
    with AdminClient(daemon.endpoint) as admin:
        daemon.wait_status(lambda s: not s["pool"]["pinned_bytes"], "no lease")
        admin.clear()
    assert one.reset()
    request = one.add("cleared", tokens)
    assert loadable(one, request) == 14 * BLOCK
    one.step()
    assert loadable(one, request) == 0, "what a lookup does not find is removed"
    one.run()
    report(one)
    assert one.prefills["cleared"] == (len(tokens), 0, 0)
    assert loadable(one, request) == 14 * BLOCK


def test_ends_within_blocks_are_loaded_but_not_published(publishing: Any, sim: Any, prompt: Any, report: Any) -> None:
    """A router does not know their parents, which are hashes within larger blocks."""
    if not sim.HAS_GROUPS:
        pytest.skip("before vLLM 0.32, engines with several groups are declined")
    specs = sim.full(2, 4 * BLOCK) | sim.states(3, 2, "align", block=4 * BLOCK)
    options = {"specs": specs, "mamba_cache_mode": "align", "block_size": 4 * BLOCK, "prefix_match_unit": BLOCK}
    one, two = (publishing(name, extra={"block_size": 0}, **options) for name in ("one", "two"))
    tokens = prompt(11 * BLOCK + 5)
    one.generate(tokens)
    report(one)
    two.generate(tokens)
    assert two.prefills["r0"] == (5, 0, 11 * BLOCK)
    for engine in (one, two):
        named = {(group, event.block_size) for (group, _), event in known_blocks(engine).items()}
        assert (0, 4 * BLOCK) in named and {size for _, size in named} == {4 * BLOCK}
