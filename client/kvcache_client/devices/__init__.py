"""Moves bytes between an engine's KV memory and the region: one interface, one module per kind of device."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
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
    """This version cannot copy from this kind of memory."""


class Memory(Protocol):
    """Mapped host memory: the region, or a stand-in."""

    @property
    def buffer(self) -> memoryview: ...  # writable
    @property
    def address(self) -> int: ...  # page-aligned
    @property
    def bytes(self) -> int: ...
    @property
    def present(self) -> int: ...  # bytes in memory, from the first one on; the rest must not be touched yet


class Scratch:
    """Private host memory in place of the region."""

    def __init__(self, size: int) -> None:
        self.buffer = memoryview(mmap.mmap(-1, size))
        self.words = np.frombuffer(self.buffer, np.uint8)
        self.address = int(self.words.ctypes.data)
        self.bytes = self.present = size


@dataclass(slots=True, eq=False)
class Job:
    """Blocks to copy in one direction: n device blocks, and the n byte offsets in the region at which they begin."""

    region: Memory  # the job keeps it mapped
    blocks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    # Called once, on the thread that sees the end, after the last byte has moved or `error` is set.
    ended: Callable[[Job], None]
    runs: Runs | None = None  # translates offsets beyond the region's end, for blocks in several runs of pages
    error: str = ""  # the reason that not all bytes were copied
    seconds: float = 0.0  # duration of the copy itself
    layout: int = 0  # number of the device's layout of a block
    section: int = 0  # a load may copy one section of each block, numbered from 1; 0 for the whole block
    # Queue a load on the device, which takes the engine's time, only in `start`, `hold` or the next load. Like all
    # loads, it waits for work that was submitted before `load`.
    later: bool = False
    saves: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)  # it never began: its blocks were reassigned; `error` is set
    direct: bool = field(default=True, init=False)  # no host thread copied its bytes

    def cancel(self) -> None:
        self.cancelled, self.error = True, "its blocks were given away before the copy began"

    def pieces(self, offset: int, size: int) -> list[tuple[int, int]]:
        """Return the pieces of the region, as offsets and sizes, that hold the `size` bytes from `offset` on."""
        return [(offset, size)] if self.runs is None else self.runs.pieces(offset, size)

    @property
    def end(self) -> int:
        """The upper bound of the offsets, translated ones included; exclusive."""
        if self.runs is None:
            return self.region.bytes
        return int(self.runs.begins[-1] + self.runs.sizes[-1])


class Device(abc.ABC):
    """Copies in the background, in the order of submission in each direction. Called from one thread.

    Methods with a `return` here are optional.
    """

    registration: Any = None  # stands for the memory that is page-locked, if the device needs that

    @abc.abstractmethod
    def register(self, region: Memory) -> None:
        """Prepare `region` for copies, and release the previous one; on another thread if that takes long.

        Copies need not wait for this: they are only slower before it ends.
        """

    def adopt(self, registration: Any, owned: bool = True) -> None:
        """Use a registration for the same kind of device from now on. No job may be running.

        Another device closes it, after this one, unless it is `owned`.
        """
        return

    @abc.abstractmethod
    def registered(self) -> tuple[bool, int]:
        """Return two values: True once registration is over, and the bytes of the region that are copied directly."""

    @abc.abstractmethod
    def save(self, job: Job) -> None:
        """Copy device blocks to the region, after all work that was submitted to the device before."""

    @abc.abstractmethod
    def load(self, job: Job) -> None:
        """Copy the region to device blocks."""

    @abc.abstractmethod
    def start(self, job: Job) -> None:
        """Queue a load that has been put off by `later`, and earlier ones."""

    @abc.abstractmethod
    def hold(self, job: Job) -> None:
        """Keep work that is submitted from now on waiting until `job`, a load, has filled its blocks.

        The device waits, not the caller, unless host threads copy the bytes.
        """

    @abc.abstractmethod
    def fence(self, blocks: Collection[int]) -> None:
        """Keep work that is submitted from now on from overwriting `blocks` before running saves have read them.

        A save of any of them that has not begun is cancelled: nothing waits for it.
        """

    def enter_step(self) -> None:
        """Stay off the device's driver until `leave_step`, and until the device has done the work of the step that the
        engine begins now. From the first step on, prepare only memory that a copy has requested."""
        return

    def leave_step(self) -> None:
        """Note that the engine has submitted a step's work to the device, or nearly all of it."""
        return

    def share(self, most: int) -> list[bytes]:
        """Prepare copies from the caches of at most `most` other processes, and return what these need to read this
        one, by layout; [] if they cannot."""
        return []

    def connect(self, peers: Mapping[int, Sequence[bytes]]) -> None:
        """Open the caches of other ranks, by rank, as they have shared them. Raises CopyError if they cannot be read.

        This and `pull` are called from one thread of their own.
        """
        raise CopyError("this device cannot read other processes' memory")

    def pull(self, rank: int, layout: int, blocks: npt.NDArray[np.int64]) -> float:
        """Copy blocks from the cache of another rank to the same places in this one, and wait for the end. Return the
        seconds that the device took.

        Neither side may touch them meanwhile. Raises CopyError; some of the bytes may then have been copied.
        """
        raise CopyError("no other cache is open")

    def poll(self) -> None:
        """Process jobs that have ended, if the device has no thread for this. Never waits."""
        return

    @abc.abstractmethod
    def linger(self, seconds: float) -> None:
        """Wait at most `seconds` for a load that is about to end; return at once if none is."""

    @abc.abstractmethod
    def peek(self, address: int, size: int) -> bytes:
        """Return `size` bytes of the device's memory, in the simplest way. Waits for all work submitted before."""

    @abc.abstractmethod
    def poke(self, address: int, data: bytes) -> None:
        """Write bytes to the device's memory, in the same way."""

    @abc.abstractmethod
    def drain(self, seconds: float) -> bool:
        """Wait at most `seconds` for running jobs; return True if all have ended. Does not start `later` jobs."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop after the copy in progress. Jobs that have not begun end with an error."""


def open_device(
    kind: str,
    fragments: Sequence[Fragment],
    num_blocks: int,
    keep: Sequence[Any] = (),
    ends: Sequence[int] = (),
    compress: bool = False,
) -> Device:
    """Return the device for tensors on `kind`, such as "cpu". It holds references to the tensors, `keep`. `ends` are
    the ends of a block's sections, in raw bytes, if it has any. With `compress`, slots contain what
    `compression.compress` makes of blocks.

    Raises Unsupported for a kind that this version cannot copy from, CopyError if a supported device does not work,
    ConfigError for a wrong setting in the environment.
    """
    if kind == "cpu":
        from kvcache_client.devices.cpu import CpuDevice

        return CpuDevice(fragments, num_blocks, keep, ends, compress)
    if kind == "cuda":
        from kvcache_client.devices.cuda import open_cuda

        return open_cuda(fragments, num_blocks, keep, ends, compress)
    if compress:
        raise Unsupported(f"KV cache on {kind!r}: this version does not compress there")
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
