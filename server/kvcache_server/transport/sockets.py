"""The daemon's listening sockets: the users that may connect, the rate of connections, and checks that the files are in
place.

A socket is created for its owner only, and then opened by an access control list to the users and groups in the
configuration: no other user can even connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

from kvcache_proto.errors import ConfigError, EndpointTaken, NotPermitted
from kvcache_server.rates import Rate

log = logging.getLogger(__name__)

# An access control list as the kernel takes it (linux/posix_acl_xattr.h): a version, then (tag, permissions, id) each.
_ACL = "system.posix_acl_access"
_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_OWNER, _USER, _OWNING_GROUP, _GROUP, _MASK, _OTHER = 1, 2, 4, 8, 16, 32
_READ_WRITE = 6  # to connect is to write; ls shows both
_NOBODY = 0xFFFFFFFF  # in entries without an id

MAX_ACCEPTS = 16  # connections accepted in one iteration of the loop
REFUSED_PAUSE = 0.005  # seconds after a refused connection: its peer may retry at once
RATE_PAUSE = 0.02  # seconds, when connections exceed the rate
ACCEPT_PAUSE = 0.5  # seconds after the process ran out of descriptors
BACKLOG = 1024
_UCRED = struct.Struct("iII")
_SO_PEERGROUPS = 59


class Peer(NamedTuple):
    """The process on the other side, as the kernel reports it."""

    pid: int
    uid: int
    groups: frozenset[int]


def peer_of(connection: socket.socket) -> Peer:
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)  # the maximum of Python's getsockopt
    except OSError:  # a kernel before 4.13, or more than 256 groups: then only the primary group counts
        packed = b""
    return Peer(pid, uid, frozenset((gid, *(group for (group,) in struct.iter_unpack("I", packed)))))


class Acceptor:
    """Accepts connections to a listening socket, a few at a time; the rest wait in the kernel."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        name: str,
        enter: Callable[[socket.socket, Any], bool],
        count: Callable[[str], None],
        rate: Rate | None = None,
    ) -> None:
        """Start to accept; if `rate` is given, at that rate, and one connection per iteration of the loop.

        Args:
            name: of the socket, for the log.
            enter: called with (connection, address); takes the connection in or closes it, and returns False if a
                connection had to be refused.
            count: called with the reason of each connection that failed: accept_failed, left.
        """
        self._loop, self._socket, self._name = loop, listener, name
        self._enter, self._count, self._rate = enter, count, rate
        self._coming: set[asyncio.Task[object]] = set()
        self._failing = False
        listener.setblocking(False)
        loop.add_reader(listener, self._accept)

    @property
    def coming(self) -> bool:
        """Whether an accepted connection is not served yet."""
        return bool(self._coming)

    def connect(self, sock: socket.socket, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Let `protocol()` serve an accepted connection, soon."""
        task = self._loop.create_task(self._connect(sock, protocol))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _connect(self, sock: socket.socket, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        try:
            await self._loop.connect_accepted_socket(protocol, sock)
        except OSError:  # the peer has gone already
            self._count("left")
            sock.close()

    def close(self) -> None:
        """Stop accepting. Calling it again does nothing."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        for task in self._coming:
            task.cancel()

    def _accept(self) -> None:
        welcome = True
        for _ in range(MAX_ACCEPTS if self._rate is None else 1):
            if self._rate is not None and not self._rate.allow(self._name, self._loop.time()):
                self._rest(RATE_PAUSE)
                return
            try:
                sock, address = self._socket.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # Most likely out of descriptors: the connection stays in the backlog, and retrying at once would spin.
                self._count("accept_failed")
                if not self._failing:
                    log.warning("%s: cannot accept connections at the moment: %s", self._name, error)
                self._failing = True
                self._rest(ACCEPT_PAUSE)
                return
            self._failing = False
            sock.setblocking(False)
            welcome &= self._enter(sock, address)
        if not welcome:
            self._rest(REFUSED_PAUSE)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.call_later(seconds, self._continue)

    def _continue(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)


class Listener(Acceptor):
    """A listening Unix socket at `path`, and the users that may connect to it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: str,
        endpoint: str,
        enter: Callable[[socket.socket, Peer], bool],
        count: Callable[[str], None],
        rate: Rate | None = None,
    ) -> None:
        """Bind it, replacing a stale one. `enter` is called with (connection, peer); the other arguments are those of
        Acceptor.

        Raises EndpointTaken, ConfigError, NotPermitted, OSError.
        """
        listener = _listen(path, endpoint)
        self.path = path
        self._found = os.lstat(path)
        self.allow_users((), ())
        super().__init__(loop, listener, path, lambda sock, _: enter(sock, peer_of(sock)), count, rate)

    def allow_users(self, uids: tuple[int, ...], gids: tuple[int, ...]) -> None:
        """Allow only these users and groups, and our own, to connect from now on. Raises OSError."""
        set_access(self.path, uids, gids)
        self._uids = {os.geteuid(), *uids}
        self._gids = {os.stat(self.path).st_gid, *gids}

    def allows(self, peer: Peer) -> bool:
        """Return True if `peer` may connect. The kernel checks this, too, if there are access control lists."""
        return peer.uid in self._uids or not self._gids.isdisjoint(peer.groups)

    def admit(self, sock: socket.socket, peer: Peer, protocol: Callable[[], asyncio.BaseProtocol]) -> bool:
        """Let `protocol()` serve the connection if `peer` may connect; otherwise close it. Return True if it may."""
        if self.allows(peer):
            self.connect(sock, protocol)
            return True
        self._count("not_permitted")
        sock.close()
        return False

    def is_ours(self) -> bool:
        """Return True if the path still leads to this socket: it was neither removed nor replaced."""
        try:
            return os.path.samestat(self._found, os.lstat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        """Stop accepting, and remove the file unless it was replaced. Calling it again does nothing."""
        super().close()
        if self.is_ours():
            os.unlink(self.path)


Member = TypeVar("Member")


def choose_victim(crowd: Iterable[Member], whose: Callable[[Member], Hashable]) -> Member:
    """Return the first member of `crowd` that belongs to the owner of most members."""
    crowd = list(crowd)
    most, _ = Counter(map(whose, crowd)).most_common(1)[0]
    return next(each for each in crowd if whose(each) == most)


def _listen(path: str, endpoint: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode):
            raise ConfigError(f"endpoint {endpoint}: {path} exists and is not a socket: remove it or choose another")
        try:
            _probe(path, endpoint)
            os.unlink(path)
        except PermissionError:
            raise NotPermitted(
                f"endpoint {endpoint}: {path} is a socket of uid {found.st_uid}: remove it or choose another"
            ) from None
        except (BlockingIOError, TimeoutError):  # a listener that does not accept
            raise EndpointTaken(f"another process serves {endpoint}: stop it or choose another endpoint") from None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    umask = os.umask(0o177)  # for its owner only
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise NotPermitted(f"endpoint {endpoint}: uid {os.geteuid()} may not create {path}") from None
        raise
    finally:
        os.umask(umask)
    listener.listen(BACKLOG)
    return listener


def _probe(path: str, endpoint: str) -> None:
    """Raise EndpointTaken if a process listens at the socket.

    We hold the endpoint's lock, so no daemon should; but the socket may be another program's, or the lock file of a
    running daemon may have been deleted.
    """
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(path)
        raise EndpointTaken(f"another daemon serves {endpoint}: stop it or choose another endpoint")


def set_access(path: str, uids: Iterable[int], gids: Iterable[int]) -> None:
    """Allow only the owner and group of the socket at `path`, and these users and groups, to connect.

    If the file system has no access control lists, all users can connect, and `Listener.allows` refuses them only then;
    a warning is logged.
    """
    uids, gids = sorted(set(uids)), sorted(set(gids))
    if not uids and not gids:
        with contextlib.suppress(OSError):  # usually there is none
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
            "%s does not support access control lists (%s): every local user can connect, and is refused only then; to "
            "let the kernel refuse them, use a folder on another file system, or let one group own the folder",
            path,
            error.strerror,
        )
        os.chmod(path, 0o666)
