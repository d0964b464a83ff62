"""The daemon as a session sees it: its connection, and how well it answers.

This decides the cost of a daemon's failure: on the fast path it is a miss.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import time
from collections.abc import Callable
from typing import TypeVar

from kvcache_client.session import forks
from kvcache_client.session.breaker import CircuitBreaker
from kvcache_client.session.channel import Handler
from kvcache_client.session.connection import Connection
from kvcache_client.session.counters import Counters
from kvcache_proto import messages as m
from kvcache_proto.errors import BadToken, ServerError, Unavailable, from_wire

logger = logging.getLogger("kvcache_client.session")

LOST = "an answer was lost, and only the session's end gives back what it granted"

T = TypeVar("T", bound=m.Reply)


class Daemon:
    """Requests to the daemon, from any thread. Only the supervisor changes `connection` and `suspended`."""

    def __init__(
        self, endpoint: str, deadline: float, connect_timeout: float, counters: Counters, wake: Callable[[], None]
    ) -> None:
        """Requests on the fast path may take `deadline` seconds, others `connect_timeout`; `wake` has the supervisor
        handle due work."""
        self.endpoint, self.deadline, self.connect_timeout = endpoint, deadline, connect_timeout
        self.owner = forks.current()  # the process that this belongs to
        self.connection: Connection | None = None  # in use
        self.suspended: Connection | None = None  # its daemon is gone, and the next one may resume it
        self.absence = "not connected yet"  # why there is no connection
        self.closing = False
        self.breaker = CircuitBreaker()
        self.counters = counters
        self._wake = wake
        self._logged: set[tuple[str, str]] = set()  # refusals, by subject and error code

    @property
    def up(self) -> bool:
        """Whether the connection is open and the daemon answers in time."""
        connection = self.connection
        return connection is not None and not connection.channel.fault and self.breaker.closed and not self.closing

    def check_process(self) -> None:
        forks.check(self.owner)

    def count(self, name: str, count: int = 1) -> None:
        self.counters.add(name, count)

    # Requests.

    def call(self, connection: Connection | None, request: m.Request, late: Handler) -> m.Reply | None:
        """Send and return the reply, or None if there is none within the deadline; `late` gets it then."""
        if connection is None or connection is not self.connection:
            return None
        if not self.breaker.closed or connection.channel.fault:
            self.count("breaker_open")
            return None
        reply = connection.channel.call(request, self.deadline, late)
        if reply is None and not (connection.channel.closed or connection.channel.fault):
            self.missed(f"no answer within {self.deadline * 1000:.0f} ms")
        return reply

    def post(
        self, connection: Connection | None, request: m.Request, stale: str, handler: Handler | None = None
    ) -> bool:
        """Send without waiting, and return whether it was sent.

        Requests of a connection that is not in use are not sent, and are counted as `stale`.
        """
        if self.owner != forks.current():
            return False
        posted = connection is not None and connection is self.connection and connection.channel.post(request, handler)
        self.count(stale, not posted)
        return posted

    def ask(
        self, request: m.Request, kind: type[T], connection: Connection | None = None, heard: Handler | None = None
    ) -> T:
        """Send and return the reply: off the fast path, where the caller may wait while other threads go on.

        `heard` gets the reply of a connection in use whenever it comes, on some thread. Raises the daemon's errors, and
        Unavailable if it does not answer within the connect timeout.
        """
        self.check_process()
        connection = connection or self.connection
        if connection is None:
            raise Unavailable(self.absence)
        if connection is not self.connection:  # not in use yet: no other thread receives for us
            reply = connection.channel.call(request, self.connect_timeout, ignore)
        else:
            reply = self._wait(connection, request, heard or ignore)
        if isinstance(reply, m.Error):
            raise from_wire(reply.code, reply.message)
        if not isinstance(reply, kind):
            self.count("requests_unanswered")
            raise Unavailable(f"the daemon at {self.endpoint} did not answer within {self.connect_timeout:g} s")
        return reply

    def _wait(self, connection: Connection, request: m.Request, heard: Handler) -> m.Reply | None:
        replies: queue.SimpleQueue[m.Reply | None] = queue.SimpleQueue()

        def answer(reply: m.Reply | None) -> None:
            heard(reply)
            replies.put(reply)

        with contextlib.suppress(queue.Empty):
            if connection.channel.post(request, answer):
                return replies.get(timeout=self.connect_timeout)
        return None

    def pump(self) -> None:
        if (connection := self.connection) is not None and self.owner == forks.current():
            connection.channel.pump()

    # Bad answers of the daemon.

    def refused(self, reply: m.Reply, counter: str, connection: Connection | None) -> None:
        """Count and log a reply that does not grant the request.

        Raises errors that are the caller's fault; the daemon's own faults are misses.
        """
        self.count(counter)
        if not isinstance(reply, m.Error):
            self.misbehaved(f"a {type(reply).__name__.lower()} to something else")
            if connection is not None:
                connection.channel.give_up(LOST)
            return
        error = from_wire(reply.code, reply.message)
        if not isinstance(error, ServerError | BadToken):
            raise error
        self.log_refusal(counter, reply)

    def log_refusal(self, what: str, error: m.Error) -> None:
        """Log a refusal, once per kind: a refusal in one step often repeats in every step. All of them are counted."""
        if (what, error.code) not in self._logged:
            self._logged.add((what, error.code))
            logger.warning("%s: %s: %s (further ones are only counted)", what, error.code, error.message)

    def misbehaved(self, what: str) -> None:
        """Note an answer that no sound daemon gives: the breaker opens, as for a missing answer."""
        self.count("odd_replies")
        self.missed(f"it answered {what}")

    # The breaker.

    def missed(self, why: str) -> None:
        """Note a missed deadline: the breaker opens, and probes are sent until an answer comes in time."""
        if self.breaker.failed(time.monotonic()):
            self.count("breaker_opened")
            logger.warning(
                "the daemon at %s is not healthy (%s): lookups miss until it answers in time", self.endpoint, why
            )
            self._wake()

    def probe(self, connection: Connection, now: float) -> None:
        """Probe whether a daemon that has missed a deadline is healthy again."""
        self.count("probes")
        connection.channel.post(m.Ping(0, b""), functools.partial(self._probed, now))

    def _probed(self, sent: float, reply: m.Reply | None) -> None:
        now = time.monotonic()
        if not isinstance(reply, m.Pong):
            return
        if now - sent > self.deadline:
            self.count("probes_late")
            self.breaker.answered_late(now)
            self._wake()
        elif self.breaker.answered():
            self.count("breaker_closed")
            logger.info("the daemon at %s answers in time again", self.endpoint)


def ignore(reply: m.Reply | None) -> None:
    """Handle an answer that is no longer waited for."""
