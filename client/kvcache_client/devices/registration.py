"""Page-locks a mapping for a device, chunk by chunk, beside whatever the engine does.

Chunks that copies have asked for come first, then the others from the region's begin on, where slots are given out
first. Copies from and to a chunk that is not locked yet take the ring. A region that another one replaces is let go of
once the copies that use it have ended.

A driver does nothing else while it locks pages, and a thread that locks one chunk after the other leaves it to nobody:
a model's step then takes as long as the whole region. So chunks are small, and after each one the thread rests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from kvcache_client.devices import CopyError, Memory
from kvcache_client.devices.runtime import Runtime

logger = logging.getLogger("vllm.kvcache.device")

# Seconds without a rest, for the first region: an engine that starts computes nothing, and finds so much ready.
_HEAD_START = 0.5
# Rests, in times that a chunk took, and in seconds at most. On an H200, beside chunks of 0.4 ms and rests of 3 times
# that, graphs run as fast as alone and launches one by one take a third longer.
_REST_WANTED, _REST, _LONGEST_REST = 3.0, 20.0, 0.25


class _Locked:
    """One mapping: which of its chunks are locked, how many bytes that is, and how many `copies` use it.

    Chunks that lie in a hole are left alone: to lock them takes memory that the daemon has given back.
    """

    def __init__(self, region: Memory, chunk: int) -> None:
        self.region, self.chunk = region, chunk
        self.chunks: npt.NDArray[np.bool_] = np.zeros(-(-region.bytes // chunk), np.bool_)
        self.bytes = self.copies = 0
        self.left = self.chunks.copy()
        for begin, size in region.holes:
            self.left[-(-begin // chunk) : (begin + size) // chunk] = True
        self.over = bool(self.left.all())
        self.wanted: dict[int, None] = {}  # in the order in which copies have asked
        self._next = 0

    def missing(self, offsets: npt.NDArray[np.int64], size: int) -> bool:
        """Return whether some of `size` bytes at each of `offsets` is not locked; if so, it is what comes next."""
        if not len(offsets) or self.bytes == self.region.bytes:
            return False
        first, last = offsets // self.chunk, (offsets + size - 1) // self.chunk
        most = int((last - first).max()) + 1
        touched = np.unique(np.minimum(first[:, None] + np.arange(most), last[:, None]))
        missing = touched[~self.chunks[touched]]
        if not self.over:
            self.wanted.update(dict.fromkeys(missing.tolist()))
        return len(missing) > 0

    def take(self) -> tuple[int, bool]:
        """Return the chunk to lock next, and whether copies have asked for it. There must be one."""
        while self.wanted:
            number = next(iter(self.wanted))
            del self.wanted[number]
            if not self.chunks[number]:
                return number, True
        while self.chunks[self._next] or self.left[self._next]:
            self._next += 1
        return self._next, False

    @property
    def whole(self) -> bool:
        """Whether there is nothing more to lock."""
        return bool((self.chunks | self.left).all())

    def place(self, number: int) -> tuple[int, int]:
        """Return the address and the bytes of a chunk."""
        begin = number * self.chunk
        return self.region.address + begin, min(self.chunk, self.region.bytes - begin)


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
        self._head_start = _HEAD_START

    def register(self, region: Memory) -> None:
        with self._changed:
            if self._stopping or (self._now is not None and self._now.region is region):
                return
            if self._now is not None:
                self._before.append(self._now)
            self._now = _Locked(region, self.chunk)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcache-register", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def progress(self) -> tuple[bool, int]:
        """Return whether the region's registration is over, and how many of its bytes are locked."""
        with self._changed:
            return (self._now.over, self._now.bytes) if self._now is not None else (False, 0)

    def borrow(self, region: Memory, offsets: npt.NDArray[np.int64], size: int) -> object | None:
        """Return what keeps `size` bytes at each of `offsets` in `region` locked until it is given back, None where
        some are not.

        Called for every copy; never waits.
        """
        with self._changed:
            if self._now is None or self._now.region is not region:
                return None
            if self._now.missing(offsets, size):
                self._changed.notify_all()
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
                idle, wanting = self._idle(), self._wanting()
            # In turn, so that neither the new region nor the memory of the old one waits for all of the other.
            if idle is not None and not (wanting is not None and wanting.wanted) and not self._unlock_chunk(idle):
                with self._changed:
                    self._before.remove(idle)
            if wanting is not None:
                self._lock_chunk(wanting)
        for locked in left:
            while self._unlock_chunk(locked):
                pass

    def _idle(self) -> _Locked | None:
        return next((locked for locked in self._before if not locked.copies), None)

    def _wanting(self) -> _Locked | None:
        return self._now if self._now is not None and not self._now.over else None

    def _lock_chunk(self, locked: _Locked) -> None:
        with self._changed:
            number, wanted = locked.take()
        address, size = locked.place(number)
        begin = time.perf_counter()
        try:
            self._runtime.register(address, size)
        except CopyError as error:
            region, done = locked.region, locked.bytes
            logger.warning(
                "%s of the region's %s bytes cannot be page-locked for this device (%s): copies to and from them go "
                "through small page-locked buffers and a thread, at the rate of one core's memory copies",
                *(f"{region.bytes - done:,}" if done else "all", f"{region.bytes:,}", error),
            )
            with self._changed:
                locked.over = True
                locked.wanted.clear()
            return
        with self._changed:
            locked.chunks[number] = True
            locked.bytes += size
            locked.over = locked.whole
        self._rest(time.perf_counter() - begin, wanted)

    def _unlock_chunk(self, locked: _Locked) -> bool:
        """Return whether there was one."""
        number = int(locked.chunks.argmax())
        if not locked.chunks[number]:
            return False
        begin = time.perf_counter()
        try:
            self._runtime.unregister(locked.place(number)[0])
        except CopyError as error:
            logger.warning("a chunk of the region stays page-locked: %s", error)
        locked.chunks[number] = False
        self._rest(time.perf_counter() - begin)
        return True

    def _rest(self, spent: float, wanted: bool = False) -> None:
        """Leave the driver to others for a multiple of what was `spent` on it, unless all is to end; for less after
        what copies have asked for, and until they ask."""
        if self._head_start > 0:
            self._head_start -= spent
            return

        def enough() -> bool:
            return self._stopping or (not wanted and self._now is not None and bool(self._now.wanted))

        with self._changed:
            self._changed.wait_for(enough, min(spent * (_REST_WANTED if wanted else _REST), _LONGEST_REST))
