"""What an operator may ask of a daemon at work: done, counted and logged alike by message, signal and HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvcache_server import logs
from kvcache_server.cache import Cache
from kvcache_server.config import format_size

log = logging.getLogger(__name__)


class Desk:
    """Belongs to the daemon's loop: call it there alone. `who` is how the log calls the one who asks."""

    def __init__(self, cache: Cache, tidy: Callable[[int], None], figures: Callable[[], dict[str, Any]]) -> None:
        """`tidy()` removes what a session that was given up left; `figures()` are the daemon's own."""
        self.integrity = {"checks": 0, "failures": 0}
        self._cache, self._tidy, self._figures = cache, tidy, figures

    @property
    def in_grace(self) -> bool:
        """Whether nothing is evicted for now: sessions of the last daemon have not said yet what they hold."""
        return self._cache.room.frozen

    def report(self) -> dict[str, Any]:
        """Return what `status` shows."""
        return self._cache.stats(time.monotonic()) | {"daemon": self._figures()}

    def clear(self, namespace: str, who: str) -> int:
        """Forget what may be forgotten of that namespace, or of all; return how many blocks.

        Raises ClientError where there is no such namespace, Unavailable during the grace.
        """
        blocks = self._cache.clear(namespace, who, time.monotonic())
        self.cleared(namespace, blocks, who)
        return blocks

    def cleared(self, namespace: str, blocks: int, who: str) -> None:
        log.info("cleared %d blocks of %s, asked by %s", blocks, namespace or "every namespace", who)

    def fence_off(self, session: int, who: str) -> int:
        """Give up a session that is away; return how many reservations ended. Raises ClientError where it is not."""
        reservations = self._cache.fence_off(session, time.monotonic())
        self.fenced_off(session, who)
        return reservations

    def fenced_off(self, session: int, who: str) -> None:
        log.warning("session %d was fenced off by %s", session, who)
        self._tidy(session)

    def resize(self, size: int, who: str) -> int:
        """Make the pool smaller, little by little; return how many bytes it will have. Raises BadArgument."""
        before, wanted = self._cache.pool.capacity, self._cache.resize(size)
        log.warning("the pool shrinks from %s to %s, asked by %s", format_size(before), format_size(wanted), who)
        return wanted

    def set_log_level(self, level: str, who: str) -> str:
        """Log from `level` on, and return the level until now."""
        before = logs.level()
        logs.set_level(level)
        log.warning("the log begins at %s from now on, instead of %s, asked by %s", level, before, who)
        return before

    def check(self) -> str:
        """Look at all that must always hold; return what is broken, "" where nothing is. O(blocks), in the loop."""
        self.integrity["checks"] += 1
        try:
            self._cache.check_integrity()
        except AssertionError as error:
            self.integrity["failures"] += 1
            log.error("integrity: broken: %s", error)
            return str(error) or "broken"
        log.info("integrity: sound")
        return ""
