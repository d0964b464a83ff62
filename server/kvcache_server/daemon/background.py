"""The work of the daemon's loop between requests: the sweeper's, long answers, and requests that may wait."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvcache_proto.errors import Unavailable
from kvcache_proto.messages import Chain, Stats, Why
from kvcache_server.core.cache import Cache
from kvcache_server.rates import DutyCycle
from kvcache_server.slices import Result, Steps

SLOW = (Stats, Why, Chain)
SHARE = 0.1  # of the loop's time, for the slow queue
SLICE_SECONDS = 0.002  # of the loop's time for consecutive slices

Done = Callable[[Any, Exception | None], object]  # called with the result of steps, or with their error


class Background:
    """Does the deferred work of the cache, and the steps given to `run`: one slice of each per turn."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cache: Cache,
        answered: Callable[[], object],
        failed: Callable[[int, Exception], object],
    ) -> None:
        """`answered()` is called after each turn, `failed(0, error)` with an internal error."""
        self._loop, self._cache = loop, cache
        self._answered, self._failed = answered, failed
        self._running: deque[tuple[Steps[Any], Done]] = deque()
        self._scheduled = False

    def run(self, steps: Steps[Result]) -> asyncio.Future[Result]:
        """Start `steps`. Cancelling the future does not stop them."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def done(result: Result, error: Exception | None) -> None:
            if future.cancelled():
                if error is not None:
                    self._failed(0, error)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._running.append((steps, done))
        self.schedule()
        return future

    def schedule(self) -> None:
        """Schedule a turn if there is work."""
        if not self._scheduled and (self._running or self._cache.sweeper):
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        until = time.monotonic() + SLICE_SECONDS
        try:
            while self._cache.sweeper.go_on() and time.monotonic() < until:
                pass
        except Exception as error:  # noqa: BLE001 - an internal error is logged; sessions are still served
            self._failed(0, error)
        try:
            if self._running and _advance(*(work := self._running.popleft())):
                self._running.append(work)
        finally:
            self.schedule()
            self._answered()


class SlowQueue:
    """Slow requests, answered one after the other within a fraction of the loop's time, also between their slices.

    One per session may wait, so that no session waits for many requests of another.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Callable[[Any, bytes], object]) -> None:
        """`answer(sender, frame)` answers a request; it may call `go_on`."""
        self._loop, self._answer = loop, answer
        self._duty_cycle = DutyCycle(SHARE)
        self._waiting: dict[int, tuple[Any, bytes]] = {}  # by session
        self._current: tuple[Steps[Any], Done] | None = None  # the remaining work of the first one, once it has begun

    def add(self, session: int, sender: Any, frame: bytes) -> None:
        """Add a request. Raises Unavailable, and adds nothing, if one of the same session is waiting already."""
        if session in self._waiting:
            raise Unavailable("an earlier request of this session is still waiting: wait for its reply first")
        self._waiting[session] = sender, frame
        if len(self._waiting) == 1:
            self._wait()

    def go_on(self, steps: Steps[Any], done: Done) -> None:
        """Continue the current request with `steps`; `done` is called with their result or error."""
        self._current = steps, done

    def _wait(self) -> None:
        self._loop.call_later(self._duty_cycle.wait(time.monotonic()), self._next)

    def _next(self) -> None:
        session, (sender, frame) = next(iter(self._waiting.items()))
        began = time.monotonic()
        work, self._current = self._current, None
        try:
            if work is None:
                self._answer(sender, frame)
            else:
                while _advance(*work):
                    if time.monotonic() - began >= SLICE_SECONDS:
                        self._current = work
                        break
        finally:
            if self._current is None:
                del self._waiting[session]
            self._duty_cycle.spent(began, time.monotonic())
            if self._waiting:
                self._wait()


def _advance(steps: Steps[Any], done: Done) -> bool:
    """Do one slice; return whether there are more. After the last one, call `done`."""
    try:
        next(steps)
    except StopIteration as ended:
        done(ended.value, None)
    except Exception as error:  # noqa: BLE001 - reported to the caller
        done(None, error)
    else:
        return True
    return False
