"""Work that no request waits for, done in slices between requests. Pure.

What has no bound (the end of a session, a clear, the blocks below one that is wrong) takes effect at once. The rest of
it is a step: a function that does a slice of the work, and returns whether more is left. Its state is plain data, and
other requests may change the cache between two slices, so it checks again what it relies on. All invariants hold
after each slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcache_server.core.effects import Actor, Effects

Step = Callable[[], bool]


class Sweeper:
    """The steps that have something left to do, in order. `now` is the time of the last request or tick."""

    def __init__(self, effects: Effects) -> None:
        self.now = 0.0
        self._effects = effects
        self._steps: deque[tuple[Step, Actor]] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: Step) -> None:
        """Let `step` be done until nothing is left, on behalf of whom the core works for now; if nothing else waits,
        its first slice is done at once. A step that waits already is not added."""
        if all(step != each for each, _ in self._steps) and (self._steps or step()):
            self._steps.append((step, self._effects.actor))

    def go_on(self) -> bool:
        """Do one slice; return whether more is left. A step that raises an exception is not continued."""
        if self._steps:
            step, self._effects.actor = self._steps.popleft()
            if step():
                self._steps.appendleft((step, self._effects.actor))
        return bool(self._steps)

    def finish(self) -> None:
        """Do all that is left."""
        while self.go_on():
            pass
