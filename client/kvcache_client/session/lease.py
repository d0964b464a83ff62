"""The right to read the slots of a prefix."""

from __future__ import annotations

from kvcache_client.session.connection import Connection
from kvcache_client.session.daemon import Daemon
from kvcache_client.session.slots import Parts, Slot, unpack_slots
from kvcache_proto.messages import Acquired, Release
from kvcache_proto.types import FULL, REF_BYTES

_NOTHING = Acquired(0, 0, 0, 0, b"")


class Lease:
    """The answer to a lookup: the longest cached prefix, pinned until `release` or the end of the session.

    In a namespace with tails, that is the longest prefix after which an engine can continue.

    Attributes:
        id: the daemon's number; 0 if nothing is pinned.
        hits: number of leading hashes that are cached.
        packed: their slots' references, REF_BYTES each: those of the full group, then those of each tail.
        parts: the groups that they belong to, in their order.
        pending: number of blocks after the hits that are being written now.
        withheld: number of blocks after the hits that are cached, but beyond this engine's pin quota.
        coming: number of blocks after the hits that a tier is fetching; some may be pending already.
        eta: seconds until those are expected; if there are none, until it is known whether tiers have some, else 0.
        junction: number of blocks after which an engine could continue if it had the tails there; 0 if that is not more
            than the cached ones, `withheld` included.
        failed: whether the daemon did not answer; the lease then has no information on the cache.
        sums: if requested, a checksum per shard of each slot, SUM_BYTES each, 0 for none.
        region_id: the region that the slots lie in; b"" if there are none.
    """

    def __init__(
        self,
        daemon: Daemon,
        connection: Connection | None,
        parts: Parts = (),
        found: Acquired = _NOTHING,
        failed: bool = False,
    ) -> None:
        self._daemon, self._connection, self.parts, self.failed = daemon, connection, parts, failed
        self._slots: list[Slot] | None = None
        self.id, self.hits, self.pending, self.packed = found.lease, found.hits, found.pending, found.slots
        self.withheld, self.sums, self.coming, self.eta = found.withheld, found.sums, found.coming, found.eta_ms / 1000
        self.junction = found.junction
        self.region_id = connection.region.id if connection and found.hits else b""
        if found.lease and connection is not None:
            full, count = parts[0]
            before = max(0, count - 1) if full.kind == FULL else 0
            connection.leases[found.lease] = found.slots[before * REF_BYTES :]

    @property
    def slots(self) -> list[Slot]:
        """The slots of all groups, in the order of `packed`; slot i of a full group holds hash i."""
        if self._slots is None:
            region = self._connection.region if self._connection else None
            self._slots = unpack_slots(self.packed, self.parts, region, writable=False)
        return self._slots

    def release(self) -> None:
        """Unpin the slots; from any thread, never waits. Idempotent; after the session's end it does nothing."""
        lease, self.id = self.id, 0
        if lease and self._connection is not None:
            self._connection.leases.pop(lease, None)
            self._daemon.post(self._connection, Release(0, b"", [lease]), "stale_releases")

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *failure: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, hits={self.hits}, pending={self.pending}, failed={self.failed})"
