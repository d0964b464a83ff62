"""The file of the checksums: the daemon's own, beside its socket, 0600, handed to nobody.

Not beside the region: that may be a mount of huge pages, each counted. It takes 1/512 of the region's size, all of it
at once, for on a full mount a page that is missing would end the daemon when it is written.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os

from kvcache_proto.types import PoolGeometry
from kvcache_server.sums import Sums, sums_bytes

log = logging.getLogger(__name__)


def open_sums(path: str, geometry: PoolGeometry, life: int) -> Sums | None:
    """Return what is kept at `path` of this region, by the daemon before the one of number `life`; or None where there
    is no room, so that blocks are not verified."""
    size = sums_bytes(geometry)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, size)
            return Sums(memoryview(mmap.mmap(fd, size)), geometry, life)
        finally:
            os.close(fd)
    except OSError as error:
        log.warning("no checksums of blocks are kept: %s of %d bytes: %s", path, size, error)
        return None


def remove_sums(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
