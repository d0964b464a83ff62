"""What KV depends on beside the tokens: LoRA adapters, salts, embeddings, images. No block is used for another content.

The simulated worker loads adapters as vLLM's does, and checks in each step that all KV is of the adapter that it has.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BLOCK = 32


@pytest.fixture
def lora_engines(engines: Any) -> Callable[..., Any]:
    """`lora_engines(name, **options)` makes an engine for LoRA."""
    return lambda name, **options: engines(name, enable_lora=True, **{"max_loras": 2, "max_cpu_loras": 2} | options)


@pytest.fixture
def adapter(sim: Any, tmp_path: Path) -> Callable[..., Path]:
    """`adapter(weights, folder)` writes an adapter, or overwrites it."""
    return lambda weights, folder="adapter": sim.write_adapter(tmp_path / folder, weights)


def lora(name: str, number: int, folder: Path, **facts: Any) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    return {"lora_request": LoRARequest(name, number, str(folder), **facts)}


def test_an_adapter_s_blocks_are_found_by_another_engine(
    lora_engines: Any, sim: Any, prompt: Any, idle: Any, adapter: Any, runner: str
) -> None:
    tokens, folder = prompt(5 * BLOCK + 3), adapter("one")
    answer = sim.expected(tokens, 40, sim.adapter_of(folder))
    one, two = lora_engines("one"), lora_engines("two")
    assert one.generate(tokens, 40, "r", **lora("x", 1, folder)) == answer
    idle()
    for number in (2, 3):  # of no meaning to another engine
        assert two.generate(tokens + answer[:-1], 1, f"{number}", **lora("x", number, folder)) == answer[-1:]
        assert two.prefills[f"{number}"][2] == (6 * BLOCK if number == 2 else 0)
    assert two.generate(tokens, 3) == sim.expected(tokens, 3), "without an adapter"
    assert two.prefills["r2"] == (len(tokens), 0, 0)


def test_two_adapters_of_one_name_share_no_block(
    lora_engines: Any, sim: Any, prompt: Any, idle: Any, adapter: Any
) -> None:
    """In one folder, as in containers of two hosts' files: what vLLM's hashes name is the same in every version."""
    tokens = prompt(5 * BLOCK + 3)
    for name, weights, hit in (("one", "old", 0), ("two", "new", 0), ("three", "old", 5), ("four", "new", 5)):
        folder = adapter(weights)
        engine = lora_engines(name)
        answer = sim.expected(tokens, 4, sim.adapter_of(folder))
        assert engine.generate(tokens, 4, "r", **lora("x", 1, folder)) == answer
        assert engine.prefills["r"][2] == hit * BLOCK
        idle()


def test_other_settings_of_lora_are_another_content(
    lora_engines: Any, prompt: Any, idle: Any, adapter: Any, runner: str
) -> None:
    """The dtype decides what the same files do."""
    tokens, folder = prompt(5 * BLOCK + 3), adapter("one")
    for name, dtype, hit in (("one", "bfloat16", 0), ("two", "float16", 0), ("three", "bfloat16", 5)):
        engine = lora_engines(name, lora_dtype=dtype)
        engine.generate(tokens, 4, "r", **lora("x", 1, folder))
        assert engine.prefills["r"][2] == hit * BLOCK
        idle()


def test_a_rewritten_folder(lora_engines: Any, sim: Any, prompt: Any, idle: Any, adapter: Any, lines: Any) -> None:
    """The ranks have the old weights until they load the adapter again, and nobody says which they have."""
    tokens, more, folder = prompt(5 * BLOCK + 3), prompt(4 * BLOCK), adapter("old")
    old = sim.adapter_of(folder)
    one, two = lora_engines("one", max_loras=1, max_cpu_loras=1), lora_engines("two")
    one.generate(tokens, 2, **lora("x", 1, folder))
    idle()
    new = sim.adapter_of(adapter("new"))
    saved = one.counters["saved_bytes"]
    assert one.generate(more, 2, "kept", **lora("x", 1, folder)) == sim.expected(more, 2, old)
    one.generate(more, 2, **lora("other", 2, adapter("other", "other")))
    idle()
    assert one.counters["saved_bytes"] > saved, "other adapters are served as before"
    saved = one.counters["saved_bytes"]
    assert one.reset()
    assert one.generate(more, 2, "reloaded", **lora("x", 1, folder)) == sim.expected(more, 2, new)
    assert one.prefills["kept"] == one.prefills["reloaded"] == (len(more), 0, 0)
    idle()
    assert one.counters["saved_bytes"] == saved
    assert one.counters["lookups_declined_lora"] == 2
    assert sum("its files have changed" in line for line in lines) == 1
    assert two.generate(more, 2, "r", **lora("x", 1, folder)) == sim.expected(more, 2, new)
    assert two.prefills["r"] == (len(more), 0, 0)


def test_a_folder_that_is_rewritten_between_its_load_and_the_first_request(
    lora_engines: Any, sim: Any, prompt: Any, idle: Any, adapter: Any, runner: str
) -> None:
    """As with `--lora-modules` and `/v1/load_lora_adapter`, which load an adapter before there is a request for it."""
    tokens, folder = prompt(5 * BLOCK + 3), adapter("old")
    old = sim.adapter_of(folder)
    one = lora_engines("one")
    assert one.core.add_lora(lora("x", 1, folder)["lora_request"])
    adapter("new")
    assert one.generate(tokens, 2, **lora("x", 1, folder)) == sim.expected(tokens, 2, old)
    idle()
    assert "saved_bytes" not in one.counters or not one.counters["saved_bytes"]
    assert one.counters["lookups_declined_lora"] == 1


def test_an_adapter_is_replaced_in_place_while_its_requests_run(
    lora_engines: Any, sim: Any, prompt: Any, idle: Any, adapter: Any
) -> None:
    """vLLM goes on with them, with the new weights; their blocks have KV of both."""
    tokens, folder = prompt(3 * BLOCK + 3), adapter("old")
    old = sim.adapter_of(folder)
    one = lora_engines("one")
    one.add("r", tokens, 6 * BLOCK, **lora("x", 1, folder))
    one.run(lambda: len(one.outputs["r"]) > BLOCK + 9)
    adapter("new")
    again = lora("x", 1, folder, load_inplace=True)
    assert one.core.add_lora(again["lora_request"])
    one.run()
    one.step()
    idle()
    assert one.counters["saved_bytes"] == 4 * 3 * sim.PAGE, "of the old weights alone"
    one.generate(prompt(4 * BLOCK), 2, **again)
    idle()
    assert one.counters["saved_bytes"] == 4 * 3 * sim.PAGE
    adapter("old")
    two = lora_engines("two")
    assert one.outputs["r"][:40] == sim.expected(tokens, 40, old)
    two.generate(tokens + one.outputs["r"], 2, "r", **lora("x", 1, folder))
    assert two.prefills["r"][2] == 4 * BLOCK


def test_a_name_that_has_stood_for_another_adapter(
    lora_engines: Any, sim: Any, prompt: Any, idle: Any, adapter: Any
) -> None:
    """From 0.32 on vLLM's own prefix cache tells them apart, and so they are cached; before, it does not."""
    from kvcache_client.engines.vllm.compat import lora_in_hashes

    first, second = lora("x", 1, adapter("one", "a")), lora("x", 2, adapter("two", "b"))
    apart = lora_in_hashes(first["lora_request"]) != lora_in_hashes(second["lora_request"])
    one, two = lora_engines("one"), lora_engines("two")
    one.generate(prompt(3 * BLOCK), 2, **first)
    tokens = prompt(5 * BLOCK + 3)
    answer = one.generate(tokens, 2, **second)
    assert answer == sim.expected(tokens, 2, sim.adapter_of(Path(second["lora_request"].lora_path)))
    idle()
    assert two.generate(tokens, 2, "r", **second) == answer
    assert two.prefills["r"][2] == (5 * BLOCK if apart else 0)


def test_a_number_that_stands_for_two_adapters(
    lora_engines: Any, sim: Any, prompt: Any, idle: Any, adapter: Any, runner: str
) -> None:
    """The ranks go by the number: they have one of the two, whichever they loaded."""
    first, second = lora("a", 1, adapter("one", "a")), lora("b", 1, adapter("two", "b"))
    one = lora_engines("one")
    one.generate(prompt(3 * BLOCK), 2, **first)
    idle()
    saved = one.counters["saved_bytes"]
    wrong = sim.adapter_of(Path(first["lora_request"].lora_path))
    for each in (second, first):
        tokens = prompt(4 * BLOCK, [len(one.outputs)])
        assert one.generate(tokens, 2, **each) == sim.expected(tokens, 2, wrong)
    idle()
    assert one.counters["saved_bytes"] == saved


def test_an_adapter_that_is_in_no_folder_of_this_host(tmp_path: Path, lines: Any) -> None:
    """Such as a repository's name: vLLM downloads it, and perhaps another commit the next time."""
    from kvcache_client.engines.vllm.lora import Adapters

    adapters = Adapters(None, lambda numbers: None)
    for _ in range(2):
        assert adapters.digest(lora("x", 1, Path("organisation/adapter"))["lora_request"]) == (b"", "lora")
    (tmp_path / "adapter_config.json").touch()
    assert adapters.digest(lora("y", 2, tmp_path)["lora_request"]) == (b"", "lora")
    assert len(lines) == 2


def test_files_that_take_long_to_read(sim: Any, adapter: Any) -> None:
    """No request waits for them: it is left alone until they are read."""
    from kvcache_client.engines.vllm.lora import Adapters

    folder = adapter("large")
    with (folder / "adapter_model.safetensors").open("r+b") as weights:
        weights.truncate(1 << 30)
    adapters, request = Adapters(None, lambda numbers: None), lora("x", 1, folder)["lora_request"]
    assert adapters.digest(request) == (b"", "lora_unread")
    assert adapters._claim(request).read.wait(sim.PATIENCE)
    digest, why = adapters.digest(request)
    assert digest and not why
    copy = lora("x", 1, Path(shutil.copytree(folder, folder.parent / "copy")))["lora_request"]
    other = Adapters(None, lambda numbers: None)
    other.digest(copy)
    assert other._claim(copy).read.wait(sim.PATIENCE)
    assert other.digest(copy) == (digest, ""), "wherever it lies"
    with (folder.parent / "copy" / "adapter_model.safetensors").open("r+b") as weights:
        weights.seek(777_777_777)
        weights.write(b"\1")
    third = Adapters(None, lambda numbers: None)
    third.digest(copy)
    assert third._claim(copy).read.wait(sim.PATIENCE)
    assert third.digest(copy)[0] not in (b"", digest), "any byte counts"
    assert other.digest(copy) == (b"", "lora")


def test_salts_share_nothing_with_and_without_an_adapter(
    lora_engines: Any, prompt: Any, idle: Any, adapter: Any, runner: str
) -> None:
    tokens, folder = prompt(5 * BLOCK + 3), adapter("one")
    one, two = lora_engines("one"), lora_engines("two")
    kinds = [
        {"cache_salt": salt, **with_adapter}
        for salt in (None, "x", "pepper")  # one of them is the adapter's name
        for with_adapter in ({}, lora("x", 1, folder))
    ]
    for at, facts in enumerate(kinds):
        assert one.reset()
        one.generate(tokens, 2, f"{at}", **facts)
        assert one.prefills[f"{at}"] == (len(tokens), 0, 0)
        idle()
    for at, facts in enumerate(kinds):
        assert two.reset()
        two.generate(tokens, 2, f"{at}", **facts)
        assert two.prefills[f"{at}"][2] == 5 * BLOCK


def test_embeddings_of_a_prompt(engines: Any, sim: Any, idle: Any, request: Any) -> None:
    """vLLM's hashes have a digest of their bytes, which may be of another dtype's numbers."""
    draw = sim.torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))
    rows = sim.torch.randint(0x3000, 0x3C00, (5 * BLOCK + 3, 16), generator=draw, dtype=sim.torch.int16)
    for name, dtype, hit in (("one", "bfloat16", 0), ("two", "float16", 0), ("three", "bfloat16", 5)):
        engine, prompt = engines(name, enable_prompt_embeds=True), rows.view(getattr(sim.torch, dtype))
        assert engine.generate(prompt, 40, "r") == sim.expected(sim.embedded(prompt), 40)
        assert engine.prefills["r"][2] == hit * BLOCK
        idle()
    other = rows.clone()
    other[2 * BLOCK, 0] += 1
    assert engine.reset()
    engine.generate(other.view(sim.torch.bfloat16), 2, "other")
    assert engine.prefills["other"][2] == 2 * BLOCK
    idle()
    # vLLM's own prefix cache does not tell the dtypes apart: what comes from there has KV of either.
    saved = engine.counters["saved_bytes"]
    assert engine.reset()
    for at, dtype in enumerate((sim.torch.float16, sim.torch.bfloat16)):
        assert engine.reset()
        engine.generate(rows.view(dtype)[BLOCK:], 2, f"{at}")
    idle()
    assert engine.counters["saved_bytes"] == saved
    engine.generate(rows.view(sim.torch.bfloat16).float(), 2, "another size")
    idle()
    assert engine.counters["saved_bytes"] > saved


def test_embeddings_among_tokens_are_left_alone(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """Where a row is of zeros, no hash of vLLM says whether it is an embedding or the place of token 0."""
    one = engines("one", enable_prompt_embeds=True)
    tokens = prompt(4 * BLOCK)
    rows = sim.torch.zeros((len(tokens), 16))
    one.generate(rows, 2, "mixed", prompt_is_token_ids=[True, False] * (2 * BLOCK))
    idle()
    assert one.counters["lookups_declined_prompt_embeds"] == 1
    assert not one.counters.get("saved_bytes")


def test_prompts_that_grow_are_left_alone(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """What comes next takes the place of a token that was sampled, whose block may have been hashed with it."""
    one = engines("one")
    tokens = prompt(4 * BLOCK - 1)
    one.add("r", tokens, 2, resumable=True)
    for _ in range(4):
        one.step()
    assert one.outputs["r"] == sim.expected(tokens, 2)
    one.abort("r")
    one.run()
    idle()
    assert one.counters["lookups_declined_streaming"] == 1
    assert not one.counters.get("saved_bytes")


def test_an_image_is_content(engines: Any, sim: Any, prompt: Any, idle: Any, runner: str) -> None:
    """The same text with the same image is found by another engine; with another image only what is before it."""
    text, more = prompt(6 * BLOCK + 5), prompt(3 * BLOCK)
    engines_of_a_host = one, two = engines("one"), engines("two")
    before = 2 * BLOCK + 3  # tokens of text before the image

    def ask(engine: Any, name: str, tokens: list[int], *images: Any) -> int:
        """Return the hit tokens. As with a real processor, the prompt shows where an image is, not which."""
        for each in images:
            at, length = each.mm_position.offset, each.mm_position.length
            tokens = [*tokens[:at], *[7] * length, *tokens[at + length :]]
        answer = sim.expected(sim.seen(tokens, images), 3)
        assert engine.generate(tokens, 3, name, mm_features=list(images)) == answer
        idle()
        return int(engine.prefills[name][2])

    cat, dog = sim.image(before, 2 * BLOCK, "cat"), sim.image(before, 2 * BLOCK, "dog")
    assert ask(one, "first", text, cat) == 0
    assert ask(two, "the same", text, cat) == 6 * BLOCK
    assert ask(two, "another image", text, dog) == 0, "its beginning is on the device"
    assert ask(engines("three"), "no image", text) == 2 * BLOCK
    assert ask(engines("four"), "another text", more + text, sim.image(len(more) + before, 2 * BLOCK, "cat")) == 0
    smaller = sim.image(before, BLOCK, "cat")
    assert ask(engines("five"), "cut short", text, smaller) == 3 * BLOCK
    moved = sim.image(before + 1, 2 * BLOCK, "cat")
    assert ask(engines("six"), "one token later", text, moved) == 2 * BLOCK
    assert ask(engines("seven"), "two images", text, cat, sim.image(5 * BLOCK, BLOCK, "dog")) == 5 * BLOCK
    assert not any(each.counters.get("lookups_declined_multimodal") for each in engines_of_a_host)


def test_images_are_left_alone_if_the_host_says_so(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    tokens, image = prompt(4 * BLOCK + 5), sim.image(BLOCK, BLOCK, "cat")
    one = engines("one", extra={"multimodal": "off"})
    one.generate(tokens, 2, "image", mm_features=[image])
    idle()
    assert one.counters["lookups_declined_multimodal"] == 1
    assert not one.counters.get("saved_bytes")
    one.generate(prompt(4 * BLOCK), 2, "text")
    idle()
    assert one.counters["saved_bytes"] > 0


def test_a_user_s_text_is_trusted_only_if_the_host_says_so(engines: Any, sim: Any, prompt: Any, idle: Any) -> None:
    """It may name one image today and another one tomorrow, after vLLM's own prefix cache has forgotten the first."""
    tokens, image = prompt(4 * BLOCK + 5), sim.image(BLOCK, BLOCK, "")
    image.identifier = "image 0"
    for name, setting, declined in (("one", "on", 1), ("two", "uuids", 0)):
        engine = engines(name, extra={"multimodal": setting})
        engine.generate(tokens, 2, "r", mm_features=[image])
        idle()
        assert engine.counters.get("lookups_declined_multimodal", 0) == declined
        assert bool(engine.counters.get("saved_bytes")) != bool(declined)


def test_an_identifier_may_be_a_user_s_text() -> None:
    """With options of the processor, it looks like a digest, and two images may have the same one."""
    import inspect

    from PIL import Image
    from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
    from vllm.multimodal.processing.inputs import ProcessorInputs

    images = MultiModalDataItems({"image": ImageProcessorItems([Image.new("RGB", (8, 8), color) for color in (1, 2)])})
    takes_algorithm = "hash_algorithm" in inspect.signature(ProcessorInputs.get_mm_hashes).parameters

    def identifiers(**facts: Any) -> list[str]:
        inputs = ProcessorInputs([1], images, **facts)
        found: list[str] = inputs.get_mm_hashes("model", *(["sha256"] if takes_algorithm else []))["image"]
        return found

    own = identifiers()
    assert own[0] != own[1]
    chosen = identifiers(mm_uuid_items={"image": ["same", "same"]}, hf_processor_mm_kwargs={"size": 5})
    assert chosen[0] == chosen[1], "two images, one identifier"
    assert len(chosen[0]) == len(own[0]) and set(chosen[0]) <= set("0123456789abcdef")


def test_events_of_an_adapter_s_blocks(
    lora_engines: Any, sim: Any, prompt: Any, idle: Any, adapter: Any, runner: str
) -> None:
    """They have the hashes and the adapter that vLLM's own events have: a router knows nothing of the daemon's keys."""
    from vllm.config.kv_events import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    tokens, facts = prompt(5 * BLOCK + 3), lora("x", 7, adapter("one"))
    one, two = (lora_engines(name, kv_events_config=events) for name in ("one", "two"))
    one.generate(tokens, 4, **facts)
    idle()
    for at in range(2):  # verdicts come with a step, and events with the one after
        one.generate(prompt(9), name=f"later {at}")
    two.generate(tokens, 4, **facts)
    for engine in (one, two):
        by_medium = {
            medium: [
                (name, event.lora_id, event.lora_name)
                for event in engine.published
                if event.medium == medium
                for name in event.block_hashes
            ]
            for medium in ("GPU", "CPU")
        }
        assert by_medium["CPU"] == by_medium["GPU"][:5]
        assert {name for _, _, name in by_medium["CPU"]} == {"x"}
