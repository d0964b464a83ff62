"""A namespace as a session holds it: lookups, reservations, settlements."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from kvcache_client.session.channel import Channel
from kvcache_client.session.connection import Connection
from kvcache_client.session.daemon import LOST, Daemon, ignore
from kvcache_client.session.grants import Lease, Parts, PendingReservation, Reservation, chosen_shards, parts_of_hits
from kvcache_client.session.reply_checks import wrong_lookup, wrong_reservation
from kvcache_client.session.settlements import Settlements
from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import (
    FROM_ROOT,
    MAX_BLOCKS,
    MAX_HASHES,
    MAX_NAME,
    REF_BYTES,
    Finding,
    GroupSpec,
    NamespaceSpec,
    Outcome,
    Refusal,
    Resume,
    Verdict,
)

logger = logging.getLogger("kvcache_client.session")

_NOTHING = m.Reserved(0, 0, b"", b"")


class Namespace:
    """Made by `Session.attach`; it outlives restarts of the daemon."""

    def __init__(
        self,
        daemon: Daemon,
        settlements: Settlements,
        spec: NamespaceSpec,
        shards: tuple[int, ...],
        ceiling_bytes: int,
        reports_leaving: bool = False,
    ) -> None:
        if len(set(shards)) != len(shards) or not all(0 <= shard < spec.shards for shard in shards):
            raise BadArgument(f"shards {shards}: each once, 0 to {spec.shards - 1}")
        self._daemon, self._settlements = daemon, settlements
        self.spec, self.shards, self.ceiling_bytes = spec, shards, ceiling_bytes
        self._reports_leaving = reports_leaving
        self.id = spec.id  # 16 hex digits, the same in every process that attaches the same model and identity
        self.refused = ""  # why the daemon does not let this session join; "" if it does, or was not asked yet
        self._left = False
        self._number: tuple[Channel | None, int] = (None, 0)  # the daemon's number, and the channel that it came by

    # Joining, and joining again at each daemon.

    @property
    def attached(self) -> bool:
        """Whether the daemon knows it now; if not, every lookup misses and every reservation is refused."""
        return self._joined()[0] is not None

    def join(self, connection: Connection) -> None:
        """Attach over `connection`, and wait for the answer. Raises the daemon's refusals, and Unavailable."""
        heard = functools.partial(self._take_answer, connection, connection.channel)
        heard(self._daemon.ask(self._attachment(), m.Attached, connection, heard))

    def join_later(self, connection: Connection) -> None:
        """Attach over `connection` without waiting; a refusal is logged and counted."""
        channel = connection.channel

        def heard(reply: m.Reply | None) -> None:
            self._take_answer(connection, channel, reply)
            if isinstance(reply, m.Error):
                self.refuse(reply.message)

        self._daemon.post(connection, self._attachment(), "stale_attaches", heard)

    def refuse(self, why: str) -> None:
        """Note that the daemon does not let this session join; count and log each reason once, as attempts repeat."""
        if why != self.refused:
            self._daemon.count("attaches_refused")
            logger.warning("namespace %s (%s) is refused: %s", self.id, self.spec.model, why)
        self.refused = why

    def leave(self) -> None:
        """Detach for good, without waiting."""
        self._left = True
        connection, number = self._joined()
        self._number = (None, 0)
        if connection is not None:
            self._daemon.post(connection, m.Detach(0, b"", number), "stale_detaches")

    def _attachment(self) -> m.Attach:
        return m.Attach(0, b"", self.spec, self.shards, self.ceiling_bytes, self._reports_leaving)

    def _take_answer(self, connection: Connection, channel: Channel, reply: m.Reply | None) -> None:
        """Take the answer to an attach: it is valid even if it is too late for the caller."""
        if isinstance(reply, m.Attached):
            if not self._left:
                self._number, self.refused = (channel, reply.namespace), ""
            else:  # left before it was joined
                self._daemon.post(connection, m.Detach(0, b"", reply.namespace), "stale_detaches")
        elif not isinstance(reply, m.Error):  # lost: the namespace would stay unknown for as long as the channel lives
            channel.give_up("it did not answer an attach")

    def _joined(self) -> tuple[Connection | None, int]:
        """Return the connection in use and the daemon's number of this namespace; (None, 0) if it has not joined."""
        connection, (channel, number) = self._daemon.connection, self._number
        if connection is None or connection.channel is not channel:
            return None, 0
        return connection, number

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
        resume: Resume = FROM_ROOT,
    ) -> Lease:
        """Return the longest cached prefix of `hashes`, under a lease. One round trip.

        In a namespace with suffix groups, group 0 means all groups: the result is the longest prefix after which an
        engine can `resume`.

        Args:
            hashes: n chained hashes in prompt order, at most MAX_HASHES.
            pin: if False, nothing is pinned, and the slots may be given to other blocks at any time.
            verify: whether the lease has the checksums of its blocks, if their writers took any.
            request: name of the request, for asking the daemon why there was no hit.
            tokens: number of tokens of the request.
            salted: whether the hashes have a salt in them.
        If the daemon does not answer within the session's deadline, the lease is empty and `failed`. Raises BadArgument
        for arguments that the protocol does not allow.
        """
        self._check(hashes, group)
        self._check(resume.tails, group)
        connection, number = self._joined()
        if connection is None:
            return self._no_lease("lookups_down")
        if not hashes and not resume.tails:
            return Lease(self._daemon, connection)
        told = request[:MAX_NAME], tokens, salted, resume.start, _listed(resume.tails), resume.tails_per_block
        asked = m.Acquire(0, b"", number, _listed(hashes), group, pin, verify, *told)
        reply = self._daemon.call(connection, asked, lambda late: self._return_lease(connection, late))
        if reply is None:
            return self._no_lease("lookups_unanswered")
        if not isinstance(reply, m.Acquired):
            self._daemon.refused(reply, "lookups_refused", connection)
            return self._no_lease("lookups_refused")
        parts = parts_of_hits(self.spec, group, max(0, reply.hits), resume.start)
        slots = sum(count for _, count in parts)
        counts = len(hashes), len(resume.tails)
        wrong = wrong_lookup(reply, *counts, pin, self.spec.shards, connection.region.holds, slots)
        if wrong:
            self._daemon.misbehaved(wrong)
            self._give_back(connection, reply)
            return self._no_lease("lookups_refused")
        return Lease(self._daemon, connection, parts, reply)

    def prefetch(
        self,
        hashes: Sequence[bytes],
        request: str = "",
        tokens: int = 0,
        salted: bool = False,
        then: Callable[[int, int], None] | None = None,
    ) -> bool:
        """Have the daemon evict `hashes` last until `request` is looked up with a lease, and tiers fetch those that are
        not cached; never waits, and pins nothing. Without hashes, the request waits no more.

        The first arguments are those of `acquire`; `then` gets the numbers of hits and of withheld blocks, on some
        thread: if any are withheld, it is refused, because too much waits. Returns whether it was sent. Raises
        BadArgument for values out of bounds.
        """
        self._check(hashes, 0)
        connection, number = self._joined()
        if connection is None:
            return False
        asked = m.Acquire(0, b"", number, _listed(hashes), 0, False, False, request[:MAX_NAME], tokens, salted)

        def answered(reply: m.Reply | None) -> None:
            if isinstance(reply, m.Error):
                self._daemon.log_refusal("prefetch", reply)
            elif isinstance(reply, m.Acquired) and then is not None:
                then(reply.hits, reply.withheld)

        return self._daemon.post(connection, asked, "stale_prefetches", answered)

    def _no_lease(self, reason: str) -> Lease:
        self._daemon.count(reason)
        return Lease(self._daemon, None, failed=True)

    def _return_lease(self, connection: Connection, late: m.Reply | None) -> None:
        if isinstance(late, m.Acquired):
            self._daemon.count("late_lookups")
            self._give_back(connection, late)
        elif not isinstance(late, m.Error):
            connection.channel.give_up(LOST)

    def _give_back(self, connection: Connection, unwanted: m.Acquired) -> None:
        if unwanted.lease:
            self._daemon.post(connection, m.Release(0, b"", [unwanted.lease]), "stale_releases")
        elif unwanted.hits:
            connection.channel.give_up(LOST)

    # Reservations.

    def reserve(self, hashes: Sequence[bytes], parent: bytes | None = None, group: int = 0) -> Reservation:
        """Request to write a run of at most MAX_BLOCKS blocks: the first below `parent` (None: a root), each other
        below the one before.

        If the daemon does not answer within the session's deadline, all are refused as "unavailable". Raises
        BadArgument for arguments that the protocol does not allow, and while a shard of the namespace has no live
        session of this engine.
        """
        asked = [(self._check(hashes, group, MAX_BLOCKS), len(hashes))]
        connection, number = self._joined()
        if connection is None or not hashes:
            return self._reservation(asked, connection, None if hashes else _NOTHING, "reserves_down")
        request = m.Reserve(0, b"", number, [m.Run(_listed(hashes), parent)], group)
        reply = self._daemon.call(connection, request, lambda late: self._return_reservation(connection, late))
        return self._reservation(asked, connection, reply, "reserves_unanswered")

    def reserve_later(self, hashes: Sequence[bytes], parent: bytes | None = None, group: int = 0) -> PendingReservation:
        """Ask as `reserve` does, and return at once; the result gets the answer."""
        return self.reserve_runs_later([m.Run(_listed(hashes), parent)], group)

    def reserve_runs_later(self, runs: Sequence[m.Run], group: int = 0) -> PendingReservation:
        """Request several runs at once, as `reserve_later` does for one: there is one reservation for all of them, of
        at most MAX_BLOCKS blocks together.

        Its answers, and their positions, are numbered through all runs. Runs that name no group are of `group`; a run
        of a suffix group follows the run of the full blocks that its blocks belong to, unless these are reserved
        already.
        """
        hashes = [each for run in runs for each in run.hashes]
        self._check(hashes, group, MAX_BLOCKS)
        asked = [(self._group(run.group or group), len(run.hashes)) for run in runs]
        connection, number = self._joined()
        pending = PendingReservation(
            resolve=lambda reply: self._reservation(asked, connection, reply, "reserves_unanswered"),
            abandon=lambda late: self._return_reservation(connection, late),
            pump=self._daemon.pump,
        )
        request = m.Reserve(0, b"", number, list(runs), group)

        def answered(reply: m.Reply | None) -> None:
            pending.answer(reply)
            if reply is None and connection is not None:
                connection.channel.give_up(LOST)

        if not hashes:
            pending.answer(_NOTHING)
        elif not (self._daemon.up and self._daemon.post(connection, request, "reserves_down", answered)):
            pending.answer(None)
        return pending

    def _reservation(
        self, asked: Parts, connection: Connection | None, reply: m.Reply | None, reason: str
    ) -> Reservation:
        count = sum(blocks for _, blocks in asked)
        granted = reply if isinstance(reply, m.Reserved) else None
        if reply is None:
            self._daemon.count(reason)
        elif granted is None:
            self._daemon.refused(reply, "reserves_refused", connection)
        elif connection is not None and (wrong := wrong_reservation(granted, count, connection.region.holds)):
            self._daemon.misbehaved(wrong)
            self._daemon.count("reserves_refused")
            self._disown(connection, granted)
            granted = None
        parts = _granted(asked, granted.answers) if granted else ()
        at = connection if granted else None
        reservation = Reservation(self._settlements, parts, self.shards, count, at, granted)
        refusals = list(reservation.refused.values())
        for why in set(refusals):
            self._daemon.count(f"refused_{why}", refusals.count(why))
        return reservation

    def _return_reservation(self, connection: Connection | None, late: m.Reply | None) -> None:
        if isinstance(late, m.Reserved):
            self._daemon.count("late_reserves")
            self._disown(connection, late)
        elif connection is not None and not isinstance(late, m.Error):
            connection.channel.give_up(LOST)

    def _disown(self, connection: Connection | None, unwanted: m.Reserved) -> None:
        if unwanted.reservation:
            every = range(self.spec.shards)
            self._settlements.settle(connection, unwanted.reservation, Outcome.NEVER_STARTED, (), every)
        elif connection is not None and unwanted.slots:
            connection.channel.give_up(LOST)

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
        """Report how `shards` (by default those attached with) of granted slots ended; from any thread, never waits.

        Args:
            reservation: the number of a reservation, of this session or of another one of the same engine.
            positions: positions of granted slots, 0 to len(granted) - 1; none means all.
            region_id: the region that was written to; if the session has another one by now, nothing is sent.
            sums: checksums of the committed bytes, SUM_BYTES per shard of a position, 0 for none.
            then: gets the verdicts, one per settled slot, on some thread; never called if the session ends first.
        While the daemon is away, the settlement is kept for the next one. Verdicts are counted; a refusal is counted
        and logged.
        """
        self._daemon.check_process()
        connection = self._daemon.connection or self._daemon.suspended
        if connection is not None and region_id is not None and region_id != connection.region.id:
            self._daemon.count("settles_of_another_region")
            return
        chosen = chosen_shards(shards, self.shards)
        self._settlements.settle(connection, reservation, outcome, positions, chosen, then, sums)

    # Hints.

    def retain(
        self,
        hashes: Sequence[bytes],
        seconds: float = 3600.0,
        group: int = 0,
        request: str = "",
        then: Callable[[int, str], None] | None = None,
    ) -> bool:
        """Have the daemon keep the blocks of a prompt for `seconds`, within its `retain_quota`; never waits.

        Args:
            hashes: n chained hashes in prompt order, at most MAX_HASHES; blocks that are not cached yet are kept once
                they are.
            request: name of the request, for asking the daemon why.
            then: gets the number of blocks kept now, and why no more of the cached ones are ("" if all are), on some
                thread; never called if the daemon does not answer.
        Returns whether it was sent. Raises BadArgument for values out of bounds.
        """
        self._check(hashes, group)
        if not 0 < seconds <= m.MAX_SECONDS:
            raise BadArgument(f"retain for {seconds} s: more than 0, at most {m.MAX_SECONDS:.0f}")

        def kept(reply: m.Reply | None) -> None:
            if isinstance(reply, m.Retained) and then is not None:
                then(min(reply.blocks, len(hashes)), reply.refused)

        return self._hint(m.Retain(0, b"", 0, _listed(hashes), seconds, group, request[:MAX_NAME]), kept)

    def drop(self, hashes: Sequence[bytes], after: int = 0, group: int = 0, request: str = "") -> bool:
        """Report to the daemon that the end of a chain is not needed again; never waits.

        Its blocks are evicted before all other blocks, from the last one upwards, up to the first `after` or to a block
        that other chains share. Returns whether it was sent. Raises BadArgument for values out of bounds.
        """
        self._check(hashes, group)
        if after < 0:
            raise BadArgument(f"after {after}: 0 or more blocks")

        return self._hint(m.Drop(0, b"", 0, _listed(hashes), after, group, request[:MAX_NAME]))

    def _hint(self, hint: m.Retain | m.Drop, then: Callable[[m.Reply | None], None] = ignore) -> bool:
        """Send a hint, and return whether it was sent. A refusal is logged; `then` gets any other reply."""

        def answered(reply: m.Reply | None) -> None:
            if isinstance(reply, m.Error):
                self._daemon.log_refusal(type(hint).__name__.lower(), reply)
            else:
                then(reply)

        connection, hint.namespace = self._joined()
        if connection is None:
            self._daemon.count("hints_unsent")
            return False
        return self._daemon.post(connection, hint, "hints_unsent", answered)

    # Faults.

    def invalidate(
        self,
        packed: bytes,
        shard: int,
        finding: Finding,
        region_id: bytes,
        then: Callable[[list[tuple[str, int]]], None],
    ) -> None:
        """Have the daemon forget the blocks in `packed`, whose `shard` differs from the stored one, and all below them.

        From any thread, never waits. `then` gets one (engine, session) per block, on some thread: its writer, ("", 0)
        if that is not known; an empty list if the daemon has not answered, or knows no such request.
        """
        daemon = self._daemon
        daemon.check_process()
        if len(packed) > MAX_BLOCKS * REF_BYTES:
            raise BadArgument(f"{len(packed) // REF_BYTES} blocks at once: at most {MAX_BLOCKS}")

        def answered(reply: m.Reply | None) -> None:
            if isinstance(reply, m.Error):
                daemon.log_refusal("invalidate", reply)
            then(list(reply.writers) if isinstance(reply, m.Invalidated) else [])

        connection = daemon.connection
        if connection is None or connection.region.id != region_id:
            daemon.count("invalidations_unsent")
            then([])
            return
        request = m.Invalidate(0, b"", region_id, packed, shard, int(finding))
        if not daemon.post(connection, request, "invalidations_unsent", answered):
            then([])

    def report_device(self, kept: Sequence[bytes], evicted: Sequence[bytes], group: int = 0) -> bool:
        """Report what the engine's device keeps, by the last blocks of chains, and what it has evicted; never waits.

        Returns whether it was sent.
        """
        connection, number = self._joined()
        if connection is None:
            return False
        report = m.ReportDevice(0, b"", number, _listed(kept), _listed(evicted), group)
        return self._daemon.post(connection, report, "device_reports_unsent")

    def report_misses(self, notes: list[m.MissNote], group: int = 0) -> bool:
        """Send the daemon `notes` that it cannot know otherwise; never waits. Returns whether they were sent."""
        connection, number = self._joined()
        if connection is None:
            return False
        return self._daemon.post(connection, m.ReportMisses(0, b"", number, notes, group), "notes_unsent")

    def _check(self, hashes: Sequence[bytes], group: int, most: int = MAX_HASHES) -> GroupSpec:
        self._daemon.check_process()
        if len(hashes) > most:
            raise BadArgument(f"{len(hashes)} hashes in one message: at most {most}")
        spec = self._group(group)
        try:
            size = len(b"".join(hashes))  # the daemon checks each one; this keeps a mistake from costing a deadline
        except TypeError as error:
            raise BadArgument(f"hashes are bytes: {error}") from None
        if size != len(hashes) * self.spec.hash_bytes:
            odd = next((len(each) for each in hashes if len(each) != self.spec.hash_bytes), 0)
            raise BadArgument(f"hash of {odd} bytes: this namespace has hashes of {self.spec.hash_bytes}")
        return spec

    def _group(self, group: int) -> GroupSpec:
        if not 0 <= group < len(self.spec.groups):
            raise BadArgument(f"group {group}: this namespace has {len(self.spec.groups)}")
        return self.spec.groups[group]

    def __repr__(self) -> str:
        return f"Namespace(id={self.id!r}, model={self.spec.model!r}, shards={self.shards})"


def _listed(hashes: Sequence[bytes]) -> list[bytes]:
    return hashes if isinstance(hashes, list) else list(hashes)


def _granted(asked: Parts, answers: bytes) -> Parts:
    """Return the parts of the references in an answer to a reservation."""
    if len(asked) == 1:
        return [(asked[0][0], answers.count(Refusal.GRANTED))]
    parts: list[tuple[GroupSpec, int]] = []
    at = 0
    for group, count in asked:
        granted, at = answers.count(Refusal.GRANTED, at, at + count), at + count
        if parts and parts[-1][0] is group:
            parts[-1] = group, parts[-1][1] + granted
        else:
            parts.append((group, granted))
    return parts
