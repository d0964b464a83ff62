"""The descriptors that a forked child must close.

A child inherits the handshake connection and the session lock; if they stayed open there, they would keep the parent's
session alive after the parent's death. Descriptors are registered here from the moment they exist, so that no fork
comes in between.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import threading
from collections.abc import Iterable

from kvcache_proto.errors import ClientError

guard = threading.Lock()  # no fork happens while it is held: between the creation of a descriptor and `adopt`
_descriptors: set[int] = set()
_socket_paths: set[str] = set()
_pid = os.getpid()

MAX_GUESSED = 1 << 16  # descriptors that are checked if there is no list of them


def adopt(descriptor: int) -> int:
    """Have forked children close `descriptor`. Call it under `guard`, held since before the descriptor was created."""
    _descriptors.add(descriptor)
    return descriptor


def adopt_peer(path: str) -> None:
    """Have forked children close every socket connected to `path`: ZeroMQ does not report its descriptors."""
    _socket_paths.add(path)


def close(descriptor: int) -> None:
    """Close an adopted descriptor."""
    with guard:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def current() -> int:
    """Return a number that differs in a forked child."""
    return _pid


def check(owner: int) -> None:
    """Raise ClientError unless this is the process in which `current` returned `owner`."""
    if owner != _pid:
        raise ClientError(f"this session belongs to process {owner}: a forked child connects a session of its own")


def _in_child() -> None:
    global _pid
    _pid = os.getpid()
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    if _socket_paths:
        for descriptor in _open_descriptors():
            with contextlib.suppress(OSError):
                _close_if_ours(descriptor)
    _socket_paths.clear()
    guard.release()


def _open_descriptors() -> Iterable[int]:
    """Return all open descriptors; in a root without /proc, all that are likely to be open."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(MAX_GUESSED if soft == resource.RLIM_INFINITY else min(soft, MAX_GUESSED))


def _close_if_ours(descriptor: int) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    peer = socket.socket(fileno=descriptor)
    try:
        ours = peer.family == socket.AF_UNIX and peer.getpeername() in _socket_paths
    finally:
        peer.detach()
    if ours:
        os.close(descriptor)


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_in_child)
