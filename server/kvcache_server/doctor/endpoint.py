"""The daemon at the endpoint, as an engine would meet it; where there is none, whether one could start here."""

from __future__ import annotations

import os
import stat
import statistics
import time
from collections.abc import Iterator

from kvcache_proto import __version__
from kvcache_proto.check_result import CheckResult, CheckVerdict
from kvcache_proto.endpoint import default_endpoint, socket_path
from kvcache_proto.errors import KVCacheError, NotPermitted, RegionError, Unavailable
from kvcache_proto.region import plan_geometry
from kvcache_server.admin_client import AdminClient
from kvcache_server.config import Config, format_size
from kvcache_server.doctor.child import ask
from kvcache_server.storage.folder import check_folder
from kvcache_server.storage.region_file import check_room

PINGS = 200
DEADLINE = 0.05  # seconds that an engine's scheduler waits, unless told otherwise


def daemon(config: Config) -> Iterator[CheckResult]:
    try:
        with AdminClient(config.endpoint, "doctor") as admin:
            stats = admin.stats()
            seconds = [_ping(admin) for _ in range(PINGS)]
            size = admin.geometry.region_bytes
    except Unavailable as error:
        # Nobody has asked for that endpoint: perhaps this host has no daemon yet.
        wanted = config.endpoint != default_endpoint({key: os.environ[key] for key in os.environ.keys() - _NAMED})
        here = wanted or os.path.exists(config.endpoint.removeprefix("ipc://"))
        verdict: CheckVerdict = "failed" if here else "untested"
        yield CheckResult("daemon", verdict, *_parted(error))
        yield _folder(config, verdict)
        yield _room(config)
        return
    except KVCacheError as error:
        yield CheckResult("daemon", "failed", str(error))
        return
    facts, pool = stats["daemon"], stats["pool"]
    other = "" if facts["version"] == __version__ else f"; here is {__version__}, and they understand each other"
    yield CheckResult(
        "daemon", "ok", f"kvcache-server {facts['version']}, pid {facts['pid']}, {config.endpoint}{other}"
    )
    yield CheckResult("attach", "ok", f"uid {os.geteuid()}, gid {os.getegid()} may")
    used = f"{format_size(pool['used_bytes'])} of {format_size(pool['bytes'])} used"
    yield CheckResult("region", "ok", used, values={"bytes": size, "used_bytes": pool["used_bytes"]})
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    slow = p99 > DEADLINE
    yield CheckResult(
        "round trip",
        "slow" if slow else "ok",
        f"p50 {p50 * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us",
        "engines wait 50 ms at most and then go on without: give the daemon a core" if slow else "",
        "measured",
        {"p50_seconds": p50, "p99_seconds": p99},
    )
    yield from ask("mapping", config.endpoint)


_NAMED = {"KVCACHE_ENDPOINT"}


def _ping(admin: AdminClient) -> float:
    begin = time.perf_counter()
    admin.ping()
    return time.perf_counter() - begin


def _parted(error: KVCacheError) -> tuple[str, str]:
    """Return the message and the cure in it."""
    what, _, cure = str(error).partition(": ")
    return what, cure


def _folder(config: Config, bad: CheckVerdict) -> CheckResult:
    """Whether a daemon of this user's could make its sockets; it makes the folder itself where it may."""
    folder, name = os.path.dirname(socket_path(config.endpoint)), "endpoint's folder"
    above = folder
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    cure = f"have it made for this user (install -d -o USER -g GROUP {folder}), or choose another --endpoint"
    if not os.path.isdir(above):
        return CheckResult(name, bad, f"{above} is not a folder", "choose another --endpoint")
    if not os.access(above, os.W_OK | os.X_OK):
        return CheckResult(name, bad, f"uid {os.geteuid()} may not write in {above}", cure)
    if above != folder:
        return CheckResult(name, "ok", f"{folder} is made by `serve`")
    try:
        check_folder(folder)
    except NotPermitted as error:
        return CheckResult(name, bad, str(error), cure)
    found = os.stat(folder)
    figure = f"{folder}, mode {stat.S_IMODE(found.st_mode):04o}: uid {os.geteuid()} and group {found.st_gid} may attach"
    return CheckResult(name, "ok", figure)


def _room(config: Config) -> CheckResult:
    folder, name = config.region_dir, "room for a region"
    try:
        needed = plan_geometry(bytes(16), config.size, config.extent_size).region_bytes
        if not os.path.isdir(folder):
            raise RegionError(f"{folder}: no such folder; name another with --region-dir")
        if not os.access(folder, os.W_OK):
            raise RegionError(f"uid {os.geteuid()} may not write in {folder}; name another with --region-dir")
        kind = check_room(folder, needed)
    except KVCacheError as error:
        return CheckResult(name, "failed", str(error))
    if kind not in ("tmpfs", "hugetlbfs", "ramfs"):
        cure = "take a tmpfs or a hugetlbfs: the kernel writes this one to disk"
        return CheckResult(name, "slow", f"{format_size(needed)} fit into {folder}, which is on {kind}", cure)
    return CheckResult(name, "ok", f"{format_size(needed)} fit into {folder} ({kind})", values={"bytes": needed})


CHECKS = (daemon,)
