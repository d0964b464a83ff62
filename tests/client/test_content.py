"""Further content in the hashes of blocks: LoRA adapters, embeddings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_client.engines.vllm.views import Contents, request_view
from kvcache_client.scheduler.groups import FullAttention
from kvcache_client.scheduler.views import ContentHashes, plain

HASHES = [bytes([at]) * 32 for at in range(20)]


def test_other_content_is_another_hash_and_the_same_is_the_same() -> None:
    one, two, again = (list(ContentHashes(HASHES, content)) for content in (b"one", b"two", b"one"))
    assert one == again and len({*one, *two, *HASHES}) == 3 * len(HASHES)
    assert {len(each) for each in one} == {32}
    assert {len(each) for each in ContentHashes([each[:16] for each in HASHES], b"one")} == {16}


def test_it_is_read_as_the_engine_s_own_list_is() -> None:
    """Also while that list grows, and where vLLM cuts it (sessions whose input is streamed)."""
    own = HASHES[:8]
    mixed = ContentHashes(own, b"x")
    every = list(ContentHashes(HASHES, b"x"))
    assert len(mixed) == 8 and mixed[-1] == every[7] and list(mixed[2:5]) == every[2:5]
    own += HASHES[8:]
    assert FullAttention(16, 4).keys(mixed) == every[3::4]
    assert FullAttention(16, 1).keys(mixed)[5:7] == every[5:7]
    del own[3:]
    own += reversed(HASHES[3:])
    assert list(mixed) == every[:3] + every[:2:-1]
    assert plain(mixed) is own and plain(own) is own


def a_request(name: str = "r", **facts: Any) -> Any:
    known = {"num_tokens": 40, "num_prompt_tokens": 33, "block_hashes": list(HASHES), "all_token_ids": [0] * 40}
    return SimpleNamespace(request_id=name, **known, **facts)


class Adapters:
    """Knows a digest of each adapter but of those that have none."""

    def digest(self, lora: Any) -> tuple[bytes, str]:
        return (lora.weights, "") if lora.weights else (b"", "lora")


def adapter(weights: bytes, name: str = "x") -> Any:
    return SimpleNamespace(lora_int_id=3, lora_name=name, weights=weights)


def rows(dtype: str = "float32") -> Any:
    return SimpleNamespace(dtype=dtype, itemsize=2 if "16" in dtype else 4)


def test_each_content_has_hashes_of_its_own() -> None:
    contents = Contents(Adapters().digest)
    kinds: list[dict[str, Any]] = [
        {"lora_request": lora, "prompt_embeds": embeddings}
        for lora in (None, adapter(b"one"), adapter(b"two"))
        for embeddings in (None, rows(), rows("bfloat16"))
    ]
    views = [request_view(a_request(f"{at}", **kind), contents) for at, kind in enumerate(kinds)]
    assert not any(view.uncacheable for view in views)
    assert len({view.hashes[0] for view in views}) == len(kinds)
    assert [view.adapter for view in views] == [None] * 3 + [3] * 6
    assert isinstance(views[0].hashes, list), "the engine's own"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"lora_request": adapter(b"")}, "lora"),
        ({"lora_request": adapter(b""), "prompt_embeds": rows()}, "lora"),
        ({"lora_request": adapter(b"one"), "prompt_embeds": rows(), "prompt_is_token_ids": [True]}, "prompt_embeds"),
    ],
)
def test_what_is_left_alone_beside_an_adapter(facts: dict[str, Any], why: str) -> None:
    view = request_view(a_request(**facts), Contents(Adapters().digest))
    assert (view.uncacheable, view.adapter) == (why, None)
    assert isinstance(view.hashes, list)


def test_dtypes_of_one_size_in_one_engine_are_left_alone() -> None:
    contents = Contents()
    kinds = (
        ("bfloat16", ""),
        ("float32", ""),
        ("float16", "prompt_embeds"),
        ("bfloat16", "prompt_embeds"),
        ("float32", ""),
    )
    for dtype, why in kinds:
        assert request_view(a_request(prompt_embeds=rows(dtype)), contents).uncacheable == why


def test_hashes_are_mixed_once_for_as_long_as_a_request_is_known() -> None:
    contents, request = Contents(Adapters().digest), a_request(lora_request=adapter(b"one"))
    first = request_view(request, contents)
    assert request_view(request, contents).hashes is first.hashes
    request.lora_request = adapter(b"two")
    assert request_view(request, contents).hashes[0] != first.hashes[0]
    other = a_request(lora_request=adapter(b"one"))
    other.block_hashes = HASHES[:3]
    assert list(request_view(other, contents).hashes) == list(ContentHashes(other.block_hashes, b"one"))
