"""A session's reports to the daemon for operators: its breaker's state, and its counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from kvcache_client.session.connection import Connection
from kvcache_client.session.counters import Gains
from kvcache_client.session.daemon import Daemon
from kvcache_proto.messages import Tell, Welcome
from kvcache_proto.types import Breaker

EVERY = 1.0  # seconds: `top` refreshes as often


class Telemetry:
    """Reports at once if the breaker has opened or closed or the daemon is new, otherwise the changes every second."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._gains = Gains(daemon.counters.snapshot)
        self._lock = threading.Lock()
        self._reported: tuple[Welcome, Breaker] | None = None
        self._due = 0.0

    def add_counts(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Report the counts that `source` returns, too; it is called on the supervisor's thread."""
        self._gains.sources.append(source)

    def seconds_left(self) -> float:
        """Return the seconds until a report may be due."""
        return max(0.0, self._due - time.monotonic())

    def report(self, connection: Connection, at_once: bool = False) -> None:
        """Send the changes if a report is due or `at_once`; never waits."""
        welcome, now = connection.door.welcome, time.monotonic()
        with self._lock:
            state = welcome, Breaker.CLOSED if self._daemon.breaker.closed else Breaker.OPEN
            if state == self._reported and now < self._due and not at_once:
                return
            self._due = now + EVERY
            gained, sums = self._gains.look()
            if state == self._reported and not gained:
                return
            if self._daemon.post(connection, Tell(0, b"", state[1], gained), "stale_tells"):
                self._gains.note(sums)
                self._reported = state
