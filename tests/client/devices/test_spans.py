"""Pieces joined and cut: the same bytes go to the same places."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache_client.devices.spans import Spans, cut, join

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
