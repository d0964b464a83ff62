"""Long work, cut into slices: between two slices the daemon does other work. Pure.

A piece of work is a generator. It yields after about STEP blocks, in a state in which all invariants hold, and returns
its result. The state may change before it continues, so it checks again what it relies on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

STEP = 64  # blocks granted, settled or evicted in one slice: half a millisecond
LOOK = 4096  # blocks, hashes or rows examined in one slice
SLICE_SECONDS = 0.002  # of the loop's time for consecutive slices


def begin(steps: Steps[Result]) -> Result | Steps[Result]:
    """Do the first slice. Return the result if that was all, else the remaining work."""
    try:
        next(steps)
    except StopIteration as done:
        result: Result = done.value
        return result
    return steps


def finish(steps: Steps[Result]) -> Result:
    """Do all the work at once, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result


def advance(steps: Steps[Result], done: Callable[[Result | None, Exception | None], object]) -> bool:
    """Do one slice; return whether there are more. After the last one, call `done` with the result or the error."""
    try:
        next(steps)
    except StopIteration as ended:
        done(ended.value, None)
    except Exception as error:  # noqa: BLE001 - reported to the caller
        done(None, error)
    else:
        return True
    return False


class Chores:
    """Work that no request waits for, done in order."""

    def __init__(self) -> None:
        self._left: deque[Steps[object]] = deque()

    def __bool__(self) -> bool:
        return bool(self._left)

    def do(self, steps: Steps[object]) -> None:
        """Add work after the existing work; if there is none, do the first slice now."""
        if self._left or begin(steps) is steps:
            self._left.append(steps)

    def go_on(self) -> bool:
        """Do one slice; return whether there are more. An exception ends the piece of work that raised it."""
        if self._left:
            chore = self._left.popleft()
            if begin(chore) is chore:
                self._left.appendleft(chore)
        return bool(self._left)
