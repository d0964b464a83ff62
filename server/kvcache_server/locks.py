"""The session files: each is locked for as long as its client lives, in any pid namespace, whoever the daemon is.

The daemon makes a file, locks it, hands the descriptor over and closes its own: what is left is the client's. The next
daemon asks the same file whether that client lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Collection


class SessionFiles:
    """The files of one endpoint, in a folder of the daemon's own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def make(self, session: int) -> tuple[int, str]:
        """Return a descriptor of a new file, locked for as long as somebody has this description open, and its name."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
        name = f"{session}-{secrets.token_hex(4)}"
        fd = os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd, name

    def locked(self, name: str) -> bool:
        """Whether the client that was given this file lives."""
        try:
            fd = os.open(self._path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
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
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def keep(self, names: Collection[str]) -> None:
        """Remove all others."""
        with contextlib.suppress(FileNotFoundError):
            for name in set(os.listdir(self.folder)) - set(names):
                self.remove(name)

    def close(self) -> None:
        """Remove them all, and the folder."""
        self.keep(())
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.folder)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)
