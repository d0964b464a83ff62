"""What the daemon cannot know of a request and is told, for who asks there why there was no hit. Pure.

Out of the ordinary alone: a lookup that was not made, a load that failed, blocks that were not saved. What cannot be
told now, because the daemon is away, is kept for later, and not too much of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcache_proto.messages import Note
from kvcache_proto.types import MAX_NAME

NOTES = 256
HASHES = 8192


class Notes:
    """The latest notes, oldest first."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, str, str, list[bytes]]] = deque()
        self._hashes = 0

    def add(self, request: str, cause: str, now: float, hashes: Sequence[bytes] = ()) -> int:
        """Note what became of `request`, or of its blocks `hashes`. Returns how many older notes had to go untold."""
        dropped = 0
        self.entries.append((now, request[:MAX_NAME], cause, list(hashes[:HASHES])))
        self._hashes += len(self.entries[-1][3])
        while len(self.entries) > NOTES or self._hashes > HASHES:
            self._hashes -= len(self.entries.popleft()[3])
            dropped += 1
        return dropped

    def take(self, now: float) -> list[Note]:
        """Return all that there is, and forget it."""
        taken = [Note(request, cause, int((now - at) * 1000), hashes) for at, request, cause, hashes in self.entries]
        self.entries.clear()
        self._hashes = 0
        return taken
