"""What a step loads and saves, as arithmetic."""

from __future__ import annotations

import pickle

import pytest

from kvcache_client.scheduler.groups import Found, FullAttention
from kvcache_client.scheduler.views import RequestView
from kvcache_client.step_plan import (
    NOTHING,
    LoadJob,
    SaveJob,
    StepPlan,
    pick_refs,
)
from kvcache_proto.types import BlockRef, GroupSpec, NamespaceSpec, unpack_refs


def request(tokens: int, hashed: int, prompt: int = 0) -> RequestView:
    return RequestView("r", tokens, prompt or tokens, [b"%d" % at for at in range(hashed)])


def packed(count: int) -> bytes:
    return b"".join(BlockRef(at * 64, at).pack() for at in range(count))


@pytest.mark.parametrize(
    ("tokens", "limit", "left"),
    [(0, 0, 0), (1, 0, 0), (15, 0, 0), (16, 1, 0), (17, 1, 1), (32, 2, 1), (33, 2, 2), (1024, 64, 63), (1025, 64, 64)],
)
def test_whole_prompts_are_loaded_unless_a_token_must_be_left(tokens: int, limit: int, left: int) -> None:
    assert FullAttention(16, 1).loadable(request(tokens, 100)) == limit
    assert FullAttention(16, 1, volatile=1).loadable(request(tokens, 100)) == left
    assert FullAttention(16, 1).farthest(request(tokens, 100)) == left, "the device has all but one block"


def test_what_has_no_hash_cannot_be_loaded() -> None:
    assert FullAttention(16, 1).loadable(request(1025, 60)) == 60
    assert FullAttention(16, 4).loadable(request(1025, 63)) == 15


@pytest.mark.parametrize(
    ("hashed", "computed", "per_slot", "full"),
    [
        (4, 64, 1, 4),
        (4, 63, 1, 3),
        (3, 64, 1, 3),  # computed counts a token whose value is not known yet
        (7, 112, 2, 3),
        (8, 112, 2, 3),
        (8, 128, 2, 4),
        (0, 0, 4, 0),
    ],
)
def test_a_slot_is_full_once_its_blocks_are_computed_and_hashed(
    hashed: int, computed: int, per_slot: int, full: int
) -> None:
    assert FullAttention(16, per_slot).full(request(computed, hashed), computed) == full


def test_of_prompts_nothing_generated_is_saved_and_what_is_left_out_is_known() -> None:
    group, long = FullAttention(16, 1, prompt_only=True), request(80, 5, prompt=40)
    assert (group.full(long, 80), FullAttention(16, 1).full(long, 80)) == (2, 5)
    assert group.unsaved(long, 2, 80) == [b"2", b"3", b"4"]
    assert group.unsaved(long, 5, 80) == ()


def test_a_larger_slot_goes_by_the_hash_of_its_last_block() -> None:
    hashes = [b"%d" % at for at in range(7)]
    assert FullAttention(16, 1).keys(hashes) is hashes
    assert FullAttention(16, 3).keys(hashes) == [b"2", b"5"]


def test_a_load_takes_the_blocks_beyond_those_that_the_engine_has() -> None:
    (job,) = FullAttention(16, 1).cut_loads("r", Found(b"id", packed(6), 6), [list(range(100, 106))], 2, 4)
    assert (job.blocks, job.skip) == ([102, 103, 104, 105], 0)
    assert [ref.generation for ref in unpack_refs(job.refs)] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("first", "count", "slots", "skip"),
    [(0, 6, [0, 1, 2], 0), (1, 5, [0, 1, 2], 1), (2, 2, [1], 0), (3, 1, [1], 1), (3, 2, [1, 2], 1)],
)
def test_a_load_may_begin_inside_a_slot(first: int, count: int, slots: list[int], skip: int) -> None:
    (job,) = FullAttention(16, 2).cut_loads("r", Found(b"id", packed(3), 3), [list(range(100, 106))], first, count)
    assert job.blocks == list(range(100 + first, 100 + first + count))
    assert [ref.generation for ref in unpack_refs(job.refs)] == slots
    assert job.skip == skip


def test_references_are_picked_by_position() -> None:
    assert [ref.generation for ref in unpack_refs(pick_refs(packed(5), [4, 0, 2]))] == [4, 0, 2]
    assert pick_refs(packed(5), []) == b""


def test_a_plan_reaches_another_process_whole() -> None:
    """vLLM sends what its connectors plan by its own means, which pickle."""
    spec = NamespaceSpec("m", (GroupSpec(16, 64),), {"a": "b"})
    plan = StepPlan(
        7, [SaveJob("r", b"id", 3, [0, 2], packed(2), [5, 6])], [5], [LoadJob("q", b"id", b"", [9])], ["r"], spec
    )
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(NOTHING)) == NOTHING
