"""One direction of copies: its jobs in their order, from the engine's thread to their end.

A job is queued on the device when it is submitted, or when it is started if it is `later`, on the engine's thread,
which takes about a millisecond per GiB, five if it is compressed, and needs no other thread to run. If its bytes are
not page-locked, a thread copies it through bounce buffers, and all jobs behind it until the thread has caught up. The
end of a job is seen by whichever looks first: the engine's `poll`, or a thread that sleeps until the device reports it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache_client.address_ranges import Spans, cut
from kvcache_client.devices import CopyError, Job
from kvcache_client.devices.bounce_buffers import BounceBuffers
from kvcache_client.devices.copy_paths import Path
from kvcache_client.devices.registration import Registration
from kvcache_client.devices.runtime import Handle, Runtime

logger = logging.getLogger("kvcache_client.devices")


class _Events(NamedTuple):
    """The events of one job: the one it waits for; its begin and end; after `off` it no longer touches the engine's
    blocks; at `near` its last part begins."""

    ready: Handle
    begin: Handle
    end: Handle
    off: Handle
    near: Handle


@dataclass(slots=True, eq=False)
class Entry:
    """A job that has not ended."""

    number: int
    job: Job
    events: _Events
    begun: bool = False  # the thread copies it through bounce buffers
    queued: bool = False  # all of it is queued on the device
    done: bool = False  # it has ended, and the device need not be queried
    borrowed: object | None = None


class CopyQueue:
    """Saves, or loads."""

    def __init__(
        self,
        runtime: Runtime,
        path: Path,
        registration: Registration,
        make_buffers: Callable[[Path], BounceBuffers],
        saves: bool,
        room: int | None = None,
    ) -> None:
        """`make_buffers` is called when bounce buffers are first needed.

        `room` is for a device that makes a thread wait once it has queued too much: the blocks of all jobs that the
        engine's thread may have queued at one time. The other thread queues the rest.
        """
        self.path = path
        self._runtime, self._registration, self._make_buffers = runtime, registration, make_buffers
        self._slot, self._saves = path.sections[0].bytes, saves
        self._changed = threading.Condition()
        self._entries: deque[Entry] = deque()  # all that have not ended, in order
        self._bounced: deque[Entry] = deque()  # the last of them: those that the thread still has to copy
        self._later: deque[Entry] = deque()  # behind them: those that are to begin later
        self._unended = 0  # includes jobs that are being reported
        self._number = 0
        self._room = sys.maxsize if room is None else room
        self._spare: list[_Events] = []
        self._stopping = False
        self._name = "kvcache-save" if saves else "kvcache-load"
        self._buffers: BounceBuffers | None = None
        self._bounce_thread: threading.Thread | None = None
        self._watcher = threading.Thread(target=self._watch, name=self._name, daemon=True)
        self._watcher.start()

    def put(self, job: Job, compute: Handle) -> int:
        """Start `job`, at once or `later`, behind all that is now queued on the stream `compute`; return its number,
        counting from 1 on. Raises CopyError; then `ended` is not called."""
        with self._changed:
            if self._stopping:
                raise CopyError("the device is closed")
            make = self._runtime.create_event
            events = self._spare.pop() if self._spare else _Events(make(), make(True), make(True), make(), make())
            self._runtime.record(events.ready, compute)
            self._number += 1
            entry = Entry(self._number, job, events)
            self._entries.append(entry)
            self._unended += 1
            self._later.append(entry)
            if not job.later:
                self._start_later(entry)
            return entry.number

    def start(self, job: Job) -> None:
        """Begin `job`, which was `later`, and those before it."""
        with self._changed:
            entry = next((each for each in self._later if each.job is job), None)
            if entry is not None:
                self._start_later(entry)

    def find(self, number: int) -> Entry | None:
        """Return the job of that number, None if it has ended."""
        with self._changed:
            index = number - self._entries[0].number if self._entries else -1
            return self._entries[index] if index >= 0 else None

    def wait_queued(self, job: Job) -> Handle | None:
        """Return the event after which `job` does not touch the engine's blocks any more, once all of it is queued;
        None if it has ended."""
        with self._changed:
            entry = next((each for each in self._entries if each.job is job), None)
            if entry is None:
                return None
            self._changed.wait_for(lambda: entry.queued or entry.done)
            return None if entry.done else entry.events.off

    def use(self, registration: Registration) -> None:
        """From now on, `registration` decides which memory is page-locked. No job may be running."""
        self._registration = registration

    def cancel(self, blocks: npt.NDArray[np.bool_]) -> None:
        """Cancel the jobs that touch any of `blocks`, a mask of the device's blocks, and that still wait for a thread.

        The job that the thread is copying ends with its present part, a few milliseconds at most, and is waited for.
        """
        if not self._bounced:
            return
        with self._changed:
            touching = [entry for entry in self._bounced if blocks[entry.job.blocks].any()]
            for entry in touching:
                entry.job.cancel()
                if not entry.begun:
                    entry.done = True
                    self._bounced.remove(entry)
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(entry.queued or entry.done for entry in touching))

    def settle(self, wait: bool = True) -> None:
        """Report jobs that have ended. Without `wait`, leave them to a thread that is already doing so."""
        while self._entries and self._changed.acquire(blocking=wait):
            try:
                if not self._entries or not self._is_over(self._entries[0]):
                    return
                entry = self._entries.popleft()
            finally:
                self._changed.release()
            self._report(entry)

    def linger(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the oldest job, if its last part has begun."""
        with self._changed:
            entry = self._entries[0] if self._entries else None
            if entry is not None and entry.queued and self._is_near(entry):
                self._changed.wait_for(lambda: not self._entries or self._entries[0] is not entry, seconds)

    def drain(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._unended, seconds)

    def close(self) -> None:
        """End jobs that no thread has begun with an error, wait for the rest, and free the queue's resources."""
        with self._changed:
            self._stopping = True
            self._end_unbegun(self._later)
        if self._bounce_thread is not None:
            self._bounce_thread.join()
        self._watcher.join()
        if self._buffers is not None:
            self._buffers.close()
        for events in self._spare:
            for event in events:
                self._runtime.destroy_event(event)
        self.path.close()

    def _end_unbegun(self, entries: deque[Entry]) -> None:
        for entry in entries:
            entry.job.error, entry.done = "the device was closed before the copy began", True
        entries.clear()
        self._changed.notify_all()

    # On the device.

    def _start_later(self, last: Entry) -> None:
        """Begin the `later` jobs, up to `last`. With the lock."""
        entry = None
        while entry is not last:
            entry = self._later.popleft()
            self._room -= len(entry.job.blocks)
            try:
                queued = not self._bounced and self._room >= 0 and self._queue(entry)
            except Exception as error:  # noqa: BLE001 - the owners of this job and of those behind it wait for their end
                entry.job.error, entry.done = _failure(error), True
                continue
            if not queued:
                self._bounced.append(entry)
                self._start_bounce_thread()
        self._changed.notify_all()

    def _queue(self, entry: Entry) -> bool:
        """Queue the job on the device, or return False if its bytes are not page-locked."""
        job = entry.job
        entry.borrowed = self._registration.borrow(job, self._slot)
        if entry.borrowed is None:
            return False
        base, every = job.region.address, self._registration.piece

        def at_chunks(spans: Spans) -> Spans:
            return cut(spans if job.runs is None else job.runs.translate(spans, base), base, every)

        order = np.argsort(job.offsets)  # consecutive slots become one piece
        blocks, places = job.blocks[order], (job.offsets[order] + base).astype(np.uint64)

        most = self.path.most(job.section)

        def move() -> None:
            for first in range(0, len(blocks), most):
                if first + most >= len(blocks):
                    self._runtime.record(entry.events.near, self.path.cache)
                part = slice(first, first + most)
                self.path.move(blocks[part], places[part], at_chunks, job.section)

        self._enclose(entry, move)
        return True

    def _enclose(self, entry: Entry, move: Callable[[], None]) -> None:
        """Queue `move` between the job's events. If it fails midway, the job ends when the queued part has ended."""
        runtime, events = self._runtime, entry.events
        try:
            self.path.begin(events.ready, events.begin)
            try:
                move()
            except Exception as error:  # noqa: BLE001 - the part queued before runs anyway
                entry.job.error = _failure(error)
            runtime.record(events.off, self.path.cache)
            self.path.finish(events.end)
            entry.queued = True
        except CopyError as error:  # the device is gone; nothing runs on it any more
            entry.job.error = entry.job.error or str(error)
            entry.done = True

    def _is_over(self, entry: Entry) -> bool:
        if entry.done or not entry.queued:
            return entry.done
        try:
            return self._runtime.is_over(entry.events.end)
        except CopyError as error:
            entry.job.error = str(error)
            return True

    def _is_near(self, entry: Entry) -> bool:
        with contextlib.suppress(CopyError):  # the end of the job reports it
            return self._runtime.is_over(entry.events.near)
        return False

    def _report(self, entry: Entry) -> None:
        job = entry.job
        if entry.queued and not job.error:
            with contextlib.suppress(CopyError):  # the bytes have arrived, whatever the clock says
                job.seconds = self._runtime.seconds(entry.events.begin, entry.events.end)
        if entry.borrowed is not None:
            self._registration.give_back(entry.borrowed)
        try:
            job.ended(job)
        finally:
            with self._changed:
                self._spare.append(entry.events)
                self._unended -= 1
                self._room += len(job.blocks)
                self._changed.notify_all()

    # Threads.

    def _watch(self) -> None:
        """Sleep until the oldest job has ended, and report it. An idle engine polls nothing."""
        self._runtime.enter_thread()
        while True:
            with self._changed:
                self._changed.wait_for(self._may_watch)
                if not self._entries:
                    return
                entry = self._entries[0]
            if not entry.done:
                try:
                    self._runtime.wait_host(entry.events.end)
                except Exception as error:  # noqa: BLE001 - as in _start_later
                    entry.job.error, entry.done = _failure(error), True
            try:
                self.settle()
            except Exception:  # of a job's owner: other jobs need the thread
                logger.exception("the owner of a copy failed to take its end")

    def _may_watch(self) -> bool:
        if not self._entries:
            return self._stopping
        return self._entries[0].queued or self._entries[0].done

    def _start_bounce_thread(self) -> None:
        if self._bounce_thread is None:
            self._bounce_thread = threading.Thread(target=self._bounce_all, name=f"{self._name}-bounce", daemon=True)
            self._bounce_thread.start()

    def _bounce_all(self) -> None:
        self._runtime.enter_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._bounced or self._stopping)
                if self._stopping:
                    self._end_unbegun(self._bounced)
                    return
                entry = self._bounced[0]
                entry.begun = True
            try:
                if not self._queue(entry):  # without the lock: the device may make this thread wait
                    self._bounce(entry)
            except Exception as error:  # noqa: BLE001 - as in _start_later
                entry.job.error, entry.done = _failure(error), True
            with self._changed:
                self._bounced.popleft()
                self._changed.notify_all()

    def _bounce(self, entry: Entry) -> None:
        job, events = entry.job, entry.events
        job.direct = False
        buffers = self._buffers = self._buffers or self._make_buffers(self.path)
        if not self._saves:
            self._runtime.record(events.near, self.path.cache)
            self._enclose(entry, lambda: buffers.load(job))
            return
        self.path.begin(events.ready, events.begin)
        self._runtime.wait_host(events.ready)
        begin = time.perf_counter()
        buffers.save(job)
        job.seconds = time.perf_counter() - begin
        entry.done = True


def _failure(error: Exception) -> str:
    """Return the error of a job; also log it if it is none of a device."""
    if isinstance(error, CopyError):
        return str(error)
    logger.error("a copy has failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
