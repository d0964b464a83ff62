"""Prompts with images, as a user sends them to vLLM's OpenAI server."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from cache_state import BLOCK, wait_idle
from PIL import Image

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]  # tests/client/vllm/test_content.py has images in short

TEXT = "Tell me in a few words what this picture shows, and whether you would hang it on your wall: "
ABOUT = [{"type": "text", "text": TEXT}]


def picture(seed: int, **facts: str) -> list[dict[str, Any]]:
    """Return an image of noise as a part of a message."""
    found = io.BytesIO()
    noise = bytes((seed * 7919 + at * at * 31 + at // 128 * seed) % 251 for at in range(3 * 128 * 128))
    Image.frombytes("RGB", (128, 128), noise).save(found, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(found.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}, **facts}]


def test_another_engine_has_hits_with_the_same_image_and_none_with_another(
    start_module_daemon: Any, openai_servers: Any, image_model: str
) -> None:
    daemon = start_module_daemon(size="64MiB")
    options = ("--max-model-len", "1024", "--enable-prompt-tokens-details")
    plain = openai_servers("plain", daemon.endpoint, {"multimodal": "off"}, *options, served=image_model)
    one, two = (openai_servers(name, daemon.endpoint, {}, *options, served=image_model) for name in ("one", "two"))
    # Text, an image of 64 tokens, and text: at least the blocks that end in or after the image depend on it.
    prompts = {seed: ABOUT + picture(seed) + ABOUT for seed in range(3)}
    expected = {seed: plain.chat(*prompt)[0] for seed, prompt in prompts.items()}
    assert len({tuple(answer) for answer in expected.values()}) == 3, "the model sees the images"
    assert plain.chat(*prompts[0], max_tokens=1)[1] > len(TEXT) + 64, "its own prefix cache has hits with images"

    assert one.chat(*prompts[0]) == (expected[0], 0)
    wait_idle(daemon)
    answer, cached = two.chat(*prompts[0])
    assert answer == expected[0]
    assert cached // BLOCK == (2 * len(TEXT) + 66) // BLOCK, "the same text and the same image: all whole blocks"
    wait_idle(daemon)
    for seed in (1, 2):
        answer, cached = two.chat(*prompts[seed])
        assert answer == expected[seed]
        assert cached // BLOCK == len(TEXT) // BLOCK, "only what is before the image"
    moved = [{"type": "text", "text": "Please. " * BLOCK}, *prompts[0]]
    assert two.chat(*moved) == (plain.chat(*moved)[0], 0), "the same image under another text"

    # Users can choose an identifier: then vLLM does not look at the image.
    named = ABOUT + picture(0, uuid="mine") + ABOUT
    for server in (one, two):
        answer, cached = server.chat(*named)
        assert answer == expected[0] and cached // BLOCK <= len(TEXT) // BLOCK
        wait_idle(daemon)
    assert daemon.status()["client_counts"].get("loads_failed", 0) == 0
