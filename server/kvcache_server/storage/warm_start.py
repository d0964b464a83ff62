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
from kvcache_proto.region import HEADER, RegionRows, found_geometry, is_given_up, plan_geometry
from kvcache_proto.sizes import format_size
from kvcache_proto.types import PoolGeometry
from kvcache_server.config import Config
from kvcache_server.core.cache import Cache
from kvcache_server.core.journal import Manifest, SessionOpened
from kvcache_server.storage.checksum_file import open_sums
from kvcache_server.storage.folder import Folder, file_of
from kvcache_server.storage.region_file import Progress, Region, check_room, create_region, map_region
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
    empty_reason: str = ""

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
        found: tuple[Region, Manifest] | _NoRegion
        if fresh or not config.keep:
            _remove_regions(config, folder, regions)
            found = _NoRegion("fresh" if fresh else "not_kept")
        else:
            found = _find_last(config, folder, regions)
        if isinstance(found, _NoRegion):
            opened = _start_empty(config, folder, regions, files, progress, found.why)
            if found.put_aside:
                opened.cache.counters["regions_put_aside"] += found.put_aside
            return opened
    return _resume(config, folder, files, *found)


def _resume(config: Config, folder: Folder, files: SessionFiles, region: Region, manifest: Manifest) -> WarmStart:
    """Return the cache of the previous daemon."""

    from kvcache_server.core.recovery.snapshot import Snapshot  # imports numpy, which an empty daemon does without

    began = time.monotonic()
    try:
        manifest.epoch += 1
        disconnected = {
            number: opened for number, opened in manifest.sessions.items() if any(map(files.locked, opened.files))
        }
        files.keep([name for opened in disconnected.values() for name in opened.files])
        state = _open_state(config, folder, region, manifest)
        gc.disable()  # millions of blocks are created, and none is garbage
        cache = Cache(
            *(region.buffer, region.geometry, config.limits()),
            epoch=manifest.epoch,
            secret=secrets.token_bytes(16),
            ready_pages=region.ready_pages,
        )
        cache.restore(
            Snapshot(RegionRows(region.buffer, region.geometry), manifest, set(disconnected)), time.monotonic()
        )
        for record in cache.effects.take()[0]:
            state.note(record)
        _keep_checksums(config, folder, cache)
    except BaseException:
        region.close(keep=True)
        raise
    finally:
        gc.enable()
    found = cache.counters
    log.info(
        "found %s blocks of the last daemon in %s after %.2f s; %d of its sessions live, %d saves are in progress",
        *(f"{found['blocks_recovered']:,}", region.path, time.monotonic() - began),
        *(len(disconnected), found["reservations_recovered"]),
        extra={"fields": {"event": "recovered", **found}},
    )
    _share_counters(state, cache)
    return WarmStart(region, state, files, cache, disconnected)


def _start_empty(
    config: Config, folder: Folder, regions: RegionFolder, files: SessionFiles, progress: Progress | None, why: str
) -> WarmStart:
    """Return a new, empty cache; `why` is the reason that it is empty."""
    _make_room(config, regions)
    region = create_region(
        config.region_dir,
        config.size,
        socket_path=socket_path(config.endpoint),
        page_size=config.page_size,
        lock=config.lock,
        huge_pages=config.huge_pages,
        progress=progress,
    )
    try:
        files.keep(())
        # First the manifest, then the region's header: a region without a header was never used.
        state = _open_state(config, folder, region, Manifest(region.geometry.region_id))
        cache = Cache(
            *(region.buffer, region.geometry, config.limits(), secrets.randbits(63)),
            secret=secrets.token_bytes(16),
            ready_pages=region.ready_pages,
        )
        _keep_checksums(config, folder, cache)
    except BaseException:
        region.close(keep=False)
        raise
    _share_counters(state, cache)
    return WarmStart(region, state, files, cache, {}, why)


def _open_state(config: Config, folder: Folder, region: Region, manifest: Manifest) -> StateFile:
    rows = RegionRows(region.buffer, region.geometry)
    return StateFile(folder, file_of(config.endpoint, STATE), manifest, rows.give_up)


def _keep_checksums(config: Config, folder: Folder, cache: Cache) -> None:
    checksums = open_sums(folder, file_of(config.endpoint, SUMS), cache.geometry, cache.epoch)
    if checksums is not None:
        cache.keep_checksums(checksums)


def _share_counters(state: StateFile, cache: Cache) -> None:
    """Make the state file count in the cache's counters, and add its counts so far."""
    cache.counters.update(state.counters)
    state.counters = cache.counters


def _make_room(config: Config, regions: RegionFolder) -> None:
    """Remove regions that were put aside if there is no room for a new one."""
    wanted = _wanted(config, bytes(16))
    try:
        check_room(config.region_dir, wanted.region_bytes)
    except RegionError:
        if removed := regions.remove_aside():
            log.warning("removed %d regions that were put aside, to make room for a new one", removed)


def _wanted(config: Config, region_id: bytes) -> PoolGeometry:
    """Return the configured geometry for a region with that id. Raises ConfigError for impossible sizes."""
    try:
        return plan_geometry(region_id, config.size, config.page_size)
    except RegionError as error:
        raise ConfigError(f"size: {error}") from None


# The previous daemon's files.


class _NoRegion(NamedTuple):
    """No region can be used: the reason, and the number of regions put aside."""

    why: str
    put_aside: int = 0


class _FoundRegion(NamedTuple):
    """An existing region. `geometry` is None if it is unusable; `distrust` is the reason if that is suspicious."""

    claim: Claim
    geometry: PoolGeometry | None
    given_up: bool = False
    distrust: str = ""


def _find_last(config: Config, folder: Folder, regions: RegionFolder) -> tuple[Region, Manifest] | _NoRegion:
    """Return the region and manifest of the previous daemon, or the reason why they do not exist or cannot be used.

    Raises EndpointTaken if a running daemon holds the region, RegionError if it cannot be trusted and `strict` is set.
    """
    manifest, broken = _manifest(config, folder)
    with contextlib.ExitStack() as held:
        found = []
        for claim in _claims(regions, manifest):
            held.callback(claim.release)
            found.append(_examined(regions, claim))
        regions.tidy()
        for each in found:
            if manifest is not None and each.geometry == _wanted(config, manifest.region):
                region = map_region(each.claim, each.geometry)
                for other in found:
                    if other is not each:
                        log.warning("%s is not the last daemon's region: it is discarded", other.claim.path)
                        other.claim.remove()
                held.pop_all()
                return region, manifest
        why, doubtful = "first", []
        for each in found:
            distrust = _distrust(each, manifest, broken)
            if distrust and config.strict:
                raise RegionError(f"{each.claim.path}: {distrust}; `kvcache-server serve --fresh` discards it")
            if distrust:
                doubtful.append(each)
                _put_aside(regions, each.claim, distrust)
            else:
                why = _dismiss(each, manifest)
        if doubtful:
            _put_state_aside(folder, file_of(config.endpoint, STATE))
            why = "distrusted"
    return _NoRegion(why, len(doubtful))


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
            log.info("%s belongs to a running daemon: it is ignored", regions.folder.path_of(name + REGION))
        except (ConfigError, NotPermitted) as error:
            log.warning("%s is ignored: %s", regions.folder.path_of(name + REGION), error)


def _examined(regions: RegionFolder, claim: Claim) -> _FoundRegion:
    header, size = regions.header(claim.name)
    if size < HEADER:
        return _FoundRegion(claim, None)  # a daemon was killed while creating it
    try:
        geometry = found_geometry(memoryview(header))
        if geometry is not None and geometry.region_bytes != size:
            raise RegionError(f"a file of {size} bytes for a region of {geometry.region_bytes}")
    except RegionError as error:
        return _FoundRegion(claim, None, distrust=str(error))
    return _FoundRegion(claim, geometry, given_up=is_given_up(memoryview(header)))


def _distrust(found: _FoundRegion, manifest: Manifest | None, broken: str) -> str:
    """Return the reason that a region cannot be trusted, or ""; `broken` is the fault in the state file."""
    if found.geometry is None:
        return found.distrust
    if manifest is not None and manifest.region != found.geometry.region_id:
        return "the state file belongs to another region"
    return broken


def _dismiss(found: _FoundRegion, manifest: Manifest | None) -> str:
    """Remove an unusable region; return the reason, as the cause of misses."""
    path, why = found.claim.path, "first"
    if found.given_up:
        why = "no_state"
        log.warning("the last daemon could not keep the state file of %s: it is discarded", path)
    elif found.geometry is not None and manifest is None:
        why = "no_state"
        log.warning("%s has no state file: it is discarded", path)
    elif found.geometry is not None:
        why = "resized"
        log.warning(
            "the last daemon's region of %s was made for another size or page_size: it is discarded",
            format_size(found.geometry.region_bytes),
        )
    found.claim.remove()
    return why


def _put_aside(regions: RegionFolder, claim: Claim, distrust: str) -> None:
    """Keep a region that cannot be trusted for inspection, in place of an earlier one."""
    regions.remove_aside()
    path, aside = claim.path, claim.put_aside()
    log.error(
        "%s cannot be trusted: %s; the cache starts empty, and the file is %s",
        *(path, distrust, f"put aside as {aside}: `kvcache-server discard` frees it" if aside else "removed"),
        extra={"fields": {"event": "put_aside", "region": path, "aside": aside, "why": distrust}},
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
