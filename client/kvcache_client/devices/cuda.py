"""KV cache on an NVIDIA GPU: streams of our own for each direction, and only DMA between the device and the region."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcache_client.devices import CopyError, Unsupported
from kvcache_client.devices.copy_paths import Path, Staged, Straight
from kvcache_client.devices.cuda_compression import Compressing
from kvcache_client.devices.cuda_driver import Driver
from kvcache_client.devices.cuda_kernels import Compiler, Copying, CudaPacker, Upload, find_compiler
from kvcache_client.devices.cuda_peers import CudaPeers
from kvcache_client.devices.layout import Fragment, Section, sections
from kvcache_client.devices.runtime import Handle
from kvcache_client.devices.streams import Paths, StreamDevice
from kvcache_client.devices.tuning import Tuning, read_tuning

logger = logging.getLogger("kvcache_client.devices")

_SMALLEST_STAGE = 1 << 20


def open_cuda(
    fragments: Sequence[Fragment],
    num_blocks: int,
    keep: Sequence[Any],
    ends: Sequence[int] = (),
    compress: bool = False,
) -> StreamDevice:
    """Return the device of the tensors `keep`. Raises the errors of `open_device`."""
    if torch.version.hip is not None:
        raise Unsupported("KV cache on ROCm: this version copies only from 'cpu' and NVIDIA's 'cuda'")
    tuning = read_tuning()
    device = keep[0].device
    parts = sections(fragments, ends, compress)
    slot, smallest = parts[0].bytes, min(fragment.bytes for fragment in fragments)
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context, if there is none yet
        driver = Driver()
        held: list[torch.Tensor] = []  # our own device memory
        packer = None
        if compress or smallest < tuning.staged_below:
            try:
                packer = _packer(driver, device, parts, tuning, held, compress)
                buffers, size = _stage(device, tuning.stage_bytes, slot, held)
            except (CopyError, torch.cuda.OutOfMemoryError) as error:
                if packer is not None:
                    packer.close()
                packer = None
                held.clear()
                if compress:
                    raise CopyError(f"no compression: {error}; set `compress: off`") from None
                logger.warning(
                    "no staging for KV fragments of %d bytes: each is copied by itself, which is much slower: %s",
                    smallest,
                    error,
                )

    def make_path(saves: bool) -> Path:
        if packer is None:
            return Straight(driver, parts, saves)
        return Staged(driver, packer, buffers[:2] if saves else buffers[2:], size, parts, saves)

    def close() -> None:
        if packer is not None:
            packer.close()
        held.clear()

    def peers(most: int) -> CudaPeers:
        with torch.cuda.device(device):
            upload, grid = _upload(device, held), tuning.bursts * _multiprocessors(device)
            return CudaPeers(driver, _compiler(device), fragments, upload, grid, most)

    def compute() -> Handle:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def synchronize() -> None:
        torch.cuda.synchronize(device)

    return StreamDevice(driver, compute, synchronize, Paths(make_path, keep, close, peers), slot, num_blocks, tuning)


def _packer(
    driver: Driver,
    device: torch.device,
    parts: Sequence[Section],
    tuning: Tuning,
    held: list[torch.Tensor],
    compress: bool,
) -> CudaPacker:
    program = Compressing(parts) if compress else Copying(parts)
    grid = tuning.bursts * _multiprocessors(device)
    return CudaPacker(driver, _compiler(device), program, _upload(device, held), grid)


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _compiler(device: torch.device) -> Compiler:
    """Raises CopyError if there is none."""
    properties = torch.cuda.get_device_properties(device)
    # torch brings NVRTC, under its versioned name and as a dependency of one of torch's own libraries.
    names = [os.path.join(os.path.dirname(torch.__file__), "lib", "libcaffe2_nvrtc.so")]
    names += [f"libnvrtc.so.{version}" for version in (13, 12)]
    return find_compiler(names, 10 * properties.major + properties.minor)


def _upload(device: torch.device, held: list[torch.Tensor]) -> Upload:
    def upload(table: npt.NDArray[np.int64]) -> int:
        held.append(torch.from_numpy(table).to(device))
        torch.cuda.synchronize(device)
        return int(held[-1].data_ptr())

    return upload


def _stage(device: torch.device, size: int, slot: int, held: list[torch.Tensor]) -> tuple[list[int], int]:
    """Return the addresses of four buffers, two per direction, and the bytes of each. Raises CopyError without room."""
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
    short = "" if size >= wanted else ", less than wanted because it is short"
    logger.info("%d MiB of device memory for copies%s", 4 * size >> 20, short)
    held.extend(buffers)
    return [buffer.data_ptr() for buffer in buffers], size
