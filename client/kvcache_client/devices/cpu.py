"""KV cache in host memory: a thread per direction, and a helper for large jobs, that copy with the GIL released.

One core reaches about 60 % of the memory bandwidth: for fragments this small, memcpy reads the bytes that it is about
to overwrite. Two reach all of it. Evenly spaced fragments are copied by one numpy call per block, single ones by
memmove; either way a thread needs the GIL once per some hundred KiB. On a host, a copy that has not run yet sees later
writes, so `fence` waits as long as copying takes, on the cores that the engine would compute with.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache_client import compression
from kvcache_client.devices import Device, Job, Memory, Scratch, check_job
from kvcache_client.devices.layout import Fragment, Section, sections

logger = logging.getLogger("kvcache_client.devices")

Bytes = npt.NDArray[np.uint8]
_SHARE = 4 << 20  # bytes from which on a job is worth a second thread


class CpuDevice(Device):
    """The naive implementation that the other devices are compared with."""

    def __init__(
        self,
        fragments: Sequence[Fragment],
        num_blocks: int,
        keep: Sequence[Any] = (),
        ends: Sequence[int] = (),
        compress: bool = False,
    ) -> None:
        """`keep` are the tensors that the fragments are in; torch's, or numpy's. The rest as in `open_device`."""
        self._keep, self._blocks = keep, num_blocks
        raw = sections(fragments, ends)
        self._sections = [_Views.of(part, num_blocks, keep) for part in raw]
        self._raw = raw if compress else []
        self._stored = sections(fragments, ends, compress=True) if compress else raw
        self._end = self._stored[0].bytes
        self._region_bytes = 0
        self._helpers = futures.ThreadPoolExecutor(2, "kvcache-copy")
        self._saver = _Queue("kvcache-save", self._share)
        self._loader = _Queue("kvcache-load", self._share)

    def register(self, region: Memory) -> None:
        """Host memory needs no pinning to be copied."""
        self._region_bytes = region.bytes

    def registered(self) -> tuple[bool, int]:
        return True, self._region_bytes

    def linger(self, seconds: float) -> None:
        self._loader.linger(seconds)

    def peek(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def poke(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def save(self, job: Job) -> None:
        job.saves = True
        self._saver.put(job)

    def load(self, job: Job) -> None:
        self._loader.put(job)

    def start(self, job: Job) -> None:
        self._loader.start(job)

    def hold(self, job: Job) -> None:
        self._loader.start(job)
        self._loader.wait(lambda each: each is job)

    def fence(self, blocks: Collection[int]) -> None:
        given = set(blocks)
        self._saver.wait(lambda job: not given.isdisjoint(job.blocks.tolist()))

    def drain(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        return all(thread.drain(max(0.0, until - time.monotonic())) for thread in (self._saver, self._loader))

    def close(self) -> None:
        for thread in (self._saver, self._loader):
            thread.close()
        self._helpers.shutdown()

    def _share(self, job: Job) -> None:
        """Copy one half here and one on a helper. Returns, or raises, only when both have ended."""
        check_job(job, self._blocks, self._end)
        half = len(job.blocks) // 2 if len(job.blocks) * self._end >= _SHARE else 0
        other = self._helpers.submit(self._copy, job, slice(half)) if half else None
        try:
            self._copy(job, slice(half, None))
        finally:
            if other is not None:
                other.result()

    def _copy(self, job: Job, part: slice) -> None:
        if self._raw:
            self._copy_compressed(job, part)
        else:
            self._move(job, part)

    def _copy_compressed(self, job: Job, part: slice) -> None:
        """Copy block by block, by way of its raw bytes."""
        whole, (begin, size, _), (at, stored, _) = self._raw[0].bytes, self._raw[job.section], self._stored[job.section]
        region, raw = np.frombuffer(job.region.buffer, dtype=np.uint8), Scratch(whole)
        for block, offset in zip(job.blocks[part].tolist(), job.offsets[part].tolist(), strict=True):
            here = Job(raw, np.array([block]), np.zeros(1, np.int64), job.ended, section=job.section)
            here.saves = job.saves
            pieces = job.pieces(offset + at, stored)
            if job.saves:
                self._move(here, slice(None))
                data = compression.compress(raw.words[None])[0]
                for place, some in pieces:
                    region[place : place + some], data = data[:some], data[some:]
            else:
                data = np.concatenate([region[place : place + some] for place, some in pieces])
                raw.words[begin : begin + size] = compression.decompress(data[None], whole, begin, begin + size)[0]
                self._move(here, slice(None))

    def _move(self, job: Job, part: slice) -> None:
        region, base = np.frombuffer(job.region.buffer, dtype=np.uint8), job.region.address
        saves, end, move, copy = job.saves, job.region.bytes, ctypes.memmove, np.copyto
        even, single = views = self._sections[job.section]
        for block, at in zip(job.blocks[part].tolist(), job.offsets[part].tolist(), strict=True):
            if at < end:
                for view, run in even:
                    begin = at + run.offset
                    slot = region[begin : begin + run.number * run.bytes].reshape(run.number, run.bytes)
                    if saves:
                        copy(slot, view[block])
                    else:
                        copy(view[block], slot)
                moves = [(run.pointer + block * run.stride, at + run.offset, run.bytes) for run in single]
            else:
                moves = views.moves(job, block, at)
            for device, place, size in moves:
                if saves:
                    move(base + place, device, size)
                else:
                    move(device, base + place, size)


class FragmentRun(NamedTuple):
    """`number` fragments of one size, `step` bytes apart on the device, contiguous in the slot from `offset` on."""

    pointer: int
    stride: int
    bytes: int
    number: int
    step: int
    offset: int


class _Views(NamedTuple):
    """The pieces of a section: runs that numpy copies, each with its memory, and fragments copied one by one."""

    even: list[tuple[Bytes, FragmentRun]]
    single: list[FragmentRun]

    @classmethod
    def of(cls, section: Section, num_blocks: int, tensors: Sequence[Any]) -> _Views:
        """Have numpy copy each run that lies inside one allocation.

        numpy counts two arrays as overlapping if one begins before the other ends. The other side of the copy may lie
        between fragments of two allocations; so may the temporary that numpy then makes, and the next one that it makes
        because of that, until the stack is full.
        """
        allocations = [_allocation(tensor) for tensor in tensors]
        views = cls([], [])
        for run in runs(section.fragments, section.begin):
            span = (num_blocks - 1) * run.stride + (run.number - 1) * run.step + run.bytes
            end = run.pointer + span
            if run.number > 1 and any(first <= run.pointer and end <= last for first, last in allocations):
                memory = memoryview((ctypes.c_uint8 * span).from_address(run.pointer))
                shape, strides = (num_blocks, run.number, run.bytes), (run.stride, run.step, 1)
                views.even.append((np.ndarray(shape, np.uint8, buffer=memory, strides=strides), run))
                continue
            for number in range(run.number):
                pointer, offset = run.pointer + number * run.step, run.offset + number * run.bytes
                views.single.append(FragmentRun(pointer, run.stride, run.bytes, 1, 0, offset))
        return views

    def moves(self, job: Job, block: int, at: int) -> list[tuple[int, int, int]]:
        """Return the pieces of `block`, which lies in several runs of pages: address on the device, offset in the
        region, bytes."""
        found = []
        for run in (*(run for _, run in self.even), *self.single):
            for number in range(run.number):
                device = run.pointer + block * run.stride + number * run.step
                for place, size in job.pieces(at + run.offset + number * run.bytes, run.bytes):
                    found.append((device, place, size))
                    device += size
        return found


class _Queue:
    """Runs jobs in order, on a thread. Called from one thread.

    Not an executor: with a future per job, `tests/bench/step.py` shows it in steps that fill many blocks.
    """

    def __init__(self, name: str, copy: Callable[[Job], None]) -> None:
        self._copy = copy
        self._later: deque[Job] = deque()  # the last of `_unended`: those that have not been started
        self._unended: dict[Job, None] = {}  # in order
        self._changed = threading.Condition()  # a job has ended
        self._started: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: end
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        if self._closed:
            job.error = "the device is closed"
            job.ended(job)
            return
        self._unended[job] = None
        self._later.append(job)
        if not job.later:
            self.start(job)

    def start(self, last: Job) -> None:
        """Start the jobs up to `last`, if it has not been started."""
        while last in self._later:
            self._started.put(self._later.popleft())

    def wait(self, concerned: Callable[[Job], bool]) -> None:
        """Wait until the jobs for which `concerned` returns True have ended."""
        self._wait([job for job in self._unended.copy() if concerned(job)])

    def linger(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the first job, if it has been started."""
        unended = [*self._unended.copy()]
        if unended and unended[0] not in self._later:
            self._wait(unended[:1], seconds)

    def drain(self, seconds: float) -> bool:
        return self._wait([*self._unended.copy()], seconds)

    def _wait(self, jobs: Sequence[Job], seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the end of jobs; return whether all have ended."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(job in self._unended for job in jobs), seconds)

    def close(self) -> None:
        self._closed = True
        self._started.put(None)
        self._thread.join()
        self._later.clear()
        for job in [*self._unended]:
            job.error = "the device was closed before the copy began"
            self._end(job)

    def _run(self) -> None:
        while (job := self._started.get()) is not None and not self._closed:
            begin = time.perf_counter()
            try:
                self._copy(job)
            except Exception as error:  # noqa: BLE001  # its owner gets the error of a bad job
                job.error = f"{type(error).__name__}: {error}"
            job.seconds = time.perf_counter() - begin
            self._end(job)

    def _end(self, job: Job) -> None:
        try:
            job.ended(job)
        except Exception:  # the engine's step waits for the jobs behind this one
            logger.exception("the owner of a copy failed to take its end")
        with self._changed:
            del self._unended[job]
            self._changed.notify_all()


def _allocation(tensor: Any) -> tuple[int, int]:
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data, tensor.ctypes.data + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def runs(fragments: Sequence[Fragment], offset: int = 0) -> list[FragmentRun]:
    """Return the fragments, whose bytes begin at `offset` in the slot, as a few evenly spaced runs."""
    found: list[FragmentRun] = []
    for fragment in fragments:
        last = found[-1] if found else None
        step = fragment.pointer - (last.pointer + (last.number - 1) * last.step) if last else 0
        alike = last is not None and (last.stride, last.bytes) == (fragment.stride, fragment.bytes)
        if last and alike and step > 0 and (last.number == 1 or step == last.step):
            found[-1] = last._replace(number=last.number + 1, step=step)
        else:
            found.append(FragmentRun(fragment.pointer, fragment.stride, fragment.bytes, 1, 0, offset))
        offset += fragment.bytes
    return found
