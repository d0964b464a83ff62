"""KV cache on an NVIDIA GPU: two streams of our own a direction, DMA alone between them and the region.

A save waits for what was queued on the engine's stream before it; so does a load, since the running step may still read
a block that was freed. Neither makes the engine's thread wait.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache_client.devices import CopyError, Job, Memory, check_job
from kvcache_client.devices.cuda_driver import Driver
from kvcache_client.devices.cuda_kernels import CudaPacker, find_compiler
from kvcache_client.devices.lane import Lane
from kvcache_client.devices.paths import Path, Staged, Straight
from kvcache_client.devices.registration import Registration
from kvcache_client.devices.ring import Ring
from kvcache_client.devices.runtime import Handle
from kvcache_client.devices.tuning import Tuning, read_tuning
from kvcache_client.layout import Fragment, Run

logger = logging.getLogger("vllm.kvcache.device")

_SMALLEST_STAGE = 1 << 20


class CudaDevice:
    """Copies for one cache. Called from the engine's thread, whose current stream is the one that computes."""

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        make_path: Callable[[bool], Path],
        slot: int,
        num_blocks: int,
        tuning: Tuning,
        keep: object,
        close: Callable[[], None],
    ) -> None:
        """`make_path` makes the path of saves or of loads; `close` frees what the paths share, and `keep` they read."""
        self._driver, self._device, self._keep, self._close = driver, device, keep, close
        self._slot, self._blocks = slot, num_blocks
        self._registration = Registration(driver, tuning.register_chunk)

        def make_ring(path: Path) -> Ring:
            return Ring(driver, path, slot, tuning.stage_bytes)

        self._saves, self._loads = (
            Lane(driver, make_path(saves), self._registration, make_ring, slot, saves) for saves in (True, False)
        )
        self._saved_last: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)  # a block's last save, by number
        self._closed = False

    def register(self, region: Memory) -> None:
        self._registration.register(region)

    def registered(self) -> tuple[bool, int]:
        return self._registration.progress()

    def save(self, job: Job) -> None:
        job.saves = True
        if self._is_sound(job):
            self._saved_last[job.blocks] = self._saves.put(job, self._compute())

    def load(self, job: Job) -> None:
        if self._is_sound(job):
            self._loads.put(job, self._compute())

    def fence(self, blocks: Collection[int]) -> None:
        """Saves read blocks in their order, so that the last save of any of these is the one to wait for.

        The device waits, not the host, except where the save goes by the ring.
        """
        if not blocks or self._closed:
            return
        last = self._saves.find(int(self._saved_last[np.fromiter(blocks, np.int64, len(blocks))].max()))
        if last is None:
            return
        self._saves.wait_queued(last)
        if last.queued:
            for stream in (self._compute(), self._loads.path.cache):
                self._driver.wait(stream, last.events.off)

    def poll(self) -> None:
        self._saves.settle(wait=False)
        self._loads.settle(wait=False)

    def peek(self, address: int, size: int) -> bytes:
        torch.cuda.synchronize(self._device)
        found = np.empty(size, np.uint8)
        self._driver.copy(found.ctypes.data, address, size)
        return found.tobytes()

    def poke(self, address: int, data: bytes) -> None:
        torch.cuda.synchronize(self._device)
        self._driver.copy(address, np.frombuffer(data, np.uint8).ctypes.data, len(data))
        torch.cuda.synchronize(self._device)

    def drain(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        return all(lane.drain(max(0.0, until - time.monotonic())) for lane in (self._saves, self._loads))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._driver.use()
        self._saves.close()
        self._loads.close()
        self._registration.close()
        self._close()

    def _compute(self) -> Handle:
        self._driver.use()
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _is_sound(self, job: Job) -> bool:
        try:
            check_job(job, self._blocks, self._slot)
        except ValueError as error:
            job.error = f"ValueError: {error}"
            job.ended(job)
            return False
        return True


def open_cuda(runs: Sequence[Run], num_blocks: int, keep: Sequence[Any]) -> CudaDevice:
    """Return the device of the tensors `keep`. Raises as `open_device` does."""
    if torch.version.hip is not None:
        raise NotImplementedError("KV cache on ROCm: this version copies from 'cpu' and NVIDIA's 'cuda' alone")
    tuning = read_tuning()
    device = keep[0].device
    fragments = [
        Fragment(run.pointer + number * run.step, run.stride, run.bytes) for run in runs for number in range(run.number)
    ]
    slot = sum(fragment.bytes for fragment in fragments)
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context, where nothing has
        driver = Driver()
        held: list[torch.Tensor] = []  # device memory of ours
        packer = None
        if min(fragment.bytes for fragment in fragments) < tuning.staged_below:
            try:
                packer = _packer(driver, device, fragments, tuning, held)
                buffers, size = _stage(device, tuning.stage_bytes, slot, held)
            except (CopyError, torch.cuda.OutOfMemoryError) as error:
                if packer is not None:
                    packer.close()
                packer = None
                held.clear()
                logger.warning(
                    "no stage for KV fragments of %d bytes, each is copied by itself, at a fraction of the bus: %s",
                    *(min(fragment.bytes for fragment in fragments), error),
                )

    def make_path(saves: bool) -> Path:
        if packer is None:
            return Straight(driver, fragments, saves)
        two = buffers[:2] if saves else buffers[2:]
        return Staged(driver, packer, two, size, slot, saves)

    def close() -> None:
        if packer is not None:
            packer.close()
        held.clear()

    return CudaDevice(driver, device, make_path, slot, num_blocks, tuning, keep, close)


def _packer(
    driver: Driver, device: torch.device, fragments: Sequence[Fragment], tuning: Tuning, held: list[torch.Tensor]
) -> CudaPacker:
    properties = torch.cuda.get_device_properties(device)
    # torch brings NVRTC, under the name of its version and as what one of its own libraries depends on.
    names = [os.path.join(os.path.dirname(torch.__file__), "lib", "libcaffe2_nvrtc.so")]
    names += [f"libnvrtc.so.{version}" for version in (13, 12)]
    compiler = find_compiler(names, 10 * properties.major + properties.minor)

    def upload(table: npt.NDArray[np.int64]) -> int:
        held.append(torch.from_numpy(table).to(device))
        torch.cuda.synchronize(device)
        return int(held[-1].data_ptr())

    return CudaPacker(driver, compiler, fragments, upload, tuning.bursts * properties.multi_processor_count)


def _stage(device: torch.device, size: int, slot: int, held: list[torch.Tensor]) -> tuple[list[int], int]:
    """Return the addresses of four buffers, two a direction, and the bytes of each. Raises CopyError without room."""
    wanted = size
    while True:
        size = max(size, slot)
        try:
            buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(4)]
            break
        except torch.cuda.OutOfMemoryError as error:
            if size == slot or size // 2 < _SMALLEST_STAGE:
                raise CopyError(f"four buffers of {size} bytes: {error}") from None
            size //= 2
    short = "" if size >= wanted else ", less than wanted: it is short"
    logger.info("%d MiB of device memory for copies%s", 4 * size >> 20, short)
    held.extend(buffers)
    return [buffer.data_ptr() for buffer in buffers], size
