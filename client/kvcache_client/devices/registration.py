"""Page-locks a mapping for a device: all of it before the engine serves, the rest when the device is idle.

A driver does nothing else while it locks pages: a concurrent step of the model takes as long as the call, and a
thousand small calls slow down a thousand steps. In large calls, before the first step, 32 GiB take a second. Memory
that is not locked by then (because the daemon made it later, or the region came later, or is too large) is locked piece
by piece, when a copy has requested it and the engine computes nothing. Copies from and to other pieces go through
bounce buffers. A region that another one replaces is unlocked once the copies that use it have ended.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvcache_client.devices import CopyError, Job, Memory
from kvcache_client.devices.runtime import Runtime

logger = logging.getLogger("kvcache_client.devices")

CALL = 1 << 30  # bytes of one call before the engine serves: 19 to 33 ms on an H200's host
_GROWS = 0.05  # seconds between two checks whether more of the region is in memory
_GLANCE = 0.001  # seconds between two checks whether the device is idle: nothing signals it
_PATIENCE = 1.0  # seconds that each call to unlock an unused mapping waits for an idle device


class _Locked:
    """One mapping: its locked `pieces`, their `bytes`, and the number of `copies` that use it."""

    def __init__(self, region: Memory, piece: int) -> None:
        self.region, self.piece = region, piece
        self.pieces: npt.NDArray[np.bool_] = np.zeros(-(-region.bytes // piece), np.bool_)
        self.calls: dict[int, int] = {}  # number of pieces locked together, by the first of them
        self.bytes = self.copies = 0
        self.over = False
        self.wanted: dict[int, None] = {}  # in the order of the copies' requests
        self._next = 0

    def missing(self, job: Job, size: int) -> bool:
        """Return True if any of `size` bytes at each offset of `job` are not locked; then they are locked next."""
        if not len(job.offsets) or self.bytes == self.region.bytes:
            return False
        offsets, sizes = job.offsets, np.full(len(job.offsets), size)
        if job.runs is not None:
            here = offsets < self.region.bytes
            offsets = np.concatenate((offsets[here], job.runs.offsets.astype(np.int64)))
            sizes = np.concatenate((sizes[here], job.runs.sizes.astype(np.int64)))
        first, last = offsets // self.piece, (offsets + sizes - 1) // self.piece
        most = int((last - first).max()) + 1
        touched = np.unique(np.minimum(first[:, None] + np.arange(most), last[:, None]))
        missing = touched[~self.pieces[touched]]
        if not self.over:
            self.wanted.update(dict.fromkeys(missing.tolist()))
        return len(missing) > 0

    def take_wanted(self) -> int | None:
        """Return the piece that copies requested first, None if there is none."""
        while self.wanted:
            number = next(iter(self.wanted))
            del self.wanted[number]
            if not self.pieces[number]:
                return number
        return None

    @property
    def present(self) -> int:
        """The number of pieces in memory."""
        return len(self.pieces) if self.region.present == self.region.bytes else self.region.present // self.piece

    def take_run(self, most: int) -> tuple[int, int] | None:
        """Return the first piece to lock and the number of pieces, `most` at most; None if it is not in memory yet."""
        while self._next < len(self.pieces) and self.pieces[self._next]:
            self._next += 1
        end, last = self._next, min(self._next + most, self.present)
        while end < last and not self.pieces[end]:
            end += 1
        return (self._next, end - self._next) if end > self._next else None

    def note(self, first: int, count: int) -> None:
        """Note that these pieces were locked by one call."""
        self.pieces[first : first + count] = True
        self.calls[first] = count
        self.bytes += self.place(first, count)[1]
        self.over = bool(self.pieces.all())

    def forget(self, first: int) -> None:
        self.pieces[first : first + self.calls.pop(first)] = False

    def place(self, first: int, count: int = 1) -> tuple[int, int]:
        """Return the address and the bytes of some pieces."""
        begin = first * self.piece
        return self.region.address + begin, min(count * self.piece, self.region.bytes - begin)


class Registration:
    """The region that copies reach directly. Its thread makes the slow calls."""

    def __init__(self, runtime: Runtime, piece: int) -> None:
        """`piece` is in bytes, a multiple of the page size: a copy must not cross the end of a piece."""
        self.piece = piece
        self._runtime = runtime
        self._changed = threading.Condition()
        self._now: _Locked | None = None
        self._before: deque[_Locked] = deque()
        self._stopping = self._serving = False
        self._idle: Callable[[], bool] = lambda: True
        self._most = max(1, CALL // piece)  # pieces of one call
        self._thread: threading.Thread | None = None

    def register(self, region: Memory) -> None:
        with self._changed:
            if self._stopping or (self._now is not None and self._now.region is region):
                return
            if self._now is not None:
                self._before.append(self._now)
            self._now = _Locked(region, self.piece)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvcache-register", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def serve(self, idle: Callable[[], bool]) -> None:
        """The engine serves from now on: lock only pieces that copies request, and only while `idle()`, which any
        thread may call, returns that it computes nothing."""
        with self._changed:
            self._serving, self._idle = True, idle

    def wait(self, seconds: float) -> bool:
        """Wait until all lockable memory is locked; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._now is None or self._now.over, seconds)

    @property
    def unfinished(self) -> bool:
        """Whether there is something to lock or to unlock yet. Not exact while it changes; never waits."""
        return bool(self._before) or (self._now is not None and not self._now.over)

    def progress(self) -> tuple[bool, int]:
        """Return whether the region's registration is over, and the number of its locked bytes."""
        with self._changed:
            return (self._now.over, self._now.bytes) if self._now is not None else (False, 0)

    def borrow(self, job: Job, size: int) -> object | None:
        """Return an object that keeps `size` bytes at each offset of `job` locked until given back, None if some are
        not.

        Called for every copy; never waits.
        """
        with self._changed:
            if self._now is None or self._now.region is not job.region:
                return None
            if self._now.missing(job, size):
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
        try:
            self._runtime.enter_thread()
            while self._work():
                pass
        except Exception:  # copies work without this thread, through bounce buffers
            logger.exception("page-locking has ended by an error: what is not locked stays so")
            with self._changed:
                if self._now is not None:
                    self._now.over = True
                self._changed.notify_all()

    def _work(self) -> bool:
        """Do the due work; return False at the end."""
        with self._changed:
            while not (self._unused() or self._wanting() or self._stopping):
                self._changed.wait(_GROWS if self._grows() else None)
            unused, wanting, serving = self._unused(), self._wanting(), self._serving
            if self._stopping:
                left = [*self._before, *([self._now] if self._now else [])]
        if self._stopping:
            for locked in left:
                while self._unlock(locked):
                    pass
            return False
        # In turn, so that neither locking the new region nor unlocking the old one waits for all of the other.
        if unused is not None:
            self._wait_idle(_PATIENCE)
            if not self._unlock(unused):
                with self._changed:
                    self._before.remove(unused)
        if wanting is not None:
            if not serving:
                with self._changed:
                    run = wanting.take_run(self._most)
                if run is not None:
                    self._lock(wanting, *run)
            elif self._wait_idle(None if unused is None else 0.0):
                with self._changed:
                    number = wanting.take_wanted()
                if number is not None:
                    self._lock(wanting, number, 1)
        return True

    def _unused(self) -> _Locked | None:
        return next((locked for locked in self._before if not locked.copies), None)

    def _wanting(self) -> _Locked | None:
        if self._now is None or self._now.over:
            return None
        wants = bool(self._now.wanted) if self._serving else self._now.take_run(1) is not None
        return self._now if wants else None

    def _grows(self) -> bool:
        """Whether to lock the part of the region that will be in memory soon."""
        return self._now is not None and not self._now.over and not self._serving

    def _wait_idle(self, seconds: float | None) -> bool:
        """Wait until the engine computes nothing, `seconds` at most; return whether it is idle."""
        with self._changed:
            while self._serving and not self._stopping and not self._idle():
                if seconds is not None and seconds <= 0:
                    return False
                self._changed.wait(_GLANCE)
                seconds = None if seconds is None else seconds - _GLANCE
        return True

    def _lock(self, locked: _Locked, first: int, count: int) -> None:
        address, size = locked.place(first, count)
        try:
            self._runtime.register(address, size)
        except CopyError as error:
            if count > 1:  # there may be room for less
                self._most = count // 2
                return
            region, done = locked.region, locked.bytes
            logger.warning(
                "%s of the region's %s bytes cannot be page-locked for this device (%s): copies to and from them go "
                "through small page-locked buffers and a thread, at the rate of one core's memory copies",
                *(f"{region.bytes - done:,}" if done else "all", f"{region.bytes:,}", error),
            )
            with self._changed:
                locked.over = True
                locked.wanted.clear()
                self._changed.notify_all()
            return
        with self._changed:
            locked.note(first, count)
            self._changed.notify_all()

    def _unlock(self, locked: _Locked) -> bool:
        """Unlock the pieces that one call has locked; return whether there were any."""
        if not locked.calls:
            return False
        first = next(iter(locked.calls))
        try:
            self._runtime.unregister(locked.place(first)[0])
        except CopyError as error:
            logger.warning("a part of the region stays page-locked: %s", error)
        locked.forget(first)
        return True
