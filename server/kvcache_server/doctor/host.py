"""What the kernel gives to this process: cores, memory, limits, mounts."""

from __future__ import annotations

import mmap
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from kvcache_proto.findings import Finding, Verdict
from kvcache_server.config import Config, format_size
from kvcache_server.memory import RAISE_MEMLOCK, available_memory, filesystem, group_room

_CAP_IPC_LOCK = 14
_SWEET_KERNEL = (5, 14)  # MADV_POPULATE_WRITE


def system(config: Config) -> Iterator[Finding]:
    release = platform.release()
    figure = f"{platform.system()} {release}, {platform.machine()}, Python {platform.python_version()}"
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if platform.system() == "Linux" and numbers < _SWEET_KERNEL:
        yield Finding("system", "slow", figure, "from Linux 5.14 on the region is pre-faulted faster")
    else:
        yield Finding("system", "ok", figure)


def cores(config: Config) -> Iterator[Finding]:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    figure = f"{usable} usable of {there}"
    if usable < 2:
        yield Finding("cores", "slow", figure, "daemon, engine and copying threads want two at least")
    else:
        yield Finding("cores", "ok", figure, values={"usable": usable, "cores": there})


def memory(config: Config) -> Iterator[Finding]:
    total, left = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, available_memory()
    rooms = [room for room in group_room() if room < total]  # a group without a limit may show an absurd one
    groups = f"control groups leave {format_size(min(rooms))}" if rooms else "no control group limits it"
    figure = f"{format_size(total)}, {format_size(left)} available; {groups}"
    yield Finding("memory", "ok", figure, values={"bytes": total, "available_bytes": left})


def pages(config: Config) -> Iterator[Finding]:
    yield Finding("page size", "ok", format_size(mmap.PAGESIZE), values={"bytes": mmap.PAGESIZE})
    sizes = sorted(Path("/sys/kernel/mm/hugepages").glob("hugepages-*"))
    counts = [(_read(folder / "free_hugepages"), _read(folder / "nr_hugepages"), folder.name[10:]) for folder in sizes]
    mounts = [line.split()[1] for line in _read(Path("/proc/self/mounts")).splitlines() if " hugetlbfs " in line]
    shown = ", ".join(f"{free} free of {count} of {size}" for free, count, size in counts) or "none"
    where = ", ".join(mounts) or "nowhere"
    yield Finding("huge pages", "ok", f"{shown}; hugetlbfs mounted {where}")
    chosen = _read(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    choice = chosen[chosen.find("[") + 1 : chosen.find("]")] if "[" in chosen else "unknown"
    yield Finding("shmem huge pages", "ok", f"shmem_enabled is {choice}")


def locked_memory(config: Config) -> Iterator[Finding]:
    """The daemon raises its own limit as far as it may, so that the hard one counts."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    name, limit = "locked memory", "unlimited" if hard == resource.RLIM_INFINITY else format_size(hard)
    values = {} if hard == resource.RLIM_INFINITY else {"limit_bytes": hard}
    if _capable():
        yield Finding(name, "ok", f"limit {limit}, which CAP_IPC_LOCK lifts", values=values)
    elif hard == resource.RLIM_INFINITY or hard >= config.size:
        yield Finding(name, "ok", f"limit {limit}", values=values)
    else:
        verdict: Verdict = "failed" if config.lock == "always" else "slow"
        figure = f"limit {limit}: a region of {format_size(config.size)} stays unlocked, and may be swapped out"
        yield Finding(name, verdict, figure, RAISE_MEMLOCK, values=values)


def shared_memory(config: Config) -> Iterator[Finding]:
    """Not judged by room alone: an engine's container needs none, the daemon's is judged where no daemon is."""
    folder = config.region_dir
    if not os.path.isdir(folder):
        yield Finding(folder, "slow", "not there", "the daemon wants a tmpfs or a hugetlbfs: --region-dir")
        return
    mount, kind = os.statvfs(folder), filesystem(folder)
    room = mount.f_bavail * mount.f_frsize
    figure = f"{kind}, {format_size(room)} free of {format_size(mount.f_blocks * mount.f_frsize)}"
    yield Finding(folder, "ok", figure, values={"free_bytes": room})


def _capable() -> bool:
    rows = dict(line.split(":", 1) for line in _read(Path("/proc/self/status")).splitlines() if ":" in line)
    return bool(int(rows.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not mounted, as in a container: shown as unknown


CHECKS = (system, cores, memory, pages, locked_memory, shared_memory)
