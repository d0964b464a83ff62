"""Which loads run while the rest of their requests is computed. Pure.

A request that has the engine to itself would first load, and then compute its rest. If both overlap, it takes only as
long as the slower one. Other requests that come meanwhile wait for the step, which the load may make longer: so a load
must not take much longer than the computation.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcache_client.scheduler.pace import Pace

LEAST = 0.002  # seconds that it must save
LONGEST = 2.0  # times the computation, for a load


class Overlap:
    """The overlap of loads and computation in one engine."""

    def __init__(self, pace: Pace, is_on: bool, ranks: int, step_tokens: int) -> None:
        """`step_tokens` are the most that a step computes; `ranks` is the number that have to be ready."""
        self._pace, self._is_on, self._step_tokens = pace, is_on, step_tokens
        self.ranks = ranks
        self._ready: dict[int, bool] = {}

    def ranks_ready(self, changed: Mapping[int, bool]) -> None:
        """Note, by rank, whether the engine announces its layers."""
        self._ready |= changed

    def wins(self, begin: int, end: int, tokens: int) -> bool:
        """Return True if tokens `begin` to `end` of a request are to be loaded while those up to `tokens` are computed.

        Not before both times are known, nor if threads carry the bytes: the engine's own threads would wait for them.
        """
        if not self._is_on or sum(self._ready.values()) < self.ranks or self._pace.is_carried:
            return False
        load, compute = self._pace.loading(end - begin), self._pace.computing(end, min(tokens, end + self._step_tokens))
        if load is None or compute is None:
            return False
        return min(load, compute) >= LEAST and load <= LONGEST * compute
