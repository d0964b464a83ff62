"""What can go wrong, sorted by whose fault it is.

Each error has a `code`, its name on the wire, so that a client raises the class that the daemon meant.
"""

from __future__ import annotations


class KVCacheError(Exception):
    """Base of every error that this project raises on purpose."""

    code = "error"


class ClientError(KVCacheError):
    """The caller asked for something wrong; asking again the same way fails the same way."""

    code = "client_error"


class BadFrame(ClientError):
    """A frame that is no message of this protocol."""

    code = "bad_frame"


class BadToken(ClientError):
    """The session token is unknown or its session has ended."""

    code = "bad_token"


class VersionMismatch(ClientError):
    """Client and daemon speak protocol versions that do not meet."""

    code = "version_mismatch"


class GeometryMismatch(ClientError):
    """The namespace is registered with other groups, shard sizes or hash length."""

    code = "geometry_mismatch"


class BadArgument(ClientError):
    """A value outside of what the protocol allows; the message names it and its bounds."""

    code = "bad_argument"


class UnknownHandle(ClientError):
    """A namespace, lease or reservation that this session does not hold."""

    code = "unknown_handle"


class NotPermitted(ClientError):
    """The peer's uid and gid are not on the allowed list, or a limit of the daemon is reached."""

    code = "not_permitted"


class ConfigError(ClientError):
    """A configuration value, file or flag that cannot be used."""

    code = "config_error"


class ServerError(KVCacheError):
    """The request was sound and the daemon could not serve it."""

    code = "server_error"


class RegionError(ServerError):
    """The region cannot be made, mapped or trusted."""

    code = "region_error"


class EndpointTaken(ServerError):
    """Another daemon serves this endpoint."""

    code = "endpoint_taken"


class EndpointLost(ServerError):
    """Somebody removed or replaced the sockets of a daemon that serves."""

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
    """Return the error that `code` names; an unknown code, from a newer daemon, gives a ServerError."""
    return _BY_CODE.get(code, ServerError)(message)
