"""What a step loads and saves, as arithmetic."""

from __future__ import annotations

import pickle

import pytest

from kvcache_client.step_plan import (
    NOTHING,
    LoadJob,
    SaveJob,
    StepPlan,
    cut_load,
    full_slots,
    hit_limit,
    pick_refs,
    slot_hashes,
)
from kvcache_proto.types import GroupSpec, NamespaceSpec, SlotRef, unpack_refs


def packed(count: int) -> bytes:
    return b"".join(SlotRef(at * 64, at, 1).pack() for at in range(count))


@pytest.mark.parametrize(
    ("tokens", "limit"), [(0, 0), (1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (1024, 63), (1025, 64)]
)
def test_one_token_is_left_to_compute(tokens: int, limit: int) -> None:
    assert hit_limit(tokens, 16) == limit


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
    assert full_slots(hashed, computed, 16, per_slot) == full


def test_a_larger_slot_goes_by_the_hash_of_its_last_block() -> None:
    hashes = [b"%d" % at for at in range(7)]
    assert slot_hashes(hashes, 1) is hashes
    assert slot_hashes(hashes, 3) == [b"2", b"5"]


def test_a_load_takes_the_blocks_beyond_those_that_the_engine_has() -> None:
    job = cut_load("r", b"id", packed(6), list(range(100, 106)), 2, 4, 1)
    assert (job.blocks, job.skip) == ([102, 103, 104, 105], 0)
    assert [ref.generation for ref in unpack_refs(job.refs)] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("first", "count", "slots", "skip"),
    [(0, 6, [0, 1, 2], 0), (1, 5, [0, 1, 2], 1), (2, 2, [1], 0), (3, 1, [1], 1), (3, 2, [1, 2], 1)],
)
def test_a_load_may_begin_inside_a_slot(first: int, count: int, slots: list[int], skip: int) -> None:
    job = cut_load("r", b"id", packed(3), list(range(100, 106)), first, count, 2)
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
