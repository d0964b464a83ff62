"""The region file: created within the host's memory, pre-faulted and locked; or mapped again; or removed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvcache_proto.errors import ConfigError, NotPermitted, RegionError
from kvcache_proto.mapping import HUGE_PAGE, address_of, map_file
from kvcache_proto.region import ALIGN, RegionRows, plan_geometry
from kvcache_proto.sizes import format_size
from kvcache_proto.types import PoolGeometry
from kvcache_server import signals
from kvcache_server.storage.region_names import Claim, RegionFolder, abandoned

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # bytes made so far, and in all

CHUNK = 32 << 20
FIRST = 256 << 20  # bytes made before the daemon is ready: a tenth of a second
MADV_POPULATE_WRITE = 23  # Linux 5.14
# Measured with 48 GiB that two engines page-lock at once, beside an H100.
_LOCK_SECONDS_PER_GIB, _LOCK_SECONDS_PER_GIB_HUGE = 0.09, 0.04
MADV_COLLAPSE = 25  # Linux 6.1: huge pages regardless of the host's settings for shared memory, unless they forbid it
MAX_THREADS = 16
RAISE_MEMLOCK = "raise it (ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock=-1 in docker), or give CAP_IPC_LOCK"

# Called through ctypes, which releases the GIL; `mmap.madvise` keeps it, and threads would not run in parallel.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Region:
    """The mapped region. `fd` is passed to clients.

    Of its bytes, the first `present` are in memory; `fill` makes the rest.
    """

    def __init__(self, claim: Claim, fd: int, mapping: memoryview, geometry: PoolGeometry, made: bool = True) -> None:
        """`made`: its file is new; otherwise it is an earlier daemon's."""
        self._made = made
        self.path = claim.path
        self.fd = fd
        self.geometry = geometry
        self.buffer = mapping
        self.present = 0
        self.locked = False
        self.huge_bytes = 0  # bytes in huge pages, as far as this process has filled it
        self._claim = claim
        self._prefault: _Prefault | None = None
        self._closed = False

    @property
    def ready_pages(self) -> int:
        """The number of pages present, from the first one on."""
        return max(0, self.present - self.geometry.data_offset) // self.geometry.page_bytes

    def fill(
        self,
        lock: str,
        huge_pages: str,
        progress: Progress,
        done: Callable[[], object],
        failed: Callable[[Exception], object],
    ) -> None:
        """Make the rest of the pages, and lock those that are not locked yet, in a thread.

        `lock` and `huge_pages` are as for `create_region`. The thread calls `progress` as `present` grows, and in the
        end `done`, or `failed` with a RegionError if memory runs out.
        """
        begin, whole = self.present, self.present == self.geometry.region_bytes
        if self._made and not self.locked:
            lock = "never"  # was tried already
        if not self._made:
            begin, huge_pages = 0, "never"  # engines may be copying
        if whole and (self._made or lock == "never"):
            return
        if filesystem(os.path.dirname(self.path)) == "hugetlbfs":
            huge_pages = "never"
        prefault = self._prefault = _Prefault(self.buffer, self.fd, lock, huge_pages)

        def note(made: int, total: int) -> None:
            if made > self.present:
                self.present = made
                progress(made, total)

        def work() -> None:
            try:
                self.note(lock, prefault, prefault.run(note, begin))
            except RegionError as error:
                failed(error)
            except OSError as error:
                failed(RegionError(f"the region's memory cannot be made: {error}"))
            else:
                if self.present == self.geometry.region_bytes:  # else it was closed
                    done()

        signals.start_thread("fill-region", work)

    @property
    def kind_of_memory(self) -> str:
        """The kind of its pages, as far as this process has made them, for the log."""
        pages = "in huge pages, " if self.huge_bytes else ""
        if self._made and not self.huge_bytes and (cost := cost_of_small_pages(self.geometry.region_bytes)):
            pages = f"in small pages ({cost}), "
        return pages + ("locked" if self.locked else "not locked")

    def note(self, lock: str, prefault: _Prefault, why_unlocked: str) -> None:
        """Note the outcome for the pages."""
        self.huge_bytes += prefault.huge_bytes
        self.locked = lock != "never" and not why_unlocked
        if why_unlocked:
            log.warning("the region is not locked into memory: %s", why_unlocked)

    def close(self, keep: bool = False) -> None:
        """Close the region and, without `keep`, remove the file. Clients' mappings stay. Calling it again does
        nothing."""
        if self._closed:
            return
        self._closed = True
        if self._prefault is not None:
            self._prefault.stop()
        if not keep:
            self._claim.remove()
        self.buffer.release()  # unmaps it if nothing else refers to the mapping
        os.close(self.fd)
        self._claim.release()


def geometry_for(region_id: bytes, size: int, page_size: int) -> PoolGeometry:
    """Return the geometry of a region with the configured sizes. Raises ConfigError if they are impossible."""
    try:
        return plan_geometry(region_id, size, page_size)
    except RegionError as error:
        raise ConfigError(f"size: {error}") from None


def create_region(
    directory: str,
    size: int,
    *,
    socket_path: str,
    page_size: int = 0,
    lock: str = "auto",
    huge_pages: str = "auto",
    progress: Progress | None = None,
) -> Region:
    """Return a fresh region with `size` bytes of pages and their rows, in a new file in `directory`.

    `lock` and `huge_pages` are "auto", "always" or "never". If one is "always", the whole region is present, otherwise
    at least the rows and some pages.

    Raises:
        ConfigError: the directory or the sizes cannot be used.
        RegionError: the mount or the host has too little memory, or too few huge pages if these are required.
        NotPermitted: the directory cannot be written, or the memory may not be locked.
    Then nothing is left behind.
    """
    geometry = geometry_for(os.urandom(16), size, page_size)
    kind = check_room(directory, geometry.region_bytes)
    with contextlib.ExitStack() as undo:
        with RegionFolder(directory, socket_path) as regions:
            claim = regions.new()
        undo.callback(claim.remove)
        try:
            fd = claim.create()
        except OSError as error:
            raise NotPermitted(f"region_dir {directory}: {claim.path} cannot be created: {error.strerror}") from None
        undo.callback(os.close, fd)
        try:
            os.ftruncate(fd, geometry.region_bytes)
            mapping = map_file(fd, geometry.region_bytes)
        except OSError as error:
            raise RegionError(f"region of {format_size(geometry.region_bytes)} in {directory}: {error}") from None
        region = Region(claim, fd, mapping, geometry)
        undo.pop_all()
        undo.callback(region.close)
        if kind not in ("tmpfs", "hugetlbfs", "ramfs"):
            log.warning("region_dir %s is on %s, not in memory: the kernel writes it to disk", directory, kind)
        prefault = _Prefault(mapping, fd, lock, "never" if kind == "hugetlbfs" else huge_pages)
        end = geometry.region_bytes
        if "always" not in (lock, huge_pages):
            end = min(end, max(FIRST, geometry.data_offset + ALIGN))
        why_unlocked = prefault.run(progress or (lambda done, total: None), 0, end)
        if why_unlocked and lock == "always":
            raise NotPermitted(f"lock = always: {why_unlocked}")
        region.present = end
        region.note(lock, prefault, why_unlocked)
        if kind == "hugetlbfs":
            region.huge_bytes = geometry.region_bytes
        if prefault.why_small and huge_pages == "always":
            raise RegionError(f"huge_pages = always: {prefault.why_small}")
        undo.pop_all()
    return region


def map_region(claim: Claim, geometry: PoolGeometry) -> Region:
    """Return the region of an earlier daemon; `geometry` is from its header. Its pages are not locked, and if that
    daemon ended early, not all of them are present.

    Raises RegionError if the file has another size or cannot be mapped; then the caller keeps the claim.
    """
    fd = claim.open()
    try:
        size = os.fstat(fd).st_size
        if size != geometry.region_bytes:
            raise RegionError(f"a file of {size} bytes for a region of {geometry.region_bytes}")
        region = Region(claim, fd, map_file(fd, size), geometry, made=False)
        ready = RegionRows(region.buffer, geometry).ready_pages
        region.present = geometry.data_offset + ready * geometry.page_bytes
        return region
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise RegionError(f"{claim.path} cannot be mapped: {error.strerror}") from None
        raise


def check_room(directory: str, needed: int) -> str:
    """Return the mount's file system type. Raises RegionError if the mount or the host has less than `needed` bytes."""
    if not os.path.isdir(directory):
        raise ConfigError(f"region_dir {directory}: no such folder")
    kind, room = filesystem(directory), free_room(directory)
    if kind == "hugetlbfs":
        page = os.statvfs(directory).f_frsize
        if page > ALIGN:
            raise ConfigError(f"region_dir {directory}: pages of {format_size(page)}, mount it with pagesize=2M")
        if needed > room:
            raise RegionError(
                f"the region needs {format_size(needed)}; {directory} has {format_size(room)} of huge pages free: "
                f"increase vm.nr_hugepages by {-(-(needed - room) // page)}, or choose a smaller size"
                f"{_abandoned(directory)}"
            )
        return kind
    if needed > room:
        raise RegionError(
            f"the region needs {format_size(needed)}; {directory} has room for {format_size(room)}: "
            f"choose a smaller size, or enlarge it (mount -o remount,size=... {directory}; docker run --shm-size)"
            f"{_abandoned(directory)}"
        )
    available = available_memory()
    if needed > available:
        raise RegionError(
            f"the region needs {format_size(needed)}; this host, or the container's limit, leaves "
            f"{format_size(available)}: choose a smaller size{_abandoned(directory)}"
        )
    return kind


def _abandoned(directory: str) -> str:
    """Return the end of a message: the memory that regions without a daemon take in `directory`, and how to free it."""
    found = abandoned(directory)
    if not found:
        return ""
    path, stat = found[0]
    more = f", and {len(found) - 1} more" if found[1:] else ""
    return (
        f". No daemon runs for {path}, {format_size(stat.st_size)} of uid {stat.st_uid}{more}: "
        f"`kvcache-server discard` with the endpoint of that daemon, or `rm {path}`, frees it"
    )


def cost_of_small_pages(size: int) -> str:
    """Return the extra time that an engine on a GPU takes to start if a region has no huge pages, "" below a second."""
    gib = size / (1 << 30)
    small, huge = gib * _LOCK_SECONDS_PER_GIB, gib * _LOCK_SECONDS_PER_GIB_HUGE
    return (
        ""
        if small < 1
        else f"an engine on a GPU page-locks them in about {small:.1f} s, and huge pages in {huge:.1f} s"
    )


def no_huge_pages(directory: str) -> str:
    """Return the reason that a region in `directory` would get no huge pages, "" if it would. Tries to allocate one."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return f"no file can be made in {directory}: {error.strerror}"
    try:
        os.ftruncate(descriptor, HUGE_PAGE)
        prefault = _Prefault(map_file(descriptor, HUGE_PAGE), descriptor, "never", "always")
        prefault.run(lambda done, total: None)
        return prefault.why_small
    except (OSError, RegionError) as error:
        return str(error)
    finally:
        os.close(descriptor)


def free_room(directory: str) -> int:
    """Return the bytes that the mount of `directory` has left."""
    mount = os.statvfs(directory)
    room = mount.f_bavail * mount.f_frsize
    if filesystem(directory) != "hugetlbfs":
        return room
    # The mount reports only its own limit, or 0 blocks without a limit; the pages are the host's.
    folder = Path(f"/sys/kernel/mm/hugepages/hugepages-{mount.f_frsize >> 10}kB")
    pages = int((folder / "free_hugepages").read_text()) - int((folder / "resv_hugepages").read_text())
    free = pages * mount.f_frsize
    return min(room, free) if mount.f_blocks else free


class Mount(NamedTuple):
    """A mount, as in /proc/mounts."""

    point: str
    kind: str
    options: tuple[str, ...]


def mount_of(directory: str) -> Mount:
    """Return the mount that holds `directory`."""
    real, best = os.path.realpath(directory), Mount("", "unknown", ())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best.point):
            best = Mount(point, kind, tuple(options.split(",")))
    return best


def filesystem(directory: str) -> str:
    """Return the type of the mount that holds `directory`."""
    return mount_of(directory).kind


def available_memory() -> int:
    """Return the bytes available for new pages, on the host and within the control groups of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return min([int(fields["MemAvailable"].split()[0]) * 1024, *group_room()])


def group_room() -> Iterator[int]:
    """Yield the available bytes in each control group of this process that has a limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, inside = line.split(":", 2)
        if number == "0":
            mount, limit, usage, idle = "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, usage, idle = (
                "/sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        here = Path(mount + inside)
        for folder in (here, *here.parents):
            try:
                most = (folder / limit).read_text().strip()
                if most != "max":
                    stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
                    yield int(most) - int((folder / usage).read_text()) + int(stat.get(idle, 0))
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                pass  # not mounted here: a container sees its own group as the root
            if str(folder) == mount:
                break


class _Prefault:
    """Makes every page of a mapping present in several threads, in huge pages if possible, and locks them.

    Attributes:
        huge_bytes: bytes in huge pages.
        why_small: the reason that some of it is not in huge pages, or "".
    """

    def __init__(self, mapping: memoryview, fd: int, lock: str, huge_pages: str) -> None:
        """`lock` and `huge_pages` are "auto", "always" or "never"."""
        self._mapping, self._fd, self._lock = mapping, fd, lock
        self._huge = huge_pages != "never"
        self._why_unlocked = ""
        self._stop = threading.Event()
        self._counting = threading.Lock()
        self.huge_bytes = 0
        self.why_small = ""

    def run(self, progress: Progress, begin: int = 0, end: int = 0) -> str:
        """Fill and lock the pages from `begin` to `end`, or to that of the mapping; return the reason that they are not
        locked, or "". Raises RegionError if memory runs out."""
        if self._lock != "never":
            _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        end = end or len(self._mapping)
        progress(begin, end)
        with self._mapping[:] as mapping:  # keeps the mapping if it is released in the meantime
            start = address_of(mapping)
            with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "prefault") as pool:
                chunks = [(offset, min(CHUNK, end - offset)) for offset in range(begin, end, CHUNK)]
                try:
                    # In order: everything reported is present.
                    for filled in [pool.submit(self._fill, start, *each) for each in chunks]:
                        length = filled.result()
                        if not length:  # it was stopped
                            break
                        begin += length
                        progress(begin, end)
                finally:
                    self._stop.set()  # after an error or a signal, remaining chunks return at once
            if self._why_unlocked:
                _libc.munlock(start, len(mapping))
        return self._why_unlocked

    def stop(self) -> None:
        """Let `run`, in another thread, return early."""
        self._stop.set()

    def _fill(self, start: int, offset: int, length: int) -> int:
        if self._stop.is_set():
            return 0
        if _libc.madvise(start + offset, length, MADV_POPULATE_WRITE):
            _explain(ctypes.get_errno(), offset, len(self._mapping))
            # An older kernel. Touching pages on a full mount would raise SIGBUS; this returns an error.
            try:
                os.posix_fallocate(self._fd, offset, length)
            except OSError as error:
                _explain(error.errno or 0, offset, len(self._mapping))
                raise
        if self._huge:
            self._collapse(start + offset, length)
        if self._lock != "never" and not self._why_unlocked and _libc.mlock(start + offset, length):
            self._why_unlocked = _why_no_lock(ctypes.get_errno())
        return length

    def _collapse(self, address: int, length: int) -> None:
        """Merge the pages into huge ones. After the first failure, no more are tried: each search for room takes
        long."""
        if not _libc.madvise(address, length, MADV_COLLAPSE):
            with self._counting:
                self.huge_bytes += length
        elif length % HUGE_PAGE == 0:  # the last part of a mapping may be shorter than a huge page
            self._huge = False
            self.why_small = f"the kernel gives no huge pages: {os.strerror(ctypes.get_errno())}"


def _explain(error: int, offset: int, total: int) -> None:
    """Raise RegionError if `error` means that memory ran out."""
    if error in (errno.ENOMEM, errno.EFAULT, errno.ENOSPC):
        raise RegionError(
            f"memory ran out after {format_size(offset)} of {format_size(total)}: choose a smaller size, or see what "
            "else uses the host's memory"
        )
    if error not in (errno.EINVAL, errno.EOPNOTSUPP):
        raise RegionError(f"cannot allocate pages of the region: {os.strerror(error)}")


def _why_no_lock(error: int) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
    return f"{os.strerror(error)} (the limit on locked memory is {limit}); {RAISE_MEMLOCK}"
