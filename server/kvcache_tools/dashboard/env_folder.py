"""The folder of engines' environment files, which are read and atomically replaced only there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from kvcache_proto.errors import BadArgument, ConfigError, KVCacheError, NotPermitted
from kvcache_server.storage.folder import Folder
from kvcache_tools.dashboard import engine_fields

MOST = 64 << 10  # bytes of a file
BACKUP = ".before"  # the content before the last change


class Changed(KVCacheError):
    """The file has changed since it was read."""


class EnvFolder:
    """A folder. Links in it are not followed, and only regular files are accepted."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError unless `path` is absolute."""
        if not os.path.isabs(path):
            raise ConfigError(f"--env-folder {path}: an absolute path expected")
        self.path = Path(path)
        self._changing = threading.Lock()  # of two concurrent changes, the second sees the first

    def names(self) -> list[str]:
        """Return the names of the engines that have a file."""
        try:
            return sorted(path.name.removesuffix(".env") for path in self.path.glob("[!.]*.env"))
        except OSError:
            return []

    def name_of(self, path: str) -> str:
        """Return the file name of `path` if it lies in this folder, else ""."""
        folder, _, name = path.rpartition("/")
        return name if folder == str(self.path) and name else ""

    def read(self, name: str) -> tuple[str, str]:
        """Return the text and the version of a file. Raises BadArgument, NotPermitted."""
        with _plainly(self.path / name), Folder(str(self.path)) as folder:
            text, _ = _read(folder.fd, name)
        return text, _version(text)

    def change(self, name: str, version: str, values: dict[str, str]) -> str:
        """Write these values of fields, keep a backup, and return the new version.

        Raises Changed if the file now has another version, BadArgument or NotPermitted; the file is then unchanged.
        """
        with _plainly(self.path / name), self._changing, Folder(str(self.path)) as folder:
            before, found = _read(folder.fd, name)
            if _version(before) != version:
                raise Changed(f"{self.path / name} has changed in the meantime: reload it")
            after = engine_fields.change(before, values)
            if after != before:
                _replace(folder.fd, name + BACKUP, before, found)
                _replace(folder.fd, name, after, found)
                os.fsync(folder.fd)
        return _version(after)


@contextlib.contextmanager
def _plainly(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise NotPermitted(f"{path}: {error.strerror}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadArgument(f"{path}: {error}") from None


def _version(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(folder: int, name: str) -> tuple[str, os.stat_result]:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST:
            raise BadArgument(f"{name}: not a regular file of at most {MOST} bytes")
        return file.read(MOST).decode(), found


def _replace(folder: int, name: str, text: str, like: os.stat_result) -> None:
    """Atomically replace the file `name` with `text`; it gets the owner and mode of `like`."""
    new = f".{name}.{secrets.token_hex(8)}"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(fd, like.st_uid, like.st_gid)
            os.fchmod(fd, stat.S_IMODE(like.st_mode))
            file.write(text.encode())
            file.flush()
            os.fsync(fd)
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(new, dir_fd=folder)
        raise
