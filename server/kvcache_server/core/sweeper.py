"""Work that no request waits for, done in slices between requests. Pure.

Unbounded work (the end of a session, a clear, the blocks below one that is wrong) takes effect at once. The rest of it
is a step: a function that does a slice of the work, and returns whether more is left. Its state is plain data, and
other requests may change the cache between two slices, so it checks its assumptions again. All invariants hold after
each slice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvcache_server.core.effects import Actor, Effects

AT_ONCE = 8  # slices that one request or tick does at once: some milliseconds

Step = Callable[[], bool]


class Sweeper:
    """The steps that have something left to do, in turn. `now` is the time of the last request or tick."""

    def __init__(self, effects: Effects) -> None:
        self.now = 0.0
        self.at_once = AT_ONCE  # slices that this request or tick may still do at once
        self.effects = effects
        self._steps: OrderedDict[Step, Actor] = OrderedDict()  # each with the actor on whose behalf it is done

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: Step) -> None:
        """Queue `step` until nothing is left of it, on behalf of the present actor. If nothing else waits, its first
        slice is done at once, as far as `at_once` allows. A step that waits already is not added."""
        if not self._steps and self.at_once:
            self.at_once -= 1
            if not step():
                return
        self._steps.setdefault(step, self.effects.actor)

    def go_on(self) -> bool:
        """Do one slice; return whether more is left. A step that raises an exception is not continued."""
        if self._steps:
            step, self.effects.actor = self._steps.popitem(last=False)
            if step():
                self._steps[step] = self.effects.actor
        return bool(self._steps)

    def finish(self) -> None:
        while self.go_on():
            pass
