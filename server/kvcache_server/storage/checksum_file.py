"""The file of the checksums: the daemon's own, beside its socket, 0600, handed to nobody.

Not beside the region: that may be a mount of huge pages, each counted. At most 1/512 of the region's size, a piece at a
time where somebody verifies: taken before it is written, for on a full mount a missing page would end the daemon.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os

from kvcache_proto.region import PAGE
from kvcache_proto.types import PoolGeometry
from kvcache_server.core.checksums import PIECE, Checksums, sums_bytes, sums_header
from kvcache_server.storage.folder import Folder

log = logging.getLogger(__name__)


def open_sums(folder: Folder, name: str, geometry: PoolGeometry, epoch: int) -> Checksums | None:
    """Return what is kept in the file `name` of this region, by the daemon of the epoch before `epoch`; or None
    where there is no room, so that blocks are not verified.

    Raises ConfigError, NotPermitted where something else has that name.
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
        os.posix_fallocate(fd, 0, PAGE)  # the header
        have = _pieces(fd, size)
        for piece in have:  # one that was cut short by a full mount is made whole
            os.posix_fallocate(fd, piece * PIECE, PIECE)
        os.pwrite(fd, sums_header(geometry, epoch), 0)
        return Checksums(memoryview(mmap.mmap(fd, size)), have, _PieceAllocator(fd, path, have))
    except OSError as error:
        os.close(fd)
        log.warning("no checksums of blocks are kept: %s of %d bytes: %s", path, size, error)
        return None


def _pieces(fd: int, size: int) -> set[int]:
    """Return the pieces of which the file has something, the header aside."""
    found: set[int] = set()
    end = PAGE
    with contextlib.suppress(OSError):  # ENXIO: nothing follows
        while end < size:
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            found.update(range(begin // PIECE, -(-end // PIECE)))
    return found


class _PieceAllocator:
    """Gives pieces of the file their memory, for as long as the process lives. Where there is none, it says so once."""

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
            log.warning("checksums of further blocks are not kept: %s: %s", self._path, error.strerror)
            return False
        self._have.add(piece)
        return True
