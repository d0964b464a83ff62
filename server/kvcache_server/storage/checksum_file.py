"""The checksum file: beside the socket, mode 0600, never passed to a client.

It is not beside the region, which may be on a mount of huge pages. It has at most 1/512 of the region's size, and is
allocated in pieces as checksums arrive. Pieces are allocated before they are written: on a full mount, touching a
missing page would kill the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os

from kvcache_proto.region import LEAST_PAGE
from kvcache_proto.types import PoolGeometry
from kvcache_server.core.checksums import PIECE, Checksums, sums_bytes, sums_header
from kvcache_server.storage.folder import Folder

log = logging.getLogger(__name__)


def open_sums(folder: Folder, name: str, geometry: PoolGeometry, epoch: int) -> Checksums | None:
    """Return the checksums in the file `name` if the daemon of the previous epoch kept them for this region, else empty
    ones. Returns None if there is no room for them; then blocks are not verified.

    Raises ConfigError, NotPermitted if something else has that name.
    """
    size, path = sums_bytes(geometry), folder.path_of(name)
    try:
        fd = folder.open(name, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        log.warning("no checksums of blocks are kept: %s: %s", path, error.strerror)
        return None
    try:
        kept = sums_header(geometry, epoch - 1)
        if os.fstat(fd).st_size != size or os.pread(fd, len(kept), 0) != kept:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, LEAST_PAGE)  # the header
        have = _pieces(fd, size)
        for piece in have:  # a full mount may have left one incomplete
            os.posix_fallocate(fd, piece * PIECE, PIECE)
        os.pwrite(fd, sums_header(geometry, epoch), 0)
        return Checksums(memoryview(mmap.mmap(fd, size)), have, _PieceAllocator(fd, path, have))
    except OSError as error:
        os.close(fd)
        log.warning("no checksums of blocks are kept: %s of %d bytes: %s", path, size, error)
        return None


def _pieces(fd: int, size: int) -> set[int]:
    """Return the pieces with data, without the header."""
    found: set[int] = set()
    end = LEAST_PAGE
    with contextlib.suppress(OSError):  # ENXIO: nothing follows
        while end < size:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            found.update(range(begin // PIECE, -(-end // PIECE)))
    return found


class _PieceAllocator:
    """Allocates pieces of the file. The first failure is logged and ends all further attempts."""

    def __init__(self, fd: int, path: str, have: set[int]) -> None:
        self._fd, self._path, self._have = fd, path, have
        self._full = False

    def __call__(self, piece: int) -> bool:
        if self._full:
            return False
        try:
            os.posix_fallocate(self._fd, piece * PIECE, PIECE)
        except OSError as error:
            self._full = True
            log.warning("no checksums of further blocks are kept: %s: %s", self._path, error.strerror)
            return False
        self._have.add(piece)
        return True
