"""The right to read the slots of a prefix."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kvcache_client.session.slots import Slot, unpack_slots
from kvcache_proto.messages import Release
from kvcache_proto.types import REF_BYTES, GroupSpec

if TYPE_CHECKING:
    from kvcache_client.session.connection import Link
    from kvcache_client.session.session import Session


class Lease:
    """The answer to a lookup: the longest cached prefix, pinned until `release` or the end of the session.

    Attributes:
        id: the daemon's number; 0 where nothing is pinned.
        hits: how many hashes from the first one on are cached.
        packed: their slots' references, REF_BYTES each.
        pending: how many blocks after them are being written now.
        withheld: how many blocks after them are cached, but beyond what this engine may pin at one time.
        failed: whether the daemon did not answer: no statement about the cache.
        sums: where they were asked for, a checksum of each shard of each slot, SUM_BYTES each, 0 for none.
        region_id: the region that the slots lie in; b"" where there are none.
    """

    __slots__ = (
        *("_group", "_link", "_session", "_slots"),
        *("failed", "hits", "id", "packed", "pending", "region_id", "sums", "withheld"),
    )

    def __init__(
        self,
        session: Session,
        link: Link | None,
        group: GroupSpec,
        lease: int = 0,
        hits: int = 0,
        pending: int = 0,
        packed: bytes = b"",
        failed: bool = False,
        withheld: int = 0,
        sums: bytes = b"",
    ) -> None:
        self._session, self._link, self._group = session, link, group
        self._slots: list[Slot] | None = None
        self.id, self.hits, self.pending, self.packed, self.failed = lease, hits, pending, packed, failed
        self.withheld, self.sums = withheld, sums
        self.region_id = link.region.id if link and hits else b""
        if lease and link is not None:
            link.leases[lease] = packed[-REF_BYTES:]

    @property
    def slots(self) -> list[Slot]:
        """The `hits` slots; slot i holds hash i."""
        if self._slots is None:
            region = self._link.region if self._link else None
            self._slots = unpack_slots(self.packed, self._group, region, writable=False)
        return self._slots

    def release(self) -> None:
        """Give the slots back; from any thread, never waits. A second call, or one after the session's end, does
        nothing."""
        lease, self.id = self.id, 0
        if lease and self._link is not None:
            self._link.leases.pop(lease, None)
            self._session.post(self._link, Release(0, b"", [lease]), "stale_releases")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, hits={self.hits}, pending={self.pending}, failed={self.failed})"
