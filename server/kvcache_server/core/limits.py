"""The bounds of the state machine. Pure."""

from __future__ import annotations

import msgspec

OPERATOR = "kvcache-server"  # the engine that a command is, where it says nothing else; some sessions are kept for it


class Limits(msgspec.Struct, frozen=True):
    """Bounds of the state machine. Times are seconds, quotas and floors are parts of the pool."""

    pin_quota: float = 0.25
    write_quota: float = 0.5
    supersede_after: float = 2.0
    quarantine: float = 10.0
    grace: float = 10.0
    namespace_floor: float = 0.0
    namespace_ceiling: float = 1.0
    max_sessions: int = 1024
    max_user_sessions: int = 0
    max_namespaces: int = 1024
    max_user_namespaces: int = 0
    max_leases: int = 4096

    @property
    def user_sessions(self) -> int:
        """How many sessions one user may have."""
        return self.max_user_sessions or _most_of(self.max_sessions)

    @property
    def user_namespaces(self) -> int:
        """How many of the namespaces that there are one user may have made."""
        return self.max_user_namespaces or _most_of(self.max_namespaces)


def _most_of(count: int) -> int:
    """Return what one user may have of what all share, where nothing is configured: the others find an eighth."""
    return count - count // 8
