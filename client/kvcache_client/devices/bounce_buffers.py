"""Copies for host memory that is not page-locked: through two page-locked buffers, by a thread.

A direct copy from such memory would look asynchronous and yet make the engine wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from kvcache_client.address_ranges import Spans
from kvcache_client.devices import Job
from kvcache_client.devices.copy_paths import Blocks, Path, rows
from kvcache_client.devices.runtime import Handle, Runtime


class BounceBuffers:
    """Two buffers of one direction, used by one thread at a time."""

    def __init__(self, runtime: Runtime, path: Path, size: int) -> None:
        """Take two buffers of `size` bytes, at least one slot each. Raises CopyError."""
        self._runtime, self._path = runtime, path
        self._slot = path.sections[0].bytes
        self._size = max(self._slot, min(size, path.most(0) * self._slot))
        self._buffers: list[tuple[int, Handle]] = []
        for _ in range(2):
            self._buffers.append((runtime.allocate_host(self._size), runtime.create_event()))

    def save(self, job: Job) -> None:
        """Copy a job; return when the bytes are in the region."""
        filling: tuple[list[int], int, Handle] | None = None
        try:
            for blocks, offsets, buffer, event in self._parts(job):
                if job.cancelled:
                    break
                self._path.move(blocks, rows(buffer, len(blocks), self._slot), _whole)
                self._path.finish(event)
                if filling is not None:
                    self._copy_host(job, filling[0], 0, self._slot, *filling[1:])
                filling = (offsets, buffer, event)
            if filling is not None:
                self._copy_host(job, filling[0], 0, self._slot, *filling[1:])
        except BaseException:
            self._path.synchronize()  # no copy may still write to a buffer that the next job takes
            raise

    def load(self, job: Job) -> None:
        """Copy a job; return when the last bytes are in a buffer and their copy to the device is queued."""
        begin, size, _ = self._path.sections[job.section]
        try:
            for blocks, offsets, buffer, event in self._parts(job):
                self._copy_host(job, offsets, begin, size, buffer, event)
                self._path.move(blocks, rows(buffer - begin, len(blocks), size), _whole, job.section)
                self._path.record(event)
        except BaseException:
            self._path.synchronize()
            raise

    def close(self) -> None:
        for buffer, event in self._buffers:
            self._runtime.free_host(buffer)
            self._runtime.destroy_event(event)

    def _parts(self, job: Job) -> Iterator[tuple[Blocks, list[int], int, Handle]]:
        most = max(1, min(self._size // self._path.sections[job.section].bytes, self._path.most(job.section)))
        for number, begin in enumerate(range(0, len(job.blocks), most)):
            part = slice(begin, begin + most)
            yield job.blocks[part], job.offsets[part].tolist(), *self._buffers[number % 2]

    def _copy_host(self, job: Job, offsets: list[int], begin: int, size: int, buffer: int, event: Handle) -> None:
        """Copy `size` bytes from `begin` on of each slot from or to a buffer, after its `event`."""
        self._runtime.wait_host(event)
        for number, offset in enumerate(offsets):
            at = buffer + number * size
            for place, part in job.pieces(offset + begin, size):
                host = job.region.address + place
                target, source = (host, at) if job.saves else (at, host)
                ctypes.memmove(target, source, part)
                at += part


def _whole(spans: Spans) -> Spans:
    """Return `spans` as they are: a buffer is one piece of memory, so there is nothing to cut."""
    return spans
