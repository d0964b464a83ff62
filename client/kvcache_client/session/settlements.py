"""Settlements of granted slots, on their way to the daemon.

None is lost when a daemon goes, as long as the next one knows the session.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvcache_client.session import forks
from kvcache_client.session.channel import Channel, Handler
from kvcache_client.session.connection import Connection
from kvcache_client.session.daemon import Daemon
from kvcache_client.session.reply_checks import wrong_settlement
from kvcache_proto.messages import Error, Reply, Settle, Settled
from kvcache_proto.types import Outcome, Verdict

_VERDICTS = {verdict.value: verdict for verdict in Verdict}


class Settlements:
    """The settlements of one session, over all its connections. Thread-safe."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._paying = threading.Lock()

    def settle(
        self,
        connection: Connection | None,
        reservation: int,
        outcome: Outcome,
        positions: Sequence[int],
        shards: Sequence[int],
        then: Callable[[list[Verdict]], None] | None = None,
        sums: bytes = b"",
    ) -> None:
        """Report how `shards` of granted slots ended; never waits. `Namespace.settle` has the arguments."""
        if connection is None:
            self._daemon.count("settles_unanswered")
            return

        def settled(reply: Reply | None) -> None:
            verdicts = self._verdicts(reply)
            if verdicts and then is not None:
                then(verdicts)

        region = connection.region.id
        request = Settle(0, b"", region, reservation, tuple(shards), int(outcome), list(positions), sums)
        self._send(connection, request, settled)

    def commit(self, connection: Connection, reservation: int, shards: Sequence[int]) -> list[Verdict]:
        """Report that `shards` of all slots of a reservation are written, and return the verdicts.

        Empty if the daemon does not answer in time: then the commit is on its way. Raises the daemon's refusals.
        """
        daemon, channel = self._daemon, connection.channel
        daemon.check_process()
        request = Settle(0, b"", connection.region.id, reservation, tuple(shards), int(Outcome.COMMITTED))
        reply: Reply | None = None
        if connection is daemon.connection and daemon.up:
            late = partial(self._heard, connection, channel, request, self._verdicts)
            reply = daemon.call(connection, request, late)
        if reply is None and not request.id:
            # It never had its turn: the daemon is slow or gone, or other calls were running. It must not be lost.
            self._send(connection, request, self._verdicts)
            return []
        if isinstance(reply, Error):
            daemon.refused(reply, "settles_refused", connection)
            return []
        return self._verdicts(reply)

    def pay(self, connection: Connection) -> None:
        """Send the owed settlements to the next daemon. Not all at once, or that would end the session again."""
        # If a thread fails to get the lock, the thread that holds it sends its settlements after the release.
        while (
            connection.owed
            and connection is self._daemon.connection
            and connection.channel.roomy
            and self._paying.acquire(blocking=False)
        ):
            try:
                owed = connection.owed.popleft() if connection.owed else None
                if owed is not None:
                    self._daemon.count("settles_sent_again")
                    self._send(connection, *owed)
            finally:
                self._paying.release()

    def _send(self, connection: Connection, request: Settle, answer: Handler) -> None:
        """Send without waiting; while the daemon is away, keep it for the next one."""
        if self._daemon.owner != forks.current():
            return
        channel = connection.channel if connection is self._daemon.connection else None
        heard = partial(self._heard, connection, channel, request, answer)
        if channel is None or not channel.post(request, heard):
            heard(None)

    def _heard(
        self, connection: Connection, channel: Channel | None, request: Settle, answer: Handler, reply: Reply | None
    ) -> None:
        """Take the answer that came by `channel`. If none came and the daemon is gone, the next one gets the
        request."""
        daemon = self._daemon
        if reply is not None or (channel is not None and not channel.closed):
            answer(reply)
            if reply is not None and connection.owed:
                self.pay(connection)
        elif connection in (daemon.connection, daemon.suspended) and not daemon.closing:
            connection.owed.append((request, answer))
            self.pay(connection)
        else:
            daemon.count("stale_settles")

    def _verdicts(self, reply: Reply | None) -> list[Verdict]:
        daemon = self._daemon
        if isinstance(reply, Settled) and (wrong := wrong_settlement(reply)):
            daemon.misbehaved(wrong)
        elif isinstance(reply, Settled):
            verdicts = [_VERDICTS[verdict] for verdict in reply.verdicts]
            for verdict in set(verdicts):
                daemon.count(f"verdict_{verdict.name.lower()}", verdicts.count(verdict))
            return verdicts
        elif isinstance(reply, Error):
            daemon.count("settles_refused")
            daemon.log_refusal("settle", reply)
        elif reply is None:
            daemon.count("settles_unanswered")
        else:
            daemon.misbehaved(f"a {type(reply).__name__.lower()} to a settlement")
        return []
