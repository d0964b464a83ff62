"""A namespace as this session holds it: lookups, reservations, settlements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcache_client.session import forks
from kvcache_client.session.lease import Lease
from kvcache_client.session.replies import wrong_lookup, wrong_reservation, wrong_settlement
from kvcache_client.session.reservation import Reservation, Ticket
from kvcache_proto.errors import BadArgument, BadToken, ServerError, from_wire
from kvcache_proto.messages import (
    Acquire,
    Acquired,
    Attach,
    Distrust,
    Distrusted,
    Error,
    Note,
    Release,
    Remark,
    Reply,
    Reserve,
    Reserved,
    Run,
    Settle,
    Settled,
)
from kvcache_proto.types import MAX_HASHES, MAX_NAME, Finding, GroupSpec, NamespaceSpec, Outcome, Verdict

if TYPE_CHECKING:
    from kvcache_client.session.connection import Link
    from kvcache_client.session.session import Session

_NOTHING = Reserved(0, 0, b"", b"")
_LOST = "an answer was lost, and what it granted is given back by the session's end alone"
_VERDICTS = {verdict.value: verdict for verdict in Verdict}


class Namespace:
    """Made by `Session.attach`; it outlives restarts of the daemon.

    Attributes:
        spec: what was attached.
        id: 16 hex digits, the same in every process that attaches the same model and identity.
        shards: the shards that this session writes.
        session: whose it is.
        refused: why the daemon did not let this session join it; "" where it did, or was not asked yet.
    """

    def __init__(self, session: Session, spec: NamespaceSpec, shards: tuple[int, ...], ceiling_bytes: int) -> None:
        if len(set(shards)) != len(shards) or not all(0 <= shard < spec.shards for shard in shards):
            raise BadArgument(f"shards {shards}: each once, 0 to {spec.shards - 1}")
        self.session, self.spec, self.shards, self.ceiling_bytes = session, spec, shards, ceiling_bytes
        self.id = spec.id
        self.refused = ""

    @property
    def attached(self) -> bool:
        """Whether the daemon knows of it now; where not, every lookup misses and every reservation is refused."""
        link = self.session.link
        return link is not None and self in link.namespaces

    def attachment(self) -> Attach:
        """Return the request that joins it."""
        return Attach(0, b"", self.spec, self.shards, self.ceiling_bytes)

    # Lookups.

    def acquire(
        self,
        hashes: Sequence[bytes],
        group: int = 0,
        pin: bool = True,
        verify: bool = False,
        request: str = "",
        tokens: int = 0,
        salted: bool = False,
    ) -> Lease:
        """Return the longest cached prefix of `hashes`, n chained hashes in prompt order, under a lease.

        With `pin` False nothing is pinned, and the slots may be given to others at any time. With `verify` the lease
        has the checksums of its blocks, as far as their writers made any. `request` is for whom it is, of so many
        `tokens`, `salted` where the hashes have a salt in them: it is the name by which one asks the daemon why there
        was no hit. Where the daemon does not answer within the session's deadline the lease is empty and `failed`. One
        round trip. Raises BadArgument for what the protocol does not allow.
        """
        spec = self._check(hashes, group)
        link, number = self._link()
        if link is None:
            return self._no_lease(spec, "lookups_down")
        if not hashes:
            return Lease(self.session, link, spec)
        asked = Acquire(0, b"", number, _listed(hashes), group, pin, verify, request[:MAX_NAME], tokens, salted)
        reply = self.session.call(link, asked, lambda late: self._return_lease(link, late))
        if reply is None:
            return self._no_lease(spec, "lookups_unanswered")
        if not isinstance(reply, Acquired):
            self._refused(reply, "lookups_refused", link)
            return self._no_lease(spec, "lookups_refused")
        wrong = wrong_lookup(reply, len(hashes), pin, self.spec.shards, self._holds(link, spec))
        if wrong:
            self.session.distrust(wrong)
            self._give_back(link, reply)
            return self._no_lease(spec, "lookups_refused")
        pinned = (reply.lease, reply.hits, reply.pending, reply.slots)
        return Lease(self.session, link, spec, *pinned, withheld=reply.withheld, sums=reply.sums)

    def _no_lease(self, spec: GroupSpec, reason: str) -> Lease:
        self.session.count(reason)
        return Lease(self.session, None, spec, failed=True)

    def _return_lease(self, link: Link, late: Reply | None) -> None:
        if isinstance(late, Acquired):
            self.session.count("late_lookups")
            self._give_back(link, late)
        elif not isinstance(late, Error):
            link.channel.give_up(_LOST)

    def _give_back(self, link: Link, unwanted: Acquired) -> None:
        if unwanted.lease:
            self.session.post(link, Release(0, b"", [unwanted.lease]), "stale_releases")
        elif unwanted.hits:
            link.channel.give_up(_LOST)

    # Reservations.

    def reserve(self, hashes: Sequence[bytes], parent: bytes | None = None, group: int = 0) -> Reservation:
        """Ask to write a run of blocks: the first below `parent` (None: a root), each other below the one before.

        Where the daemon does not answer within the session's deadline, all are refused as "unavailable". Raises
        BadArgument for what the protocol does not allow, and while a shard of the namespace has no live session of
        this engine.
        """
        self._check(hashes, group)
        link, number = self._link()
        if link is None or not hashes:
            return self._reservation(group, hashes, link, None if hashes else _NOTHING, "reserves_down")
        request = Reserve(0, b"", number, [Run(_listed(hashes), parent)], group)
        reply = self.session.call(link, request, lambda late: self._return_reservation(link, late))
        return self._reservation(group, hashes, link, reply, "reserves_unanswered")

    def reserve_later(self, hashes: Sequence[bytes], parent: bytes | None = None, group: int = 0) -> Ticket:
        """Ask as `reserve` does, and return at once; the answer is picked up from the ticket."""
        return self.reserve_runs_later([Run(_listed(hashes), parent)], group)

    def reserve_runs_later(self, runs: Sequence[Run], group: int = 0) -> Ticket:
        """Ask for several runs at once, as `reserve_later` does for one: there is one reservation for all of them.

        Its answers, and the positions in them, count on from run to run.
        """
        hashes = [each for run in runs for each in run.hashes]
        self._check(hashes, group)
        link, number = self._link()
        ticket = Ticket(
            resolve=lambda reply: self._reservation(group, hashes, link, reply, "reserves_unanswered"),
            abandon=lambda late: self._return_reservation(link, late),
            pump=self.session.pump,
        )
        request = Reserve(0, b"", number, list(runs), group)

        def answered(reply: Reply | None) -> None:
            ticket.answer(reply)
            if reply is None and link is not None:
                link.channel.give_up(_LOST)

        if not hashes:
            ticket.answer(_NOTHING)
        elif not (self.session.up and self.session.post(link, request, "reserves_down", answered)):
            ticket.answer(None)
        return ticket

    def _reservation(
        self, group: int, hashes: Sequence[bytes], link: Link | None, reply: Reply | None, reason: str
    ) -> Reservation:
        wrong = ""
        if isinstance(reply, Reserved):
            if link is not None:
                wrong = wrong_reservation(reply, len(hashes), self._holds(link, self.spec.groups[group]))
            if wrong:
                self.session.distrust(wrong)
                self.session.count("reserves_refused")
                self._disown(link, reply)
            reservation = Reservation(self, group, len(hashes), link, None if wrong else reply)
        else:
            if reply is None:
                self.session.count(reason)
            else:
                self._refused(reply, "reserves_refused", link)
            reservation = Reservation(self, group, len(hashes), None, None)
        for why in set(reservation.refused.values()):
            self.session.count(f"refused_{why}", sum(1 for each in reservation.refused.values() if each == why))
        return reservation

    def _return_reservation(self, link: Link | None, late: Reply | None) -> None:
        if isinstance(late, Reserved):
            self.session.count("late_reserves")
            self._disown(link, late)
        elif link is not None and not isinstance(late, Error):
            link.channel.give_up(_LOST)

    def _disown(self, link: Link | None, unwanted: Reserved) -> None:
        if unwanted.reservation:
            self._settle(link, unwanted.reservation, Outcome.NEVER_STARTED, (), range(self.spec.shards), None)
        elif link is not None and unwanted.slots:
            link.channel.give_up(_LOST)

    # Settlements.

    def settle(
        self,
        reservation: int,
        outcome: Outcome,
        positions: Sequence[int] = (),
        shards: Sequence[int] | None = None,
        region_id: bytes | None = None,
        then: Callable[[list[Verdict]], None] | None = None,
        sums: bytes = b"",
    ) -> None:
        """Say how `shards` (those attached with, by default) of granted slots ended; from any thread, never waits.

        Args:
            reservation: the number of a reservation, this session's or another one's of the same engine.
            positions: which of the granted slots, 0 to len(granted) - 1; none means all.
            region_id: the region that was written to; where the session has another one by now, nothing is sent.
            sums: checksums of what was committed, SUM_BYTES a shard of a position, 0 for none.
            then: gets the verdicts, one a settled slot, on some thread; never called where the session ends first.
        While the daemon is away it is kept for the next one. Verdicts are counted; a refusal is counted and logged.
        """
        forks.check(self.session.owner)
        link = self.session.link or self.session.away
        if link is not None and region_id is not None and region_id != link.region.id:
            self.session.count("settles_of_another_region")
            return
        self._settle(link, reservation, outcome, positions, self._shards(shards), then, sums)

    def _settle(
        self,
        link: Link | None,
        reservation: int,
        outcome: Outcome,
        positions: Sequence[int],
        shards: Sequence[int],
        then: Callable[[list[Verdict]], None] | None,
        sums: bytes = b"",
    ) -> None:
        def settled(reply: Reply | None) -> None:
            verdicts = self._verdicts(reply)
            if verdicts and then is not None:
                then(verdicts)

        self.session.settlements.send(link, _settlement(link, reservation, outcome, positions, shards, sums), settled)

    def _commit(self, reservation: Reservation, shards: Sequence[int] | None) -> list[Verdict]:
        forks.check(self.session.owner)
        link, chosen = reservation._link, self._shards(shards)
        reservation._open = False
        request = _settlement(link, reservation.id, Outcome.COMMITTED, (), chosen)
        if link is None or link is not self.session.link or not self.session.up:
            # Not to be lost on a daemon that is slow or away: sent all the same, and not waited for.
            self.session.settlements.send(link, request, self._verdicts)
            return []
        channel = link.channel
        reply = self.session.call(
            link, request, lambda late: self.session.settlements.heard(link, channel, request, self._verdicts, late)
        )
        if isinstance(reply, Error):
            self._refused(reply, "settles_refused", link)
            return []
        if reply is None and not request.id:
            # It never had its turn: others were asking, or the daemon has gone since we looked.
            self.session.settlements.send(link, request, self._verdicts)
            return []
        return self._verdicts(reply)

    def _verdicts(self, reply: Reply | None) -> list[Verdict]:
        if isinstance(reply, Settled) and (wrong := wrong_settlement(reply)):
            self.session.distrust(wrong)
        elif isinstance(reply, Settled):
            verdicts = [_VERDICTS[verdict] for verdict in reply.verdicts]
            for verdict in set(verdicts):
                self.session.count(f"verdict_{verdict.name.lower()}", verdicts.count(verdict))
            return verdicts
        elif isinstance(reply, Error):
            self.session.count("settles_refused")
            self.session.log_refusal("settle", reply)
        elif reply is None:
            self.session.count("settles_unanswered")
        else:
            self.session.distrust(f"a {type(reply).__name__.lower()} to a settlement")
        return []

    def _shards(self, shards: Sequence[int] | None) -> Sequence[int]:
        chosen = self.shards if shards is None else shards
        if not chosen:
            raise BadArgument("no shards to settle: this session attached with none")
        return chosen

    # What should not happen.

    def distrust(
        self,
        packed: bytes,
        shard: int,
        finding: Finding,
        region_id: bytes,
        then: Callable[[list[tuple[str, int]]], None],
    ) -> None:
        """Have the daemon forget the blocks in `packed`, whose `shard` is not what was stored, and all below them.

        From any thread, never waits. `then` gets a (engine, session) a block, on some thread: who stored it, ("", 0)
        where that is not known; nothing where the daemon has not answered, or knows no such request.
        """
        forks.check(self.session.owner)

        def answered(reply: Reply | None) -> None:
            if isinstance(reply, Error):
                self.session.log_refusal("distrust", reply)
            then(list(reply.writers) if isinstance(reply, Distrusted) else [])

        link = self.session.link
        if link is None or link.region.id != region_id or link.door.welcome.version < 2:
            self.session.count("distrusts_unsaid")
            then([])
        elif not self.session.post(
            link, Distrust(0, b"", region_id, packed, shard, int(finding)), "distrusts_unsaid", answered
        ):
            then([])

    def remark(self, notes: list[Note], group: int = 0) -> bool:
        """Tell the daemon what it cannot know of some requests; never waits. Returns whether it was sent."""
        link, number = self._link()
        if link is None or link.door.welcome.version < 2:
            return False
        return self.session.post(link, Remark(0, b"", number, notes, group), "notes_unsaid")

    # What all of them share.

    def _check(self, hashes: Sequence[bytes], group: int) -> GroupSpec:
        forks.check(self.session.owner)
        if len(hashes) > MAX_HASHES:
            raise BadArgument(f"{len(hashes)} hashes in one message: at most {MAX_HASHES}")
        if not 0 <= group < len(self.spec.groups):
            raise BadArgument(f"group {group}: this namespace has {len(self.spec.groups)}")
        try:
            size = len(b"".join(hashes))  # the daemon checks each one; this keeps a mistake from costing a deadline
        except TypeError as error:
            raise BadArgument(f"hashes are bytes: {error}") from None
        if size != len(hashes) * self.spec.hash_bytes:
            odd = next((len(each) for each in hashes if len(each) != self.spec.hash_bytes), 0)
            raise BadArgument(f"hash of {odd} bytes: this namespace has hashes of {self.spec.hash_bytes}")
        return self.spec.groups[group]

    def _link(self) -> tuple[Link | None, int]:
        link = self.session.link
        number = link.namespaces.get(self) if link is not None else None
        return (None, 0) if number is None else (link, number)

    @staticmethod
    def _holds(link: Link, spec: GroupSpec) -> Callable[[bytes], bool]:
        return lambda packed: link.region.holds(packed, spec.block_bytes)

    def _refused(self, reply: Reply, counter: str, link: Link | None) -> None:
        """Count and log; raise where it is the caller's fault, for the daemon's own faults are misses."""
        self.session.count(counter)
        if not isinstance(reply, Error):
            self.session.distrust(f"a {type(reply).__name__.lower()} to something else")
            if link is not None:
                link.channel.give_up(_LOST)
            return
        error = from_wire(reply.code, reply.message)
        if not isinstance(error, ServerError | BadToken):
            raise error
        self.session.log_refusal(counter, reply)

    def __repr__(self) -> str:
        return f"Namespace(id={self.id!r}, model={self.spec.model!r}, shards={self.shards})"


def _listed(hashes: Sequence[bytes]) -> list[bytes]:
    return hashes if isinstance(hashes, list) else list(hashes)


def _settlement(
    link: Link | None,
    reservation: int,
    outcome: Outcome,
    positions: Sequence[int],
    shards: Sequence[int],
    sums: bytes = b"",
) -> Settle:
    region = link.region.id if link is not None else b""
    return Settle(0, b"", region, reservation, tuple(shards), int(outcome), list(positions), sums)
