"""The resources that the kernel gives this process: cores, memory, limits, mounts."""

from __future__ import annotations

import mmap
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from kvcache_proto.region import ALIGN
from kvcache_proto.sizes import format_size
from kvcache_server.config import Config
from kvcache_server.storage.region_file import (
    RAISE_MEMLOCK,
    Mount,
    available_memory,
    cost_of_small_pages,
    free_room,
    group_room,
    mount_of,
    no_huge_pages,
)
from kvcache_tools.doctor.check_result import CheckResult, CheckVerdict

_CAP_IPC_LOCK = 14
_HUGE = 2 << 20
_ENTRY = 8  # bytes of a page's entry in the page tables
_LARGE_TABLES = 128 << 20
_FAST_POPULATE = (5, 14)  # MADV_POPULATE_WRITE


def system(config: Config) -> Iterator[CheckResult]:
    release = platform.release()
    figure = f"{platform.system()} {release}, {platform.machine()}, Python {platform.python_version()}"
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if platform.system() == "Linux" and numbers < _FAST_POPULATE:
        yield CheckResult("system", "slow", figure, "Linux 5.14 and later pre-fault the region faster")
    else:
        yield CheckResult("system", "ok", figure)


def cores(config: Config) -> Iterator[CheckResult]:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    figure = f"{usable} usable of {there}"
    if usable < 2:
        yield CheckResult("cores", "slow", figure, "daemon, engine and copy threads need at least two")
    else:
        yield CheckResult("cores", "ok", figure, values={"usable": usable, "cores": there})


def memory(config: Config) -> Iterator[CheckResult]:
    total, left = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, available_memory()
    rooms = [room for room in group_room() if room < total]  # a group without a limit may report an absurd one
    groups = f"control groups leave {format_size(min(rooms))}" if rooms else "not limited by a control group"
    figure = f"{format_size(total)}, {format_size(left)} available; {groups}"
    yield CheckResult("memory", "ok", figure, values={"bytes": total, "available_bytes": left})


def pages(config: Config) -> Iterator[CheckResult]:
    yield CheckResult("page size", "ok", format_size(mmap.PAGESIZE), values={"bytes": mmap.PAGESIZE})
    sizes = sorted(Path("/sys/kernel/mm/hugepages").glob("hugepages-*"))
    counts = [(_read(folder / "free_hugepages"), _read(folder / "nr_hugepages"), folder.name[10:]) for folder in sizes]
    mounts = [line.split()[1] for line in _read(Path("/proc/self/mounts")).splitlines() if " hugetlbfs " in line]
    shown = ", ".join(f"{free} free of {count} of {size}" for free, count, size in counts) or "none"
    where = ", ".join(mounts) or "nowhere"
    yield CheckResult("huge pages", "ok", f"{shown}; hugetlbfs mounted {where}")
    if os.path.isdir(config.region_dir):
        yield _region_pages(config)


def _region_pages(config: Config) -> CheckResult:
    """Check the page size: each process that maps the region has a page table entry for every page."""
    name, mount = "region's pages", mount_of(config.region_dir)
    if mount.kind == "hugetlbfs":
        page, why = os.statvfs(config.region_dir).f_frsize, "hugetlbfs"
    else:
        page, why = tmpfs_page(mount, _read(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")))
        if page < _HUGE and config.huge_pages != "never" and (refused := no_huge_pages(config.region_dir)) != "":
            why += f"; {refused}"
        elif page < _HUGE and config.huge_pages != "never":
            page, why = _HUGE, f"{why}; the kernel merges pages when asked to"
    figure, values = f"{format_size(page)} ({why})", {"bytes": page}
    if page > ALIGN:
        return CheckResult(name, "failed", figure, "mount it with pagesize=2M", values=values)
    if page < _HUGE and (cost := cost_of_small_pages(config.size)):
        figure += f"; {cost}"
    tables = config.size // page * _ENTRY
    if tables < _LARGE_TABLES:
        return CheckResult(name, "ok", figure, values=values)
    figure += f"; {format_size(tables)} of page tables in the daemon and in each rank that maps all of it"
    if config.huge_pages == "never":
        return CheckResult(name, "slow", figure, "leave huge_pages at auto", values=values)
    cure = f"mount -o remount,huge=always {mount.point}" if mount.kind == "tmpfs" else "use a tmpfs with huge=always"
    if "shmem_enabled" in why:
        cure = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, and " + cure
    return CheckResult(name, "slow", figure, f"{cure}; or use a hugetlbfs: --region-dir", values=values)


def tmpfs_page(mount: Mount, shmem_enabled: str) -> tuple[int, str]:
    """Return the page size of a region on `mount`, and the setting that determines it.

    `shmem_enabled` is the content of the kernel's file, with the choice in brackets. `deny` and `force` override the
    mount's options.
    """
    chosen = shmem_enabled[shmem_enabled.find("[") + 1 : shmem_enabled.find("]")]
    if mount.kind != "tmpfs" or not shmem_enabled:
        return mmap.PAGESIZE, mount.kind
    if chosen in ("deny", "force"):
        return (_HUGE if chosen == "force" else mmap.PAGESIZE), f"tmpfs; shmem_enabled is {chosen}"
    huge = next((option for option in mount.options if option.startswith("huge=")), "huge=never")
    # within_size: the file has its full size before its pages. `advise` has no effect: the daemon does not advise.
    return (_HUGE if huge in ("huge=always", "huge=within_size") else mmap.PAGESIZE), f"tmpfs, {huge}"


def locked_memory(config: Config) -> Iterator[CheckResult]:
    """Check the hard limit: the daemon raises its soft one up to that."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    name, limit = "locked memory", "unlimited" if hard == resource.RLIM_INFINITY else format_size(hard)
    values = {} if hard == resource.RLIM_INFINITY else {"limit_bytes": hard}
    if _capable():
        yield CheckResult(name, "ok", f"limit {limit}, which CAP_IPC_LOCK lifts", values=values)
    elif hard == resource.RLIM_INFINITY or hard >= config.size:
        yield CheckResult(name, "ok", f"limit {limit}", values=values)
    else:
        verdict: CheckVerdict = "failed" if config.lock == "always" else "slow"
        figure = f"limit {limit}: a region of {format_size(config.size)} stays unlocked and may be swapped out"
        yield CheckResult(name, verdict, figure, RAISE_MEMLOCK, values=values)


def shared_memory(config: Config) -> Iterator[CheckResult]:
    """Report the space. It is not judged here: an engine's container needs none; see `endpoint` for the daemon's."""
    folder = config.region_dir
    if not os.path.isdir(folder):
        yield CheckResult(folder, "slow", "missing", "the daemon needs a tmpfs or a hugetlbfs: --region-dir")
        return
    mount, kind, room = os.statvfs(folder), mount_of(folder).kind, free_room(folder)
    limit = mount.f_blocks * mount.f_frsize
    figure = f"{kind}, {format_size(room)} free" + (f" of {format_size(limit)}" if limit else "")
    yield CheckResult(folder, "ok", figure, values={"free_bytes": room})


def _capable() -> bool:
    rows = dict(line.split(":", 1) for line in _read(Path("/proc/self/status")).splitlines() if ":" in line)
    return bool(int(rows.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not mounted, as in a container


CHECKS = (system, cores, memory, pages, locked_memory, shared_memory)
