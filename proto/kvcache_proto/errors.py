"""The errors, grouped by who is at fault.

Each error has a `code`, its name on the wire, so that the client raises the same class as the daemon.
"""

from __future__ import annotations


class KVCacheError(Exception):
    """The base class of every error that this project raises on purpose."""

    code = "error"


class ClientError(KVCacheError):
    """The caller made a mistake; the same call would fail again."""

    code = "client_error"


class BadFrame(ClientError):
    """The frame is not a message of this protocol."""

    code = "bad_frame"


class BadToken(ClientError):
    """The session token is unknown, or its session has ended."""

    code = "bad_token"


class VersionMismatch(ClientError):
    """Client and daemon have no protocol version in common."""

    code = "version_mismatch"


class GeometryMismatch(ClientError):
    """The namespace is registered with other groups, shard sizes or hash length."""

    code = "geometry_mismatch"


class BadArgument(ClientError):
    """A value is outside the bounds of the protocol; the message names the value and its bounds."""

    code = "bad_argument"


class UnknownHandle(ClientError):
    """The session does not hold this namespace, lease or reservation."""

    code = "unknown_handle"


class NotPermitted(ClientError):
    """The peer's uid and gid are not allowed, or a limit of the daemon is reached."""

    code = "not_permitted"


class ConfigError(ClientError):
    """A configuration value, file or flag is invalid."""

    code = "config_error"


class ServerError(KVCacheError):
    """The request was valid, and the daemon could not serve it."""

    code = "server_error"


class RegionError(ServerError):
    """The region cannot be created, mapped or trusted."""

    code = "region_error"


class EndpointTaken(ServerError):
    """Another daemon serves this endpoint."""

    code = "endpoint_taken"


class EndpointLost(ServerError):
    """The sockets of a running daemon were removed or replaced."""

    code = "endpoint_lost"


class Unavailable(ServerError):
    """No daemon answers at the endpoint, or not within the deadline."""

    code = "unavailable"


def _family(cls: type[KVCacheError]) -> dict[str, type[KVCacheError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        found.update(_family(child))
    return found


_BY_CODE = _family(KVCacheError)


def from_wire(code: str, message: str) -> KVCacheError:
    """Return the error for `code`; a ServerError for an unknown code, which a newer daemon may send."""
    return _BY_CODE.get(code, ServerError)(message)
