"""Streams used in turn, so that the outcome of each job is known when it ends.

CANN reports a copy that failed on the device only when its stream is synchronised: the event behind it completes as if
nothing were wrong, and the stream continues (ACL_CONTINUE_ON_FAILURE, the default; the other mode would stop the
engine's streams, too). Synchronising waits for all queued work. So consecutive jobs take different streams, each
waiting for the one before: when the last event of a stream has completed, the stream is idle, and synchronising costs
nothing. Jobs share a stream, and are reported together, only if all other streams still have jobs.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from kvcache_client.devices import CopyError
from kvcache_client.devices.acl import COMPLETE, RECORDED, Acl
from kvcache_client.devices.runtime import Handle

_STREAMS = 4  # of a direction: those of a device are few, and graphs take most of them
_PAUSE = 0.0005  # between looks at a turn that another job keeps open: CANN has no event for its end


@dataclass(slots=True, eq=False)
class StreamTurn:
    """Consecutive jobs on one stream. `last` is the end of the last one, `error` "" if none has failed."""

    pool: StreamPool
    stream: Handle
    last: Handle | None = None
    error: str | None = None


class StreamPool:
    """Several streams that act as one. One thread at a time queues copies; any may wait or query."""

    def __init__(self, acl: Acl) -> None:
        self._acl = acl
        self._streams = [acl.made("aclrtCreateStreamWithConfig", 0, 0) for _ in range(_STREAMS)]
        self.handle = self._streams[0]
        self._lock = threading.Lock()
        self._free = self._streams[1:]
        self._now = StreamTurn(self, self._streams[0])
        self._before: list[StreamTurn] = []  # turns whose outcome is not known
        self._begun = False  # whether a job is only partly queued

    def begin(self) -> Handle:
        """Return the stream for a job's next copies."""
        with self._lock:
            self._begun = True
            return self._now.stream

    def record(self, event: Handle) -> None:
        with self._lock:
            self._acl.call("aclrtRecordEvent", event, self._now.stream)

    def wait(self, event: Handle) -> None:
        with self._lock:
            self._acl.call("aclrtStreamWaitEvent", self._now.stream, event)

    def finish(self, event: Handle) -> StreamTurn:
        """Record the end of a job, and let the next one take another stream if one is free."""
        with self._lock:
            turn = self._now
            self._acl.call("aclrtRecordEvent", event, turn.stream)
            turn.last, self._begun = event, False
            if self._free:
                self._acl.call("aclrtStreamWaitEvent", self._free[0], event)
                self._before.append(turn)
                self._now = StreamTurn(self, self._free.pop(0))
            return turn

    def settle(self, turn: StreamTurn) -> bool:
        """Return True if the outcome of `turn` is known. Never waits. Raises CopyError if the device is gone."""
        if not self._lock.acquire(blocking=False):
            return False  # the thread that has it may be waiting for room in a stream
        try:
            if turn.error is not None or turn.last is None:
                return True
            if not is_recorded(self._acl, turn.last):
                return False
            if turn is self._now and (self._begun or not self._is_idle(turn.stream)):
                return False
            self._synchronize(turn)
            return True
        finally:
            self._lock.release()

    def wait_settled(self, turn: StreamTurn) -> None:
        """The same, on a thread that may sleep."""
        while True:
            last = turn.last
            if last is not None:
                self._acl.call("aclrtSynchronizeEvent", last)
            if self.settle(turn):
                return
            if turn.last is last:
                time.sleep(_PAUSE)  # another job has been begun behind it, or waits there

    def synchronize(self) -> None:
        """Wait for all work that this thread has queued. Raises CopyError if any of it has failed."""
        with self._lock:
            self._begun = False
            turns = [*self._before, self._now]
        for turn in turns:
            while not self._settle_idle(turn):
                time.sleep(_PAUSE)  # another job has the turn open, and nothing signals its end
        failed = [turn.error for turn in turns if turn.error]
        if failed:
            raise CopyError(failed[0])

    def close(self) -> None:
        for stream in self._streams:
            self._acl.call("aclrtDestroyStream", stream)

    def _settle_idle(self, turn: StreamTurn) -> bool:
        with self._lock:
            if turn.error is not None:
                return True
            if not self._is_idle(turn.stream):
                return False
            self._synchronize(turn)
            return True

    def _is_idle(self, stream: Handle) -> bool:
        return self._acl.status("aclrtStreamQuery", stream) == COMPLETE

    def _synchronize(self, turn: StreamTurn) -> None:
        """Query the outcome of an idle stream's work, which makes CANN forget it."""
        result = self._acl.result("aclrtSynchronizeStream", turn.stream)
        turn.error = str(self._acl.error("aclrtSynchronizeStream", result)) if result else ""
        if turn is self._now:
            self._now = StreamTurn(self, turn.stream)
        else:
            self._before.remove(turn)
            self._free.append(turn.stream)


def is_recorded(acl: Acl, event: Handle) -> bool:
    """Return True if the work before `event` has run, well or not. Raises AclError if the device is gone."""
    return acl.status("aclrtQueryEventStatus", event) == RECORDED
