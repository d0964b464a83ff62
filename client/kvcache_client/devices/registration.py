"""Page-locks a mapping for a device, chunk by chunk, beside whatever the engine does.

What is locked grows from the region's begin, where slots are given out first; copies beyond it take the ring. A region
that another one replaces is let go of once the copies that use it have ended.

A driver does nothing else while it locks pages: a model's step takes until the whole chunk is locked, and the thread
that locks the next one at once is ahead of it again. So chunks are small, and after each one the thread rests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvcache_client.devices import CopyError, Memory
from kvcache_client.devices.runtime import Runtime

logger = logging.getLogger("vllm.kvcache.device")

# Times that a chunk took: on an H200, steps beside chunks of 16 MiB are as fast then as without. With 1 they took a
# tenth longer, and launches twice as long; with 0 a step waited for the whole region.
_REST = 3.0


class _Locked:
    """One mapping: `done` bytes of it are locked, `copies` use it."""

    def __init__(self, region: Memory) -> None:
        self.region = region
        self.done = self.copies = 0
        self.over = False


class Registration:
    """The region that copies reach directly. Its thread does all that takes long."""

    def __init__(self, runtime: Runtime, chunk: int) -> None:
        """`chunk` bytes at once, a multiple of the page size: a copy must not cross the end of one."""
        self.chunk = chunk
        self._runtime = runtime
        self._changed = threading.Condition()
        self._now: _Locked | None = None
        self._before: deque[_Locked] = deque()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def register(self, region: Memory) -> None:
        with self._changed:
            if self._stopping or (self._now is not None and self._now.region is region):
                return
            if self._now is not None:
                self._before.append(self._now)
            self._now = _Locked(region)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcache-register", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def progress(self) -> tuple[bool, int]:
        """Return whether the region's registration is over, and how many bytes from its begin are locked."""
        with self._changed:
            return (self._now.over, self._now.done) if self._now is not None else (False, 0)

    def borrow(self, region: Memory, end: int) -> object | None:
        """Return what keeps the first `end` bytes of `region` locked until it is given back, None where they are not.

        Called for every copy; never waits.
        """
        with self._changed:
            if self._now is None or self._now.region is not region or end > self._now.done:
                return None
            self._now.copies += 1
            return self._now

    def give_back(self, borrowed: object) -> None:
        assert isinstance(borrowed, _Locked)
        with self._changed:
            borrowed.copies -= 1
            if not borrowed.copies:
                self._changed.notify_all()

    def close(self) -> None:
        """Unlock everything. No copy may be running."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._runtime.enter_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._idle() or self._wanting() or self._stopping)
                if self._stopping:
                    left = [*self._before, *([self._now] if self._now else [])]
                    break
                idle = self._idle()
                if idle is not None:
                    self._before.remove(idle)
                wanting = self._wanting()
            if idle is not None:
                self._unlock(idle, self._rest)
            if wanting is not None:
                begin = time.perf_counter()
                self._lock_chunk(wanting)
                self._rest(time.perf_counter() - begin)
        for locked in left:
            self._unlock(locked)

    def _rest(self, spent: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, spent * _REST)

    def _idle(self) -> _Locked | None:
        return next((locked for locked in self._before if not locked.copies), None)

    def _wanting(self) -> _Locked | None:
        return self._now if self._now is not None and not self._now.over else None

    def _lock_chunk(self, locked: _Locked) -> None:
        region, done = locked.region, locked.done
        size = min(self.chunk, region.bytes - done)
        try:
            self._runtime.register(region.address + done, size)
        except CopyError as error:
            logger.warning(
                "%s of the region's %s bytes cannot be page-locked for this device (%s): copies to and from them go "
                "through small page-locked buffers and a thread, at the rate of one core's memory copies",
                *(f"{region.bytes - done:,}" if done else "all", f"{region.bytes:,}", error),
            )
            size, over = 0, True
        else:
            over = done + size == region.bytes
        with self._changed:
            locked.done, locked.over = done + size, over

    def _unlock(self, locked: _Locked, rest: Callable[[float], None] = lambda spent: None) -> None:
        for at in range(0, locked.done, self.chunk):
            begin = time.perf_counter()
            try:
                self._runtime.unregister(locked.region.address + at)
            except CopyError as error:
                logger.warning("a chunk of the region stays page-locked: %s", error)
            rest(time.perf_counter() - begin)
