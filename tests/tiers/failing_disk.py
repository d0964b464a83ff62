"""A file system that fails on demand, through FUSE; run as a program, it serves one until it is unmounted."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
MNT_DETACH = 2


class FailingDisk:
    """`folder` shows the files of another folder."""

    def __init__(self, folder: Path, switch: Path) -> None:
        self.folder, self._switch = folder, switch

    @contextlib.contextmanager
    def failing(self, operation: str, error: str) -> Iterator[None]:
        """All calls of `operation`, `read` or `write`, fail with the `error` of that name, or hang if it is HANG."""
        new = self._switch.with_suffix(".new")
        new.write_text(f"{operation} {error}")
        new.rename(self._switch)
        try:
            yield
        finally:
            self._switch.unlink()


def missing() -> str | None:
    """Return why there can be no such file system here, or None."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"no FUSE: {error}"
    return None if os.geteuid() == 0 and os.access("/dev/fuse", os.W_OK) else "no FUSE: /dev/fuse is for root"


@contextlib.contextmanager
def failing_disk(at: Path) -> Iterator[FailingDisk]:
    """Mount one. Raises OSError where that is not possible."""
    folder, files, switch, log = at / "mounted", at / "files", at / "switch", at / "fuse.log"
    folder.mkdir(parents=True)
    files.mkdir()
    with log.open("wb") as output:
        command = [sys.executable, __file__, str(folder), str(files), str(switch)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        until = time.monotonic() + 20
        while not folder.is_mount():
            if process.poll() is not None or time.monotonic() > until:
                raise OSError(f"not mounted: {log.read_text()}")
            time.sleep(0.01)
        yield FailingDisk(folder, switch)
    finally:
        process.kill()  # the kernel ends what waits for it
        process.wait()
        unmount(folder)


@contextlib.contextmanager
def a_small_disk(folder: Path, size: int, options: str = "") -> Iterator[None]:
    """Mount memory of `size` bytes. Raises OSError where that is not possible."""
    folder.mkdir(parents=True)
    data = f"size={size}{options}".encode()
    if _libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, data):
        raise OSError(ctypes.get_errno(), "mount of a tmpfs")
    try:
        yield
    finally:
        unmount(folder)


def remount(folder: Path, size: int, read_only: bool = False) -> None:
    """Change a small disk. Raises OSError, also where it is in use and should be read-only."""
    remount, rdonly = 32, 1
    flags = remount | (rdonly if read_only else 0)
    if _libc.mount(b"tmpfs", bytes(folder), b"tmpfs", flags, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "remount of a tmpfs")


def unmount(folder: Path) -> None:
    _libc.umount2(bytes(folder), MNT_DETACH)


def _serve(folder: str, files: str, switch: str) -> None:
    import mfusepy

    class Passthrough(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def _check(self, operation: str) -> None:
            while True:
                try:
                    which, _, error = Path(switch).read_text().partition(" ")
                except FileNotFoundError:
                    return
                if which != operation:
                    return
                if error != "HANG":
                    raise mfusepy.FuseOSError(getattr(errno, error))
                time.sleep(0.05)

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            found = os.fstat(fh) if fh is not None else os.lstat(files + path)
            names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_blocks")
            times = ("st_atime", "st_mtime", "st_ctime")
            return {name: getattr(found, name) for name in names} | {
                name: getattr(found, f"{name}_ns") for name in times
            }

        def readdir(self, path: str, fh: Any) -> Any:
            return [".", "..", *os.listdir(files + path)]

        def open(self, path: str, flags: int) -> int:
            return os.open(files + path, flags & ~os.O_DIRECT)

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            return os.open(files + path, os.O_RDWR | os.O_CREAT, mode)

        def mkdir(self, path: str, mode: int) -> int:
            os.mkdir(files + path, mode)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            self._check("read")
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            self._check("write")
            return os.pwrite(fh, data, offset)

        def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
            os.posix_fallocate(fh, offset, size)
            return 0

        def truncate(self, path: str, length: int, fh: Any = None) -> int:
            os.truncate(files + path if fh is None else fh, length)
            return 0

        def unlink(self, path: str) -> int:
            os.unlink(files + path)
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def statfs(self, path: str) -> dict[str, int]:
            found = os.statvfs(files)
            return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    mfusepy.FUSE(Passthrough(), folder, foreground=True, default_permissions=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
