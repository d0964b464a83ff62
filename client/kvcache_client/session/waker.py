"""Waiting for descriptors, and a waker that ends the wait from another thread."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable


class Waker:
    """Any thread may call `wake`: it ends the present wait, or the next one."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def wait(self, descriptors: Iterable[int], timeout: float | None) -> set[int]:
        """Return those of `descriptors` that are readable, as `readable` does; `wake` ends the wait early."""
        ready = readable([*descriptors, self.descriptor], timeout)
        if self.descriptor in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
        return ready

    def close(self) -> None:
        os.close(self.descriptor)


def readable(descriptors: Iterable[int], timeout: float | None) -> set[int]:
    """Return those of `descriptors` that can be read or have ended, after at most `timeout` seconds; None: no limit."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout is None else timeout * 1000)}
