"""Telemetry of clients: the states of their breakers, and their counters. Pure."""

from __future__ import annotations

from collections import Counter

from kvcache_proto.counts import CLIENT_COUNTS, MAX_COUNT, MAX_GAIN, MAX_NAMES, OTHER
from kvcache_proto.errors import BadArgument
from kvcache_proto.messages import Tell
from kvcache_proto.types import Breaker
from kvcache_server.core.sessions import Session


class Client:
    """The telemetry of one session's client. `breaker` is None if it has sent none."""

    __slots__ = ("breaker", "counts")

    def __init__(self) -> None:
        self.breaker: Breaker | None = None
        self.counts: Counter[str] = Counter()


_SILENT = Client()


class Telemetry:
    """`total` has the counts of all clients together, including former ones."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self._clients: dict[int, Client] = {}  # by session

    def of(self, session: int) -> Client:
        return self._clients.get(session, _SILENT)

    def tell(self, session: Session, request: Tell) -> None:
        """Store the telemetry of a session's client, and add it to the total. Raises BadArgument; then nothing has
        changed."""
        counts = request.counts
        if request.breaker not in list(Breaker):
            raise BadArgument(f"breaker {request.breaker}: one of {', '.join(str(int(each)) for each in Breaker)}")
        if len(counts) > MAX_NAMES or not all(0 <= count <= MAX_GAIN for count in counts.values()):
            raise BadArgument(f"{len(counts)} counts: at most {MAX_NAMES}, each 0 to {MAX_GAIN}")
        client = self._clients.get(session.id)
        if client is None:
            client = self._clients[session.id] = Client()
        client.breaker = Breaker(request.breaker)
        for name, count in counts.items():
            known = name if name in CLIENT_COUNTS else OTHER
            for told in (client.counts, self.total):
                told[known] = min(told[known] + count, MAX_COUNT)

    def forget(self, session: int) -> None:
        """Drop the telemetry of a session's client; the total keeps it."""
        self._clients.pop(session, None)
