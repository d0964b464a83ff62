"""`python -m kvcache_tiers.bench`: how fast a store is as a tier. `kvcache-server bench --tier URL` does the same.

It writes values of one size as a tier does, in batches from several threads, looks them up, reads them back, and
removes them. The values are not compressible.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from kvcache_proto.errors import KVCacheError
from kvcache_proto.sizes import format_size, parse_size
from kvcache_tiers.backend import Backend, Failed, Value, find_opener
from kvcache_tiers.process import READERS, URL, WRITERS

LOOKUPS = 200  # lookups of LOOKED_UP keys each
LOOKED_UP = 64
HEADER = bytes(128)
_STAMP = 8  # bytes at the beginning of a value that identify it


class Bench:
    """The benchmark of one backend, with `count` values of `size` bytes."""

    def __init__(self, backend: Backend, region: memoryview, size: int, count: int) -> None:
        self._backend, self._size = backend, size
        run = secrets.token_bytes(16)
        self._keys = [b"\0\0" + run + number.to_bytes(32, "big") for number in range(count)]
        self._batch = max(1, backend.batch_bytes // size)
        buffers = [region[at : at + size] for at in range(0, len(region) - size + 1, size)]
        places = range(0, len(buffers) - self._batch + 1, self._batch)
        self._buffers = [buffers[at : at + self._batch] for at in places]
        self._free = list(range(len(self._buffers)))
        for buffer in buffers:
            buffer[:] = os.urandom(size)

    def put(self) -> float:
        """Write all values; return bytes per second. Raises Failed, also if the store does not take one."""
        return self._run(WRITERS, self._put)

    def get(self) -> float:
        """Read all values; return bytes per second. Raises Failed, also if one differs from the written one."""
        return self._run(READERS, self._get)

    def look(self) -> float:
        """Return the median of the seconds that the store takes to look up LOOKED_UP values."""
        times = []
        for number in range(LOOKUPS):
            at = number * LOOKED_UP % len(self._keys)
            keys = self._keys[at : at + LOOKED_UP]
            begin = time.perf_counter()
            found = self._backend.contains(keys)
            times.append(time.perf_counter() - begin)
            if not all(found):
                raise Failed("the store does not have what was written to it: is it too small?")
        return statistics.median(times)

    def remove(self) -> None:
        for at in range(0, len(self._keys), self._batch):
            self._backend.remove(self._keys[at : at + self._batch])

    def _run(self, threads: int, move: Callable[[Sequence[int], Sequence[memoryview]], None]) -> float:
        def part(at: int) -> None:
            place = self._free.pop()
            try:
                numbers = range(at, min(at + self._batch, len(self._keys)))
                move(numbers, self._buffers[place][: len(numbers)])
            finally:
                self._free.append(place)

        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(part, at) for at in range(0, len(self._keys), self._batch)]:
                done.result()
        return len(self._keys) * self._size / (time.perf_counter() - begin)

    def _put(self, numbers: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for number, buffer in zip(numbers, buffers, strict=True):
            buffer[:_STAMP] = number.to_bytes(_STAMP, "big")
        stored = self._backend.put([self._keys[each] for each in numbers], [Value(HEADER, each) for each in buffers])
        if not all(stored):
            raise Failed("the store has no room for what is measured")

    def _get(self, numbers: Sequence[int], buffers: Sequence[memoryview]) -> None:
        headers = self._backend.get([self._keys[each] for each in numbers], buffers)
        for number, buffer, header in zip(numbers, buffers, headers, strict=True):
            if header != HEADER or buffer[:_STAMP] != number.to_bytes(_STAMP, "big"):
                raise Failed("the store does not give back what was written to it: is it too small?")


def measure(url: str, size: int, total: int) -> dict[str, float]:
    """Return bytes per second written and read, and milliseconds of a lookup. Raises ConfigError or Failed."""
    opener = find_opener(url)
    region = memoryview(mmap.mmap(-1, max(READERS, WRITERS) * max(size, 64 << 20)))
    with closing(opener(url, region)) as backend:
        bench = Bench(backend, region, size, max(1, total // size))
        try:
            put = bench.put()
            return {"put_bytes_per_second": put, "lookup_ms": bench.look() * 1e3, "get_bytes_per_second": bench.get()}
        finally:
            bench.remove()


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvcache-server bench --tier URL")
    parser.add_argument("--block", default="2MiB", help="size of a value")
    parser.add_argument("--total", default="1GiB", help="how much is written and read")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        size, total = parse_size(given.block), parse_size(given.total)
        figures = measure(os.environ[URL], size, total)
    except (KVCacheError, Failed) as error:
        print(f"kvcache-server bench: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(figures, indent=2))
        return 0
    print(f"{format_size(total)} in values of {format_size(size)}")
    print(f"written  {format_size(round(figures['put_bytes_per_second']))}/s by {WRITERS} threads")
    print(f"read     {format_size(round(figures['get_bytes_per_second']))}/s by {READERS} threads")
    print(f"lookup   {figures['lookup_ms']:.3f} ms for {LOOKED_UP} values")
    return 0


if __name__ == "__main__":
    sys.exit(main())
