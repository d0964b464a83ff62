"""The state file: the manifest of a region, beside the endpoint, readable only by the daemon. Records are appended.

It is not synced to disk: like the region, it need not survive a reboot.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable

from kvcache_proto import __version__
from kvcache_proto.errors import ConfigError, RegionError
from kvcache_server.core.journal import MAGIC, Manifest, Record, pack, read
from kvcache_server.storage.folder import Folder

log = logging.getLogger(__name__)

_SLACK = 1 << 20  # bytes of superfluous records before the file is rewritten
NEW, ASIDE = ".new", ".aside"


class StateFile:
    """Applies records to `manifest`, and appends them to the file.

    `counters` counts losses of the file.
    """

    def __init__(
        self, folder: Folder, name: str, manifest: Manifest, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """Write `manifest` to the file `name`, replacing an existing one.

        `give_up()` is called once if the file can no longer be written: it marks the region as unusable for the next
        daemon. Raises RegionError if the file cannot be written, ConfigError or NotPermitted if something else has its
        name.
        """
        self.manifest = manifest
        self.counters: Counter[str] = Counter()
        self._folder, self._name, self._give_up = folder, name, give_up
        self._fd = -1
        folder.check(name)
        try:
            self._rewrite()
        except OSError as error:
            raise RegionError(
                f"state file {self.path}: {error.strerror}: the next daemon could not read the region"
            ) from None

    @property
    def path(self) -> str:
        return self._folder.path_of(self._name)

    def note(self, record: Record) -> None:
        """Write one record, before any client learns of the change.

        If it cannot be written, the region is given up and the file is removed: the next daemon starts empty, not with
        an incomplete manifest. This never raises.
        """
        self.manifest.apply(record)
        if self._fd < 0:
            return
        packed = pack(record)
        try:
            if os.write(self._fd, packed) != len(packed):
                raise OSError(0, "the disk is full")
        except OSError as error:
            self._lose(error)
            return
        self._size += len(packed)
        if self._size > self._limit:
            try:
                self._rewrite()
            except (OSError, ConfigError) as error:
                # The existing file is complete, only longer than necessary.
                self._limit += self._size
                log.warning("state file %s cannot be rewritten and continues to grow: %s", self.path, error)

    def _lose(self, why: OSError) -> None:
        self._give_up()  # first: then no daemon uses the region, even if the file stays
        self.counters["state_files_lost"] += 1
        self.close()
        try:
            self._folder.remove(self._name)
            rest = ""
        except (OSError, ConfigError) as error:
            rest = f" (and the file cannot be removed: {error})"
        log.error("state file %s: %s%s: the next daemon will start with an empty cache", self.path, why.strerror, rest)

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rewrite(self) -> None:
        packed = MAGIC + b"".join(map(pack, self.manifest.records(__version__)))
        new = self._name + NEW
        self._folder.remove(new)
        fd = self._folder.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            if os.write(fd, packed) != len(packed):
                raise OSError(0, "the disk is full")
            self._folder.rename(new, self._name)
        except BaseException:
            os.close(fd)
            self._folder.remove(new)
            raise
        self.close()
        self._fd, self._size, self._limit = fd, len(packed), 2 * len(packed) + _SLACK


def read_state(folder: Folder, name: str) -> Manifest | None:
    """Return the manifest in the file, None if the file does not exist.

    Raises RegionError if the content cannot be trusted, ConfigError or NotPermitted if something else has its name.
    """
    try:
        fd = folder.open(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RegionError(f"state file {folder.path_of(name)}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        return read(file.read())
