"""Pieces joined and cut: the same bytes go to the same places."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache_client.address_ranges import Runs, Spans, cut, join

PIECES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 30)), max_size=12)


def spans(rows: list[tuple[int, int, int]]) -> Spans:
    device, host, sizes = (np.array([row[i] for row in rows], np.uint64) for i in range(3))
    return Spans(device + np.uint64(1 << 40), host + np.uint64(1 << 41), sizes)


def bytewise(found: Spans) -> list[tuple[int, int]]:
    rows = zip(*(column.tolist() for column in found), strict=True)
    return sorted((device + i, host + i) for device, host, size in rows for i in range(size))


@given(PIECES)
def test_joining_keeps_every_byte(rows: list[tuple[int, int, int]]) -> None:
    assert bytewise(join(spans(rows))) == bytewise(spans(rows))


@given(PIECES, st.integers(0, 40), st.integers(1, 16))
def test_cutting_keeps_every_byte_and_crosses_nothing(rows: list[tuple[int, int, int]], back: int, every: int) -> None:
    begin = (1 << 41) - back
    found = cut(spans(rows), begin, every)
    assert bytewise(found) == bytewise(spans(rows))
    first, last = found.host - np.uint64(begin), found.host + found.sizes - np.uint64(begin + 1)
    assert (first // np.uint64(every) == last // np.uint64(every)).all()


def test_what_follows_on_both_sides_is_one_piece() -> None:
    found = join(spans([(0, 0, 4), (4, 4, 4), (8, 8, 2), (10, 20, 2), (12, 22, 1), (20, 23, 1)]))
    assert found.sizes.tolist() == [10, 3, 1]


SIZES = st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=5), min_size=1, max_size=4)  # of runs, of each block


@given(SIZES, st.randoms(use_true_random=False), st.integers(0, 1 << 41))
def test_blocks_in_several_runs_keep_every_byte(sizes: list[list[int]], draw: random.Random, base: int) -> None:
    """Copies that begin and end anywhere inside of blocks, beside copies of what lies in one piece."""
    flat = [size for each in sizes for size in each]
    region = 2 * sum(flat) + 20
    order = list(range(len(flat)))
    draw.shuffle(order)
    places, at = {}, 20  # before them lies what has one run
    for number in order:
        places[number], at = at, at + flat[number] + draw.randrange(2)
    begins = [region + sum(flat[:number]) for number in range(len(flat))]
    runs = Runs(*(np.array(each, np.uint64) for each in (begins, [places[n] for n in range(len(flat))], flat)))
    lies = {begins[n] + i: places[n] + i for n in range(len(flat)) for i in range(flat[n])} | {n: n for n in range(20)}
    rows, end = [(0, 3, 17)], region
    for each in sizes:
        begin = draw.randrange(sum(each))
        rows.append((100 + end, end + begin, draw.randint(1, sum(each) - begin)))
        end += sum(each)
    device, host, lengths = (np.array([row[column] for row in rows], np.uint64) for column in range(3))
    found = runs.translate(Spans(device, host + np.uint64(base), lengths), base)
    expected = [(row[0] + i, base + lies[row[1] + i]) for row in rows for i in range(row[2])]
    assert bytewise(found) == sorted(expected)
    for _, begin, size in rows:
        pieces = runs.pieces(begin, size)
        assert [at + i for at, part in pieces for i in range(part)] == [lies[begin + i] for i in range(size)]
