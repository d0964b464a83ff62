"""The operator's token: a file beside the endpoint, for the daemon's user alone. Who can read it may change things."""

from __future__ import annotations

import os
import secrets

from kvcache_proto.errors import ConfigError, NotPermitted
from kvcache_server.storage.folder import Folder, open_folder

LEAST = 16  # characters; what is shorter could be guessed
MOST = 256


class BearerToken:
    """A token, and whether somebody has it."""

    def __init__(self, path: str) -> None:
        """Read the token at `path`, or make one there. Raises ConfigError where the file is not to be trusted."""
        self.path = path
        name = os.path.basename(path)
        try:
            with open_folder(os.path.dirname(path)) as folder:
                token = _read(folder, name)
                if token is None:
                    token = _make(folder, name)
        except OSError as error:
            raise ConfigError(f"token {path}: {error.strerror}") from None
        except NotPermitted as error:
            raise ConfigError(
                f"token {error}, and the daemon makes another: whoever may have read this one keeps it"
            ) from None
        self._token = token.encode()

    def admits(self, authorization: str) -> bool:
        """Whether that header bears the token."""
        return bears_token(authorization, self._token)


def bears_token(authorization: str, token: bytes) -> bool:
    """Whether that header bears that token; takes as long for a wrong one as for the right one."""
    scheme, _, offered = authorization.partition(" ")
    # Both, always: the comparison must not say by its absence that the scheme was wrong, either.
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
            f"token {folder.path_of(name)}: {LEAST} to {MOST} letters without spaces: remove it, and the daemon makes "
            "another"
        )
    return token
