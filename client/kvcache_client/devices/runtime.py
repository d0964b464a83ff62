"""The calls of a device's runtime that copies beside the model need: streams, events, page-locked memory, batches."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Handle = int  # of a stream or an event
Addresses = npt.NDArray[np.uint64]


class Runtime(Protocol):
    """Every call raises CopyError if it fails, and releases the GIL."""

    def use(self) -> None:
        """Make this thread, the engine's, work in the context of the engine's tensors."""

    def enter_thread(self) -> None:
        """The same for a thread of our own, which must not disturb a graph that another thread is capturing."""

    def register(self, address: int, size: int) -> None:
        """Page-lock memory that was mapped elsewhere."""

    def unregister(self, address: int) -> None: ...

    def allocate_host(self, size: int) -> int:
        """Return the address of `size` bytes of page-locked memory."""

    def free_host(self, address: int) -> None: ...

    def create_stream(self) -> Handle: ...

    def destroy_stream(self, stream: Handle) -> None: ...

    def synchronize(self, stream: Handle) -> None: ...

    def create_event(self, timed: bool = False) -> Handle:
        """Return an event. A `timed` one has a time, and a host thread that waits for it sleeps."""

    def destroy_event(self, event: Handle) -> None: ...

    def record(self, event: Handle, stream: Handle) -> None: ...

    def finish(self, event: Handle, stream: Handle) -> None:
        """Record the end of all work that has been queued since the last `finish`, as one.

        Querying `event`, or waiting for it on the host, raises CopyError if any of the work has failed. Only for our
        own streams.
        """

    def wait(self, stream: Handle, event: Handle) -> None:
        """Let `stream` wait, on the device, for the work recorded by `event`; not at all if there is none."""

    def is_over(self, event: Handle) -> bool: ...

    def wait_host(self, event: Handle) -> None: ...

    def seconds(self, begin: Handle, end: Handle) -> float: ...

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, saves: bool, stream: Handle) -> None:
        """Copy n pieces, in no particular order, from device memory to page-locked host memory (`saves`) or back.

        One thread at a time queues copies on a stream.
        """

    def peek(self, address: int, size: int) -> bytes:
        """Return bytes of device memory, now."""

    def poke(self, address: int, data: bytes) -> None:
        """Write bytes to device memory, now."""
