"""Region files by name: which of them in a folder are this endpoint's, who holds one, and what becomes of the others.

    kvcache-UID-DIGEST-RANDOM.region     the memory; DIGEST stands for the path of the endpoint's socket
    kvcache-UID-DIGEST-RANDOM.lock       locked by the daemon that holds the region, and never handed to anybody
    kvcache-UID-DIGEST-RANDOM.aside      a region that a daemon would not trust; one of them at most

The folder may be everybody's, as /dev/shm is. What is random in a name keeps others from taking it before the daemon
does; lock and region come and go together, so that afterwards nobody can either. Clients hold descriptors of the
region, and whoever holds one may lock it: so it is another file that is locked. Daemons of other containers may have
the same names for their endpoints, and regions here of their own.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Collection

from kvcache_proto.errors import ConfigError, EndpointTaken, KVCacheError, NotPermitted
from kvcache_proto.region import PAGE
from kvcache_server.storage.folder import Folder

log = logging.getLogger(__name__)

REGION, LOCK, ASIDE = ".region", ".lock", ".aside"


class RegionFolder:
    """The folder of region files, and which in it are those of this user's daemons at `socket_path`."""

    def __init__(self, path: str, socket_path: str) -> None:
        """Raises ConfigError where there is no such folder, NotPermitted where it cannot be read."""
        digest = hashlib.sha256(os.fsencode(os.path.abspath(socket_path))).hexdigest()[:16]
        self._prefix = f"kvcache-{os.geteuid()}-{digest}"
        self._pattern = re.compile(re.escape(self._prefix) + r"(?:-[0-9a-f]{16})?")
        try:
            self.folder = Folder(path)
        except PermissionError:
            raise NotPermitted(f"region_dir {path}: uid {os.geteuid()} may not read it") from None
        except OSError:
            raise ConfigError(f"region_dir {path}: no such folder") from None

    def close(self) -> None:
        self.folder.close()

    def __enter__(self) -> RegionFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def found(self, suffix: str = REGION) -> list[str]:
        """Return the names, less `suffix`, of the files here that a daemon of this endpoint has made.

        What another user has put here by such a name is none of them: it is let alone.
        """
        names = [name.removesuffix(suffix) for name in self.folder.names() if name.endswith(suffix)]
        ours, others = [], 0
        for name in filter(self._pattern.fullmatch, names):
            try:
                if self.folder.check(name + suffix) is not None:
                    ours.append(name)
            except KVCacheError:
                others += 1
        if others:  # one line: whoever may make files here may make many
            log.warning(
                "%s has %d of what is not this daemon's by the names of its *%s files: let alone",
                *(self.folder.path, others, suffix),
            )
        return sorted(ours)

    def header(self, name: str) -> tuple[bytes, int]:
        """Return the first page of a region, and the file's size. Raises OSError."""
        fd = self.folder.open(name + REGION)
        try:
            return os.pread(fd, PAGE, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)

    def claim(self, name: str) -> Claim:
        """Return the hold on a region by its name. Raises EndpointTaken where a living daemon has it."""
        return Claim(self.folder, name, legacy=name == self._prefix)

    def new(self) -> Claim:
        """Return the hold on a name that nobody has. Raises NotPermitted where nothing may be made here, OSError."""
        while True:
            try:
                return Claim(self.folder, f"{self._prefix}-{secrets.token_hex(8)}")
            except EndpointTaken:
                continue  # a daemon elsewhere that tidies up has taken the lock for one that was left behind

    def tidy(self) -> None:
        """Remove the locks of regions that are not there: of a daemon that was killed between two steps."""
        for name in set(self.found(LOCK)) - set(self.found()):
            try:
                claim = self.claim(name)
            except KVCacheError:
                continue  # it is about to make its region
            claim.release() if self.folder.check(name + REGION) else claim.remove()

    def remove_aside(self) -> int:
        """Remove what was put aside; return how many files."""
        return sum(self.folder.remove(name + ASIDE) for name in self.found(ASIDE))

    def remove_all(self, claims: Collection[Claim]) -> int:
        """Remove these regions, and what was put aside and is left over; return how many files."""
        for claim in claims:
            claim.remove()
        self.tidy()
        return len(claims) + self.remove_aside()


class Claim:
    """The hold on one region file, until `release` or `remove`."""

    def __init__(self, folder: Folder, name: str, legacy: bool = False) -> None:
        """Take the lock. Raises EndpointTaken, NotPermitted, ConfigError.

        `legacy`: named as 0.1.0 does, which has its lock on the region.
        """
        self._folder = Folder(folder.path, os.dup(folder.fd))
        self.name = name
        self._legacy_fd = -1
        try:
            self._lock_fd = self._folder.lock(name + LOCK)
            if legacy:
                self._lock_legacy()
        except BlockingIOError:
            self._folder.close()
            raise EndpointTaken(
                f"{self.path} belongs to a living daemon with the same endpoint path, in another container perhaps"
            ) from None
        except PermissionError:
            self._folder.close()
            raise NotPermitted(f"region_dir {folder.path}: uid {os.geteuid()} may not make {self.path}") from None
        except BaseException:
            self._folder.close()
            raise

    def _lock_legacy(self) -> None:
        try:
            self._legacy_fd = self._folder.open(self.name + REGION, os.O_RDWR)
            fcntl.flock(self._legacy_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except BaseException:
            self._close()
            raise

    @property
    def path(self) -> str:
        return self._folder.path_of(self.name + REGION)

    def open(self, flags: int = 0) -> int:
        """Return a descriptor of the region file. Raises as Folder.open does."""
        return self._folder.open(self.name + REGION, os.O_RDWR | flags)

    def create(self) -> int:
        """Make the region file and return a descriptor of it. Raises OSError."""
        return self.open(os.O_CREAT | os.O_EXCL)

    def remove(self) -> None:
        """Remove the region, then its lock. Who has it mapped keeps the mapping."""
        self._folder.remove(self.name + REGION)
        self._folder.remove(self.name + LOCK)
        self._close()

    def put_aside(self) -> str:
        """Give the region a name by which no daemon finds it again, and return its path; "" where it had to go."""
        try:
            self._folder.rename(self.name + REGION, self.name + ASIDE)
            aside = self._folder.path_of(self.name + ASIDE)
        except OSError:  # another user has put something there
            aside = ""
        self.remove()
        return aside

    def release(self) -> None:
        """Let go of it; region and lock stay. Calling it again does nothing."""
        if self._lock_fd >= 0:
            self._close()

    def _close(self) -> None:
        for fd in (self._lock_fd, self._legacy_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._legacy_fd = -1
        self._folder.close()
