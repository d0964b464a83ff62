"""Pure: whether a load takes less time than computing the same tokens, where a thread must carry its bytes.

Copies straight between the device and the region always win. Copies through bounce buffers, which memory needs that is
not page-locked, may not.
"""

from __future__ import annotations

from collections.abc import Mapping

LEAST_TOKENS = 256  # of a step that shows how fast the engine computes: smaller ones are bound by kernel launches


class Pace:
    """How fast one engine computes, and how fast its ranks carry bytes. Times are seconds."""

    def __init__(self) -> None:
        self._carried: dict[int, float] = {}  # to carry the bytes of one of the engine's blocks, by rank
        self._per_token = 0.0  # to compute one token; 0 while that is not known
        self._tokens, self._began = 0, 0.0

    @property
    def computing(self) -> bool:
        """Whether the last step had tokens to compute."""
        return self._tokens > 0

    def step(self, tokens: int, now: float) -> None:
        """Note that a step of `tokens` tokens begins, and that the one before has ended."""
        if self._tokens >= LEAST_TOKENS and now > self._began:
            seconds = (now - self._began) / self._tokens
            self._per_token = min(seconds, (self._per_token + seconds) / 2) if self._per_token else seconds
        self._tokens, self._began = tokens, now

    def carried(self, changed: Mapping[int, float]) -> None:
        """Note how long ranks take to carry one of the engine's blocks; 0 for one whose copies go straight."""
        self._carried |= changed

    def worth_loading(self, blocks: int, tokens: int) -> bool:
        """Return whether loading `blocks` of the engine is faster than computing `tokens`; False while unknown."""
        slowest = max(self._carried.values(), default=0.0)
        return not slowest or blocks * slowest < tokens * self._per_token
