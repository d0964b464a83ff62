"""Makes the rest of the region's memory while engines are served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from kvcache_proto.errors import KVCacheError
from kvcache_proto.sizes import format_size
from kvcache_server.config import Config
from kvcache_server.core.cache import Cache
from kvcache_server.storage.region_file import Region

log = logging.getLogger(__name__)

REPORT_SECONDS = 5.0  # between two lines about memory that is being made


class RegionFilling:
    """Grows the cache as memory is made, and logs progress."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cache: Cache, region: Region, started: float) -> None:
        """`started` is when the daemon started, by the monotonic clock."""
        self._loop, self._cache, self._region, self._started = loop, cache, region, started
        self._reported_at = time.monotonic()

    def begin(self, config: Config, stop: Callable[[KVCacheError], None]) -> None:
        """Begin to make memory, in a thread; call `stop` with a RegionError in the loop if it runs out."""
        in_loop = self._in_loop
        self._region.fill(config.lock, config.huge_pages, in_loop(self._grow), in_loop(self._complete), in_loop(stop))

    def _in_loop(self, call: Callable[..., object]) -> Callable[..., None]:
        def soon(*arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has stopped
                self._loop.call_soon_threadsafe(call, *arguments)

        return soon

    def _grow(self, made: int, total: int) -> None:
        self._cache.grow(self._region.ready_pages)
        if time.monotonic() - self._reported_at >= REPORT_SECONDS and made < total:
            self._reported_at = time.monotonic()
            log.info("%s of %s are in memory", format_size(made), format_size(total))

    def _complete(self) -> None:
        log.info(
            "all %s are in memory, %s, after %.1f s",
            format_size(self._region.geometry.region_bytes),
            self._region.kind_of_memory,
            time.monotonic() - self._started,
            extra={"fields": {"event": "complete", "region_bytes": self._region.geometry.region_bytes}},
        )
