"""vLLM's requests and steps as plain values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_client.engines.vllm.views import Contents, request_view, step_view
from kvcache_client.scheduler.requests import RequestState, follow_blocks
from kvcache_client.scheduler.views import IDLE, NewTable, RequestView


def item(offset: int, length: int, identifier: str) -> Any:
    """Return an image as vLLM's front end describes it."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def a_request(**facts: Any) -> Any:
    known = {"request_id": "r", "num_tokens": 40, "num_prompt_tokens": 33, "block_hashes": [b"h"] * 2}
    return SimpleNamespace(**known, all_token_ids=list(range(40)), **facts)


def output(
    tokens: dict[str, int],
    fresh: list[Any] = (),  # type: ignore[assignment]
    cached: list[tuple[Any, ...]] = (),  # type: ignore[assignment]
    resumed: Any = (),
    preempted: Any = None,
) -> Any:
    """`cached` has (request, computed, blocks) rows."""
    names, computed, blocks = ([row[column] for row in cached] for column in range(3))
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, block_ids=b, num_computed_tokens=c) for r, c, b in fresh],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names, num_computed_tokens=computed, new_block_ids=blocks, resumed_req_ids=set(resumed)
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        preempted_req_ids=preempted,
    )


def test_a_request_is_seen_as_it_is_and_what_grows_is_not_copied() -> None:
    request = a_request()
    view = request_view(request)
    assert view == RequestView("r", 40, 33, [b"h"] * 2, list(range(40)), key=request)
    request.block_hashes.append(b"next")
    assert view.hashes is request.block_hashes and view.token_ids is request.all_token_ids


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, ""),
        ({"lora_request": None, "mm_features": [], "prompt_embeds": None}, ""),
        ({"lora_request": "adapter"}, "lora"),
        ({"mm_features": [item(0, 4, "5" * 64), item(4, 4, "an adapter:" + "6" * 128)]}, ""),
        ({"mm_features": [item(0, 4, "5" * 64), item(4, 4, "a user's text")]}, "multimodal"),
        ({"mm_features": [item(0, 4, "5" * 64), item(0, 4, "6" * 64)]}, "multimodal"),
        ({"prompt_embeds": "tensor", "prompt_is_token_ids": [True, False]}, "prompt_embeds"),
    ],
)
def test_hashes_that_do_not_name_content(facts: dict[str, Any], why: str) -> None:
    assert request_view(a_request(**facts)).uncacheable == why


def test_texts_of_users_may_be_trusted_and_images_left_out() -> None:
    image, chosen = item(0, 4, "5" * 64), item(8, 4, "a user's text")
    for setting, digests, texts in (("on", "", "multimodal"), ("uuids", "", ""), ("off", "multimodal", "multimodal")):
        contents = Contents(multimodal=setting)
        assert request_view(a_request(mm_features=[image]), contents).uncacheable == digests
        assert request_view(a_request(mm_features=[image, chosen]), contents).uncacheable == texts
        assert request_view(a_request(mm_features=[]), contents).uncacheable == ""


def test_a_salt_and_a_wish_not_to_be_served() -> None:
    view = request_view(a_request(cache_salt="s", skip_reading_prefix_cache=True))
    assert (view.salted, view.skips_cache) == (True, True)


def test_a_step_without_tokens_is_idle() -> None:
    assert step_view(output({})) is IDLE


def test_new_running_and_resumed_requests() -> None:
    cached = [("run", 50, ([7],)), ("again", 16, ([4, 5, 6],)), ("still", 20, None)]
    scheduled = {"new": 32, "run": 1, "again": 30, "still": 1}
    view = step_view(output(scheduled, [("new", 16, ([1, 2, 3],))], cached, ["again"]))
    assert (view.tokens, view.scheduled) == (64, scheduled)
    assert view.started == [NewTable("new", ([1, 2, 3],), 16), NewTable("again", ([4, 5, 6],), 16)]
    assert (list(view.running), list(view.computed), list(view.added)) == (["run", "still"], [50, 20], [([7],), None])
    states = {name: RequestState(request_view(a_request())) for name in scheduled}
    for state in states.values():
        state.tables = [[9]]
    assert follow_blocks(states, view, [16]) == [2, 3, 5, 6, 7], "without those that were computed or loaded before"
    assert [state.tables[0] for state in states.values()] == [[1, 2, 3], [9, 7], [4, 5, 6], [9]]


def test_preempted_requests() -> None:
    assert step_view(output({"run": 1}, (), [("run", 50, None)], preempted={"again"})).preempted == {"again"}
    assert step_view(output({}, preempted={"again"})).preempted == {"again"}
    assert not step_view(output({"run": 1}, (), [("run", 50, None)])).preempted


def test_running_requests_are_not_copied() -> None:
    step = output({"run": 1}, (), [("run", 50, None)])
    view = step_view(step)
    assert view.running is step.scheduled_cached_reqs.req_ids
    assert view.added is step.scheduled_cached_reqs.new_block_ids
    assert view.scheduled is step.num_scheduled_tokens
