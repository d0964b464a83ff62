"""The users that a client trusts as servers: it gives them the KV of prompts, and computes with the KV that they
return.

The default endpoint of a user may be in /tmp, where a folder belongs to the user who creates it first. A client
therefore asks the kernel which user listens on the handshake socket, and checks which users could replace the sockets
or a folder on the path.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterator, Mapping

from kvcache_proto.endpoint import handshake_path, socket_path
from kvcache_proto.errors import ConfigError, NotPermitted, Unavailable
from kvcache_proto.users import parse_ids, user

VARIABLE = "KVCACHE_SERVER_UIDS"
MAX_LINKS = 40  # on the path to a socket; the limit of the kernel
_UCRED = struct.Struct("iII")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_USERS = (1 << 32) - 1
_HOW = f"name it in server_uids (of the connector, of `Session`) or in {VARIABLE}"


def server_uids(given: object = (), environ: Mapping[str, str] | None = None) -> frozenset[int]:
    """Return the trusted users besides root and the own user: those in `given`, else those in the variable.

    They are names or numbers, in a list or separated by commas. Raises ConfigError.
    """
    if given not in ((), [], "", None):
        return _parsed("server_uids", given)
    return _parsed(VARIABLE, (os.environ if environ is None else environ).get(VARIABLE, ""))


def _parsed(name: str, value: object) -> frozenset[int]:
    try:
        return frozenset(parse_ids(value, "user", user))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def check_server(connection: socket.socket, endpoint: str, named: frozenset[int]) -> None:
    """Raise NotPermitted unless the user who listens on the other side of `connection`, a connected socket, is trusted.

    Trusted are root, this process's user, the users in `named`, and the owner of the endpoint's folder if only root
    could have created it there, as systemd does with /run/kvcache. Only trusted users may own a folder, a link or a
    socket on the path, because an owner could replace it between two checks. Users that are unknown to this user
    namespace all have the same number, which is trusted only if it is named. Raises Unavailable if the path has
    disappeared meanwhile.
    """
    unknown = _unknown_user()
    trusted = ({0, os.geteuid()} - {unknown}) | named
    path = handshake_path(endpoint)
    try:
        *above, (_, folder) = _way(os.path.dirname(path))
        if all(_is_safe(each, trusted) for _, each in above) and folder.st_uid != unknown:
            trusted.add(folder.st_uid)
        for each, found in (*_way(path), *_way(socket_path(endpoint))):
            if found.st_uid not in trusted and found.st_uid != unknown:
                raise NotPermitted(
                    f"{each} belongs to {_called(found.st_uid)}, who could serve there instead of {_us()} or root: "
                    f"choose another endpoint, or, to trust that user, {_HOW}"
                )
    except OSError as error:
        raise Unavailable(f"no daemon at {path} any more ({error.strerror})") from None
    _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if uid in trusted:
        return
    if uid == unknown:
        raise NotPermitted(
            f"{path}: uid {uid} serves there, which stands for every user that this user namespace (a container's, or "
            "that of a unit with PrivateUsers=) does not know, the host's root among them: to trust whoever can write "
            f"in that folder, set server_uids (of the connector, of `Session`) or {VARIABLE}={uid}"
        )
    raise NotPermitted(f"{path}: {_called(uid)} serves there, not {_us()} or root: to trust that user, {_HOW}")


def _way(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each folder and link on the path to `path`, then `path` if it exists, with its stat. Raises OSError."""
    left, at, links = path.split("/")[::-1], "/", 0
    yield at, os.lstat(at)
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, part)
        try:
            found = os.lstat(here)
        except FileNotFoundError:
            if left:
                raise
            return
        yield here, found
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(0, "too many links")
            target = os.readlink(here)
            at = "/" if target.startswith("/") else at
            left.extend(target.split("/")[::-1])
        else:
            at = here


def _is_safe(found: os.stat_result, trusted: set[int]) -> bool:
    """Return True if only trusted users can create files there. The mode of a link has no effect."""
    return found.st_uid in trusted and (stat.S_ISLNK(found.st_mode) or not found.st_mode & _OTHERS_WRITE)


def _unknown_user() -> int | None:
    """Return the number of all users that this user namespace does not know; None if it knows all users."""
    try:
        with open("/proc/self/uid_map") as file:
            if sum(int(line.split()[2]) for line in file) >= _ALL_USERS:
                return None
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except (OSError, ValueError, IndexError):
        return 65534


def _us() -> str:
    return f"this user (uid {os.geteuid()})"


def _called(uid: int) -> str:
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"
