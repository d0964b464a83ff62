"""The state file: the book of a region, beside the endpoint, for the daemon's eyes alone. Records are appended.

Nothing is forced to a disk: the file need not outlive the host, for the region does not.
"""

from __future__ import annotations

import contextlib
import logging
import os

from kvcache_proto import __version__
from kvcache_proto.errors import RegionError
from kvcache_server.journal import MAGIC, Book, Record, pack, read

log = logging.getLogger(__name__)

_SLACK = 1 << 20  # bytes of records beyond what the book needs, before it is written anew


class StateFile:
    """Notes what happens in `book` and in the file."""

    def __init__(self, path: str, book: Book) -> None:
        """Write `book` to `path`, in the place of what is there. Raises RegionError where it cannot be written."""
        self.path = path
        self.book = book
        self._fd = -1
        try:
            self._write_anew()
        except OSError as error:
            raise RegionError(
                f"state file {path}: {error.strerror}: the next daemon could not read the region"
            ) from None

    def note(self, record: Record) -> None:
        """Note one change before anybody is told of it.

        Where it cannot be written, the file goes: the next daemon begins empty, rather than with half of a book.
        """
        self.book.apply(record)
        if self._fd < 0:
            return
        try:
            packed = pack(record)
            if os.write(self._fd, packed) != len(packed):
                raise OSError(0, "the disk is full")
            self._size += len(packed)
            if self._size > self._limit:
                self._write_anew()
        except OSError as error:
            log.error("state file %s: %s: the next daemon will begin with an empty cache", self.path, error.strerror)
            self.close()
            self.remove(self.path)

    def close(self) -> None:
        """Write no more. Calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_anew(self) -> None:
        packed = MAGIC + b"".join(map(pack, self.book.records(__version__)))
        new = self.path + ".new"
        self.remove(new)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_APPEND, 0o600)
        try:
            if os.write(fd, packed) != len(packed):
                raise OSError(0, "the disk is full")
            os.rename(new, self.path)
        except BaseException:
            os.close(fd)
            self.remove(new)
            raise
        self.close()
        self._fd, self._size, self._limit = fd, len(packed), 2 * len(packed) + _SLACK

    @staticmethod
    def read(path: str) -> Book | None:
        """Return the book in the file, None where there is none. Raises RegionError where it cannot be trusted."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RegionError(f"state file {path}: {error.strerror}") from None
        with os.fdopen(fd, "rb") as file:
            if os.fstat(fd).st_uid != os.geteuid():
                raise RegionError(f"state file {path} belongs to uid {os.fstat(fd).st_uid}")
            return read(file.read())

    @staticmethod
    def remove(path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
