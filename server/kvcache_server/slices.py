"""Long answers, cut into slices: between two slices the daemon does other work. Pure.

A piece of work is a generator. It yields after about LOOK blocks, and returns its result. The cache may change before
it continues, so it checks its assumptions again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def finish(steps: Steps[Result]) -> Result:
    """Do all the work at once, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: Result = done.value
            return result


def begin(steps: Steps[Result]) -> Result | Steps[Result]:
    """Do the first slice. Return the result if no work remains, else the remaining work."""
    try:
        next(steps)
    except StopIteration as done:
        result: Result = done.value
        return result
    return steps
