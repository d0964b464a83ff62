"""Session files: each is locked for as long as its client lives, in any pid namespace and across restarts of the
daemon.

The daemon creates a file, locks it, passes the descriptor to the client and closes its own: then only the client holds
the lock. The next daemon finds out from the same file whether the client lives. No process may write to it, not even
its client, which could fill the file system that has the daemon's own files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Collection

from kvcache_server.core.journal import SESSION_FILE
from kvcache_server.storage.folder import Folder

_NAME = re.compile(SESSION_FILE)  # files with other names are not deleted


class SessionFiles:
    """The session files of one endpoint, in the folder `name` within the endpoint's folder."""

    def __init__(self, folder: Folder, name: str) -> None:
        """Raises ConfigError, NotPermitted if something else has that name."""
        self._outer, self._name = folder, name
        self._folder: Folder | None = None
        with contextlib.suppress(FileNotFoundError):
            self._folder = folder.folder(name)

    @property
    def folder(self) -> str:
        return self._outer.path_of(self._name)

    def make(self, session: int) -> tuple[int, str]:
        """Return a descriptor of a new file, and its name. The file is locked as long as this open file description
        exists.

        Descriptor and file are read-only. Raises OSError, ConfigError, NotPermitted.
        """
        name = f"{session}-{secrets.token_hex(4)}"
        try:
            fd = self._create(name)
        except FileNotFoundError:  # the folder does not exist yet, or was removed
            self._leave()
            self._folder = self._outer.folder(self._name, make=True)
            fd = self._create(name)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd, name

    def _create(self, name: str) -> int:
        if self._folder is None:
            raise FileNotFoundError(self.folder)
        return self._folder.open(name, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o400)

    def locked(self, name: str) -> bool:
        """Whether the client that holds this file lives."""
        if self._folder is None:
            return False
        try:
            fd = self._folder.open(name)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def remove(self, name: str) -> None:
        if self._folder is not None:
            self._folder.remove(name)

    def keep(self, names: Collection[str]) -> None:
        """Remove all other session files."""
        if self._folder is not None:
            for name in set(self._folder.names()) - set(names):
                if _NAME.fullmatch(name):
                    self._folder.remove(name)

    def close(self) -> None:
        """Remove all session files, and the folder if it is empty then."""
        self.keep(())
        self._leave()
        self._outer.remove_folder(self._name)

    def _leave(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None
