"""The grants of the daemon: slots, leases to read them, and reservations to write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple

from kvcache_client.session.connection import Connection
from kvcache_client.session.daemon import Daemon
from kvcache_client.session.region import Region
from kvcache_client.session.settlements import Settlements
from kvcache_proto.errors import BadArgument, KVCacheError, RegionError
from kvcache_proto.messages import Acquired, Release, Reply, Reserved
from kvcache_proto.types import (
    FULL,
    REF_BYTES,
    BlockRef,
    GroupSpec,
    NamespaceSpec,
    Outcome,
    Refusal,
    Verdict,
    unpack_refs,
)

Parts = Sequence[tuple[GroupSpec, int]]  # packed references: number in a row to slots of the group

UNAVAILABLE = "unavailable"
_NOT_FOUND = Acquired(0, 0, 0, 0, b"")
_REFUSALS = {refusal.value: refusal for refusal in Refusal}


class Slot(NamedTuple):
    """The place of one block: its reference, the sizes of its shards, its region, and whether it may be written."""

    ref: BlockRef
    group: GroupSpec
    region: Region
    writable: bool

    def views(self, shard: int = 0) -> list[memoryview]:
        """Return the bytes of `shard` as they lie, in one piece or in several; writable under a reservation, read-only
        under a lease.

        Raises BadArgument for a shard that the block does not have, RegionError if the place now belongs to another
        block.
        """
        shards = self.group.shards
        if not 0 <= shard < len(shards):
            raise BadArgument(f"shard {shard}: this block has {len(shards)}")
        begin, size = self.group.shard_offset(shard), shards[shard]
        views = self.region.rows.views(self.ref, self.group.block_bytes, begin, size)
        return views if self.writable else [view.toreadonly() for view in views]

    def view(self, shard: int = 0) -> memoryview:
        """Return the bytes of `shard` in one piece: a copy under a lease if they lie in several.

        Raises the errors of `views`, and RegionError if they are to be written and lie in several pieces.
        """
        views = self.views(shard)
        if len(views) == 1:
            return views[0]
        if self.writable:
            raise RegionError(f"shard {shard} lies in {len(views)} pieces: write to `views`")
        return memoryview(b"".join(views))


def parts_of_hits(spec: NamespaceSpec, group: int, hits: int, start: int) -> Parts:
    """Return the parts of the references that a lookup returns for `hits`, by an engine that has the suffix groups of
    the first `start` blocks."""
    if not spec.suffixes:
        return ((spec.groups[group], hits),)
    least = max(0, hits - start)
    return [(each, each.needed(hits) if each.kind == FULL else min(each.needed(hits), least)) for each in spec.groups]


def split(packed: bytes, parts: Parts) -> Iterator[tuple[GroupSpec, bytes]]:
    """Yield each part's group and references."""
    at = 0
    for group, count in parts:
        yield group, packed[at : (at := at + count * REF_BYTES)]


def unpack_slots(packed: bytes, parts: Parts, region: Region | None, writable: bool) -> list[Slot]:
    """Return the slots in `packed`, REF_BYTES per reference, in their order."""
    if region is None:
        return []
    return [Slot(ref, group, region, writable) for group, refs in split(packed, parts) for ref in unpack_refs(refs)]


class Lease:
    """The answer to a lookup: the longest cached prefix, pinned until `release` or the end of the session.

    In a namespace with suffix groups, that is the longest prefix after which an engine can continue.

    Attributes:
        id: the daemon's number; 0 if nothing is pinned.
        hits: number of leading hashes that are cached, and one more if the last of the hits is a tail.
        tail: the number of that tail in the lookup's, 1 for the first; 0 if there is none.
        packed: their slots' references, REF_BYTES each: those of the full group, then those of each suffix group.
        parts: the groups that they belong to, in their order.
        pending: number of blocks after the hits that are being written now.
        withheld: number of blocks after the hits that are cached, but beyond this engine's pin quota.
        coming: number of blocks after the hits that a tier is fetching; some may be pending already.
        eta: seconds until those are expected; if there are none, until it is known whether tiers have some, else 0.
        divergence: number of blocks after which an engine could continue if it had the suffix groups there; 0 if that
            is not more than the cached ones, `withheld` included.
        failed: whether the daemon did not answer; the lease then has no information on the cache.
        sums: if requested, a checksum per shard of each slot, SUM_BYTES each, 0 for none.
        region_id: the region that the slots lie in; b"" if there are none.
    """

    __slots__ = (
        *("_connection", "_daemon", "_slots", "coming", "divergence", "eta", "failed", "hits", "id", "packed", "parts"),
        *("pending", "region_id", "sums", "tail", "withheld"),
    )

    def __init__(
        self,
        daemon: Daemon,
        connection: Connection | None,
        parts: Parts = (),
        found: Acquired = _NOT_FOUND,
        failed: bool = False,
    ) -> None:
        self._daemon, self._connection, self.parts, self.failed = daemon, connection, parts, failed
        self._slots: list[Slot] | None = None
        self.id, self.hits, self.pending, self.packed = found.lease, found.hits, found.pending, found.slots
        self.withheld, self.sums, self.coming, self.eta = found.withheld, found.sums, found.coming, found.eta_ms / 1000
        self.divergence, self.tail = found.divergence, found.tail
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


class Reservation:
    """The answer to `reserve`. Every granted slot must be settled: by `commit`, `abort`, or its writers' `settle`.

    Attributes:
        id: the daemon's number; 0 if nothing was granted.
        region_id: the region that the slots lie in; b"" if there are none.
        answers: one Refusal per hash, GRANTED among them; empty if the daemon did not answer.
        granted: positions of the hashes that have a slot; `slots` and `packed` are in this order.
        refused: the reason, by position, for those that have none; "unavailable" if the daemon did not answer.
        packed: the granted slots' references, REF_BYTES each.
        failed: whether the daemon did not answer.
    """

    __slots__ = (
        *("_connection", "_open", "_parts", "_settlements", "_shards", "_slots", "answers", "failed", "granted", "id"),
        *("packed", "refused", "region_id"),
    )

    def __init__(
        self,
        settlements: Settlements,
        parts: Parts,
        shards: Sequence[int],
        count: int,
        connection: Connection | None,
        reply: Reserved | None,
    ) -> None:
        """Make the reservation of `count` blocks, with `parts` granted, by a session that writes `shards`."""
        self._settlements, self._parts, self._shards, self._connection = settlements, parts, shards, connection
        self._slots: list[Slot] | None = None
        self.failed = reply is None
        self.id, self.packed = (reply.reservation, reply.slots) if reply else (0, b"")
        self.answers = [_REFUSALS[answer] for answer in reply.answers] if reply else []
        self.granted = [at for at, answer in enumerate(self.answers) if answer is Refusal.GRANTED]
        if reply:
            self.refused = {at: answer.name.lower() for at, answer in enumerate(self.answers) if answer}
        else:
            self.refused = dict.fromkeys(range(count), UNAVAILABLE)
        self.region_id = connection.region.id if connection and self.granted else b""
        self._open = self.id != 0

    @property
    def slots(self) -> list[Slot]:
        """The granted slots, in the order of `granted`."""
        if self._slots is None:
            region = self._connection.region if self._connection else None
            self._slots = unpack_slots(self.packed, self._parts, region, writable=True)
        return self._slots

    def commit(self, shards: Sequence[int] | None = None) -> list[Verdict]:
        """Report that `shards` (by default those attached with) of every granted slot are written.

        Returns one Verdict per granted slot: VISIBLE means that lookups find it. Empty if nothing was granted, if the
        session has ended since, and if the daemon did not answer in time: then the commit is on its way. Raises the
        daemon's refusals.
        """
        if not self.id or self._connection is None:
            return []
        chosen = chosen_shards(shards, self._shards)
        self._open = False
        return self._settlements.commit(self._connection, self.id, chosen)

    def abort(self) -> None:
        """Give every granted slot back, unwritten. Only before any of them was handed to a writer; never waits."""
        if self._open:
            self._open = False
            every = range(len(self._parts[0][0].shards))
            self._settlements.settle(self._connection, self.id, Outcome.NEVER_STARTED, (), every)

    def __repr__(self) -> str:
        return f"Reservation(id={self.id}, granted={len(self.granted)}, refused={len(self.refused)})"


def chosen_shards(shards: Sequence[int] | None, own: Sequence[int]) -> Sequence[int]:
    """Return the shards to settle: `shards`, or all of a session's `own`. Raises BadArgument for none."""
    chosen = own if shards is None else shards
    if not chosen:
        raise BadArgument("no shards to settle: this session attached with none")
    return chosen


class PendingReservation:
    """A reservation that was requested and is not answered yet.

    `resolve` turns a reply into the reservation; None is no answer. `abandon` gives back the grants of a reply
    that comes after `cancel`.
    """

    def __init__(
        self,
        resolve: Callable[[Reply | None], Reservation],
        abandon: Callable[[Reply | None], None],
        pump: Callable[[], None],
    ) -> None:
        self._resolve, self._abandon, self._pump = resolve, abandon, pump
        self._answer: Future[Reservation] = Future()

    def poll(self) -> Reservation | None:
        """Return the reservation, or None while it is not answered. Never waits. Raises the daemon's refusals."""
        if not self._answer.done():
            self._pump()
        return self._answer.result() if self._answer.done() and not self._answer.cancelled() else None

    def wait(self, timeout: float) -> Reservation:
        """Return the reservation; if there is none within `timeout` seconds, cancel it: everything is refused."""
        self._pump()
        try:
            return self._answer.result(timeout)
        except FutureTimeout:  # another class than TimeoutError before Python 3.11
            self.cancel()
            return self._resolve(None)

    def cancel(self) -> None:
        """Give back the granted slots, even if they are granted later. Only before a slot was handed to a writer."""
        if not self._answer.cancel() and self._answer.exception() is None:
            self._answer.result().abort()

    def answer(self, reply: Reply | None) -> None:
        """Take the reply, or None if the connection ended; the session calls this."""
        if not self._answer.set_running_or_notify_cancel():
            self._abandon(reply)
            return
        try:
            self._answer.set_result(self._resolve(reply))
        except KVCacheError as error:
            self._answer.set_exception(error)
        except BaseException:  # a defect, which the channel counts and logs: to the engine, there is no answer
            self._answer.set_result(self._resolve(None))
            raise
