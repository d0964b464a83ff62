"""Moves bytes between an engine's KV memory and the region: one interface, one module per kind of device."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache_client.address_ranges import Runs
from kvcache_client.devices.layout import Fragment
from kvcache_proto.errors import ServerError


class CopyError(ServerError):
    """The device or its driver lacks something that copies need."""


class Unsupported(CopyError):
    """A kind of memory that this version cannot copy from."""


class Memory(Protocol):
    """Mapped host memory: the region, or a stand-in."""

    @property
    def buffer(self) -> memoryview: ...  # writable
    @property
    def address(self) -> int: ...  # page-aligned
    @property
    def bytes(self) -> int: ...
    @property
    def present(self) -> int: ...  # bytes, from the first one on, that are in memory: the rest must not be touched yet


class Scratch:
    """Private host memory in place of the region."""

    def __init__(self, size: int) -> None:
        self.buffer = memoryview(mmap.mmap(-1, size))
        self.words = np.frombuffer(self.buffer, np.uint8)
        self.address = int(self.words.ctypes.data)
        self.bytes = self.present = size


@dataclass(slots=True, eq=False)
class Job:
    """Blocks to copy, one way: n device blocks, and the n offsets in the region at which their bytes begin."""

    region: Memory  # the job keeps it mapped
    blocks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    # Called once, on the thread that sees the end, after the last byte has moved or `error` is set.
    ended: Callable[[Job], None]
    runs: Runs | None = None  # translates offsets from the region's end on: blocks that lie in several runs of pages
    error: str = ""  # why not all bytes have arrived
    seconds: float = 0.0  # duration of the copy itself
    layout: int = 0  # number of the device's layout of a block
    section: int = 0  # of a load: the section of each block that is copied, from 1 on; 0 for the whole block
    # Of a load: queue it on the device, which takes the engine's time, only in `start`, `hold` or the next load. It
    # waits for work that was submitted before `load`, as all loads do.
    later: bool = False
    saves: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)  # it never began: its blocks were given away; `error` is set
    direct: bool = field(default=True, init=False)  # no thread had to carry its bytes

    def cancel(self) -> None:
        self.cancelled, self.error = True, "its blocks were given away before the copy began"

    def pieces(self, offset: int, size: int) -> list[tuple[int, int]]:
        """Return the places in the region of `size` bytes from one of the offsets on, in order: offsets and sizes."""
        return [(offset, size)] if self.runs is None else self.runs.pieces(offset, size)

    @property
    def end(self) -> int:
        """The end of the offsets, translated ones included."""
        if self.runs is None:
            return self.region.bytes
        return int(self.runs.begins[-1] + self.runs.sizes[-1])


class Device(abc.ABC):
    """Copies in the background, in the order of submission in each direction. Called from one thread.

    Methods that return at once here are for kinds of devices that need them.
    """

    registration: Any = None  # the memory that is page-locked for this device, if its kind needs that

    @abc.abstractmethod
    def register(self, region: Memory) -> None:
        """Prepare `region` for copies, and release the one before; on another thread if that takes long.

        Copies need not wait for it: they are slower until then.
        """

    def adopt(self, registration: Any, owned: bool = True) -> None:
        """Use this registration, of the same kind of device, from now on. No job may be running.

        If it is not `owned`, another device closes it, after this one.
        """
        return

    @abc.abstractmethod
    def registered(self) -> tuple[bool, int]:
        """Return whether registration is over, and the number of the region's bytes that copies reach directly."""

    @abc.abstractmethod
    def save(self, job: Job) -> None:
        """Copy device blocks to the region, as they are after all work that was submitted to the device before."""

    @abc.abstractmethod
    def load(self, job: Job) -> None:
        """Copy the region to device blocks."""

    @abc.abstractmethod
    def start(self, job: Job) -> None:
        """Queue a load that was to be queued `later`, and those before it."""

    @abc.abstractmethod
    def hold(self, job: Job) -> None:
        """Keep work that is submitted from now on waiting until `job`, a load, has filled its blocks.

        The device waits, not the caller, unless a thread has to carry the bytes.
        """

    @abc.abstractmethod
    def fence(self, blocks: Collection[int]) -> None:
        """Keep work that is submitted from now on from overwriting `blocks` before running saves have read them.

        A save of any of them that has not begun is cancelled: nothing waits for it.
        """

    def enter_step(self) -> None:
        """The engine begins a step: do not occupy the device's driver until `leave_step`, and until the device has done
        the step's work. From the first step on, prepare only memory that a copy has requested."""
        return

    def leave_step(self) -> None:
        """The engine has submitted all of a step, or nearly all of it."""
        return

    def poll(self) -> None:
        """Notice jobs that have ended, if the device has no thread that does. Never waits."""
        return

    @abc.abstractmethod
    def linger(self, seconds: float) -> None:
        """Wait at most `seconds` for a load that is about to end; return at once if none is."""

    @abc.abstractmethod
    def peek(self, address: int, size: int) -> bytes:
        """Return bytes of the device's memory, by its simplest means. Waits for all work submitted before."""

    @abc.abstractmethod
    def poke(self, address: int, data: bytes) -> None:
        """Write bytes to the device's memory, likewise."""

    @abc.abstractmethod
    def drain(self, seconds: float) -> bool:
        """Wait for running jobs; return whether all have ended. It does not start `later` jobs."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop. Jobs that have not begun end with an error; waits for the one being copied."""


def open_device(
    kind: str, fragments: Sequence[Fragment], num_blocks: int, keep: Sequence[Any] = (), ends: Sequence[int] = ()
) -> Device:
    """Return the device for tensors on `kind`, such as "cpu". `keep` is referenced as long as the device exists: the
    tensors. `ends` are the ends of a block's sections in its slot, if it has any.

    Raises Unsupported for a kind that this version cannot copy from, CopyError if a supported device does not work,
    ConfigError for a wrong setting in the environment.
    """
    if kind == "cpu":
        from kvcache_client.devices.cpu import CpuDevice

        return CpuDevice(fragments, num_blocks, keep, ends)
    if kind == "cuda":
        from kvcache_client.devices.cuda import open_cuda

        return open_cuda(fragments, num_blocks, keep, ends)
    if kind == "npu":
        from kvcache_client.devices.npu import open_npu

        return open_npu(fragments, num_blocks, keep, ends)
    raise Unsupported(f"KV cache on {kind!r}: this version copies only from 'cpu', 'cuda' and 'npu'")


def check_job(job: Job, num_blocks: int, block_bytes: int) -> None:
    """Raise ValueError unless all of `job` lies inside the region and the cache: copies themselves check nothing."""
    if not len(job.blocks):
        return
    low, high = int(job.offsets.min()), int(job.offsets.max()) + block_bytes
    if low < 0 or high > job.end:
        raise ValueError(f"bytes {low} to {high} of a region of {job.region.bytes}")
    first, last = int(job.blocks.min()), int(job.blocks.max())
    if first < 0 or last >= num_blocks:
        raise ValueError(f"blocks {first} to {last} of {num_blocks}")
    if len(job.blocks) != len(job.offsets):
        raise ValueError(f"{len(job.blocks)} blocks for {len(job.offsets)} places")
