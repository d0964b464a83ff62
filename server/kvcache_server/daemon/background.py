"""The work of the daemon's loop between requests: the sweeper's, and long answers, one slice per turn."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from kvcache_server.core.cache import Cache
from kvcache_server.slices import SLICE_SECONDS, Result, Steps, advance


class Background:
    """Does the deferred work of the cache, and the steps given to `run`."""

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
        self._running: deque[Callable[[], bool]] = deque()  # each does a slice, and returns whether more is left
        self._scheduled = False

    def run(self, steps: Steps[Result]) -> asyncio.Future[Result]:
        """Start `steps`. Cancelling the future does not stop them."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def done(result: Result | None, error: Exception | None) -> None:
            if future.cancelled():
                if error is not None:
                    self._failed(0, error)
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        self._running.append(lambda: advance(steps, done))
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
            if self._running and (work := self._running.popleft())():
                self._running.append(work)
        finally:
            self.schedule()
            self._answered()
