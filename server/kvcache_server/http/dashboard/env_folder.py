"""The folder of engines' environment files: read and replaced there alone, whole or not at all."""

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
from kvcache_server.http.dashboard import engine_fields

MOST = 64 << 10  # bytes of a file
BACKUP = ".before"  # what the last change replaced


class Changed(KVCacheError):
    """The file is not what it was when somebody looked at it."""

    code = "changed"


class EnvFolder:
    """A folder, by its name; links in it are not followed, and what is no regular file is refused."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError where that is no absolute path."""
        if not os.path.isabs(path):
            raise ConfigError(f"--env-folder {path}: an absolute path")
        self.path = Path(path)
        self._changing = threading.Lock()  # of two at once, the second finds what the first wrote

    def names(self) -> list[str]:
        """Return the names of engines that have a file here."""
        try:
            return sorted(path.name.removesuffix(".env") for path in self.path.glob("[!.]*.env"))
        except OSError:
            return []

    def name_of(self, path: str) -> str:
        """Return the name in this folder that `path` means, "" where it lies elsewhere."""
        folder, _, name = path.rpartition("/")
        return name if folder == str(self.path) and name else ""

    def read(self, name: str) -> tuple[str, str]:
        """Return text and version of that file. Raises BadArgument, NotPermitted."""
        with _plainly(self.path / name), self._open() as folder:
            text, _ = _read(folder, name)
        return text, _version(text)

    def change(self, name: str, version: str, values: dict[str, str]) -> str:
        """Write these values of fields, and keep a backup; return the new version.

        Raises Changed where the file has another version by now, BadArgument, NotPermitted: then it is as it was.
        """
        with _plainly(self.path / name), self._changing, self._open() as folder:
            before, found = _read(folder, name)
            if _version(before) != version:
                raise Changed(f"{self.path / name} has changed meanwhile: look at it again")
            after = engine_fields.change(before, values)
            if after != before:
                _replace(folder, name + BACKUP, before, found)
                _replace(folder, name, after, found)
                os.fsync(folder)
        return _version(after)

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(folder)


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
            raise BadArgument(f"{name}: no file of at most {MOST} bytes")
        return file.read(MOST).decode(), found


def _replace(folder: int, name: str, text: str, like: os.stat_result) -> None:
    """Put a file of `text` at `name`, with the owner and mode of `like`, at once."""
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
