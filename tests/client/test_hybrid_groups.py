"""Which blocks of an engine with several KV cache groups are loaded and saved, as numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache_client.scheduler.groups import Found, HybridGroups
from kvcache_client.scheduler.lookups import Lookups
from kvcache_client.scheduler.requests import LookupResult, RequestState, follow_blocks
from kvcache_client.scheduler.views import Group, NewTable, RequestView, StepView, Table
from kvcache_client.session.counters import Counters
from kvcache_client.worker.places import Column, Places, without_nulls
from kvcache_proto.types import REF_BYTES, SUFFIX, BlockRef, GroupSpec

# Slots of 4 tokens. Full attention has blocks of 2 tokens, in two groups of the engine; windows of 6 have blocks of 4.
FULL = Group((Table(0, 2, 2), Table(2, 2, 2)))
WINDOW = Group((Table(1, 4, 1),), window_blocks=2, kept=5)
STATE = Group((Table(3, 4, 1), Table(4, 4, 1)), window_blocks=1, is_state=True)
SPECS = {FULL: GroupSpec(4, 64), WINDOW: GroupSpec(4, 64, SUFFIX, 2), STATE: GroupSpec(4, 64, SUFFIX, 1)}


def several(*groups: Group, **options: Any) -> HybridGroups:
    return HybridGroups(groups, [SPECS[group] for group in groups], 2, **options)


def packed(count: int) -> bytes:
    return b"".join(BlockRef(64 * slot, 1).pack() for slot in range(count))


def slots(refs: bytes) -> list[int]:
    return [BlockRef.unpack(refs[at : at + REF_BYTES]).offset // 64 for at in range(0, len(refs), REF_BYTES)]


def request(prompt: int, tokens: int = 0) -> RequestView:
    tokens = tokens or prompt
    return RequestView("r", tokens, prompt, [bytes([at]) * 32 for at in range(tokens // 2)])


def test_what_is_volatile_is_left_out_once() -> None:
    """By the daemon, if the number of hits depends on suffix groups; then the block that follows the hits is asked for,
    too."""
    assert several(FULL, volatile=1).usable(5) == 4
    assert several(FULL, WINDOW, volatile=1).usable(5) == 5


@pytest.mark.parametrize("prompt", [40, 41, 43])
def test_windows_are_saved_where_a_prompt_is_found_again(prompt: int) -> None:
    """Its last slot is volatile: a request with the same prompt continues before it, a longer one perhaps after it."""
    assert several(FULL, WINDOW, volatile=1).suffix_slots(1, request(prompt), 0, prompt // 4, None) == [7, 8, 9]
    assert several(FULL, WINDOW, volatile=1).suffix_slots(1, request(prompt), 0, 6, 6) == [3, 4, 5]


# 12 tokens: block n of a group is 10 * group + n + 1; windows begin at token 7, states are before token 12.
TABLES = [
    [1, 2, 3, 4, 5, 6],
    [0, 12, 13],
    [21, 22, 23, 24, 25, 26],
    [0, 0, 33],
    [0, 0, 43],
]


def test_a_load_brings_each_group_what_it_has_blocks_for() -> None:
    group = several(FULL, WINDOW, STATE)
    jobs = group.cut_loads("r", Found(b"id", packed(3 + 2 + 1), 3), TABLES, 0, 6)
    assert [(job.group, job.jobs, slots(job.refs), job.blocks) for job in jobs] == [
        (0, 3, [0, 1, 2], [1, 2, 21, 22, 3, 4, 23, 24, 5, 6, 25, 26]),
        (1, 3, [3, 4], [12, 13]),
        (2, 3, [5], [33, 43]),
    ]
    assert [group.references(["a", "b", "c"], 3, had) for had in (0, 2)] == [
        ["a", "b", "c", "b", "c", "c"],
        ["a", "b", "c", "c", "c"],
    ]


def test_what_the_engine_has_already_is_left_alone() -> None:
    """It has 8 tokens: of the lookup's references, one is to the window's last slot."""
    group = several(FULL, WINDOW)
    sums = bytes(range(4 * 8))
    jobs = group.cut_loads("r", Found(b"id", packed(3 + 1), 3, 2, sums), TABLES, 4, 2)
    assert [(slots(job.refs), job.blocks, job.sums) for job in jobs] == [
        ([2], [5, 6, 25, 26], sums[16:24]),
        ([3], [13], sums[24:]),
    ]
    jobs = group.cut_loads("r", Found(b"id", packed(3 + 2), 3, 1), TABLES, 2, 4)
    assert [(slots(job.refs), job.blocks) for job in jobs] == [
        ([1, 2], [3, 4, 23, 24, 5, 6, 25, 26]),
        ([3, 4], [12, 13]),
    ]


@pytest.mark.parametrize(
    ("groups", "tables", "end"),
    [
        ((FULL, WINDOW), [TABLES[0][:4], [11, 12], TABLES[2][:4]], 8),  # the window before token 8 begins in slot 0
        ((FULL, WINDOW), [TABLES[0][:5], [11, 12, 13], TABLES[2][:5]], 10),  # within a block of the window
        ((FULL, STATE), [TABLES[0][:4], [], TABLES[2][:4], [0, 32], [0, 42]], 8),
        ((FULL, WINDOW), [TABLES[0] + [7, 8], [0, 0, 13, 14], TABLES[2] + [27, 28]], 16),  # more than was offered
    ],
)
def test_another_boundary_than_the_one_that_is_leased(groups: Any, tables: list[list[int]], end: int) -> None:
    group = several(*groups)
    assert group.cut_loads("r", Found(b"id", packed(9), 3), tables, 0, end // 2) == []


def test_fewer_tokens_whose_window_is_leased_all_the_same() -> None:
    """The engine has begun where nothing but the last slots is needed: these are there."""
    group = several(FULL)
    jobs = group.cut_loads("r", Found(b"id", packed(3), 3), TABLES, 0, 4)
    assert [(slots(job.refs), job.blocks) for job in jobs] == [([0, 1], [1, 2, 21, 22, 3, 4, 23, 24])]


@pytest.mark.parametrize(
    ("prompt", "first", "end", "limit", "wanted"),
    [
        (41, 0, 10, None, [8, 9]),  # the end of the prompt: 10 slots
        (40, 0, 10, None, [7, 8, 9]),  # also one slot before: the last token is always computed
        (41, 0, 12, None, [8, 9, 10, 11]),  # all that is generated
        (41, 9, 12, None, [9, 10, 11]),
        (41, 0, 5, 5, [3, 4]),  # the end of what is saved
        (41, 0, 7, None, []),
        (3, 0, 4, None, [0, 1, 2, 3]),
    ],
)
def test_which_blocks_of_a_window_are_saved(
    prompt: int, first: int, end: int, limit: int | None, wanted: list[int]
) -> None:
    group = several(FULL, WINDOW)
    assert group.suffix_slots(1, request(prompt, 60), first, end, limit) == wanted


@pytest.mark.parametrize(
    ("every", "wanted"), [(16, [2, 3, 6, 7, 8, 9]), (8, [*range(10)]), (20, [3, 4, 8, 9]), (3, [8, 9])]
)
def test_windows_at_checkpoints(every: int, wanted: list[int]) -> None:
    group = several(FULL, WINDOW, checkpoint_tokens=every)
    assert group.suffix_slots(1, request(41), 0, 10, None) == wanted
    steps = [slot for at in range(10) for slot in group.suffix_slots(1, request(41), at, at + 1, None)]
    assert steps == wanted, "also in small steps"


@pytest.mark.parametrize(("groups", "every"), [((FULL, WINDOW), 16384), ((WINDOW,), 2048)])
def test_windows_alone_have_more_checkpoints(groups: tuple[Group, ...], every: int) -> None:
    """The daemon does not know where prompts part."""
    prompt, slots, step = RequestView("r", 20_001, 20_001, []), 20_000 // 4, every // 4
    found = several(*groups, checkpoint_tokens=None).suffix_slots(len(groups) - 1, prompt, 0, slots, None)
    assert found == [end - back for end in [*range(step, slots, step), slots] for back in (2, 1)]


@pytest.mark.parametrize(
    ("divergence", "wanted"), [(5, [3, 4, 8, 9]), (1, [0, 8, 9]), (9, [7, 8, 9]), (10, [8, 9]), (0, [8, 9])]
)
def test_windows_where_a_prompt_parts_from_others(divergence: int, wanted: list[int]) -> None:
    group = several(FULL, WINDOW)
    assert group.suffix_slots(1, request(41), 0, 10, None, divergence) == wanted
    steps = [slot for at in range(10) for slot in group.suffix_slots(1, request(41), at, at + 1, None, divergence)]
    assert steps == wanted, "also in small steps"


def test_nobody_continues_where_a_state_is_missing() -> None:
    group = several(FULL, WINDOW, STATE)
    assert group.suffix_slots(1, request(41), 0, 10, None, 5) == [8, 9]


def test_a_window_is_saved_while_it_is_there() -> None:
    """Before token 12 the engine has computed 8, and keeps the five before those."""
    group = several(FULL, WINDOW)
    tables = [TABLES[0], [11, 12, 13], TABLES[2]]
    assert group.suffix_blocks(1, tables, [0, 1, 2], 8) == {0: [11], 1: [12], 2: [13]}
    assert group.suffix_blocks(1, tables, [0, 1, 2], 9) == {1: [12], 2: [13]}
    assert group.suffix_blocks(1, [TABLES[0], [0, 12], TABLES[2]], [0, 1, 2], 0) == {1: [12]}


def test_a_state_is_saved_where_all_of_its_groups_have_one() -> None:
    group = several(FULL, STATE)
    offers = [(3, 31, 4), (4, 41, 4), (3, 32, 8), (3, 33, 10), (4, 43, 10), (1, 99, 8)]
    assert group.state_slots(offers) == [(1, 0, [31, 41])]
    assert group.suffix_slots(1, request(41), 0, 10, None) == []


def test_without_full_attention_a_suffix_is_the_first_group() -> None:
    group = several(WINDOW)
    assert (group.has_full, group.suffixes, group.align) == (False, (0,), 4)
    jobs = group.cut_loads("r", Found(b"id", packed(2), 3), [[], TABLES[1]], 0, 6)
    assert [(slots(job.refs), job.blocks) for job in jobs] == [([0, 1], [12, 13])]


def test_tables_of_all_groups_are_followed() -> None:
    states = {"r": RequestState(request(8))}
    started = StepView(1, {"r": 8}, [NewTable("r", ([1, 2], [0, 7], [3]), 4)])
    assert follow_blocks(states, started, (2, 4, 4)) == [7]
    more = StepView(1, {"r": 1}, [], ["r"], [8], [([4], [], [5, 6])])
    assert follow_blocks(states, more, (2, 4, 4)) == [4, 5, 6]
    assert states["r"].tables == [[1, 2, 4], [0, 7], [3, 5, 6]]


def test_what_was_found_for_another_beginning_is_looked_up_again() -> None:
    """Of the suffix groups of the first two blocks, none was asked for: the engine had them then, and has one of them
    now."""
    lookups = Lookups(several(FULL, WINDOW), 1, 4096, "off", Counters(), None)  # type: ignore[arg-type]
    state = RequestState(request(20))
    state.lookup = LookupResult(SimpleNamespace(id=1), 4, 4, 0.0, had=2)  # type: ignore[arg-type]
    assert [lookups.known(state, 4, start, 0.0) is None for start in (6, 4, 3, 2)] == [False, False, True, True]
    assert lookups.known(state, 3, 4, 0.0) is None, "another boundary"


def test_a_preempted_request_does_not_part_from_what_it_has_saved_itself() -> None:
    lookups = Lookups(several(FULL, WINDOW), 1, 4096, "off", Counters(), None)  # type: ignore[arg-type]
    state = RequestState(request(41))

    def divergence(found: int) -> int:
        lease = SimpleNamespace(
            id=0, hits=0, pending=0, sums=b"", region_id=b"", failed=False, divergence=found, tail=0
        )
        lookups.ask(state, SimpleNamespace(acquire=lambda *_, **__: lease), 10, 0, 0.0)  # type: ignore[arg-type]
        return state.progress.divergence

    assert [divergence(4), divergence(5)] == [4, 5], "while it waits, others go on"
    state.tables = [[1, 2, 3]]
    assert divergence(8) == 5


def test_a_null_block_is_not_filled() -> None:
    places = Places(100, [Column(0, 8, 2), Column(1, 16, 1)])
    pieces = without_nulls(places.cut(np.array([1000, 2000]), [0, 5, 0, 6, 7, 9]))
    assert [(each.layout, each.blocks.tolist(), each.offsets.tolist()) for each in pieces] == [
        (0, [5, 6, 7], [1108, 2100, 2108]),
        (1, [9], [2116]),
    ]
    assert (places.begin, places.bytes, places.columns) == (100, 32, 3)
