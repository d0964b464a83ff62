"""Names of region files, which tell the files of this endpoint in a folder, and the daemon that holds each region.

    kvcache-UID-DIGEST-RANDOM.region     the memory; DIGEST stands for the path of the endpoint's socket
    kvcache-UID-DIGEST-RANDOM.lock       locked by the daemon that holds the region, and never passed to a client
    kvcache-UID-DIGEST-RANDOM.aside      a region that a daemon did not trust; at most one

The folder may be world-writable, like /dev/shm. The random part of a name prevents other users from taking it first.
Lock and region are created and removed together, so they cannot take it later either. The lock is a separate file
because clients have descriptors of the region, and could lock it. Daemons in other containers may have the same
endpoint path, and regions of their own in this folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Collection
from pathlib import Path

from kvcache_proto.errors import ConfigError, EndpointTaken, KVCacheError, NotPermitted
from kvcache_proto.region import HEADER
from kvcache_server.storage.folder import Folder

log = logging.getLogger(__name__)

REGION, LOCK, ASIDE = ".region", ".lock", ".aside"


class RegionFolder(Folder):
    """The folder of region files, for the daemons of this user at `socket_path`."""

    def __init__(self, path: str, socket_path: str) -> None:
        """Raises ConfigError if the folder does not exist, NotPermitted if it cannot be read."""
        digest = hashlib.sha256(os.fsencode(os.path.abspath(socket_path))).hexdigest()[:16]
        self._prefix = f"kvcache-{os.geteuid()}-{digest}"
        self._pattern = re.compile(re.escape(self._prefix) + r"(?:-[0-9a-f]{16})?")
        try:
            super().__init__(path)
        except PermissionError:
            raise NotPermitted(f"region_dir {path}: uid {os.geteuid()} may not read it") from None
        except OSError:
            raise ConfigError(f"region_dir {path}: no such folder") from None

    def found(self, suffix: str = REGION) -> list[str]:
        """Return the names, without `suffix`, of files that a daemon of this endpoint has created.

        Files of other users with such names are ignored.
        """
        names = [name.removesuffix(suffix) for name in self.names() if name.endswith(suffix)]
        ours, others = [], 0
        for name in filter(self._pattern.fullmatch, names):
            try:
                if self.check(name + suffix) is not None:
                    ours.append(name)
            except KVCacheError:
                others += 1
        if others:  # one line, because other users may create many
            log.warning(
                "%s has %d files with names of this daemon's *%s files that are not its own: they are ignored",
                *(self.path, others, suffix),
            )
        return sorted(ours)

    def header(self, name: str) -> tuple[bytes, int]:
        """Return the first page of a region, and the file's size. Raises OSError."""
        fd = self.open(name + REGION)
        try:
            return os.pread(fd, HEADER, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)

    def claim(self, name: str) -> Claim:
        """Return a claim on an existing region. Raises EndpointTaken if a running daemon holds it."""
        return Claim(self, name)

    def new(self) -> Claim:
        """Return a claim on an unused name. Raises NotPermitted if no file may be created here, OSError."""
        while True:
            try:
                return Claim(self, f"{self._prefix}-{secrets.token_hex(8)}")
            except EndpointTaken:
                continue  # another daemon, cleaning up, took the lock for a stale one

    def tidy(self) -> None:
        """Remove locks without a region, left by a daemon that was killed between two steps."""
        for name in set(self.found(LOCK)) - set(self.found()):
            try:
                claim = self.claim(name)
            except KVCacheError:
                continue  # its daemon is about to create the region
            claim.release() if self.check(name + REGION) else claim.remove()

    def remove_aside(self) -> int:
        """Remove regions that were put aside; return their number."""
        return sum(self.remove(name + ASIDE) for name in self.found(ASIDE))

    def remove_all(self, claims: Collection[Claim]) -> int:
        """Remove these regions, stale locks, and regions that were put aside; return the number of regions."""
        for claim in claims:
            claim.remove()
        self.tidy()
        return len(claims) + self.remove_aside()


def abandoned(directory: str) -> list[tuple[str, os.stat_result]]:
    """Return the regions in `directory`, of any endpoint, that no running daemon holds, largest first.

    Those of other users are left out if their locks cannot be read.
    """
    found = []
    for region in Path(directory).glob(f"kvcache-*{REGION}"):
        try:
            fd = os.open(region.with_suffix(LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found.append((str(region), region.lstat()))
        except OSError:  # a daemon holds it, or has just removed it
            continue
        finally:
            os.close(fd)
    return sorted(found, key=lambda each: -each[1].st_size)


class Claim:
    """The exclusive hold on one region file, until `release` or `remove`."""

    def __init__(self, folder: Folder, name: str) -> None:
        """Take the lock. Raises EndpointTaken, NotPermitted, ConfigError."""
        self.name = name
        with contextlib.ExitStack() as undo:
            self._folder = undo.enter_context(Folder(folder.path, os.dup(folder.fd)))
            try:
                self._lock_fd = self._folder.lock(name + LOCK)
            except BlockingIOError:
                raise EndpointTaken(
                    f"{self.path} belongs to a running daemon with the same endpoint path, perhaps in another container"
                ) from None
            except PermissionError:
                raise NotPermitted(f"region_dir {folder.path}: uid {os.geteuid()} may not create {self.path}") from None
            undo.pop_all()

    @property
    def path(self) -> str:
        return self._folder.path_of(self.name + REGION)

    def open(self, flags: int = 0) -> int:
        """Return a descriptor of the region file. Raises like Folder.open."""
        return self._folder.open(self.name + REGION, os.O_RDWR | flags)

    def create(self) -> int:
        """Create the region file and return a descriptor of it. Raises OSError."""
        return self.open(os.O_CREAT | os.O_EXCL)

    def remove(self) -> None:
        """Remove the region, then its lock. Existing mappings stay valid."""
        self._folder.remove(self.name + REGION)
        self._folder.remove(self.name + LOCK)
        self.release()

    def put_aside(self) -> str:
        """Rename the region so that no daemon uses it again, and return its path; "" if it had to be removed."""
        try:
            self._folder.rename(self.name + REGION, self.name + ASIDE)
            aside = self._folder.path_of(self.name + ASIDE)
        except OSError:  # a file of another user has that name
            aside = ""
        self.remove()
        return aside

    def release(self) -> None:
        """Release the lock; both files stay. Calling it again does nothing."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._folder.close()
