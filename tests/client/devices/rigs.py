"""What the conformance suite runs on: kinds of devices, layouts of a cache, and a region to copy to."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from kvcache_client.devices import Device, Job, open_device
from kvcache_client.layout import block_fragments, runs
from kvcache_client.worker import _describe

BLOCKS, LAYERS, SLOTS = 24, 5, 40
TOKENS, HEADS, DIM = 32, 4, 128
GAP = 192  # between slots lies what a copy must leave alone
SECONDS = 60.0


class Rig:
    """A kind of device. `delay` keeps whatever is queued on it from now on waiting for a while, and does not wait."""

    kind = "cpu"

    def why_not(self) -> str:
        """Return why this host cannot run it, or nothing."""
        return ""

    def delay(self) -> None:
        """On a host, what is written is written."""

    def synchronize(self) -> None:
        """Wait for all that was queued."""


class Cuda(Rig):
    kind = "cuda"

    def why_not(self) -> str:
        return (
            "" if torch.cuda.is_available() else "torch.cuda.is_available() is False: no NVIDIA GPU, or torch for CPU"
        )

    def delay(self) -> None:
        torch.cuda._sleep(200_000_000)  # about 0.1 s

    def synchronize(self) -> None:
        torch.cuda.synchronize()


RIGS = {rig.kind: rig for rig in (Rig(), Cuda())}


class Layout:
    """Tensors as an attention back end makes them, and where in each of them block b is."""

    def __init__(self, make: Callable[[str], list[Any]], axis: int = 0, kernel_blocks: int = 1) -> None:
        self.make, self.axis, self.kernel_blocks = make, axis, kernel_blocks

    def block(self, tensor: Any, number: int) -> Any:
        return tensor.narrow(self.axis, number * self.kernel_blocks, self.kernel_blocks)


def _empty(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.empty(*shape, dtype=dtype, device=device)


def _layers_outermost(device: str) -> list[Any]:
    """One allocation, as vLLM 0.32 makes it: evenly spaced fragments."""
    return list(_empty(LAYERS, BLOCKS, HEADS, TOKENS, 2 * DIM, device=device))


def _keys_and_values_apart(device: str) -> list[Any]:
    return [_empty(2, BLOCKS, TOKENS, HEADS, DIM, device=device) for _ in range(LAYERS)]


def _blocks_first(device: str) -> list[Any]:
    return [_empty(BLOCKS, 2, TOKENS, HEADS, DIM, device=device) for _ in range(LAYERS)]


def _cross_layer(device: str) -> list[Any]:
    """Blocks outermost: one fragment a block."""
    whole = _empty(BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM, device=device)
    return [whole[:, layer] for layer in range(LAYERS)]


def _large(device: str) -> list[Any]:
    """Fragments that no stage is needed for."""
    return [_empty(BLOCKS, 1 << 20, device=device, dtype=torch.uint8) for _ in range(2)]


def _mla(device: str) -> list[Any]:
    return [_empty(BLOCKS, TOKENS, 576, device=device) for _ in range(LAYERS)]


def _padded(device: str) -> list[Any]:
    """Views that begin inside a storage, of rows longer than what is used, more of them than blocks."""
    whole = _empty(LAYERS, BLOCKS + 3, TOKENS + 5, HEADS * DIM, device=device)
    return [layer[1:, 2 : TOKENS + 2] for layer in whole]


def _kernel_blocks(device: str) -> list[Any]:
    return [_empty(2, 2 * BLOCKS, TOKENS // 2, HEADS, DIM, device=device) for _ in range(LAYERS)]


def _odd(device: str) -> list[Any]:
    """Quantised keys with their scales behind them: nothing begins at a multiple of four."""
    return [_empty(BLOCKS, 40_962, device=device, dtype=torch.uint8) for _ in range(LAYERS)]


def _mixed(device: str) -> list[Any]:
    """Layers of two geometries, as with an indexer beside MLA."""
    return [*_mla(device), *(_empty(BLOCKS, TOKENS, 132, device=device, dtype=torch.uint8) for _ in range(LAYERS))]


LAYOUTS = {
    "layers outermost": Layout(_layers_outermost),
    "keys and values apart": Layout(_keys_and_values_apart, axis=1),
    "blocks first": Layout(_blocks_first),
    "cross layer": Layout(_cross_layer),
    "large": Layout(_large),
    "mla": Layout(_mla),
    "padded": Layout(_padded),
    "kernel blocks": Layout(_kernel_blocks, axis=1, kernel_blocks=2),
    "odd": Layout(_odd),
    "mixed": Layout(_mixed),
}


class Memory:
    """A region without rows: a file in memory, which another process can map too."""

    def __init__(self, size: int, path: str = "") -> None:
        descriptor = os.open(path, os.O_RDWR) if path else os.memfd_create("region", os.MFD_CLOEXEC)
        if not path:
            os.ftruncate(descriptor, size)
        self.buffer = memoryview(mmap.mmap(descriptor, size))
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.descriptor = descriptor
        self.array = np.frombuffer(self.buffer, np.uint8)
        self.address, self.bytes = int(self.array.ctypes.data), size

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.descriptor)


class Bench:
    """A cache full of noise, a region, and the device between them. A slot every `slot` + GAP bytes."""

    def __init__(self, rig: Rig, layout: Layout, path: str = "") -> None:
        self.rig, self.layout = rig, layout
        self.tensors = layout.make(rig.kind)
        for tensor in self.tensors:
            noise = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), dtype=torch.uint8)
            tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))
        rig.synchronize()
        self.slot_bytes = sum(self._block(tensor, 0).nbytes for tensor in self.tensors)
        self.runs = runs(block_fragments(map(_describe, self.tensors), BLOCKS, self.slot_bytes))
        self.pitch = self.slot_bytes + GAP
        size = -(-SLOTS * self.pitch // mmap.PAGESIZE) * mmap.PAGESIZE
        self.region = Memory(size, path)
        if not path:
            self.region.array[:] = 0xA5
        self.device: Device = open_device(rig.kind, self.runs, BLOCKS, keep=self.tensors)
        self.ended: list[Job] = []

    def _block(self, tensor: Any, number: int) -> Any:
        return self.layout.block(tensor, number)

    def register(self) -> None:
        """Register the region, and wait until copies go the way that they will go."""
        self.device.register(self.region)
        pause = threading.Event()
        for _ in range(int(SECONDS * 1000)):
            if self.device.registered()[0]:
                return
            pause.wait(0.001)
        raise AssertionError("registering does not come to an end")

    def job(self, blocks: Sequence[int], slots: Sequence[int], region: Any = None) -> Job:
        offsets = np.array(slots, np.int64) * self.pitch
        return Job(region or self.region, np.array(blocks, np.int64), offsets, self.ended.append)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> Job:
        job = self.job(blocks, slots)
        self.device.save(job)
        return job

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Job:
        job = self.job(blocks, slots)
        self.device.load(job)
        return job

    def finish(self) -> None:
        assert self.device.drain(SECONDS)
        assert [job.error for job in self.ended if job.error] == []

    def block(self, number: int) -> bytes:
        """The bytes of a device block, in a slot's order, by torch's own means."""
        parts = (self._block(tensor, number).contiguous().cpu().view(torch.uint8) for tensor in self.tensors)
        return b"".join(part.numpy().tobytes() for part in parts)

    def blocks(self) -> list[bytes]:
        self.rig.synchronize()
        return [self.block(number) for number in range(BLOCKS)]

    def fill(self, number: int, value: int) -> None:
        """Queue a write of every byte of a block, behind what is queued."""
        for tensor in self.tensors:
            self._block(tensor, number).view(torch.uint8).fill_(value)

    def slot(self, number: int) -> bytes:
        return self.region.array[number * self.pitch : number * self.pitch + self.slot_bytes].tobytes()

    def put(self, number: int, data: bytes) -> None:
        self.region.array[number * self.pitch : number * self.pitch + len(data)] = np.frombuffer(data, np.uint8)

    def gaps_are_whole(self) -> bool:
        slots = self.region.array[: SLOTS * self.pitch].reshape(SLOTS, self.pitch)
        return bool(
            (slots[:, self.slot_bytes :] == 0xA5).all() and (self.region.array[SLOTS * self.pitch :] == 0xA5).all()
        )

    def around(self) -> list[bytes]:
        """Every byte of the tensors' storages, those that are no block's too."""
        self.rig.synchronize()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.tensors}
        return [
            torch.tensor([], dtype=torch.uint8, device=s.device).set_(s).cpu().numpy().tobytes()
            for s in storages.values()
        ]

    def close(self) -> None:
        self.device.close()
