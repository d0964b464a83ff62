"""The daemon's lifecycle: lock the endpoint, find or create the region, serve until stopped, and release both."""

from __future__ import annotations

import faulthandler
import logging
import os
import time
from collections.abc import Callable

from kvcache_proto import __version__
from kvcache_proto.errors import KVCacheError
from kvcache_proto.sizes import format_size
from kvcache_server import signals
from kvcache_server.config import Config
from kvcache_server.daemon import descriptor_limit
from kvcache_server.daemon.service import Service
from kvcache_server.daemon.systemd import ServiceManager
from kvcache_server.storage.folder import EndpointLock
from kvcache_server.storage.region_file import Progress
from kvcache_server.storage.warm_start import open_cache

log = logging.getLogger(__name__)


def serve(config: Config, read: Callable[[], Config], fresh: bool = False, progress: Progress | None = None) -> None:
    """Run the daemon: lock the endpoint, find or create the region, open the sockets, serve until stopped.

    `read()` returns the current configuration, for SIGHUP; `fresh` discards the state left by the previous daemon. The
    caller has blocked SIGNALS. Raises ConfigError, EndpointTaken, RegionError or NotPermitted if it cannot start.
    """
    faulthandler.enable()  # a watchdog ends a hanging loop with SIGABRT: log the place
    descriptor_limit.raise_limit()
    descriptor_limit.warn_if_few(config)
    manager = ServiceManager(os.environ)
    try:
        _serve(config, read, fresh, progress, manager)
    except KVCacheError as error:
        manager.failed(error)
        raise
    finally:
        manager.close()


def _serve(
    config: Config, read: Callable[[], Config], fresh: bool, progress: Progress | None, manager: ServiceManager
) -> None:
    lock = EndpointLock(config.endpoint)
    try:
        began = time.monotonic()
        opened = open_cache(config, lock.folder, fresh, _until_told_to_stop(manager, progress))
        region = opened.region
        try:
            service = Service(config, opened, manager, read)
            log.info(
                "kvcache-server %s ready at %s: %s in %s, %s%s, after %.1f s",
                __version__,
                config.endpoint,
                format_size(region.geometry.region_bytes),
                config.region_dir,
                region.kind_of_memory,
                f", {format_size(region.present)} so far" if region.present < region.geometry.region_bytes else "",
                time.monotonic() - began,
                extra={"fields": {"event": "ready", "region_bytes": region.geometry.region_bytes}},
            )
            service.run()
        finally:
            opened.close(lock.folder, config)
    finally:
        lock.release()
    if config.keep:
        log.info("stopped; %s stays in memory for the next daemon: `kvcache-server discard` frees it", region.path)
    else:
        log.info("stopped")


def _until_told_to_stop(manager: ServiceManager, progress: Progress | None) -> Progress:
    """Return a callback that reports progress, and ends the start if a stop signal is pending; it is only called when
    nothing is half done."""

    def report(done: int, total: int) -> None:
        if signals.stop_is_pending():
            log.info("stopped before it was ready, at %s of %s", format_size(done), format_size(total))
            raise SystemExit(0)
        if progress is not None:
            progress(done, total)
        manager.preparing(done, total)

    return report
