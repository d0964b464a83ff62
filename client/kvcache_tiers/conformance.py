"""The tests that every backend passes, for pytest: import this class, and define the fixture `open_tier`.

    from kvcache_tiers.conformance import BackendSuite

    class TestMine(BackendSuite):
        @pytest.fixture
        def open_tier(self, region, tmp_path): return lambda: MyBackend(..., region)

`open_tier()` opens the same store again each time, which is empty at the beginning of a test.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvcache_tiers.backend import Backend, Value

SIZE = 3 * 4096
Open = Callable[[], Backend]


def key(number: int) -> bytes:
    return b"\1\0key" + number.to_bytes(32, "big")


def header(number: int) -> bytes:
    return b"header" + number.to_bytes(40, "big")


def data(number: int, size: int = SIZE) -> bytes:
    return random.Random(number * 1009 + size).randbytes(size)


class Region:
    """Memory that all buffers of a test are parts of, as those of a tier are parts of the daemon's region."""

    def __init__(self) -> None:
        self.whole = memoryview(mmap.mmap(-1, 512 << 20))
        self._lock, self._next = threading.Lock(), 0

    def cut(self, size: int) -> memoryview:
        with self._lock:
            begin, self._next = self._next, self._next + -(-size // 64) * 64
        assert self._next <= len(self.whole)
        return self.whole[begin : begin + size]

    def filled(self, data: bytes) -> memoryview:
        here = self.cut(len(data))
        here[:] = data
        return here


class BackendSuite:
    size = SIZE

    @pytest.fixture(autouse=True)
    def region(self) -> Region:
        self.buffers = Region()
        return self.buffers

    @pytest.fixture
    def tier(self, open_tier: Open) -> Iterator[Backend]:
        with closing(open_tier()) as tier:
            yield tier

    def stored(self, tier: Backend, *numbers: int, size: int | None = None) -> list[bool]:
        """Return, for each value, whether it is there, after a check of its bytes."""
        size = size or self.size
        buffers = [self.buffers.cut(size) for _ in numbers]
        headers = tier.get([key(each) for each in numbers], buffers)
        for number, found, buffer in zip(numbers, headers, buffers, strict=True):
            assert found is None or (found == header(number) and buffer == data(number, size))
        return [found is not None for found in headers]

    def put(self, tier: Backend, *numbers: int, size: int | None = None) -> list[bool]:
        values = [Value(header(each), self.buffers.filled(data(each, size or self.size))) for each in numbers]
        return tier.put([key(each) for each in numbers], values)

    def test_what_was_put_is_there(self, tier: Backend) -> None:
        assert self.put(tier, 1, 2) == [True, True]
        assert tier.contains([key(1), key(3), key(2)]) == [True, False, True]
        assert self.stored(tier, 2, 3, 1) == [True, False, True]

    def test_nothing_is_asked_for(self, tier: Backend) -> None:
        assert not (tier.put([], []) or tier.get([], []) or tier.contains([]))
        tier.remove([])

    def test_it_is_not_lost(self, tier: Backend) -> None:
        self.put(tier, 1, 2)
        tier.remove([key(1)])
        assert tier.lost() == ""

    def test_what_was_removed_is_not(self, tier: Backend) -> None:
        self.put(tier, 1, 2)
        tier.remove([key(1), key(3)])
        assert tier.contains([key(1), key(2)]) == [False, True]
        assert self.stored(tier, 1, 2) == [False, True]
        assert self.put(tier, 1) == [True] and self.stored(tier, 1) == [True]

    def test_what_is_there_can_be_put_again(self, tier: Backend) -> None:
        assert self.put(tier, 1) == self.put(tier, 1) == [True]
        assert self.stored(tier, 1) == [True]

    @pytest.mark.parametrize("size", [1, 64, 4095, 4097, 1 << 20])
    def test_any_size(self, tier: Backend, size: int) -> None:
        assert self.put(tier, 1, 2, size=size) == [True, True]
        assert self.stored(tier, 1, 2, size=size) == [True, True]

    def test_another_size_is_not_there(self, tier: Backend) -> None:
        self.put(tier, 1)
        assert tier.get([key(1)], [self.buffers.cut(self.size + 1)]) == [None]
        assert tier.get([key(1)], [self.buffers.cut(self.size - 1)]) == [None]

    def test_buffers_within_a_page(self, tier: Backend) -> None:
        """Slots begin at multiples of 64 bytes."""
        whole = self.buffers.cut(self.size + 192)
        here = whole[64 : 64 + self.size]
        here[:] = data(1, self.size)
        assert tier.put([key(1)], [Value(header(1), here)]) == [True]
        here[:] = bytes(self.size)
        assert tier.get([key(1)], [here]) == [header(1)]
        assert here == data(1, self.size) and not any(whole[:64]) and not any(whole[64 + self.size :])

    def test_it_is_there_after_it_was_opened_again(self, open_tier: Open) -> None:
        with closing(open_tier()) as tier:
            self.put(tier, 1, 2)
        with closing(open_tier()) as tier:
            assert self.stored(tier, 1, 2, 3) == [True, True, False]

    def test_many_threads(self, tier: Backend) -> None:
        """Each thread finds a value whole, or not at all."""
        ended: list[int] = []

        def work(seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(60):
                numbers = draw.sample(range(20), 4)
                what = draw.random()
                if what < 0.4:
                    self.put(tier, *numbers)
                elif what < 0.5:
                    tier.remove([key(each) for each in numbers])
                else:
                    self.stored(tier, *numbers)
            ended.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert sorted(ended) == list(range(8)), "some have failed"
