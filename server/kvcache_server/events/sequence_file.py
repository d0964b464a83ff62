"""The file that keeps the numbers of KV events increasing, even if the clock is set back or the region is lost.

A subscriber ignores batches whose number is not higher than the last one. Numbers begin at the clock's milliseconds, so
that after a reboot, when the file is gone, they are still higher than before. If the clock was set back, the file's
number is used.
"""

from __future__ import annotations

import logging
import os

from kvcache_proto.errors import KVCacheError
from kvcache_server.storage.folder import open_folder

log = logging.getLogger(__name__)

ROOM = 1 << 20  # numbers reserved ahead: the file is written once per this many batches
MOST = 1 << 63  # first numbers are below this; the highest number of all marks the end of a replay


class SequenceFile:
    """`first` is the number to begin with: higher than any that a daemon of this endpoint has used."""

    def __init__(self, path: str, clock: int) -> None:
        """Read the number in the file at `path`; without it, numbers begin at `clock`.

        If the file cannot be read or written, a warning is logged and numbers begin at `clock`.
        """
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
            log.warning("%s; event numbers may go down if the clock is set back", error)

    def _known(self, text: bytes) -> int:
        number = int(text) if text.strip().isdigit() and len(text) < 64 else MOST
        if number >= MOST:
            log.warning("%s contains no valid event number: numbers begin at the clock instead", self._path)
            return 0
        return number

    def give(self, number: int) -> None:
        """Reserve `number` in the file, before the batch with that number is sent."""
        if number < self._noted:
            return
        self._noted = number + ROOM
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, os.pwrite(self._fd, b"%020d\n" % self._noted, 0))
        except OSError as error:
            log.warning("%s: %s: event numbers may go down if the clock is set back", self._path, error.strerror)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
