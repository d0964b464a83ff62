"""The bounds of the state machine: the configured ones, and those of the work done at once. Pure."""

from __future__ import annotations

import msgspec

OPERATOR = "kvcache-server"  # the engine id of commands by default; some sessions are reserved for it
STEP = 64  # blocks granted, settled, removed or evicted in one slice: half a millisecond
LOOK = 4096  # blocks, hashes or rows examined in one slice


class Limits(msgspec.Struct, frozen=True):
    """Bounds of the state machine. Times are in seconds; quotas, floors and ceilings are fractions of the pool."""

    pin_quota: float = 0.5
    write_quota: float = 0.5
    retain_quota: float = 0.1
    operator_quota: float = 0.25
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
        return self.max_user_sessions or _most_of(self.max_sessions)

    @property
    def user_namespaces(self) -> int:
        return self.max_user_namespaces or _most_of(self.max_namespaces)


def _most_of(count: int) -> int:
    """Return one user's default share of a limit: an eighth is left for other users."""
    return count - count // 8
