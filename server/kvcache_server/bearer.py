"""The operator's token: a file beside the endpoint, for the daemon's user alone. Who can read it may change things."""

from __future__ import annotations

import os
import secrets
import stat

from kvcache_proto.errors import ConfigError

LEAST = 16  # characters; what is shorter could be guessed
MOST = 256


class Bearer:
    """A token, and whether somebody has it."""

    def __init__(self, path: str) -> None:
        """Read the token at `path`, or make one there. Raises ConfigError where the file is not to be trusted."""
        self.path = path
        try:
            token = _read(path)
            if token is None:
                token = _make(path)
        except OSError as error:
            raise ConfigError(f"token {path}: {error.strerror}") from None
        self._token = token.encode()

    def admits(self, authorization: str) -> bool:
        """Whether that header bears the token."""
        return bears(authorization, self._token)


def bears(authorization: str, token: bytes) -> bool:
    """Whether that header bears that token; takes as long for a wrong one as for the right one."""
    scheme, _, offered = authorization.partition(" ")
    # Both, always: the comparison must not say by its absence that the scheme was wrong, either.
    same = secrets.compare_digest(offered.strip().encode(errors="surrogateescape"), token)
    return scheme.lower() == "bearer" and same


def _make(path: str) -> str:
    token = secrets.token_urlsafe(32)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")
    return token


def _read(path: str) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(f"token {path}: no file of uid {os.geteuid()}: remove it, and the daemon makes one")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                f"token {path}: others may read or change it (mode {stat.S_IMODE(found.st_mode):04o}): remove it, and "
                "the daemon makes another, for whoever has read this one keeps it"
            )
        token = file.read(MOST + 2).decode("ascii", "replace").strip()
    if not LEAST <= len(token) <= MOST or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"token {path}: {LEAST} to {MOST} letters without spaces: remove it, and the daemon makes one"
        )
    return token
