"""Pure: whether a load takes less time than computing the same tokens, where a thread must carry its bytes.

Copies straight between the device and the region always win; those by way of small buffers, which memory takes that is
not page-locked, may not.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_TOKENS = 256  # of a step that says how fast the engine computes: smaller ones are bound by their launches


class Pace:
    """Of one engine. Times are seconds."""

    def __init__(self) -> None:
        self._carried: dict[int, float] = {}  # by rank: for the bytes of one of the engine's blocks
        self._a_token = 0.0  # to compute one; 0 while that is not known
        self._tokens, self._began = 0, 0.0

    @property
    def computing(self) -> bool:
        """Whether the last step had tokens to compute."""
        return self._tokens > 0

    def step(self, tokens: int, now: float) -> None:
        """Note that a step of so many `tokens` begins, and with it that the one before has ended."""
        if self._tokens >= LEAST_TOKENS and now > self._began:
            seconds = (now - self._began) / self._tokens
            self._a_token = min(seconds, (self._a_token + seconds) / 2) if self._a_token else seconds
        self._tokens, self._began = tokens, now

    def carried(self, changed: Mapping[int, float]) -> None:
        """Note how long ranks take to carry one of the engine's blocks; 0 for one whose copies go straight."""
        self._carried |= changed

    def worth_loading(self, blocks: int, tokens: int) -> bool:
        """Return whether to load `blocks` of the engine's beats computing their `tokens`; False while that is not
        known."""
        slowest = max(self._carried.values(), default=0.0)
        return not slowest or blocks * slowest < tokens * self._a_token
