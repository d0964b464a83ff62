"""What clients tell the daemon of themselves, as its operator sees it."""

from __future__ import annotations

import ast
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcache_client
from kvcache_client import NamespaceSpec, Session
from kvcache_client.session import supervisor
from kvcache_client.session.counters import Counters, Gains
from kvcache_proto.counts import CLIENT_COUNTS

Connect = Callable[..., Session]
Hashes = Callable[[int], list[bytes]]
Until = Callable[[Callable[[], Any], str], Any]


def told(daemon: Any, name: str) -> int:
    return int(daemon.status()["client_counts"].get(name, 0))


def row(daemon: Any, session: Session) -> dict[str, Any]:
    rows = {each["engine"]: each for each in daemon.status()["sessions"]}
    return rows[session.engine]


def test_gains_are_told_once_and_kept_until_they_are() -> None:
    counts, gains = Counters(), Gains()
    gains.sources.append(counts.snapshot)
    counts.add("probes", 2)
    gained, _ = gains.look()
    assert gained == gains.take() == {"probes": 2}
    assert gains.take() == {}
    counts.add("probes")
    counts.add("unsent", 5)
    assert gains.take() == {"probes": 1, "unsent": 5}


def test_a_new_session_says_that_it_is_well(daemon: Any, connect: Connect, until: Until) -> None:
    session = connect()
    until(lambda: row(daemon, session)["breaker"] == "closed", "its telling")


def test_a_breaker_that_opened_is_told_at_once(
    daemon: Any, connect: Connect, spec: NamespaceSpec, hashes: Hashes, until: Until
) -> None:
    session = connect(deadline=0.3)
    ns = session.attach(spec, shards=(0,))
    daemon.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, daemon.process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        assert ns.acquire(hashes(1)).failed
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    until(lambda: told(daemon, "breaker_opened") == 1, "what was told when the breaker opened")
    until(lambda: row(daemon, session)["breaker"] == "closed", "what was told when it closed")
    assert row(daemon, session)["counts"]["lookups_unanswered"] == 1


def test_what_was_counted_is_told_now_and_then(
    daemon: Any, connect: Connect, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "REPORT_SECONDS", 0.02)
    session = connect()
    session.daemon.count("probes_late", 3)
    until(lambda: told(daemon, "probes_late") == 3, "what it counted")
    session.daemon.count("probes_late", 4)
    until(lambda: told(daemon, "probes_late") == 7, "what it counted since")


def test_others_in_the_process_have_their_counts_told_too(
    daemon: Any, connect: Connect, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "REPORT_SECONDS", 0.02)
    session, counts = connect(), Counters()
    counts.add("loaded_bytes", 1 << 40)
    session.add_counts(counts.snapshot)
    until(lambda: told(daemon, "loaded_bytes") == 1 << 40, "the other's count")


def test_a_session_that_leaves_tells_the_rest_and_its_counts_stay_in_the_sum(daemon: Any, until: Until) -> None:
    with Session.connect(daemon.endpoint, engine="short", deadline=10.0) as session:
        until(lambda: row(daemon, session)["breaker"] == "closed", "its first telling")
        session.daemon.count("loads_failed", 2)
    status = daemon.wait_status(lambda status: not status["sessions"], "its end")
    assert status["client_counts"]["loads_failed"] == 2


def test_the_next_daemon_hears_what_happened_while_none_was_there_and_nothing_twice(
    start_daemon: Any, until: Until
) -> None:
    daemon = start_daemon(keep="true")
    with Session.connect(daemon.endpoint, engine="e1", deadline=10.0) as session:
        until(lambda: row(daemon, session)["breaker"] == "closed", "its first telling")
        session.daemon.count("loads_failed", 2)
        session._telemetry.report(session.daemon.connection, at_once=True)
        until(lambda: told(daemon, "loads_failed") == 2, "what the first daemon is told")
        daemon.stop()
        daemon = start_daemon(keep="true")
        until(lambda: told(daemon, "links_lost") == 1, "what happened between the daemons")
        assert "loads_failed" not in daemon.status()["client_counts"]
    daemon.wait_status(lambda status: not status["sessions"], "its end")


def _counted() -> set[str]:
    """Return the names that the client's source counts by."""
    names = set()
    for file in Path(kvcache_client.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                counting = {"add": 1, "count": 1, "warn": 1, "_count_copy": 2, "_no_lease": 9, "refused": 9}
                counting |= {"post": 9, "_reservation": 9}
                for argument in node.args[: counting.get(node.func.attr, 0)]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        names.add(argument.value)
    return {name for name in names if re.fullmatch("[a-z_]+", name)}


def test_the_daemon_knows_every_name_that_the_client_counts_by() -> None:
    counted = _counted()
    assert len(counted) > 60
    assert counted <= CLIENT_COUNTS
