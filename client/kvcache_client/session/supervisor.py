"""Connects a session, and keeps it connected: the session's own thread.

The thread watches the connection, receives answers that no call waits for, probes a daemon that has missed a deadline,
reports counts to it, and reconnects after it has come back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import zmq

from kvcache_client.session.breaker import Backoff
from kvcache_client.session.connection import Connection, Dialer
from kvcache_client.session.counters import Gains
from kvcache_client.session.daemon import Daemon
from kvcache_client.session.namespace import Namespace
from kvcache_client.session.region import Region
from kvcache_client.session.settlements import Settlements
from kvcache_client.session.waker import Waker
from kvcache_proto import messages as m
from kvcache_proto.errors import ClientError, KVCacheError, Unavailable
from kvcache_proto.types import Breaker

logger = logging.getLogger("kvcache_client.session")

PUMP_SECONDS = 0.02  # for which messages are received before the connection is checked again
ATTACH_AGAIN_SECONDS = 2.0  # until a refused namespace is attached again: there may be room now
REPORT_SECONDS = 1.0  # between two reports: `top` refreshes as often
STEADY_SECONDS = 1.0  # a connection that has lasted longer resets the delay of the next one


class Telemetry:
    """Reports counts: at once if the breaker has opened or closed or the daemon is new, otherwise every second."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._gains = Gains(daemon.counters.snapshot)
        self._lock = threading.Lock()
        self._reported: tuple[m.Welcome, Breaker] | None = None
        self._due = 0.0

    def add_counts(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Also report the counts that `source` returns; it is called on the supervisor's thread."""
        self._gains.sources.append(source)

    def seconds_left(self) -> float:
        """Return the seconds until a report may be due."""
        return max(0.0, self._due - time.monotonic())

    def report(self, connection: Connection, at_once: bool = False) -> None:
        """Send the changed counts if a report is due or `at_once`; never waits."""
        welcome, now = connection.handshake.welcome, time.monotonic()
        with self._lock:
            state = welcome, Breaker.CLOSED if self._daemon.breaker.closed else Breaker.OPEN
            if state == self._reported and now < self._due and not at_once:
                return
            self._due = now + REPORT_SECONDS
            gained, sums = self._gains.look()
            if state == self._reported and not gained:
                return
            if self._daemon.post(connection, m.ReportClient(0, b"", state[1], gained), "stale_client_reports"):
                self._gains.note(sums)
                self._reported = state


class Supervisor:
    """Keeps a session connected, and its namespaces attached."""

    def __init__(
        self, daemon: Daemon, dialer: Dialer, settlements: Settlements, telemetry: Telemetry, waker: Waker
    ) -> None:
        self.region: Region | None = None  # stays mapped when the daemon ends, until a later one has another region
        self._daemon, self._dialer, self._settlements, self._telemetry = daemon, dialer, settlements, telemetry
        self._waker = waker
        self._backoff = Backoff()
        self._namespaces: list[Namespace] = []
        self._region_callbacks: list[Callable[[Region], None]] = []
        self._change = threading.RLock()  # held while region, connection or namespaces change
        self._steady_at = self._attached_at = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvcache-session", daemon=True)

    # Requests of the session.

    def start(self) -> None:
        self._thread.start()

    def attach(self, namespace: Namespace, wait: bool, put_off: bool, insist: bool) -> None:
        """Attach `namespace` now and at each later daemon, as described in `Session.attach`.

        With `put_off` and without a daemon, it is attached at the next one. Raises the daemon's refusals, and
        Unavailable; then nothing has changed.
        """
        with self._change:
            self._namespaces.append(namespace)  # first: the answer may be here before `join_later` returns
            connection = self._daemon.connection
            try:
                if connection is None:
                    raise Unavailable(self._daemon.absence)
                if wait:
                    namespace.join(connection)
                else:
                    namespace.join_later(connection)
            except KVCacheError as error:
                if put_off and isinstance(error, Unavailable):
                    self._daemon.count("attaches_put_off")
                elif insist:
                    namespace.refuse(str(error))
                else:
                    self._namespaces.remove(namespace)
                    namespace.leave()
                    raise

    def detach(self, namespace: Namespace) -> None:
        with self._change:
            if namespace in self._namespaces:
                self._namespaces.remove(namespace)
                namespace.leave()

    def on_region(self, callback: Callable[[Region], None]) -> None:
        with self._change:
            self._region_callbacks.append(callback)
            if self.region is not None:
                callback(self.region)

    def begin_closing(self) -> bool:
        """Stop looking for a daemon. Return True if this is the first call."""
        with self._change:
            first = not self._daemon.closing
            self._daemon.closing = True
        return first

    def stop(self) -> None:
        """End the thread, once it has done what it is doing."""
        self._stopping = True
        self._waker.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        """End the thread, and close the connection or the suspended one."""
        self.stop()
        self.leave("closed")
        self._give_up_suspended()
        self._dialer.close()
        self._waker.close()

    # The thread.

    def _run(self) -> None:
        while not self._stopping:
            try:
                if self._daemon.connection is None:
                    self._reconnect()
                else:
                    self._watch(self._daemon.connection)
            except Exception:  # without this thread, the session would never reconnect or receive late answers
                self._daemon.count("keeper_errors")
                logger.exception("an error in the session's own thread")
                self._waker.wait([], self._backoff.longest)

    def _reconnect(self) -> None:
        until = time.monotonic() + self._backoff.next()
        while not self._stopping and (left := until - time.monotonic()) > 0:
            self._waker.wait([], left)
        if not self._stopping:
            self.look_for_daemon()

    def _watch(self, connection: Connection) -> None:
        """Wait until something is due at `connection`, and do it."""
        daemon, channel = self._daemon, connection.channel
        self._telemetry.report(connection)
        channel.watched = False  # before `busy` is read: a post in between calls `wake`
        channel.watched = watched = channel.busy
        probe_at = daemon.breaker.probe_at
        timeout, now = daemon.deadline if watched else self._telemetry.seconds_left(), time.monotonic()
        if self._refused():
            timeout = min(timeout, max(0.0, self._attached_at + ATTACH_AGAIN_SECONDS - now))
        if probe_at is not None:
            timeout = max(0.0, probe_at - now)
        handshake = connection.handshake
        ready = self._waker.wait([handshake.descriptor, *([channel.descriptor] if watched else [])], timeout)
        if handshake.descriptor in ready and not handshake.still_open():
            self.leave("the daemon closed the connection")
        elif channel.fault:
            self.leave(channel.fault)
        else:
            if watched:
                channel.pump(PUMP_SECONDS)  # a running call receives for us, but the end of the connection must be seen
            now = time.monotonic()
            if now >= self._attached_at + ATTACH_AGAIN_SECONDS and daemon.breaker.probe_at is None:
                self._attached_at = now
                for namespace in self._refused():
                    namespace.join_later(connection)
            if channel.overdue(now, daemon.deadline):
                daemon.missed("an answer is overdue")
            if daemon.breaker.probe_due(now):
                daemon.probe(connection, now)

    def _refused(self) -> list[Namespace]:
        """Return the namespaces that the daemon has refused.

        It takes no lock: a call that waits for an answer holds it.
        """
        return [namespace for namespace in list(self._namespaces) if namespace.refused]

    # Connecting and leaving: on the thread, except for the first and the last time.

    def look_for_daemon(self) -> None:
        """Connect if there is a daemon; otherwise log the reason, once per reason."""
        try:
            self.connect(interruptible=True)
        except (KVCacheError, OSError, zmq.ZMQError) as error:
            self._daemon.count("connects_failed")
            if str(error) != self._daemon.absence:
                self._daemon.absence = str(error)
                logger.warning("no cache until the daemon is there: %s", self._daemon.absence)

    def connect(self, interruptible: bool = False) -> None:
        """Perform the handshake, map the region, and attach the session's namespaces.

        Raises the errors of `Session.connect`; then nothing has changed.
        """
        daemon = self._daemon
        suspended = daemon.suspended
        connection = self._dialer.dial(daemon.connect_timeout, suspended, self.region, interruptible)
        try:
            with self._change:
                self._adopt_region(connection.region)
            self._attach_all(connection, reclaim=connection is suspended)
        except BaseException:
            connection.close()
            if connection is not suspended:
                connection.unlock()
            raise
        if connection is suspended:
            daemon.suspended = None
        else:
            self._give_up_suspended()
        self._settlements.pay(connection)
        self._steady_at = time.monotonic() + STEADY_SECONDS
        daemon.breaker.answered()
        again = "connected again" if connection.handshake.welcome.resumed else "connected"
        session = connection.handshake.welcome.session
        logger.info("%s to %s as %r, session %d", again, self._dialer.endpoint, self._dialer.engine, session)

    def _attach_all(self, connection: Connection, reclaim: bool) -> None:
        """Attach all namespaces over `connection`, and then put it into use."""
        tried: set[Namespace] = set()
        while self._daemon.connection is not connection:  # without the lock, for which an engine's step may wait
            with self._change:
                left = [namespace for namespace in self._namespaces if namespace not in tried]
                if not left and not reclaim:
                    self._daemon.connection = connection
            for namespace in left:
                try:
                    namespace.join(connection)
                except ClientError as error:
                    namespace.refuse(str(error))
            tried.update(left)
            if reclaim:
                self._reclaim(connection)
                reclaim = False

    def _reclaim(self, connection: Connection) -> None:
        """Report our state to a new daemon: leases, and the highest reservation in earlier daemons' answers."""
        leases = list(connection.leases.items())
        lost = self._daemon.ask(m.Reclaim(0, b"", connection.newest_reservation, leases), m.Reclaimed, connection).lost
        self._daemon.count("sessions_resumed")
        self._daemon.count("leases_reclaimed", len(leases) - len(lost))
        self._daemon.count("leases_lost", len(lost))

    def _adopt_region(self, region: Region) -> None:
        if region is self.region:
            return
        self.region = region
        for callback in self._region_callbacks:
            try:
                callback(region)
            except Exception:  # a caller's own code: it must not break the session, nor the callbacks after it
                self._daemon.count("region_callback_errors")
                logger.exception("a callback of on_region failed")

    def leave(self, reason: str) -> None:
        """End the connection, if there is one. Requests that wait for an answer get none."""
        daemon = self._daemon
        if (connection := daemon.connection) is None:
            return
        if not daemon.closing:
            daemon.suspended = connection  # first: a concurrent settlement finds at least one of the two connections
        daemon.connection = None
        daemon.absence = f"the session with the daemon at {self._dialer.endpoint} ended: {reason}"
        if daemon.closing:
            connection.unlock()  # no copy is running: the daemon need not check whether this process has ended
        connection.close()
        if time.monotonic() > self._steady_at:  # if a daemon accepts and then drops us, retry less and less often
            self._backoff.reset()
        if not daemon.closing:
            daemon.count("links_lost")
            logger.warning("%s; lookups miss until it is back", daemon.absence)

    def _give_up_suspended(self) -> None:
        """Drop the session with the last daemon: a new session has replaced it, or this one is closed."""
        suspended, self._daemon.suspended = self._daemon.suspended, None
        if suspended is not None:
            self._daemon.count("stale_settles", len(suspended.owed))
            suspended.unlock()
