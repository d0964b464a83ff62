"""The engine's side of the KV cache daemon.

    session = Session.connect(endpoint, engine="e1")
    namespace = session.attach(NamespaceSpec(model="llama", groups=[GroupSpec(16, 65536)]), shards=(0,))

Importing this touches no device and starts nothing.
"""

from __future__ import annotations

from kvcache_client.session.grants import Lease, PendingReservation, Reservation, Slot
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.region import Region
from kvcache_client.session.session import Session
from kvcache_proto import __version__
from kvcache_proto.errors import (
    BadArgument,
    ClientError,
    ConfigError,
    GeometryMismatch,
    KVCacheError,
    NotPermitted,
    RegionError,
    ServerError,
    Unavailable,
    VersionMismatch,
)
from kvcache_proto.messages import Run
from kvcache_proto.types import BlockRef, GroupSpec, NamespaceSpec, Outcome, Refusal, Verdict

__all__ = [
    "BadArgument",
    "BlockRef",
    "ClientError",
    "ConfigError",
    "GeometryMismatch",
    "GroupSpec",
    "KVCacheError",
    "Lease",
    "Namespace",
    "NamespaceSpec",
    "NotPermitted",
    "Outcome",
    "PendingReservation",
    "Refusal",
    "Region",
    "RegionError",
    "Reservation",
    "Run",
    "ServerError",
    "Session",
    "Slot",
    "Unavailable",
    "Verdict",
    "VersionMismatch",
    "__version__",
]
