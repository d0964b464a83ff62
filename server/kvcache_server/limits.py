"""The bounds of the state machine. Pure."""

from __future__ import annotations

import msgspec


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
    max_namespaces: int = 1024
    max_leases: int = 4096
