"""Upper bounds for any cache: unlimited memory, and an optimal eviction policy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcache_server.core.eviction.optimum import most_hits
from kvcache_server.core.slices import finish

if TYPE_CHECKING:
    from kvcache_server.replay.trace import TraceRequest


def distinct(requests: Sequence[TraceRequest]) -> int:
    """Return the number of distinct blocks: with unlimited memory, each misses once."""
    return len({block for request in requests for block in request.blocks})


def optimum(requests: Sequence[TraceRequest], blocks: int) -> int:
    """Return the most hits that a cache of `blocks` blocks can have if the whole trace is known beforehand."""
    return finish(most_hits([request.blocks for request in requests], blocks))
