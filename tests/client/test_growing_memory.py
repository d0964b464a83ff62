"""A daemon that has just started: engines use the part of its memory that is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcache_client import GroupSpec, NamespaceSpec, Outcome, Session

MIB = 1 << 20
Hashes = Callable[[int], list[bytes]]
Until = Callable[[Callable[[], Any], str], Any]


def test_a_daemon_serves_before_its_memory_is_complete(start_daemon: Any, hashes: Hashes, until: Until) -> None:
    daemon = start_daemon(size="1GiB", huge_pages="never")
    with Session.connect(daemon.endpoint, engine="e1", deadline=10.0) as session:
        ns = session.attach(NamespaceSpec(model="m", groups=[GroupSpec(128, MIB)]), shards=(0,))
        region = session.region
        assert region is not None
        run = hashes(64)
        reserved = ns.reserve(run)
        assert len(reserved.granted) == 64
        assert max(slot.ref.offset for slot in reserved.slots) < region.present
        for slot in reserved.slots:
            slot.view()[:] = b"x" * MIB
        ns.settle(reserved.id, Outcome.COMMITTED)
        until(lambda: region.present == region.bytes, "all of the memory")
        assert ns.acquire(run).hits == 64
    until(lambda: "MiB are in memory, " in daemon.log or "GiB are in memory, " in daemon.log, "a line about that")
