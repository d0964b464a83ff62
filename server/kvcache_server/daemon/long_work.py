"""Long work in the daemon's loop: a slice in each turn, of one job after the other, and what waits behind it.

The messages of one session are answered in their order: while a long one is under way, the later ones wait here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcache_proto.errors import Unavailable
from kvcache_server.core.slices import SLICE_SECONDS, Chores, Result, Steps, advance

WAITING, WAITING_BYTES = 1024, 8 << 20  # messages of a session, and their bytes; the protocol tells of it

Message = tuple[Any, bytes]  # whoever sent it, and the frame


class _Job:
    """What is done for one session: steps, then the messages that have waited, then whatever comes `after`."""

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
    """`chores` are the cache's; what else there is comes by `begin`, for a session, and by `run`, for the daemon."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        chores: Chores,
        answer: Callable[[Any, bytes], object],
        answered: Callable[[], object],
        failed: Callable[[int, Exception], object],
    ) -> None:
        """`answer(sender, frame)` takes a message that has waited, `answered()` follows each turn, `failed(0, error)`
        notes a defect of ours."""
        self._loop, self._chores, self._failed = loop, chores, failed
        self._answer, self._answered = answer, answered
        self._jobs: dict[object, _Job] = {}  # by session; those of the daemon by themselves
        self._scheduled = False

    def __contains__(self, session: int) -> bool:
        return session in self._jobs

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def begin(
        self, session: int, steps: Steps[Result], done: Callable[[Result | None, Exception | None], object]
    ) -> None:
        """Go on with `steps` for `session`, which has no others; `done` is called with their result, or their error."""
        job = self._jobs.setdefault(session, _Job())
        job.steps, job.done = steps, done
        self.schedule()

    def run(self, steps: Steps[Result]) -> asyncio.Future[Result]:
        """Go on with `steps` of the daemon's own. Who gives the future up does not end them."""
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
        """Let a message wait behind the session's work. Raises Unavailable where too many do: it is not taken."""
        job = self._jobs[session]
        if len(job.waiting) >= WAITING or job.bytes + len(frame) > WAITING_BYTES:
            raise Unavailable("an earlier request of this session takes long, and too many wait behind it")
        job.waiting.append((sender, frame))
        job.bytes += len(frame)

    def after(self, session: int, then: Callable[[], object]) -> None:
        """Call `then` once nothing is under way for `session`: at once, or later."""
        if session in self._jobs:
            self._jobs[session].after = then
        else:
            then()

    def cut_short(self, session: int) -> None:
        """Let what was to come after the session's work come now. What is begun goes on, and nobody hears of it."""
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
        """See to it that what there is to do is done."""
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
                    self._jobs[key] = self._jobs.pop(key)  # the others first
        finally:
            self.schedule()
            self._answered()

    def _do_chores(self, until: float) -> None:
        try:
            while self._chores.go_on() and time.monotonic() < until:
                pass
        except Exception as error:  # noqa: BLE001 - a defect of ours is logged, the others are served on
            self._failed(0, error)

    def _advance(self, job: _Job, until: float) -> None:
        """Take it one step further at least."""
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
