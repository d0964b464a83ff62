"""A session with the daemon, and the calls that it offers.

The calls run on their caller's thread. One more thread, the supervisor's, keeps the session connected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvcache_client.session import forks
from kvcache_client.session.connection import Dialer
from kvcache_client.session.counters import Counters
from kvcache_client.session.daemon import Daemon, ignore
from kvcache_client.session.grants import Slot
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.region import Region
from kvcache_client.session.settlements import Settlements
from kvcache_client.session.supervisor import Supervisor, Telemetry
from kvcache_client.session.waker import Waker
from kvcache_proto import messages as m
from kvcache_proto.endpoint import check_endpoint, default_endpoint
from kvcache_proto.errors import RegionError, Unavailable
from kvcache_proto.trust import server_uids
from kvcache_proto.types import NamespaceSpec

DEADLINE = 0.05  # seconds
CONNECT_TIMEOUT = 2.0  # seconds


class Session:
    """One attached process. Its grants end with the session, or with the process.

    `connect` needs a running daemon; `open` also works before there is one. A session is thread-safe. In a forked
    child it raises ClientError: the child must make its own.
    """

    def __init__(
        self,
        endpoint: str | None,
        engine: str,
        label: str,
        deadline: float,
        connect_timeout: float,
        servers: Sequence[int | str] | str = (),
        patient: bool = False,
    ) -> None:
        """Use `connect` or `open` instead."""
        self.endpoint = check_endpoint(endpoint) if endpoint else default_endpoint()
        self.engine, self.label = engine, label
        self._patient = patient
        trusted = server_uids(servers)
        waker, counters = Waker(), Counters()
        self.daemon = Daemon(self.endpoint, deadline, connect_timeout, counters, waker.wake)
        self._settlements, self._telemetry = Settlements(self.daemon), Telemetry(self.daemon)
        dialer = Dialer(self.endpoint, engine, label, trusted, counters, waker)
        self._supervisor = Supervisor(self.daemon, dialer, self._settlements, self._telemetry, waker)

    @classmethod
    def connect(
        cls,
        endpoint: str | None = None,
        *,
        engine: str,
        label: str = "",
        deadline: float = DEADLINE,
        connect_timeout: float = CONNECT_TIMEOUT,
        server_uids: Sequence[int | str] | str = (),
    ) -> Session:
        """Return a session with the daemon at `endpoint`.

        Args:
            endpoint: `ipc:///path/to/kvcache.sock`; None means KVCACHE_ENDPOINT or the default of this user.
            engine: the id that a scheduler and its ranks share.
            label: a name for this process, which `status` shows.
            deadline: seconds that a lookup or a reservation may take; after one missed deadline the breaker opens.
            connect_timeout: seconds for connecting, and for each request off the fast path.
            server_uids: users, by name or number, whose daemons are trusted besides root's and this user's; () means
                KVCACHE_SERVER_UIDS. Nothing is sent to another user's daemon, and NotPermitted names the user.
        Raises ConfigError, Unavailable, NotPermitted, VersionMismatch, RegionError.
        """
        session = cls(endpoint, engine, label, deadline, connect_timeout, server_uids)
        try:
            session._supervisor.connect()
            session._supervisor.start()
            session.ping()
        except BaseException:
            session.close()
            raise
        return session

    @classmethod
    def open(
        cls,
        endpoint: str | None = None,
        *,
        engine: str,
        label: str = "",
        deadline: float = DEADLINE,
        connect_timeout: float = CONNECT_TIMEOUT,
        server_uids: Sequence[int | str] | str = (),
    ) -> Session:
        """Return a session, whether or not a daemon is running.

        Until one is, lookups miss and the session tries to connect. The arguments are those of `connect`. Raises only
        ConfigError.
        """
        session = cls(endpoint, engine, label, deadline, connect_timeout, server_uids, patient=True)
        session._supervisor.look_for_daemon()
        session._supervisor.start()
        return session

    @property
    def up(self) -> bool:
        """Whether the connection is open and the daemon answers in time."""
        return self.daemon.up

    @property
    def region(self) -> Region | None:
        """The mapped region; it stays mapped when the daemon ends, until a later daemon has another region."""
        return self._supervisor.region

    @property
    def deadline(self) -> float:
        """Seconds that a lookup or a reservation may take."""
        return self.daemon.deadline

    @property
    def counters(self) -> dict[str, int]:
        """The counts of failures, refusals and late answers, by name; counts of 0 are left out."""
        return self.daemon.counters.snapshot()

    def add_counts(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Also report the counts that `source` returns to the daemon; it is called on the supervisor's thread."""
        self._telemetry.add_counts(source)

    def attach(
        self,
        spec: NamespaceSpec,
        shards: Sequence[int] = (),
        ceiling_bytes: int = 0,
        wait: bool = True,
        insist: bool = False,
        reports_leaving: bool = False,
    ) -> Namespace:
        """Join a namespace, and join it again after each restart of the daemon.

        Args:
            shards: the shards that this process writes and reads; a scheduler, which touches no bytes, joins with none.
            ceiling_bytes: limit of the bytes that this engine's saves may occupy; 0 is no limit.
            wait: if False, return at once and raise only BadArgument: a refusal is logged and counted, and lookups miss
                until the namespace is joined.
            reports_leaving: this engine's reservations report what its device is about to evict: see `Run`.
            insist: raise nothing after the wait: `Namespace.refused` has the reason, and later daemons are tried.
        Raises the daemon's refusals (GeometryMismatch, BadArgument) and, on a session made by `connect`, Unavailable;
        then nothing has changed. A session made by `open` attaches as soon as there is a daemon.
        """
        self.daemon.check_process()
        namespace = Namespace(self.daemon, self._settlements, spec, tuple(shards), ceiling_bytes, reports_leaving)
        self._supervisor.attach(namespace, wait, self._patient, insist)
        return namespace

    def detach(self, namespace: Namespace) -> None:
        """Leave a namespace, without waiting; running reads and writes there continue until they end."""
        self._supervisor.detach(namespace)

    def view(self, slot: Slot, shard: int = 0) -> memoryview:
        """Return the bytes of `shard` of `slot`, in the mapped region: writable under a reservation, else read-only.

        Raises BadArgument for a shard that the block does not have, RegionError if the slot was given to another block,
        lies in a region that this session has left, or is to be written and lies in several pieces (`views`).
        """
        self.daemon.check_process()
        if slot.region is not self.region:
            raise RegionError("the slot lies in another region: the daemon was restarted with a new one")
        return slot.view(shard)

    @property
    def capacity(self) -> int:
        """Bytes of the mapped region; 0 if there is none."""
        return self.region.bytes if self.region is not None else 0

    def on_region(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` with the present region, if there is one, and with each later one.

        For a later one, it is called on the supervisor's thread, after a restart of the daemon with another region and
        before any namespace is attached there.
        """
        self._supervisor.on_region(callback)

    def stats(self) -> dict[str, Any]:
        """Return the daemon's statistics. Raises Unavailable, also if another thread is requesting them now."""
        try:
            return msgspec.msgpack.decode(self.daemon.ask(m.Stats(0, b""), m.Report).stats, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unavailable(f"the daemon's statistics cannot be read: {error}") from None

    def clear(self, namespace: str = "") -> int:
        """Forget all visible blocks of the namespace with this id, or of all for "", and return their number.

        Raises Unavailable, and the daemon's refusals.
        """
        return self.daemon.ask(m.Clear(0, b"", namespace), m.Cleared).blocks

    # For tiers.

    def poll_jobs(
        self, tier: str, batch_bytes: int, writes: str, writes_off: str = "", removals_off: str = ""
    ) -> m.Jobs:
        """Return jobs for the tier `tier`, perhaps none, after at most half a second. Arguments are fields of PollJobs.

        Raises Unavailable, and the daemon's refusals: NotPermitted for users other than its own.
        """
        return self.daemon.ask(m.PollJobs(0, b"", tier, batch_bytes, writes, writes_off, removals_off), m.Jobs)

    def report_jobs(
        self,
        exists: Sequence[tuple[int, bytes]] = (),
        fetched: Sequence[tuple[int, bytes]] = (),
        stored: Sequence[tuple[int, bytes]] = (),
        off: str = "",
        writes_off: str = "",
    ) -> None:
        """Report the results of jobs, from any thread, without waiting. The arguments are fields of JobResults."""
        report = m.JobResults(0, b"", list(exists), list(fetched), list(stored), off, writes_off)
        self.daemon.post(self.daemon.connection, report, "stale_reports")

    def ping(self) -> float:
        """Return the seconds that the daemon's answer took. Raises Unavailable."""
        start = time.monotonic()
        self.daemon.ask(m.Ping(0, b""), m.Pong)
        return time.monotonic() - start

    def close(self) -> None:
        """End the session and all its grants, after all sent messages have arrived, if the daemon answers."""
        daemon = self.daemon
        if daemon.owner != forks.current() or not self._supervisor.begin_closing():
            return
        try:
            if (connection := daemon.connection) is not None:
                self._telemetry.report(connection, at_once=True)
                # When the last request in the queue is answered, all earlier ones are. Again, for messages that their
                # answers caused; the session's thread may still be about to send one.
                if connection.channel.call(m.Ping(0, b""), daemon.connect_timeout, ignore) is not None:
                    self._supervisor.stop()
                    connection.channel.call(m.Ping(0, b""), daemon.connect_timeout, ignore)
        finally:  # a session that stays open, though unusable, would keep its leases
            self._supervisor.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
