"""What moves bytes between an engine's KV memory and the region: one small protocol, one module a kind of device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache_client.layout import Run
from kvcache_client.region import Region


@dataclass(slots=True, eq=False)
class Job:
    """Blocks to copy, one way.

    Attributes:
        region: whose mapping the bytes of the slots lie in; the job keeps it mapped.
        blocks: n device blocks.
        offsets: n places in the region; the bytes of blocks[i] begin at offsets[i].
        ended: called once, on whichever thread sees the end, after the last byte has moved or `error` is set.
        error: why the bytes are not all there.
        seconds: how long the copy itself took.
    """

    region: Region
    blocks: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    ended: Callable[[Job], None]
    error: str = ""
    seconds: float = 0.0
    saves: bool = field(default=False, init=False)


class Device(Protocol):
    """Copies in the background, in the order of submission in each direction. Called from one thread."""

    def register(self, region: Region) -> None:
        """Make `region` ready for copies, off the calling thread where that takes long."""

    def save(self, job: Job) -> None:
        """Copy device blocks to the region, as they are once all that was submitted to the device has run."""

    def load(self, job: Job) -> None:
        """Copy the region to device blocks."""

    def fence(self, blocks: Collection[int]) -> None:
        """Let nothing that is submitted to the device from now on overwrite `blocks` before running saves have read
        them."""

    def poll(self) -> None:
        """Notice jobs that have ended, where no thread of the device's own does. Never waits."""

    def drain(self, seconds: float) -> bool:
        """Wait for running jobs; return whether all have ended."""

    def close(self) -> None:
        """Stop. Jobs that had not begun end with an error; the one being copied is waited for."""


def open_device(kind: str, runs: Sequence[Run], num_blocks: int, keep: Any = None) -> Device:
    """Return the device for tensors on `kind`, such as "cpu". `keep` is held as long as the device is: the tensors.

    Raises NotImplementedError for a kind that this version cannot copy from.
    """
    if kind == "cpu":
        from kvcache_client.devices.cpu import CpuDevice

        return CpuDevice(runs, num_blocks, keep)
    raise NotImplementedError(f"KV cache on {kind!r}: this version copies from 'cpu' alone")
