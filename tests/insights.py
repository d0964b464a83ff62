"""What the daemon does around the cache: insight follows what the core reports, and answers what it is asked."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import msgspec

from kvcache_proto import messages as m
from kvcache_proto.codec import encode
from kvcache_server.core.cache import Cache
from kvcache_server.insight.insight import Insight
from kvcache_server.miss_report import Answer
from kvcache_server.slices import finish
from kvcache_server.status import Connections, Daemon, Histogram, Integrity


def process() -> Daemon:
    """The figures of a process that has done nothing."""
    return Daemon(
        version="0",
        pid=1,
        started_at=0.0,
        uptime_s=0.0,
        endpoint="",
        region="",
        region_bytes=0,
        present_bytes=0,
        locked=False,
        log_level="info",
        messages=0,
        sessions_opened=0,
        max_sessions=0,
        acquire=Histogram.of(()),
        errors={},
        drops={},
        handshakes_refused={},
        connections=Connections(0, 0, {}),
        integrity=Integrity(),
        http=None,
        tiers=[],
        tier_processes=[],
        events=None,
    )


def insight(cache: Cache) -> Insight:
    """The one that follows the cache, from the first call on."""
    found: Insight | None = vars(cache).get("insight")
    if found is None:  # kept by the cache: it refers to it, so that any table would keep both
        found = vars(cache)["insight"] = Insight(cache, process)
    return found


def follow(cache: Cache) -> None:
    """Let insight note what the core has reported; records are left for who has a state file."""
    changes, cache.effects.changes = cache.effects.changes, []
    insight(cache).follow(changes)


def begin(cache: Cache, session: int, request: Any, now: float) -> Any:
    """Answer a request, or take one slice of an answer of insight's."""
    if type(request) in Insight.requests:
        return insight(cache).begin(session, request, now)
    return cache.handle(session, request, now)


def answer(cache: Cache, session: int, request: Any, now: float) -> Any:
    """Answer a request in full, and do what is left to the sweeper."""
    insight(cache)
    reply = begin(cache, session, request, now)
    if isinstance(reply, Generator):
        reply = finish(reply)
    cache.sweeper.finish()
    follow(cache)
    if isinstance(reply, m.Acquired) and insight(cache).wants(request, reply):
        insight(cache).looked_up(session, request, reply, encode(request), now)
    return reply


def explained(reply: m.Explained) -> Answer:
    """Return the answer of `why`."""
    return msgspec.msgpack.decode(reply.answer, type=Answer)


def figures(cache: Cache, now: float) -> dict[str, Any]:
    """Return what `status` shows."""
    follow(cache)
    found: dict[str, Any] = msgspec.to_builtins(finish(insight(cache).reporting(now)))
    return found
