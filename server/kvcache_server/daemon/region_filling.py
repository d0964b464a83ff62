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


def fill_region(
    loop: asyncio.AbstractEventLoop,
    cache: Cache,
    region: Region,
    config: Config,
    started: float,
    stop: Callable[[KVCacheError], None],
) -> None:
    """Begin to make memory, in a thread; in the loop, grow the cache with it, and log progress.

    `started` is the monotonic time of the daemon's start; `stop` is called with a RegionError if memory runs out.
    """
    reported_at = time.monotonic()

    def in_loop(call: Callable[..., object]) -> Callable[..., None]:
        def soon(*arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has stopped
                loop.call_soon_threadsafe(call, *arguments)

        return soon

    def grow(made: int, total: int) -> None:
        nonlocal reported_at
        cache.grow(region.ready_pages)
        if time.monotonic() - reported_at >= REPORT_SECONDS and made < total:
            reported_at = time.monotonic()
            log.info("%s of %s are in memory", format_size(made), format_size(total))

    def complete() -> None:
        size = region.geometry.region_bytes
        log.info(
            "all %s are in memory, %s, after %.1f s",
            *(format_size(size), region.kind_of_memory, time.monotonic() - started),
            extra={"fields": {"event": "complete", "region_bytes": size}},
        )

    region.fill(config.lock, config.huge_pages, in_loop(grow), in_loop(complete), in_loop(stop))
