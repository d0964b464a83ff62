"""Delivers the core's reports, in their order."""

from __future__ import annotations

from collections.abc import Callable

from kvcache_server.core.cache import Cache
from kvcache_server.core.effects import Change
from kvcache_server.storage.state_file import StateFile


class Delivery:
    """Records go to the state file, then changes to `followers`."""

    def __init__(self, cache: Cache, state_file: StateFile, failed: Callable[[int, Exception], object]) -> None:
        """`failed(0, error)` logs an internal error of a follower. The cache is intact, so clients are still served."""
        self.followers: list[Callable[[list[Change]], None]] = []
        self._effects, self._state_file, self._failed = cache.effects, state_file, failed

    def deliver(self) -> None:
        """Deliver all reports since the last call."""
        if self._effects:
            records, changes = self._effects.take()
            for record in records:
                self._state_file.note(record)
            for follow in self.followers:
                try:
                    follow(changes)
                except Exception as error:  # noqa: BLE001 - see __init__
                    self._failed(0, error)
