"""The errors, grouped by who is at fault.

Each error has a `code`, its name on the wire, so that the client raises the same class as the daemon.
"""

from __future__ import annotations

from typing import ClassVar

from kvcache_proto.text import snake_case


class KVCacheError(Exception):
    """The base class of every error that this project raises on purpose. A class's `code` is its name: `bad_frame`."""

    code: ClassVar[str] = "error"

    def __init_subclass__(cls) -> None:
        cls.code = snake_case(cls.__name__)


class ClientError(KVCacheError):
    """The caller made a mistake; the same call would fail again."""


class BadFrame(ClientError):
    """The frame is not a message of this protocol."""


class BadToken(ClientError):
    """The session token is unknown, or its session has ended."""


class VersionMismatch(ClientError):
    """Client and daemon have no protocol version in common."""


class GeometryMismatch(ClientError):
    """The namespace is registered with other groups, shard sizes or hash length."""


class BadArgument(ClientError):
    """A value is outside the bounds of the protocol; the message names the value and its bounds."""


class UnknownHandle(ClientError):
    """The session does not hold this namespace, lease or reservation."""


class NotPermitted(ClientError):
    """The peer's uid and gid are not allowed, or a limit of the daemon is reached."""


class ConfigError(ClientError):
    """A configuration value, file or flag is invalid."""


class ServerError(KVCacheError):
    """The request was valid, and the daemon could not serve it."""


class RegionError(ServerError):
    """The region cannot be created, mapped or trusted."""


class EndpointTaken(ServerError):
    """Another daemon serves this endpoint."""


class EndpointLost(ServerError):
    """The sockets of a running daemon were removed or replaced."""


class Unavailable(ServerError):
    """No daemon answers at the endpoint, or not within the deadline."""


def _family(cls: type[KVCacheError]) -> dict[str, type[KVCacheError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_family(child))
    return found


_BY_CODE = _family(KVCacheError)


def from_wire(code: str, message: str) -> KVCacheError:
    """Return the error for `code`; a ServerError for an unknown code, which a newer daemon may send."""
    return _BY_CODE.get(code, ServerError)(message)
