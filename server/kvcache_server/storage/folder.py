"""Protects the daemon's files from other users: checks the folders, and opens the files in them.

All paths are relative to a descriptor of the folder, so that moving folders cannot redirect the daemon. Links are not
followed, opening never blocks, and each opened file is checked again: it must be a regular file of the daemon's user
that no other user may open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from typing import TypeVar

from kvcache_proto.endpoint import socket_path
from kvcache_proto.errors import ConfigError, EndpointTaken, NotPermitted

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Opening a FIFO or a device must not block; O_NONBLOCK has no effect on a regular file.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


_Folder = TypeVar("_Folder", bound="Folder")


class Folder:
    """A folder, held by its descriptor until `close`. Names are those of files directly in it."""

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        """Open the folder at `path`. Raises OSError if it does not exist."""
        self.path = path
        self.refuses_links = False  # whether to refuse hard links, which other users may have made of other files
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if descriptor is None else descriptor

    def close(self) -> None:
        """Calling it again does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self: _Folder) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def open(self, name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
        """Return a descriptor of one of the daemon's own files.

        Raises ConfigError or NotPermitted like `check`, and OSError with the full path.
        """
        self.check(name)  # before opening it: merely opening a device may have effects
        try:
            fd = os.open(name, flags | _SAFELY, mode, dir_fd=self.fd)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, self.path_of(name)) from None
        try:
            self._judge(name, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def check(self, name: str) -> os.stat_result | None:
        """Return the status of one of the daemon's own files, None if it does not exist.

        Raises ConfigError if it is not a regular file, NotPermitted if it belongs to another user or others may open
        it.
        """
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        self._judge(name, found)
        return found

    def _judge(self, name: str, found: os.stat_result) -> None:
        path = self.path_of(name)
        _expect(path, found, stat.S_IFREG)
        if found.st_mode & 0o077:
            raise NotPermitted(f"{path} may be opened by others (mode {stat.S_IMODE(found.st_mode):04o}): remove it")
        if found.st_nlink > 1 and self.refuses_links:
            raise NotPermitted(f"{path} is a file with {found.st_nlink} names: remove it")

    def lock(self, name: str) -> int:
        """Return a descriptor that holds the lock of the file, which is created if needed.

        Raises BlockingIOError if another process holds it, and like `open`.
        """
        while True:
            fd = self.open(name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder may have removed the file: ours must still be the one in the folder.
                if self._is(name, fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def unlock(self, name: str, fd: int) -> None:
        """Remove the file, unless it was replaced, and close a descriptor from `lock`."""
        if self._is(name, fd):
            self.remove(name)
        os.close(fd)

    def _is(self, name: str, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def rename(self, name: str, to: str) -> None:
        os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> bool:
        """Remove a file of any kind except a folder; return whether it existed.

        Raises ConfigError if it is a folder, and OSError.
        """
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        except OSError:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                raise in_the_way(self.path_of(name), found) from None
            raise
        return True

    def folder(self, name: str, make: bool = False) -> Folder:
        """Return the daemon's own folder `name`. Raises like `check`, and FileNotFoundError if it does not exist."""
        path = self.path_of(name)
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
        _expect(path, os.stat(name, dir_fd=self.fd, follow_symlinks=False), stat.S_IFDIR)
        inner = Folder(path, os.open(name, os.O_RDONLY | os.O_DIRECTORY | _SAFELY, dir_fd=self.fd))
        try:
            found = os.fstat(inner.fd)
            _expect(path, found, stat.S_IFDIR)
            if found.st_mode & 0o022:
                raise NotPermitted(
                    f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):04o}): remove it"
                )
        except BaseException:
            inner.close()
            raise
        return inner

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self.fd)


def in_the_way(path: str, found: os.stat_result) -> ConfigError:
    """Return the error that describes the file at `path`."""
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something odd")
    return ConfigError(f"{path} is {kind}, in the way of the daemon's own: remove it, or choose another endpoint")


def _expect(path: str, found: os.stat_result, kind: int) -> None:
    if stat.S_IFMT(found.st_mode) != kind:
        raise in_the_way(path, found)
    if found.st_uid != os.geteuid():
        raise NotPermitted(
            f"{path} belongs to uid {found.st_uid}, not to this daemon's, {os.geteuid()}: remove it, or choose another "
            "endpoint"
        )


def open_folder(path: str) -> Folder:
    """Return the endpoint's folder.

    Raises NotPermitted if another user could replace the folder or its content. It must belong to root or to the
    daemon's user. If others may write to it, it must be sticky, so that they cannot remove files of other users.
    """
    found = os.stat(path, follow_symlinks=False)
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
        raise NotPermitted(f"{path} is a link of uid {found.st_uid}, who could lead the daemon elsewhere: remove it")
    folder = Folder(path)
    try:
        found = os.fstat(folder.fd)
        if found.st_uid not in (0, os.geteuid()):
            raise NotPermitted(
                f"{path} belongs to uid {found.st_uid}, who could take the endpoint over: choose another"
            )
        folder.refuses_links = bool(found.st_mode & 0o022)
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise NotPermitted(
                f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):04o}), who could take the "
                f"endpoint over: `chmod go-w {path}`, or choose a folder inside of it"
            )
    except BaseException:
        folder.close()
        raise
    return folder


def file_of(endpoint: str, suffix: str) -> str:
    """Return the name of the daemon's file with that suffix, beside the socket."""
    return os.path.basename(socket_path(endpoint)).removesuffix(".sock") + suffix


class EndpointLock:
    """The endpoint's folder, and the lock in it: its holder is the daemon of this endpoint."""

    def __init__(self, endpoint: str) -> None:
        """Take the lock; create the endpoint's folder if needed. Raises EndpointTaken, NotPermitted, ConfigError."""
        self._name = file_of(endpoint, ".lock")
        path = os.path.dirname(socket_path(endpoint))
        with contextlib.ExitStack() as undo:
            try:
                _make(path)
                self.folder = undo.enter_context(open_folder(path))
                self._fd = self.folder.lock(self._name)
            except PermissionError as error:
                raise NotPermitted(
                    f"endpoint {endpoint}: uid {os.geteuid()} may not write {error.filename}; choose another endpoint, "
                    "or have the folder made for this user"
                ) from None
            except (FileExistsError, NotADirectoryError) as error:
                raise ConfigError(f"endpoint {endpoint}: {error.filename} is not a folder") from None
            except FileNotFoundError as error:
                raise ConfigError(f"endpoint {endpoint}: {error.filename} cannot be created there") from None
            except BlockingIOError:
                raise EndpointTaken(f"another daemon serves {endpoint}: stop it, or choose another endpoint") from None
            except OSError as error:
                raise ConfigError(f"endpoint {endpoint}: {error.filename}: {error.strerror}") from None
            undo.pop_all()

    def release(self) -> None:
        self.folder.unlock(self._name, self._fd)
        self.folder.close()


def _make(path: str) -> None:
    """Create the folder and its parents; regardless of the umask, other users may not write to them."""
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        os.makedirs(path, mode=0o755, exist_ok=True)
    finally:
        os.umask(before)
