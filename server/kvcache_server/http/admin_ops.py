"""An operator's actions on a running daemon: the same, counted and logged, by message, signal and HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvcache_proto.messages import Invalidate, Invalidated
from kvcache_proto.sizes import format_size
from kvcache_proto.types import Finding
from kvcache_server import logs
from kvcache_server.core import integrity
from kvcache_server.core.cache import Cache
from kvcache_server.insight.insight import Insight
from kvcache_server.slices import Steps
from kvcache_server.status import Integrity, Level, Status

log = logging.getLogger(__name__)


NOTABLE = 0.05  # of its pages: the unused fraction above which a namespace is noted


class AdminOps:
    """An operator's actions. Call it only from the daemon's loop. `who` names the operator in the log."""

    def __init__(
        self,
        cache: Cache,
        insight: Insight,
        tidy: Callable[[int], None],
        run: Callable[[Steps[Any]], Awaitable[Any]],
        end_turn: Callable[[], None],
    ) -> None:
        """`tidy(session)` cleans up after a session that was fenced off; `run(steps)` does long work in slices;
        `end_turn()` delivers the core's reports."""
        self.integrity = Integrity()
        self._cache, self._insight, self._tidy = cache, insight, tidy
        self._run, self._end_turn = run, end_turn
        self._told: dict[str, int] = {}
        self._noted: set[int] = set()  # namespaces, by number, whose overhead has been logged
        self._checks: set[asyncio.Task[str]] = set()
        self._cleared_at, self._unsaid = -math.inf, 0  # time of the last log line on engines' clears; blocks since then

    @property
    def in_grace(self) -> bool:
        return self._cache.in_grace

    async def report(self) -> Status:
        figures: Status = await self._run(self._insight.reporting(time.monotonic()))
        return figures

    def attached(self, number: int) -> None:
        """Warn, once per namespace, if its blocks leave much of their pages unused."""
        namespace = self._cache.namespaces[number]
        if number in self._noted or namespace.overhead <= NOTABLE:
            return
        self._noted.add(number)
        log.warning(
            "namespace %s, model %s: blocks leave %.1f %% of their pages of %s unused; a smaller page_size wastes less",
            *(
                namespace.id,
                namespace.spec.model,
                100 * namespace.overhead,
                format_size(self._cache.geometry.page_bytes),
            ),
            extra={"fields": {"event": "overhead", "namespace": namespace.id, "overhead": namespace.overhead}},
        )

    def summarise(self, messages: int, sessions: int) -> None:
        """Log one line about the events since the last one, if any; `messages` is the count so far."""
        if messages == self._told.get("messages", 0):
            return
        cache = self._cache
        counters = cache.counters
        now = {
            "messages": messages,
            "asked": counters.get("blocks_requested", 0),
            "hit": counters.get("blocks_hit", 0),
            "stored": counters.get("blocks_committed", 0),
            "evicted": cache.evictions.total(),
            "refused": cache.refusals.total(),
        }
        new = {key: value - self._told.get(key, 0) for key, value in now.items()}
        self._told = now
        if any(count for key, count in new.items() if key != "messages"):
            blocks = sum(len(group.visible) for each in cache.namespaces.values() for group in each.groups)
            log.info(
                "stored %s blocks, hit %s of %s asked, evicted %s, refused %s; %s blocks in %s of %s, %d sessions",
                *(f"{new[key]:,}" for key in ("stored", "hit", "asked", "evicted", "refused")),
                *(
                    f"{blocks:,}",
                    format_size(cache.used),
                    format_size(cache.capacity),
                    sessions,
                ),
                extra={"fields": {"event": "summary", **new}},
            )

    def clear(self, namespace: str, who: str) -> int:
        """Forget every block of `namespace`, or of all; return the number of blocks.

        Raises ClientError for an unknown namespace, Unavailable during the grace period.
        """
        blocks = self._cache.clear(namespace, who, time.monotonic())
        self._end_turn()
        self.cleared(namespace, blocks, who)
        return blocks

    def cleared(self, namespace: str, blocks: int, who: str) -> None:
        log.info("cleared %d blocks of %s, asked by %s", blocks, namespace or "every namespace", who)

    def cleared_by_engine(self, namespace: str, blocks: int, who: str) -> None:
        """Log that an engine has cleared blocks, at most once per second: the next line counts the rest."""
        now = time.monotonic()
        self._unsaid += blocks
        if self._unsaid and now - self._cleared_at >= 1:
            self.cleared(namespace, self._unsaid, who)
            self._cleared_at, self._unsaid = now, 0

    def invalidated(self, request: Invalidate, reply: Invalidated, session: int, who: str) -> None:
        if not reply.blocks:
            return
        writers = sorted({f"engine {engine} (session {number})" for engine, number in reply.writers if engine})
        log.error(
            "shard %d of cached blocks is wrong (%s), found by %s, stored by %s; with descendants, %d are forgotten",
            *(request.shard, Finding(request.finding).name.lower(), who, ", ".join(writers), reply.blocks),
            extra={"fields": {"event": "invalidate", "session": session, "writers": writers, "blocks": reply.blocks}},
        )

    def fence_off(self, session: int, who: str) -> int:
        """Give up a session that is away; return the number of reservations that ended. Raises ClientError if it is not
        away."""
        reservations = self._cache.fence_off(session, time.monotonic())
        self._end_turn()
        self.fenced_off(session, who)
        return reservations

    def fenced_off(self, session: int, who: str) -> None:
        log.warning("session %d was fenced off by %s", session, who)
        self._tidy(session)

    def set_log_level(self, level: str, who: str) -> Level:
        """Set the log level and return the previous one."""
        before = logs.level()
        logs.set_level(level)
        log.warning("the log level is now %s, was %s; asked by %s", level, before, who)
        return before

    async def check(self) -> str:
        """Check the invariants; return the one that is violated, or "".

        All are checked at one instant if that is quick or no client is attached, otherwise part by part, in slices.
        """
        broken = ""
        try:
            if self._cache.sessions and integrity.takes_long(self._cache):
                await self._run(integrity.audit(self._cache))
            else:
                integrity.check_integrity(self._cache)
        except AssertionError as error:
            self.integrity.failures += 1
            log.error("integrity: broken: %s", error)
            broken = str(error) or "broken"
        else:
            log.info("integrity: sound")
        self.integrity.checks += 1
        return broken

    def check_soon(self) -> None:
        """Start a check, whose result goes to the log."""
        task = asyncio.get_running_loop().create_task(self.check())
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)
