"""Long work, cut into slices: between two of them the daemon answers others. Pure.

A piece of work is a generator. It yields after each STEP blocks or so, in a state in which all invariants hold, and
returns its result. Others may change anything while it waits, so it looks again at what it relies on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

STEP = 64  # blocks that are granted, settled or evicted at a time: half a millisecond
LOOK = 4096  # blocks, hashes or rows that are only looked at
SLICE_SECONDS = 0.002  # of the loop's time, for steps one after the other


def begin(steps: Steps[Result]) -> Result | Steps[Result]:
    """Take the first slice. Return the result where that was all of it, else the work, to go on with."""
    try:
        next(steps)
    except StopIteration as done:
        result: Result = done.value
        return result
    return steps


def finish(steps: Steps[Result]) -> Result:
    """Do all of it at once, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result


def advance(steps: Steps[Result], done: Callable[[Result | None, Exception | None], object]) -> bool:
    """Take one slice; return whether there are more. Where there are none, `done` hears of the result, or the error."""
    try:
        next(steps)
    except StopIteration as ended:
        done(ended.value, None)
    except Exception as error:  # noqa: BLE001 - whoever asked is answered
        done(None, error)
    else:
        return True
    return False


class Chores:
    """What is left to do and nobody waits for, one after the other."""

    def __init__(self) -> None:
        self._left: deque[Steps[object]] = deque()

    def __bool__(self) -> bool:
        return bool(self._left)

    def do(self, steps: Steps[object]) -> None:
        """Do it after those that there are; take the first slice where there are none."""
        if self._left or begin(steps) is steps:
            self._left.append(steps)

    def go_on(self) -> bool:
        """Take one slice; return whether there are more. Raises what a chore does, which is over then."""
        if self._left:
            chore = self._left.popleft()
            if begin(chore) is chore:
                self._left.appendleft(chore)
        return bool(self._left)
