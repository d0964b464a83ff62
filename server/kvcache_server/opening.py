"""What a daemon begins with: the region and the book that the last one left, or fresh ones."""

from __future__ import annotations

import contextlib
import gc
import logging
import secrets
import time
from dataclasses import dataclass

from kvcache_proto.endpoint import socket_path
from kvcache_proto.errors import RegionError
from kvcache_proto.region import plan_geometry
from kvcache_server import recovery
from kvcache_server.cache import Cache
from kvcache_server.config import Config, format_size
from kvcache_server.journal import Book, SessionOpened
from kvcache_server.limits import Limits
from kvcache_server.locks import SessionFiles
from kvcache_server.memory import Progress, Region, create_region, region_path, remove_orphan, reopen_region
from kvcache_server.statefile import StateFile
from kvcache_server.sumfile import open_sums, remove_sums

log = logging.getLogger(__name__)


@dataclass
class Opened:
    """All that outlives a daemon, and the cache over it. `returning` are the sessions that may come back, by number."""

    region: Region
    state: StateFile
    files: SessionFiles
    cache: Cache
    returning: dict[int, SessionOpened]

    def close(self, keep: bool) -> None:
        """Let go of it; without `keep`, remove it."""
        self.state.close()
        self.region.close(keep)
        if not keep:
            StateFile.remove(self.state.path)
            remove_sums(self.state.path.removesuffix(".state") + ".sums")
            with contextlib.suppress(OSError):  # something that is not ours lies in it
                self.files.close()


def _beside(endpoint: str, suffix: str) -> str:
    return socket_path(endpoint).removesuffix(".sock") + suffix


def open_cache(config: Config, fresh: bool = False, progress: Progress | None = None) -> Opened:
    """Return the cache of the last daemon of this endpoint, or a new one; the caller holds the endpoint's lock.

    `fresh` discards what the last one left. Raises RegionError where that cannot be trusted, and what `create_region`
    raises.
    """
    limits = config.limits()
    files = SessionFiles(_beside(config.endpoint, ".sessions"))
    last = ("fresh" if fresh else "not_kept") if fresh or not config.keep else _last(config)
    if isinstance(last, str):
        opened = _begin(config, limits, files, progress)
        opened.cache.misses.began(time.monotonic(), last)
        return opened
    region, book = last
    began = time.monotonic()
    try:
        book.life += 1
        returning = {number: opened for number, opened in book.sessions.items() if any(map(files.locked, opened.files))}
        files.keep([name for opened in returning.values() for name in opened.files])
        state = StateFile(_beside(config.endpoint, ".state"), book)
        gc.disable()  # millions of blocks come to be, and none goes
        cache = recovery.reopen(
            *(region.buffer, region.geometry, limits, book, set(returning), time.monotonic(), state.note),
            secret=secrets.token_bytes(16),
        )
    except BaseException:
        region.close(keep=True)
        raise
    finally:
        gc.enable()
    cache.misses.began(time.monotonic(), "")
    found = cache.counters
    log.info(
        "found %s blocks of the last daemon in %s after %.2f s; %d of its sessions live, %d saves are under way",
        *(f"{found['blocks_recovered']:,}", region.path, time.monotonic() - began),
        *(len(returning), found["reservations_recovered"]),
        extra={"fields": {"event": "recovered", **found}},
    )
    retired = cache.pool.retired
    for extent in retired:  # its memory is there yet where the last daemon was killed before it could give it back
        region.give_back(extent)
    if retired:
        log.warning(
            "the region was made smaller while it was in use: %s of %s; `serve --fresh` begins with all of it",
            *(format_size(cache.pool.capacity), format_size(region.geometry.extents * region.geometry.extent_bytes)),
        )
    region.lock_later(config.lock, retired)
    cache.sums = open_sums(_beside(config.endpoint, ".sums"), region.geometry, book.life)
    return Opened(region, state, files, cache, returning)


def _begin(config: Config, limits: Limits, files: SessionFiles, progress: Progress | None) -> Opened:
    region = create_region(
        config.region_dir,
        config.size,
        socket_path=socket_path(config.endpoint),
        extent_size=config.extent_size,
        lock=config.lock,
        huge_pages=config.huge_pages,
        progress=progress,
    )
    try:
        files.keep(())
        # The book goes first, then the region's header: what has no header yet was never used by anybody.
        state = StateFile(_beside(config.endpoint, ".state"), Book(region.geometry.region_id))
        cache = Cache(
            *(region.buffer, region.geometry, limits, secrets.randbits(63), state.note),
            secret=secrets.token_bytes(16),
        )
        cache.sums = open_sums(_beside(config.endpoint, ".sums"), region.geometry, cache.life)
    except BaseException:
        region.close(keep=False)
        raise
    return Opened(region, state, files, cache, {})


def _last(config: Config) -> tuple[Region, Book] | str:
    """Return what the last daemon left; where there is nothing, or nothing that this one has a use for, why."""
    region = reopen_region(config.region_dir, socket_path=socket_path(config.endpoint))
    if region is None:
        return "first"
    try:
        wanted = plan_geometry(region.geometry.region_id, config.size, config.extent_size)
        if wanted != region.geometry:
            log.warning(
                "the last daemon's region of %s is cut for another size or extent_size: it is discarded",
                format_size(region.geometry.region_bytes),
            )
            region.close(keep=True)
            return "resized"
        book = StateFile.read(_beside(config.endpoint, ".state"))
        if book is None:
            log.warning("%s is there without its state file: it is discarded", region.path)
            region.close(keep=True)
            return "no_state"
        if book.region != region.geometry.region_id:
            raise RegionError("the state file belongs to another region")
        return region, book
    except RegionError as error:
        region.close(keep=True)
        raise RegionError(f"{region.path}: {error}; `kvcache-server serve --fresh` discards it") from None


def discard(config: Config) -> bool:
    """Remove what the last daemon of this endpoint left; the caller holds the endpoint's lock.

    Returns whether there was a region. Raises EndpointTaken where a living daemon has it.
    """
    found = remove_orphan(region_path(config.region_dir, socket_path(config.endpoint)))
    StateFile.remove(_beside(config.endpoint, ".state"))
    remove_sums(_beside(config.endpoint, ".sums"))
    with contextlib.suppress(OSError):
        SessionFiles(_beside(config.endpoint, ".sessions")).close()
    return found
