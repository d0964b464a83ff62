"""The free runs against a naive model: a byte for each page."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcache_proto.region import Run
from kvcache_server.core.pool import FreeRuns, Runs

PAGES = 96


class FreeRunsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.free = FreeRuns()
        self.free.add(0, PAGES)
        self.taken = bytearray(PAGES)
        self.held: list[Runs] = []

    def naive(self) -> list[Run]:
        """All free runs, in order."""
        ends = itertools.accumulate(len(list(same)) for _, same in itertools.groupby(self.taken))
        edges = [0, *ends]
        return [(begin, end - begin) for begin, end in itertools.pairwise(edges) if not self.taken[begin]]

    @rule(count=st.one_of(st.integers(1, 8), st.integers(1, PAGES)))
    def take(self, count: int) -> None:
        before = sorted((length for _, length in self.naive()), reverse=True)
        runs = self.free.take(count)
        if count > self.taken.count(0):
            assert runs is None
            return
        assert runs is not None and sum(length for _, length in runs) == count
        for page, length in runs:
            assert length > 0 and not any(self.taken[page : page + length]), "pages that are not free"
            self.taken[page : page + length] = b"\1" * length
        if len(runs) == 1:
            assert before[0] >= count
        else:
            # Of runs that are too short by less than half, not all are looked at; there are no more than that here.
            assert before[0] < count, "several runs, although one is long enough"
            bits = [length.bit_length() for length in before]
            lengths = [length for _, length in runs]
            assert [each.bit_length() for each in lengths[:-1]] == bits[: len(runs) - 1], "not the longest first"
            assert len(runs) <= 2 * next(
                at for at, total in enumerate(itertools.accumulate(before), 1) if total >= count
            )
        self.held.append(runs)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        runs = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for page, length in runs:
            self.free.add(page, length)
            self.taken[page : page + length] = bytes(length)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back_a_part(self, data: st.DataObject) -> None:
        """A run of a block in two, as pages that were claimed twice come back after a restart."""
        at = data.draw(st.integers(0, len(self.held) - 1))
        (page, length), *rest = self.held.pop(at)
        middle = data.draw(st.integers(0, length))
        for begin, count in ((page + middle, length - middle), (page, middle)):
            if count:
                self.free.add(begin, count)
                self.taken[begin : begin + count] = bytes(count)
        if rest:
            self.held.append(tuple(rest))

    @invariant()
    def is_the_naive_one(self) -> None:
        assert sorted(self.free.runs()) == self.naive(), "all runs, merged"
        assert self.free.pages == self.taken.count(0)


FreeRunsMachine.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestFreeRunsAgainstModel = FreeRunsMachine.TestCase


def comb(lengths: list[int]) -> FreeRuns:
    """Return free runs of these lengths, with a page between each two."""
    free, page = FreeRuns(), 0
    for length in lengths:
        free.add(page, length)
        page += length + 1
    return free


def test_a_short_run_is_taken_so_that_long_ones_stay() -> None:
    free = comb([100, 5, 30])
    assert free.take(4) == ((101, 4),)
    assert sorted(free.runs()) == [(0, 100), (105, 1), (107, 30)]


def test_without_a_long_run_the_longest_are_taken() -> None:
    free = comb([2, 9, 3, 17, 1])
    assert free.take(27) == ((17, 17), (3, 9), (0, 1))
    assert sorted(free.runs()) == [(1, 1), (13, 3), (35, 1)]
    assert free.take(6) is None
    assert free.pages == 5
    assert free.take(5) == ((13, 3), (35, 1), (1, 1))
    assert not free.runs() and not free.pages and free.take(1) is None


@pytest.mark.parametrize("seed", range(4))
def test_runs_merge_in_whatever_order_they_come_back(seed: int) -> None:
    draw, free = random.Random(seed), FreeRuns()
    free.add(0, 1000)
    taken: list[Run] = []
    while (runs := free.take(draw.randrange(1, 9))) is not None:
        taken += runs
    taken += free.take(free.pages) or () if free.pages else ()
    draw.shuffle(taken)
    for page, length in taken:
        free.add(page, length)
    assert free.runs() == [(0, 1000)]
