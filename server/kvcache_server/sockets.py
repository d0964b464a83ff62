"""The daemon's sockets as files: whom the kernel lets through, and whether they still lie where they were put.

A socket is made for its owner alone, and only then opened to whom the configuration names: by an access control list,
so that who is not named cannot even connect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Iterable, Iterator

import zmq

from kvcache_proto.codec import MAX_FRAME
from kvcache_proto.errors import NotPermitted

log = logging.getLogger(__name__)

# An access control list as the kernel takes it (linux/posix_acl_xattr.h): a version, then (tag, permissions, id) each.
_ACL = "system.posix_acl_access"
_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_OWNER, _USER, _OWNING_GROUP, _GROUP, _MASK, _OTHER = 1, 2, 4, 8, 16, 32
_READ_WRITE = 6  # to connect is to write; ls shows both
_NOBODY = 0xFFFFFFFF  # for entries that name no id


MAX_WIRE = 2 * MAX_FRAME  # up to here a frame is told that it is too long; beyond, ZeroMQ cuts its sender off
RECEIVE_QUEUE = 32  # messages a peer may have under way; more wait on its side
SEND_QUEUE = 1024  # replies that a peer may leave unread


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Return the socket that requests come by. Raises NotPermitted where it cannot be bound."""
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # who has gone, or does not read, is an error here and is counted
    router.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE)
    router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    router.setsockopt(zmq.LINGER, 100)
    router.setsockopt(zmq.BACKLOG, 1024)
    try:
        with private():
            router.bind(endpoint)
    except zmq.ZMQError as error:
        raise NotPermitted(f"endpoint {endpoint}: cannot be bound: {error}") from None
    return router


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Have what is made inside be its owner's alone."""
    umask = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(umask)


def admit(path: str, uids: Iterable[int], gids: Iterable[int]) -> None:
    """Let owner and group of the socket at `path` connect, and those users and groups.

    Nobody else, whoever was let in before. Where the file system has no access control lists, everybody may connect:
    the door still refuses whom the lists do not name, and the ROUTER answers nobody without a token; a warning says so.
    """
    uids, gids = sorted(set(uids)), sorted(set(gids))
    if not uids and not gids:
        with contextlib.suppress(OSError):  # there is none, as a rule
            os.removexattr(path, _ACL)
        os.chmod(path, 0o660)
        return
    entries = [(_OWNER, _READ_WRITE, _NOBODY), *((_USER, _READ_WRITE, uid) for uid in uids)]
    entries += [(_OWNING_GROUP, _READ_WRITE, _NOBODY), *((_GROUP, _READ_WRITE, gid) for gid in gids)]
    entries += [(_MASK, _READ_WRITE, _NOBODY), (_OTHER, 0, _NOBODY)]
    try:
        os.setxattr(path, _ACL, _VERSION + b"".join(_ENTRY.pack(*entry) for entry in entries))
    except OSError as error:
        log.warning(
            "%s takes no access control list (%s): every local user may connect, and only then be refused; to have "
            "the kernel keep them away, name a folder on another file system, or let one group own the folder",
            path,
            error.strerror,
        )
        os.chmod(path, 0o666)


class Place:
    """The file that a socket was bound to."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._found = os.lstat(path)

    def is_ours(self) -> bool:
        """Whether the path still leads to this socket: somebody may have removed the file, or put another there."""
        try:
            return os.path.samestat(self._found, os.lstat(self.path))
        except OSError:
            return False

    def remove(self) -> None:
        """Remove the file, unless it is another's by now."""
        if self.is_ours():
            os.unlink(self.path)
