"""The endpoint: one path, which names the request socket and, beside it, the handshake socket."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvcache_proto.errors import ConfigError

SCHEME = "ipc://"
SOCKET_NAME = "kvcache/kvcache.sock"
MAX_PATH = 100  # sun_path holds 108 bytes with its NUL
_TOKEN = b"token:"


def default_endpoint(environ: Mapping[str, str] | None = None, uid: int | None = None) -> str:
    """Return the endpoint to use if none is configured.

    The first that applies: `KVCACHE_ENDPOINT`; for root, a path below /run; a path below $XDG_RUNTIME_DIR; a path below
    a folder of the user in /tmp. Raises ConfigError if KVCACHE_ENDPOINT is not a valid endpoint.
    """
    environ = os.environ if environ is None else environ
    uid = os.getuid() if uid is None else uid
    given = environ.get("KVCACHE_ENDPOINT")
    if given:
        return check_endpoint(given)
    if uid == 0:
        return f"{SCHEME}/run/{SOCKET_NAME}"
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return f"{SCHEME}{runtime.rstrip('/')}/{SOCKET_NAME}"
    return f"{SCHEME}/tmp/kvcache-{uid}/kvcache.sock"


def check_endpoint(endpoint: str) -> str:
    """Return `endpoint`. Raises ConfigError unless it is `ipc://` and an absolute path of at most MAX_PATH bytes."""
    if not endpoint.startswith(SCHEME):
        raise ConfigError(f"endpoint {endpoint!r}: only {SCHEME}/path/to/kvcache.sock, the daemon is on this host")
    path = endpoint[len(SCHEME) :]
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(f"endpoint {endpoint!r}: {SCHEME} and the absolute path of a socket")
    if max(len(os.fsencode(path)), len(os.fsencode(_handshake(path)))) > MAX_PATH:
        raise ConfigError(f"endpoint {endpoint!r}: a path of at most {MAX_PATH} bytes, the kernel allows no more")
    return endpoint


def socket_path(endpoint: str) -> str:
    """Return the path of the request socket. Raises ConfigError as `check_endpoint` does."""
    return check_endpoint(endpoint)[len(SCHEME) :]


def handshake_path(endpoint: str) -> str:
    """Return the path of the handshake socket. Raises ConfigError as `check_endpoint` does."""
    return _handshake(socket_path(endpoint))


def closed_folder(path: str) -> str | None:
    """Return the first folder above `path` that this process may not enter; None if it may enter all of them."""
    way = os.path.dirname(os.path.realpath(path))
    while way != (above := os.path.dirname(way)) and not _may_enter(above):
        way = above
    return None if _may_enter(way) else way


def _may_enter(folder: str) -> bool:
    return os.access(folder, os.X_OK, effective_ids=True)


def _handshake(path: str) -> str:
    return path.removesuffix(".sock") + ".door"


def routing_id(token: bytes) -> bytes:
    """Return the routing id of a session's DEALER, by which the daemon knows the session before the first message.

    It must not begin with a zero byte: ZeroMQ reserves such names.
    """
    return _TOKEN + token


def token_of(routing_id: bytes) -> bytes:
    """Return the token in `routing_id`; empty if there is none."""
    return routing_id.removeprefix(_TOKEN) if routing_id.startswith(_TOKEN) else b""
