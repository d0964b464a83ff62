"""The file that keeps the numbers of KV events from falling, whatever becomes of the clock and of the region.

A subscriber takes what has a higher number than the last one. Numbers begin at the clock's milliseconds, so that a new
file, as after a reboot, begins above an old one; where the clock was put back, the file counts.
"""

from __future__ import annotations

import logging
import os

from kvcache_proto.errors import KVCacheError
from kvcache_server.storage.folder import open_folder

log = logging.getLogger(__name__)

ROOM = 1 << 20  # numbers that are noted ahead: the file is written once for so many batches
MOST = 1 << 63  # the last number of all ends a replay


class Numbers:
    """`first` is the number to begin with: above all that a daemon of this endpoint has given."""

    def __init__(self, path: str, clock: int) -> None:
        """Read what was noted at `path`; `clock` is what numbers begin at otherwise. Where it cannot be read or
        written, a line of the log says so, and the clock counts."""
        self._path = path
        self._fd = -1
        self._noted = 0
        self.first = clock
        try:
            with open_folder(os.path.dirname(path)) as folder:
                self._fd = folder.open(os.path.basename(path), os.O_RDWR | os.O_CREAT)
            text = os.pread(self._fd, 64, 0)
            self.first = max(clock, self._known(text) if text else 0)
        except (OSError, KVCacheError) as error:
            log.warning("%s; numbers of events may fall if the clock does", error)

    def _known(self, text: bytes) -> int:
        number = int(text) if text.strip().isdigit() and len(text) < 64 else MOST
        if number >= MOST:
            log.warning("%s: no number that events could begin at: they begin at the clock", self._path)
            return 0
        return number

    def give(self, number: int) -> None:
        """Note that `number` is given, before anybody hears it."""
        if number < self._noted:
            return
        self._noted = number + ROOM
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, os.pwrite(self._fd, b"%020d\n" % self._noted, 0))
        except OSError as error:
            log.warning("%s: %s: numbers of events may fall if the clock does", self._path, error.strerror)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
