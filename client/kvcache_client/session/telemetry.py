"""What a client tells the daemon of itself: its breaker, and what it has counted. The daemon shows it to operators."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvcache_client.session.connection import Link
from kvcache_client.session.counters import Gains
from kvcache_proto.messages import Tell, Welcome
from kvcache_proto.types import Breaker

if TYPE_CHECKING:
    from kvcache_client.session.session import Session

EVERY = 1.0  # seconds: `top` looks as often
SINCE_VERSION = 2


class Telling:
    """Tells when the breaker has opened or closed, when the daemon is a new one, and else every second, if there is
    something to tell."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._gains = Gains(lambda: session.counters)
        self._lock = threading.Lock()
        self._told: tuple[Welcome, Breaker] | None = None
        self._due = 0.0

    def count_too(self, source: Callable[[], Mapping[str, int]]) -> None:
        """Tell of the counts that `source` returns, too; it is called on the session's own thread."""
        self._gains.sources.append(source)

    def wait(self, link: Link) -> float | None:
        """Return the seconds until there may be something to tell; None where the daemon does not listen."""
        return max(0.0, self._due - time.monotonic()) if link.door.welcome.version >= SINCE_VERSION else None

    def tell(self, link: Link, at_once: bool = False) -> None:
        """Tell what there is to tell; never waits."""
        welcome, now = link.door.welcome, time.monotonic()
        if welcome.version < SINCE_VERSION:
            return
        with self._lock:
            state = welcome, Breaker.CLOSED if self._session.breaker.closed else Breaker.OPEN
            if state == self._told and now < self._due and not at_once:
                return
            self._due = now + EVERY
            gained, sums = self._gains.look()
            if state == self._told and not gained:
                return
            if self._session.post(link, Tell(0, b"", state[1], gained), "stale_tells"):
                self._gains.note(sums)
                self._told = state
