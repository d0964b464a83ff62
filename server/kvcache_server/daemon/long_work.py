"""Long work in the daemon's loop: one slice per turn, round-robin, and the messages that wait for it.

The messages of one session are answered in order: while a long one is in progress, later ones wait here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcache_proto.errors import Unavailable
from kvcache_server.core.slices import SLICE_SECONDS, Chores, Result, Steps, advance

WAITING, WAITING_BYTES = 1024, 8 << 20  # messages of a session, and their bytes; the protocol documents both

Message = tuple[Any, bytes]  # the sender, and the frame


class _Job:
    """The work for one session: steps, then the waiting messages, then the call of `after`."""

    def __init__(self) -> None:
        self.steps: Steps[object] | None = None
        self.done: Callable[[Any, Exception | None], object] = lambda result, error: None
        self.waiting: deque[Message] = deque()
        self.bytes = 0
        self.after: Callable[[], object] | None = None

    def take(self) -> Message:
        message = self.waiting.popleft()
        self.bytes -= len(message[1])
        return message


class LongWork:
    """Does the cache's `chores`, work of sessions (`begin`), and work of the daemon (`run`)."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        chores: Chores,
        answer: Callable[[Any, bytes], object],
        answered: Callable[[], object],
        failed: Callable[[int, Exception], object],
    ) -> None:
        """`answer(sender, frame)` answers a message that has waited. `answered()` is called after each turn, `failed(0,
        error)` with an internal error.
        """
        self._loop, self._chores, self._failed = loop, chores, failed
        self._answer, self._answered = answer, answered
        self._jobs: dict[object, _Job] = {}  # by session; the daemon's own by the job itself
        self._scheduled = False

    def __contains__(self, session: int) -> bool:
        return session in self._jobs

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def begin(
        self, session: int, steps: Steps[Result], done: Callable[[Result | None, Exception | None], object]
    ) -> None:
        """Start `steps` for `session`, which has no others; `done` is called with their result or error."""
        job = self._jobs.setdefault(session, _Job())
        job.steps, job.done = steps, done
        self.schedule()

    def run(self, steps: Steps[Result]) -> asyncio.Future[Result]:
        """Start `steps` of the daemon's own. Cancelling the future does not stop them."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def done(result: object, error: Exception | None) -> None:
            if future.cancelled():
                if error is not None:
                    self._failed(0, error)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        job = _Job()
        job.steps, job.done = steps, done
        self._jobs[job] = job
        self.schedule()
        return future

    def wait(self, session: int, sender: Any, frame: bytes) -> None:
        """Queue a message behind the session's work. Raises Unavailable, and does not queue it, at the limit."""
        job = self._jobs[session]
        if len(job.waiting) >= WAITING or job.bytes + len(frame) > WAITING_BYTES:
            raise Unavailable(
                "an earlier request of this session takes long, and too many wait for it: wait for replies"
            )
        job.waiting.append((sender, frame))
        job.bytes += len(frame)

    def after(self, session: int, then: Callable[[], object]) -> None:
        """Call `then` once no work of `session` is in progress: now or later."""
        if session in self._jobs:
            self._jobs[session].after = then
        else:
            then()

    def cut_short(self, session: int) -> None:
        """Call what was to follow the session's work now. Work in progress continues, without a reply."""
        job = self._jobs.get(session)
        while job is not None and (job.steps is not None or job.waiting):
            if job.steps is not None:
                self._chores.do(job.steps)
                job.steps = None
            if job.waiting:
                self._answer(*job.take())
        if job is not None:
            del self._jobs[session]
            if job.after is not None:
                job.after()

    def schedule(self) -> None:
        """Schedule a turn if there is work."""
        if not self._scheduled and (self._jobs or self._chores):
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        until = time.monotonic() + SLICE_SECONDS
        try:
            if self._chores:
                self._do_chores(until)
            if self._jobs:
                key, job = next(iter(self._jobs.items()))
                self._advance(job, until)
                if job.steps is None and not job.waiting:
                    del self._jobs[key]
                    if job.after is not None:
                        job.after()
                else:
                    self._jobs[key] = self._jobs.pop(key)  # to the end of the queue
        finally:
            self.schedule()
            self._answered()

    def _do_chores(self, until: float) -> None:
        try:
            while self._chores.go_on() and time.monotonic() < until:
                pass
        except Exception as error:  # noqa: BLE001 - an internal error is logged; other sessions are still served
            self._failed(0, error)

    def _advance(self, job: _Job, until: float) -> None:
        """Do at least one step of the job."""
        while True:
            if job.steps is not None:
                steps, job.steps = job.steps, None
                if advance(steps, job.done):
                    job.steps = steps
            elif job.waiting:
                self._answer(*job.take())
            else:
                return
            if time.monotonic() >= until:
                return
