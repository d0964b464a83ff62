"""Long requests that no engine waits for: answered one after the other, within a fraction of the loop's time.

The fraction also applies between the slices of one request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from kvcache_proto.errors import Unavailable
from kvcache_proto.messages import Chain, Stats, Why
from kvcache_server.duty_cycle import DutyCycle
from kvcache_server.slices import SLICE_SECONDS, Result, Steps, advance

SLOW = (Stats, Why, Chain)
SHARE = 0.1  # of the loop's time


class SlowQueue:
    """The waiting requests: one per session, so that no session waits for many requests of another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Callable[[Any, bytes], object]) -> None:
        """`answer(sender, frame)` answers a request; it may call `go_on`."""
        self._loop, self._answer = loop, answer
        self._duty_cycle = DutyCycle(SHARE)
        self._waiting: dict[int, tuple[Any, bytes]] = {}  # any steps are those of the first one
        self._steps: Steps[Any] | None = None
        self._done: Callable[[Any, Exception | None], object]

    def add(self, session: int, sender: Any, frame: bytes) -> None:
        """Add a request. Raises Unavailable, and adds nothing, if one of the same session is waiting already."""
        if session in self._waiting:
            raise Unavailable("an earlier request of this session is still waiting: wait for its reply first")
        self._waiting[session] = sender, frame
        if len(self._waiting) == 1:
            self._wait()

    def go_on(self, steps: Steps[Result], done: Callable[[Result | None, Exception | None], object]) -> None:
        """Continue the current request with `steps`; `done` is called with their result or error."""
        self._steps, self._done = steps, done

    def _wait(self) -> None:
        self._loop.call_later(self._duty_cycle.wait(time.monotonic()), self._next)

    def _next(self) -> None:
        session, (sender, frame) = next(iter(self._waiting.items()))
        began = time.monotonic()
        try:
            if self._steps is None:
                self._answer(sender, frame)
            else:
                self._advance(began + SLICE_SECONDS)
        finally:
            if self._steps is None:
                del self._waiting[session]
            self._duty_cycle.spent(began, time.monotonic())
            if self._waiting:
                self._wait()

    def _advance(self, until: float) -> None:
        """Do at least one step of the current request."""
        steps, self._steps = self._steps, None
        while steps is not None and advance(steps, self._done):
            if time.monotonic() >= until:
                self._steps = steps
                return
