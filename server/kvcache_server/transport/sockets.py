"""The daemon's sockets as files: whom the kernel lets through, and whether they still lie where they were put.

A socket is made for its owner alone, and only then opened to whom the configuration names: by an access control list,
so that who is not named cannot even connect.
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
from collections.abc import Callable, Hashable, Iterable, Iterator
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
_NOBODY = 0xFFFFFFFF  # for entries that name no id


MAX_ACCEPTS = 16  # connections between two looks at messages
REFUSED_PAUSE = 0.005  # after a turn in which somebody was refused, who may come again and again
RATE_PAUSE = 0.02  # where they come faster than they may
ACCEPT_PAUSE = 0.5  # after the process ran out of descriptors
BACKLOG = 1024
_UCRED = struct.Struct("iII")
_SO_PEERGROUPS = 59


class Peer(NamedTuple):
    """Who is on the other side, as the kernel says."""

    pid: int
    uid: int
    groups: frozenset[int]


def peer_of(connection: socket.socket) -> Peer:
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)  # Python asks for no more
    except OSError:  # a kernel before 4.13, or more than 256 groups: then the first one alone counts
        packed = b""
    return Peer(pid, uid, frozenset((gid, *(group for (group,) in struct.iter_unpack("I", packed)))))


class Acceptor:
    """Accepts who connects to a listening socket, some at a time; who is not accepted yet waits in the kernel."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        name: str,
        enter: Callable[[socket.socket, Any], bool],
        count: Callable[[str], None],
        rate: Rate | None = None,
    ) -> None:
        """Accept from now on; where there is a `rate`, so often, and one between two looks at messages.

        `name` is what the log calls the socket.

        `enter(connection, address)` takes one in, or closes it; it returns False where somebody had to leave for that.
        `count(reason)` hears of connections that came to nothing: accept_failed, left.
        """
        self._loop, self._socket, self._name = loop, listener, name
        self._enter, self._count, self._rate = enter, count, rate
        self._coming: set[asyncio.Task[object]] = set()
        self._failing = False
        listener.setblocking(False)
        loop.add_reader(listener, self._accept)

    @property
    def coming(self) -> bool:
        """Whether somebody is accepted and not served yet."""
        return bool(self._coming)

    def connect(self, sock: socket.socket, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Have what `protocol()` returns serve an accepted connection, soon."""
        task = self._loop.create_task(self._connect(sock, protocol))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _connect(self, sock: socket.socket, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        try:
            await self._loop.connect_accepted_socket(protocol, sock)
        except OSError:  # it has gone already
            self._count("left")
            sock.close()

    def close(self) -> None:
        """Accept nobody any more. Calling it again does nothing."""
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
                # Out of descriptors, most likely: the connection stays in the backlog, and to ask at once is to spin.
                self._count("accept_failed")
                if not self._failing:
                    log.warning("%s: cannot accept for now: %s", self._name, error)
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
        self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)


class Listener:
    """A Unix socket of the daemon's, at a path: it accepts who connects, and knows who may."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: str,
        endpoint: str,
        enter: Callable[[socket.socket, Peer], bool],
        count: Callable[[str], None],
        rate: Rate | None = None,
    ) -> None:
        """Bind it, replacing a stale one. `enter(connection, peer)` and the others are as `Acceptor` has them.

        Raises EndpointTaken, ConfigError, NotPermitted, OSError.
        """
        listener = _listen(path, endpoint)
        self.place = SocketFile(path)
        self.let_in((), ())
        self._acceptor = Acceptor(loop, listener, path, lambda sock, _: enter(sock, peer_of(sock)), count, rate)
        self.connect = self._acceptor.connect

    def let_in(self, uids: tuple[int, ...], gids: tuple[int, ...]) -> None:
        """Let these users and groups connect from now on besides our own, and nobody else. Raises OSError."""
        admit(self.place.path, uids, gids)
        self._uids = {os.geteuid(), *uids}
        self._gids = {os.stat(self.place.path).st_gid, *gids}

    def admits(self, peer: Peer) -> bool:
        """Whether `peer` may: the file's modes say so to the kernel, but not every file system can hold them."""
        return peer.uid in self._uids or not self._gids.isdisjoint(peer.groups)

    def close(self) -> None:
        """Accept nobody any more, and remove the file. Calling it again does nothing."""
        self._acceptor.close()
        self.place.remove()


Crowded = TypeVar("Crowded")


def who_gives_way(crowd: Iterable[Crowded], whose: Callable[[Crowded], Hashable]) -> Crowded:
    """Return the first one of whoever has most of them."""
    crowd = list(crowd)
    most, _ = Counter(map(whose, crowd)).most_common(1)[0]
    return next(each for each in crowd if whose(each) == most)


def _listen(path: str, endpoint: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode):
            raise ConfigError(f"endpoint {endpoint}: {path} exists and is no socket: remove it, or choose another")
        try:
            _probe(path, endpoint)
            os.unlink(path)
        except PermissionError:
            raise NotPermitted(
                f"endpoint {endpoint}: {path} is a socket of uid {found.st_uid}: remove it, or choose another"
            ) from None
        except (BlockingIOError, TimeoutError):  # who listens there does not accept
            raise EndpointTaken(f"somebody serves {endpoint}: stop it, or choose another endpoint") from None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with private():
            listener.bind(path)
    except PermissionError:
        listener.close()
        raise NotPermitted(f"endpoint {endpoint}: uid {os.geteuid()} may not make {path}") from None
    except OSError:
        listener.close()
        raise
    listener.listen(BACKLOG)
    return listener


def _probe(path: str, endpoint: str) -> None:
    """Raise EndpointTaken where somebody listens at the socket.

    The lock is ours, so nobody should be behind it; it may be another program's, or somebody may have deleted a living
    daemon's lock.
    """
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
        probe.settimeout(1.0)
        probe.connect(path)
        raise EndpointTaken(f"another daemon serves {endpoint}: stop it, or choose another endpoint")


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

    Nobody else, whoever was let in before. Where the file system has no access control lists, everybody may connect,
    and is refused only then (`Listener.admits`); a warning says so.
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


class SocketFile:
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
