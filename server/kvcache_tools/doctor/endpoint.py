"""The daemon at the endpoint, as seen by an engine; without one, whether one could start here."""

from __future__ import annotations

import os
import stat
import statistics
import timeit
from collections.abc import Iterator

from kvcache_proto import __version__
from kvcache_proto.endpoint import default_endpoint, socket_path
from kvcache_proto.errors import KVCacheError, NotPermitted, RegionError, Unavailable
from kvcache_proto.region import plan_geometry
from kvcache_proto.sizes import format_size
from kvcache_server.admin_client import AdminClient
from kvcache_server.config import Config
from kvcache_server.storage.folder import open_folder
from kvcache_server.storage.region_file import check_room
from kvcache_tools.doctor.check_result import CheckResult, CheckVerdict
from kvcache_tools.doctor.child import ask

PINGS = 200
DEADLINE = 0.05  # seconds that an engine's scheduler waits by default


def daemon(config: Config) -> Iterator[CheckResult]:
    try:
        with AdminClient(config.endpoint, "doctor") as admin:
            figures = admin.status()
            seconds = timeit.repeat(admin.ping, number=1, repeat=PINGS)
            size = admin.geometry.region_bytes
    except Unavailable as error:
        # At the default endpoint a missing daemon is no failure: perhaps this host has none yet.
        wanted = config.endpoint != default_endpoint({key: os.environ[key] for key in os.environ.keys() - _NAMED})
        here = wanted or os.path.exists(config.endpoint.removeprefix("ipc://"))
        verdict: CheckVerdict = "failed" if here else "untested"
        message, _, cure = str(error).partition(": ")
        yield CheckResult("daemon", verdict, message, cure)
        yield _folder(config, verdict)
        yield _room(config)
        return
    except KVCacheError as error:
        yield CheckResult("daemon", "failed", str(error))
        return
    facts, pool = figures.daemon, figures.pool
    other = "" if facts.version == __version__ else f"; this is {__version__}, which is compatible"
    yield CheckResult("daemon", "ok", f"kvcache-server {facts.version}, pid {facts.pid}, {config.endpoint}{other}")
    yield CheckResult("attach", "ok", f"uid {os.geteuid()}, gid {os.getegid()} may attach")
    used = f"{format_size(pool.used_bytes)} of {format_size(pool.bytes)} used"
    yield CheckResult("region", "ok", used, values={"bytes": size, "used_bytes": pool.used_bytes})
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    slow = p99 > DEADLINE
    yield CheckResult(
        "round trip",
        "slow" if slow else "ok",
        f"p50 {p50 * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us",
        "engines wait at most 50 ms and then go on without the cache: give the daemon a core" if slow else "",
        "measured",
        {"p50_seconds": p50, "p99_seconds": p99},
    )
    yield from ask("mapping", config.endpoint)


_NAMED = {"KVCACHE_ENDPOINT"}


def _folder(config: Config, bad: CheckVerdict) -> CheckResult:
    """Check whether a daemon of this user could create its sockets, and their folder if it is missing."""
    folder, name = os.path.dirname(socket_path(config.endpoint)), "endpoint's folder"
    above = folder
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    cure = f"create it for this user (install -d -o USER -g GROUP {folder}), or choose another --endpoint"
    if not os.path.isdir(above):
        return CheckResult(name, bad, f"{above} is not a folder", "choose another --endpoint")
    if not os.access(above, os.W_OK | os.X_OK):
        return CheckResult(name, bad, f"uid {os.geteuid()} may not write to {above}", cure)
    if above != folder:
        return CheckResult(name, "ok", f"`serve` will create {folder}")
    try:
        open_folder(folder).close()
    except NotPermitted as error:
        return CheckResult(name, bad, str(error), cure)
    found = os.stat(folder)
    figure = f"{folder}, mode {stat.S_IMODE(found.st_mode):04o}: uid {os.geteuid()} and group {found.st_gid} may attach"
    return CheckResult(name, "ok", figure)


def _room(config: Config) -> CheckResult:
    folder, name = config.region_dir, "room for a region"
    try:
        needed = plan_geometry(bytes(16), config.size, config.page_size).region_bytes
        if not os.path.isdir(folder):
            raise RegionError(f"{folder}: no such folder; choose another --region-dir")
        if not os.access(folder, os.W_OK):
            raise RegionError(f"uid {os.geteuid()} may not write to {folder}; choose another --region-dir")
        kind = check_room(folder, needed)
    except KVCacheError as error:
        return CheckResult(name, "failed", str(error))
    if kind not in ("tmpfs", "hugetlbfs", "ramfs"):
        cure = "use a tmpfs or a hugetlbfs: the kernel writes this file system to disk"
        return CheckResult(name, "slow", f"{format_size(needed)} fit into {folder}, which is on {kind}", cure)
    return CheckResult(name, "ok", f"{format_size(needed)} fit into {folder} ({kind})", values={"bytes": needed})


CHECKS = (daemon,)
