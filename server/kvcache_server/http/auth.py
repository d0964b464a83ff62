"""The operator's token: a file beside the endpoint, which only the daemon's user can read. It permits changes."""

from __future__ import annotations

import os
import secrets

from kvcache_proto.errors import ConfigError, NotPermitted
from kvcache_server.storage.folder import Folder, open_folder

LEAST = 16  # characters; a shorter one could be guessed
MOST = 256


def read_token(path: str) -> bytes:
    """Return the token at `path`, which is created if it is not there. Raises ConfigError if the file cannot be
    trusted."""
    name = os.path.basename(path)
    try:
        with open_folder(os.path.dirname(path)) as folder:
            return (_read(folder, name) or _make(folder, name)).encode()
    except OSError as error:
        raise ConfigError(f"token {path}: {error.strerror}") from None
    except NotPermitted as error:
        raise ConfigError(f"token {error}, and the daemon creates another one: others may have read this one") from None


def bears_token(authorization: str, token: bytes) -> bool:
    """Return True if the `Authorization` header carries `token`, in the same time for a wrong one as for the right."""
    scheme, _, offered = authorization.partition(" ")
    # Always compare, so that the time does not reveal a wrong scheme either.
    same = secrets.compare_digest(offered.strip().encode(errors="surrogateescape"), token)
    return scheme.lower() == "bearer" and same


def _make(folder: Folder, name: str) -> str:
    token = secrets.token_urlsafe(32)
    fd = folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with os.fdopen(fd, "w") as file:
        file.write(token + "\n")
    return token


def _read(folder: Folder, name: str) -> str | None:
    try:
        fd = folder.open(name)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        token = file.read(MOST + 2).decode("ascii", "replace").strip()
    if not LEAST <= len(token) <= MOST or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"token {folder.path_of(name)}: {LEAST} to {MOST} ASCII characters without spaces expected: remove the "
            "file, and the daemon creates another one"
        )
    return token
