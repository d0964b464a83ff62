"""The right to write the slots of a run of blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvcache_client.session.connection import Connection
from kvcache_client.session.settlements import Settlements
from kvcache_client.session.slots import Parts, Slot, unpack_slots
from kvcache_proto.errors import BadArgument, KVCacheError
from kvcache_proto.messages import Reply, Reserved
from kvcache_proto.types import Outcome, Refusal, Verdict

UNAVAILABLE = "unavailable"
_REFUSALS = {refusal.value: refusal for refusal in Refusal}


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
        if not self.id:
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


class Ticket:
    """A reservation that was requested and is not answered yet.

    `resolve` turns a reply into the reservation; None is no answer. `abandon` gives back the grants of a reply after
    the ticket was cancelled.
    """

    def __init__(
        self,
        resolve: Callable[[Reply | None], Reservation],
        abandon: Callable[[Reply | None], None],
        pump: Callable[[], None],
    ) -> None:
        self._resolve, self._abandon, self._pump = resolve, abandon, pump
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._cancelled = False
        self._result: Reservation | None = None
        self._error: KVCacheError | None = None

    def poll(self) -> Reservation | None:
        """Return the reservation, or None while it is not answered. Never waits. Raises the daemon's refusals."""
        if not self._answered.is_set():
            self._pump()
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: float) -> Reservation:
        """Return the reservation; if there is none within `timeout` seconds, cancel it: everything is refused."""
        self._pump()
        self._answered.wait(timeout)
        reservation = self.poll()
        if reservation is not None:
            return reservation
        self.cancel()
        return self._resolve(None)

    def cancel(self) -> None:
        """Give back the granted slots, even if they are granted later. Only before a slot was handed to a writer."""
        with self._lock:
            self._cancelled = True
            reservation = self._result
        if reservation is not None:
            reservation.abort()

    def answer(self, reply: Reply | None) -> None:
        """Take the reply, or None if the connection ended; the session calls this."""
        with self._lock:
            cancelled = self._cancelled
            if not cancelled:
                try:
                    self._result = self._resolve(reply)
                except KVCacheError as error:
                    self._error = error
        if cancelled:
            self._abandon(reply)
        self._answered.set()
