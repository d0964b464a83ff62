"""Notes for the daemon on events that it cannot see, for operators who ask why a request had no hit. Pure.

Only unusual events are noted: a lookup that was not made, a load that failed, blocks that were not saved. Notes that
cannot be sent now, because the daemon is away, are kept for later, within bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcache_client.scheduler.cache import CacheNamespace, Counts
from kvcache_client.scheduler.requests import RequestState
from kvcache_proto.messages import MissNote
from kvcache_proto.types import MAX_NAME

NOTES = 256
HASHES = 8192


class Notes:
    """The latest notes; `entries` has them oldest first."""

    def __init__(self, counters: Counts) -> None:
        self.entries: deque[tuple[float, str, str, list[bytes]]] = deque()
        self._counters = counters
        self._hashes = 0

    def note(self, state: RequestState, cause: str, now: float) -> None:
        """Note why a request is not served from the cache; a cause that repeats is noted once."""
        if state.noted != cause:
            state.noted = cause
            self.add(state.id, cause, now)

    def add(self, request: str, cause: str, now: float, hashes: Sequence[bytes] = ()) -> None:
        """Note an event of `request`, or of its blocks `hashes`. The oldest ones beyond the bound are dropped and
        counted."""
        self.entries.append((now, request[:MAX_NAME], cause, list(hashes[:HASHES])))
        self._hashes += len(self.entries[-1][3])
        while len(self.entries) > NOTES or self._hashes > HASHES:
            self._hashes -= len(self.entries.popleft()[3])
            self._counters.add("notes_dropped")

    def take(self, now: float) -> list[MissNote]:
        taken = [
            MissNote(request, cause, int((now - at) * 1000), hashes) for at, request, cause, hashes in self.entries
        ]
        self.entries.clear()
        self._hashes = 0
        return taken

    def send(self, namespace: CacheNamespace, now: float) -> None:
        """Send all notes to the daemon; if they cannot be sent, they are lost, and counted."""
        notes = self.take(now)
        if not namespace.report_misses(notes):
            self._counters.add("notes_unsent", len(notes))
