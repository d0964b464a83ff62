"""When a request is computed while it loads, and into which sections its blocks are divided."""

from __future__ import annotations

import pytest

from kvcache_client.scheduler.cost_model import LEAST_SAVED, CostModel, Overlap
from kvcache_client.scheduler.views import NewTable, StepView
from kvcache_client.worker.layered import MOST, section_ends

KIB = 1 << 10


@pytest.mark.parametrize(
    ("layers", "ends"),
    [
        ([64 * KIB * n for n in range(1, 33)], [128 * KIB * n for n in range(1, 17)]),
        ([256 * KIB * n for n in range(1, 33)], [512 * KIB * n for n in range(1, 17)]),
        ([100 * KIB * n for n in range(1, 4)], [200 * KIB, 300 * KIB]),  # two sections, of whole layers
        ([40 * KIB * n for n in range(1, 6)], []),  # one that is too small
        ([1024 * KIB], []),  # one layer
        ([300 * KIB, 300 * KIB, 600 * KIB], [300 * KIB, 600 * KIB]),  # the second one shares the KV of the first
        ([8 * KIB, 2048 * KIB], [2048 * KIB]),
    ],
)
def test_sections_have_whole_layers(layers: list[int], ends: list[int]) -> None:
    found = section_ends(layers)
    assert found == (ends if len(ends) > 1 else [])
    assert len(found) <= MOST and not {*found} - {*layers}


def learned(load: float, token: float, fixed: float = 0.001) -> CostModel:
    """Return the pace of an engine that takes `token` seconds for a token, and `load` for one that it loads."""
    pace, now = CostModel(), 0.0
    for number in range(1, 20):
        tokens = 100 * number
        step = StepView(tokens=tokens, scheduled={"r": tokens}, started=[NewTable("r", [[]], 0)])
        assert pace.step(number, step, now)
        now += fixed + token * tokens
        pace.ended([number], now)
        pace.load_began("r", tokens, now)
        now += fixed + load * tokens
        pace.load_ended("r", False, now)
    return pace


def test_a_load_overlaps_where_that_saves_time() -> None:
    pace = learned(load=2.5e-6, token=25e-6)  # 8,000 tokens in 20 ms, 2,000 in 50 ms
    overlap = Overlap(pace, True, ranks=2, step_tokens=8192)
    assert not overlap.wins(0, 8000, 10_000), "no rank is known to announce its layers"
    overlap.ranks_ready({0: True})
    assert not overlap.wins(0, 8000, 10_000), "only one is"
    overlap.ranks_ready({1: True})
    assert overlap.wins(0, 8000, 10_000)
    assert not overlap.wins(0, 8000, 8001), "there is nothing to compute"
    assert not overlap.wins(0, 100, 10_000), "there is hardly anything to load"
    assert not overlap.wins(0, 80_000, 82_000), "others that come would wait for 200 ms instead of 50"
    assert not Overlap(pace, False, 0, 8192).wins(0, 8000, 10_000)
    assert not Overlap(CostModel(), True, 0, 8192).wins(0, 8000, 10_000), "nothing is known yet"
    short = Overlap(pace, True, 0, step_tokens=64)
    assert pace.computing(0, 64) < LEAST_SAVED
    assert not short.wins(0, 8000, 10_000), "the step that it overlaps with is short"
    overlap.ranks_ready({0: False})
    assert not overlap.wins(0, 8000, 10_000)
    overlap.ranks_ready({0: True})
    pace.carried({0: 1e-9})
    assert not overlap.wins(0, 8000, 10_000), "the engine's thread would wait for the one that carries the bytes"


def test_what_overlaps_teaches_only_what_was_measured() -> None:
    pace = learned(load=2.5e-6, token=25e-6)
    before = pace.computing(0, 2000), pace.loading(8000)
    step = StepView(tokens=2000, scheduled={"r": 2000}, started=[NewTable("r", [[]], 8000)])
    assert before[1] == pytest.approx(8000 * (2.5e-6 + 0.001 / 1900))
    for number in range(100, 140):  # each waits for its load, which takes ten times as long as before
        assert pace.step(number, step, number, learns=False)
        pace.ended([number], number + 0.2)
        pace.arrived(8000, 0.2)
    assert pace.computing(0, 2000) == before[0]
    assert pace.loading(8000) == pytest.approx(0.2, rel=0.1)
