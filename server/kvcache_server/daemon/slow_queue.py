"""Requests that no engine waits for, and that take long: answered one after the other, within a share of the loop.

One that comes in slices has each of them paid for before the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from kvcache_proto.errors import Unavailable
from kvcache_proto.messages import Stats, Why
from kvcache_server.core.slices import SLICE_SECONDS, Result, Steps, advance
from kvcache_server.duty_cycle import DutyCycle

SLOW = (Stats, Why)
SHARE = 0.1  # of the loop's time


class SlowQueue:
    """Those that wait for their turn: one a session, so that nobody waits behind a crowd of another's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Callable[[Any, bytes], object]) -> None:
        """`answer(sender, frame)` takes a request as it came, and may call `go_on`."""
        self._loop, self._answer = loop, answer
        self._duty_cycle = DutyCycle(SHARE)
        self._waiting: dict[int, tuple[Any, bytes]] = {}  # the first one is being answered, if there are steps
        self._steps: Steps[Any] | None = None
        self._done: Callable[[Any, Exception | None], object]

    def add(self, session: int, sender: Any, frame: bytes) -> None:
        """Let it wait for its turn. Raises Unavailable where another one of the session's does: it is not taken."""
        if session in self._waiting:
            raise Unavailable("an earlier question of this session waits for its turn: have its answer first")
        self._waiting[session] = sender, frame
        if len(self._waiting) == 1:
            self._wait()

    def go_on(self, steps: Steps[Result], done: Callable[[Result | None, Exception | None], object]) -> None:
        """Take `steps` for the question that is being answered; `done` is called with their result, or their error."""
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
        """Take it one step further at least."""
        steps, self._steps = self._steps, None
        while steps is not None and advance(steps, self._done):
            if time.monotonic() >= until:
                self._steps = steps
                return
