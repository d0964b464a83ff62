"""The state file: the manifest of a region, beside the endpoint, for the daemon's eyes alone. Records are appended.

Nothing is forced to a disk: the file need not outlive the host, for the region does not.
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

_SLACK = 1 << 20  # bytes of records beyond what the manifest needs, before it is written anew
NEW, ASIDE = ".new", ".aside"


class StateFile:
    """Notes what happens in `manifest` and in the file.

    `counters` has how often the file could not be kept.
    """

    def __init__(
        self, folder: Folder, name: str, manifest: Manifest, give_up: Callable[[], None] = lambda: None
    ) -> None:
        """Write `manifest` to the file `name`, in the place of what is there.

        `give_up()` is called once where the file cannot be written any more: it has the region be read by nobody.
        Raises RegionError where it cannot be written, ConfigError or NotPermitted where something is in the way.
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
        """Note one change before anybody is told of it.

        Where it cannot be written, the region is given up and the file goes: the next daemon begins empty, rather than
        with half of a manifest. This never raises.
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
                # What is there is whole, only longer than it need be.
                self._limit += self._size
                log.warning("state file %s cannot be written anew, and grows on: %s", self.path, error)

    def _lose(self, why: OSError) -> None:
        self._give_up()  # first: whatever becomes of the file, nobody reads the region by it
        self.counters["state_files_lost"] += 1
        self.close()
        try:
            self._folder.remove(self._name)
            rest = ""
        except (OSError, ConfigError) as error:
            rest = f" (nor can the file be removed: {error})"
        log.error("state file %s: %s%s: the next daemon will begin with an empty cache", self.path, why.strerror, rest)

    def close(self) -> None:
        """Write no more. Calling it again does nothing."""
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
    """Return the manifest in the file, None where there is none.

    Raises RegionError where it cannot be trusted, ConfigError or NotPermitted where something is in the way.
    """
    try:
        fd = folder.open(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RegionError(f"state file {folder.path_of(name)}: {error.strerror}") from None
    with os.fdopen(fd, "rb") as file:
        return read(file.read())
