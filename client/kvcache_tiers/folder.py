"""A tier's folder, held by its descriptor, so that no other user can lead the tier to other files.

The folder must belong to the tier's user or to root, and no other user may write to it. The same holds for each file in
it, which must be a regular file with a single name. Links are not followed, and opening never blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from kvcache_proto.errors import NotPermitted

# Opening a FIFO or a device must not block; O_NONBLOCK has no effect on a regular file.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Folder:
    """A folder; names are of files directly in it. All methods raise OSError with the full path."""

    def __init__(self, path: Path) -> None:
        """Open the folder, and make it if needed. Raises NotPermitted, OSError."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.lstat()
        follow = 0 if stat.S_ISLNK(found.st_mode) else os.O_NOFOLLOW
        if not follow and found.st_uid not in _trusted():
            raise NotPermitted(f"{path} is a link of uid {found.st_uid}, who could lead the tier elsewhere: remove it")
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow)
        try:
            _judge(path, os.fstat(self.fd))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.fd)

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def open(self, name: str, flags: int) -> int:
        """Return a descriptor of a file. Raises NotPermitted for one that the tier has not made, and OSError."""
        self.check(name)  # before opening it: merely opening a device may have effects
        try:
            file = os.open(name, flags | _SAFELY, 0o600, dir_fd=self.fd)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(self.path / name)) from None
        try:
            _judge_file(self.path / name, os.fstat(file))
        except BaseException:
            os.close(file)
            raise
        return file

    def check(self, name: str) -> bool:
        """Return True if there is a file of that name. Raises NotPermitted for one that the tier has not made."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        _judge_file(self.path / name, found)
        return True

    def in_place(self) -> bool:
        """Return True if its path still leads to it."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        return False

    def has(self, name: str, file: int) -> bool:
        """Return True if `name` is still the name of an open file."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(name, dir_fd=self.fd, follow_symlinks=False), os.fstat(file))
        return False

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)


def _trusted() -> tuple[int, int]:
    return 0, os.geteuid()


def _judge_file(path: Path, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise NotPermitted(f"{path} is no regular file: remove it")
    if found.st_nlink > 1:
        raise NotPermitted(f"{path} is a file with {found.st_nlink} names: remove it")
    _judge(path, found)


def _judge(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in _trusted():
        raise NotPermitted(f"{path} belongs to uid {found.st_uid}, who could change what is stored: name another")
    if found.st_mode & 0o022:
        raise NotPermitted(
            f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):04o}): `chmod go-w {path}` if all "
            "in it can be trusted, or name another"
        )
