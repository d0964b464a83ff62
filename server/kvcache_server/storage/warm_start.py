"""The start of a daemon: from the region and the manifest that the previous one left, or new ones."""

from __future__ import annotations

import contextlib
import gc
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvcache_proto.endpoint import socket_path
from kvcache_proto.errors import ConfigError, EndpointTaken, NotPermitted, RegionError
from kvcache_proto.region import HEADER, RegionRows, found_geometry, is_given_up
from kvcache_proto.sizes import format_size
from kvcache_proto.types import PoolGeometry
from kvcache_server.config import Config
from kvcache_server.core.cache import Cache
from kvcache_server.core.journal import Manifest, SessionOpened
from kvcache_server.miss_report import EmptyReason
from kvcache_server.storage.checksum_file import open_sums
from kvcache_server.storage.folder import Folder, file_of
from kvcache_server.storage.region_file import Progress, Region, check_room, create_region, geometry_for, map_region
from kvcache_server.storage.region_names import REGION, Claim, RegionFolder
from kvcache_server.storage.session_locks import SessionFiles
from kvcache_server.storage.state_file import ASIDE, NEW, StateFile, read_state

log = logging.getLogger(__name__)

SESSIONS, STATE, SUMS = ".sessions", ".state", ".sums"


@dataclass
class WarmStart:
    """The initial state of a daemon: everything that outlives a daemon, and the cache on top of it.

    Attributes:
        disconnected: the sessions that may come back, by number.
        empty_reason: the reason that the cache is empty; "" if it is the previous daemon's.
    """

    region: Region
    state: StateFile
    files: SessionFiles
    cache: Cache
    disconnected: dict[int, SessionOpened]
    empty_reason: EmptyReason = ""

    def close(self, folder: Folder, config: Config) -> None:
        """Close everything; without `keep` in the configuration, also remove it."""
        self.state.close()
        self.region.close(config.keep)
        if not config.keep:
            _remove_files(folder, config)


def _remove_files(folder: Folder, config: Config) -> None:
    """Remove the files beside the endpoint, except the lock and the token."""
    state = file_of(config.endpoint, STATE)
    for name in (state, state + NEW, state + ASIDE, file_of(config.endpoint, SUMS)):
        folder.remove(name)
    SessionFiles(folder, file_of(config.endpoint, SESSIONS)).close()


def open_cache(config: Config, folder: Folder, fresh: bool = False, progress: Progress | None = None) -> WarmStart:
    """Return the cache of the previous daemon of this endpoint, or a new one. The caller holds the endpoint's lock.

    `folder` is the endpoint's. `fresh` discards the state left by the previous daemon. A region that cannot be trusted
    is put aside; with `strict`, RegionError is raised instead. Raises ConfigError, NotPermitted if something else has
    the name of a file, and the errors of `create_region`.
    """
    files = SessionFiles(folder, file_of(config.endpoint, SESSIONS))
    for suffix in (STATE, SUMS):
        folder.check(file_of(config.endpoint, suffix))
    with RegionFolder(config.region_dir, socket_path(config.endpoint)) as regions:
        if config.keep and not fresh:
            found = _find_last(config, folder, regions)
        else:
            _remove_regions(config, folder, regions)
            found = _Found(why="fresh" if fresh else "not_kept")
        if found.region is None:
            _make_room(config, regions)
    region = found.region or create_region(
        *(config.region_dir, config.size),
        socket_path=socket_path(config.endpoint),
        page_size=config.page_size,
        lock=config.lock,
        huge_pages=config.huge_pages,
        progress=progress,
    )
    resumes, manifest = found.manifest is not None, found.manifest or Manifest(region.geometry.region_id)
    try:
        if resumes:
            manifest.epoch += 1
        disconnected = {
            number: opened for number, opened in manifest.sessions.items() if any(map(files.locked, opened.files))
        }
        files.keep([name for opened in disconnected.values() for name in opened.files])
        # First the manifest, then the region's header: a region without a header was never used.
        rows = RegionRows(region.buffer, region.geometry)
        state = StateFile(folder, file_of(config.endpoint, STATE), manifest, rows.give_up)
        cache = Cache(
            *(region.buffer, region.geometry, config.limits()),
            seed=0 if resumes else secrets.randbits(63),
            epoch=manifest.epoch,
            secret=secrets.token_bytes(16),
            ready_pages=region.ready_pages,
        )
        if resumes:
            _restore(cache, region, state, set(disconnected))
        if (sums := open_sums(folder, file_of(config.endpoint, SUMS), cache.geometry, cache.epoch)) is not None:
            cache.keep_checksums(sums)
    except BaseException:
        region.close(keep=resumes)
        raise
    if found.put_aside:
        cache.counters["regions_put_aside"] += found.put_aside
    cache.counters.update(state.counters)
    state.counters = cache.counters
    return WarmStart(region, state, files, cache, disconnected, found.why)


def _restore(cache: Cache, region: Region, state: StateFile, disconnected: set[int]) -> None:
    """Restore the previous daemon's cache."""
    from kvcache_server.core.recovery.read_rows import Snapshot  # imports numpy, which an empty daemon does without

    began = time.monotonic()
    gc.disable()  # millions of blocks are created, and none is garbage
    try:
        cache.restore(
            Snapshot(RegionRows(region.buffer, region.geometry), state.manifest, disconnected), time.monotonic()
        )
        for record in cache.effects.take()[0]:
            state.note(record)
    finally:
        gc.enable()
    counters = cache.counters
    log.info(
        "found %s blocks of the last daemon in %s after %.2f s; %d of its sessions live, %d saves are in progress",
        *(f"{counters['blocks_recovered']:,}", region.path, time.monotonic() - began),
        *(len(disconnected), counters["reservations_recovered"]),
        extra={"fields": {"event": "recovered", **counters}},
    )


def _make_room(config: Config, regions: RegionFolder) -> None:
    """Remove regions that were put aside if there is no room for a new one."""
    try:
        check_room(config.region_dir, geometry_for(bytes(16), config.size, config.page_size).region_bytes)
    except RegionError:
        if removed := regions.remove_aside():
            log.warning("removed %d regions that were put aside, to make room for a new one", removed)


# The previous daemon's files.


class _Found(NamedTuple):
    """The previous daemon's region and manifest; or the reason that there are none, and the regions put aside."""

    region: Region | None = None
    manifest: Manifest | None = None
    why: EmptyReason = ""
    put_aside: int = 0


class _Candidate(NamedTuple):
    """An existing region.

    Attributes:
        geometry: its geometry, None if it is unusable.
        why: the reason, as the cause of misses, that it is not used, and `notice` for the log, if it is worth a line.
        doubt: the reason that it cannot be trusted, or "".
    """

    claim: Claim
    geometry: PoolGeometry | None = None
    why: EmptyReason = "first"
    notice: str = ""
    doubt: str = ""


def _find_last(config: Config, folder: Folder, regions: RegionFolder) -> _Found:
    """Find the region and the manifest of the previous daemon.

    Raises EndpointTaken if a running daemon holds the region, RegionError if it cannot be trusted and `strict` is set.
    """
    manifest, broken = _manifest(config, folder)
    with contextlib.ExitStack() as held:
        found = []
        for claim in _claims(regions, manifest):
            held.callback(claim.release)
            found.append(_examined(regions, claim, manifest, broken))
        regions.tidy()
        for each in found:
            if manifest is None or each.geometry != geometry_for(manifest.region, config.size, config.page_size):
                continue
            region = map_region(each.claim, each.geometry)
            for other in found:
                if other is not each:
                    log.warning("%s is not the last daemon's region: it is discarded", other.claim.path)
                    other.claim.remove()
            held.pop_all()
            return _Found(region, manifest)
        why: EmptyReason = "first"
        doubtful = 0
        for each in found:
            if each.doubt and config.strict:
                raise RegionError(f"{each.claim.path}: {each.doubt}; `kvcache-server serve --fresh` discards it")
            if each.doubt:
                doubtful += 1
                _put_aside(regions, each.claim, each.doubt)
                continue
            if each.notice:
                log.warning("%s: it is discarded", each.notice)
            each.claim.remove()
            why = each.why
    if doubtful:
        _put_state_aside(folder, file_of(config.endpoint, STATE))
        why = "distrusted"
    return _Found(why=why, put_aside=doubtful)


def _manifest(config: Config, folder: Folder) -> tuple[Manifest | None, str]:
    """Return the previous daemon's manifest, and the fault in it."""
    try:
        return read_state(folder, file_of(config.endpoint, STATE)), ""
    except RegionError as error:
        return None, str(error)


def _claims(regions: RegionFolder, manifest: Manifest | None) -> Iterator[Claim]:
    """Yield claims on all regions that no running daemon holds. Raises EndpointTaken if a daemon holds `manifest`'s."""
    for name in regions.found():
        try:
            yield regions.claim(name)
        except EndpointTaken:
            with contextlib.suppress(OSError, RegionError):
                geometry = found_geometry(memoryview(regions.header(name)[0]))
                if manifest is not None and geometry is not None and geometry.region_id == manifest.region:
                    raise
            log.info("%s belongs to a running daemon: it is ignored", regions.path_of(name + REGION))
        except (ConfigError, NotPermitted) as error:
            log.warning("%s is ignored: %s", regions.path_of(name + REGION), error)


def _examined(regions: RegionFolder, claim: Claim, manifest: Manifest | None, broken: str) -> _Candidate:
    """Judge a region; `broken` is the fault in the state file."""
    header, size = regions.header(claim.name)
    if size < HEADER:  # a daemon was killed while creating it
        return _Candidate(claim)
    try:
        geometry = found_geometry(memoryview(header))
        if geometry is not None and geometry.region_bytes != size:
            raise RegionError(f"a file of {size} bytes for a region of {geometry.region_bytes}")
    except RegionError as error:
        return _Candidate(claim, doubt=str(error))
    if is_given_up(memoryview(header)):
        return _Candidate(claim, None, "no_state", f"the last daemon could not keep the state file of {claim.path}")
    if geometry is None:
        return _Candidate(claim)
    if manifest is None:
        return _Candidate(claim, geometry, "no_state", f"{claim.path} has no state file", broken)
    if manifest.region != geometry.region_id:
        return _Candidate(claim, geometry, doubt="the state file belongs to another region")
    made = f"the last daemon's region of {format_size(geometry.region_bytes)} was made for another size or page_size"
    return _Candidate(claim, geometry, "resized", made)


def _put_aside(regions: RegionFolder, claim: Claim, doubt: str) -> None:
    """Keep a region that cannot be trusted for inspection, in place of an earlier one."""
    regions.remove_aside()
    path, aside = claim.path, claim.put_aside()
    log.error(
        "%s cannot be trusted: %s; the cache starts empty, and the file is %s",
        *(path, doubt, f"put aside as {aside}: `kvcache-server discard` frees it" if aside else "removed"),
        extra={"fields": {"event": "put_aside", "region": path, "aside": aside, "why": doubt}},
    )


def _put_state_aside(folder: Folder, state: str) -> None:
    try:
        folder.rename(state, state + ASIDE)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s cannot be put aside: %s", folder.path_of(state), error.strerror)


def discard(config: Config, folder: Folder) -> bool:
    """Remove all files left by daemons of this endpoint. The caller holds the endpoint's lock; `folder` is the
    endpoint's.

    Returns whether there was a region. Raises EndpointTaken.
    """
    with RegionFolder(config.region_dir, socket_path(config.endpoint)) as regions:
        found = _remove_regions(config, folder, regions)
    _remove_files(folder, config)
    return found > 0


def _remove_regions(config: Config, folder: Folder, regions: RegionFolder) -> int:
    """Remove all regions that no running daemon holds, and those that were put aside; return their number.

    Raises EndpointTaken if a running daemon holds the region of the state file; then nothing is removed.
    """
    with contextlib.ExitStack() as held:
        claims = []
        for claim in _claims(regions, _manifest(config, folder)[0]):
            held.callback(claim.release)
            claims.append(claim)
        return regions.remove_all(claims)
