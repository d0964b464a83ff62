"""Ranks that take no part: what that costs the daemon and the engine, and what their scheduler's side is told."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from steps import BLOCK, LAYERS, PAGE, SPEC, Request, idle

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.scheduler.saves import FIRST_RETRY, INSIST, LAST_RETRY, _Refusals
from kvcache_client.settings import ConnectorSettings
from kvcache_client.step_plan import Report
from kvcache_client.worker.places import RankFacts, Shards
from kvcache_client.worker.worker import Worker

torch = pytest.importorskip("torch")


def reserves_refused(daemon: Any) -> int:
    return int(daemon.status()["daemon"]["errors"].get("bad_argument", 0))


def test_a_refusal_that_does_not_change_is_not_asked_again_each_step(
    rigs: Any, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache_client.scheduler.saves.FIRST_RETRY", 1000.0)
    rig = rigs("one")
    rig.worker.close()  # the engine has no rank any more, and its scheduler does not know
    daemon.wait_status(lambda s: len(s["sessions"]) == 1, "the end of the rank")
    for number in range(50):
        request = Request(f"r{number}", 4 * BLOCK)
        rig.run(request, [0, 1, 2, 3])
        rig.session.ping()
    assert 1 <= reserves_refused(daemon) <= 3  # what was under way when the first refusal came
    assert rig.scheduler.counters.get("saves_refused", 0) <= 50


def test_blocks_wait_a_little_for_a_rank_that_joins_late(rigs: Any, daemon: Any) -> None:
    rig = rigs("one")
    rig.worker.close()
    daemon.wait_status(lambda s: len(s["sessions"]) == 1, "the end of the rank")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    assert reserves_refused(daemon) >= 1
    session = Session.connect(daemon.endpoint, engine="one", label="rank", deadline=5.0)
    rig.worker = Worker(session, SPEC, ConnectorSettings(daemon.endpoint), Shards(1, 1), 0, RankFacts(LAYERS * PAGE))
    rig.worker.register({str(layer): tensor for layer, tensor in enumerate(rig.tensors)}, 32)
    daemon.wait_status(lambda s: rig.step() and s["pool"]["blocks"] == 4, "the blocks")
    idle(daemon, 4)
    again = Request("s", 4 * BLOCK + 1, request.block_hashes)
    assert rig.scheduler.matched_tokens(again, 0) == (4 * BLOCK, True)


def test_delays_between_refused_questions_double_up_to_a_bound() -> None:
    refusals, now, asked = _Refusals(), 0.0, []
    refusals.add("no", now)
    while now < 60.0:
        if refusals.may_send(now):
            asked.append(now)
            refusals.add("no", now)
        now += FIRST_RETRY / 2
    assert not refusals.hopeless(INSIST - 0.1) and refusals.hopeless(INSIST)
    assert len(asked) < 40
    assert max(late - early for early, late in itertools.pairwise(asked)) <= LAST_RETRY + FIRST_RETRY
    refusals.end()
    assert refusals.may_send(now) and not refusals.hopeless(now)


def test_a_rank_that_takes_no_part_is_told_of_once_and_its_engine_asks_nothing(
    rigs: Any, daemon: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig, other = rigs("one"), rigs("other")
    request = Request("r", 4 * BLOCK)
    rig.run(request, [0, 1, 2, 3])
    idle(daemon, 4)
    assert rig.worker.take_report().declined == {}
    rig.worker.decline("its copies do not work")
    told = rig.worker.take_report().declined
    assert (told, rig.worker.take_report().declined) == ({0: "its copies do not work"}, {})
    caplog.set_level(logging.INFO)
    for _ in range(3):
        rig.scheduler.reported(Report(declined=told))
    lines = [record for record in caplog.records if "runs without" in record.message]
    assert [(line.levelname, line.getMessage()) for line in lines] == [
        ("ERROR", "this engine runs without the KV cache server: rank 0 takes no part: its copies do not work")
    ]
    before = daemon.status()
    for number in range(20):
        again = Request(f"s{number}", 5 * BLOCK, request.block_hashes)
        assert rig.scheduler.matched_tokens(again, 0) == (0, False)
        rig.run(again, [10, 11, 12, 13, 14])
    status = daemon.status()
    for name in ("blocks_requested", "blocks_reserved"):
        assert status["counters"].get(name) == before["counters"].get(name)
    # A note of each request, for `why`, and our own questions.
    assert status["daemon"]["messages"] - before["daemon"]["messages"] <= 30
    assert rig.scheduler.counters["lookups_declined_rank"] == 20
    assert other.scheduler.matched_tokens(Request("t", 5 * BLOCK, request.block_hashes), 0) == (4 * BLOCK, True)
    rig.scheduler.reported(Report(declined={0: ""}))
    assert rig.scheduler.matched_tokens(Request("u", 5 * BLOCK, request.block_hashes), 0) == (4 * BLOCK, True)


def test_a_rank_that_the_daemon_refuses_joins_the_next_one(start_daemon: Any, until: Any) -> None:
    daemon = start_daemon(max_namespaces=1)
    with Session.connect(daemon.endpoint, engine="first", deadline=5.0) as first:
        first.attach(NamespaceSpec("other", (GroupSpec(BLOCK, 4096),)), (0,))
        session = Session.open(daemon.endpoint, engine="one", label="rank", deadline=5.0)
        worker = Worker(session, SPEC, ConnectorSettings(daemon.endpoint), Shards(1, 1), 0, RankFacts(LAYERS * PAGE))
        try:
            worker.register({str(layer): torch.zeros(8, PAGE, dtype=torch.uint8) for layer in range(LAYERS)}, 8)
            (why,) = worker.take_report().declined.values()
            assert "max_namespaces is 1" in why
            daemon.kill()
            start_daemon(endpoint=daemon.endpoint)
            assert until(lambda: worker.take_report().declined, "the next daemon's leave") == {0: ""}
        finally:
            worker.close()


def test_what_the_daemon_refuses_is_asked_for_again(start_daemon: Any, until: Any) -> None:
    daemon = start_daemon(max_namespaces=1)
    with (
        Session.connect(daemon.endpoint, engine="first", deadline=5.0) as first,
        Session.connect(daemon.endpoint, engine="second", deadline=5.0) as second,
    ):
        taken = first.attach(NamespaceSpec("other", (GroupSpec(BLOCK, 4096),)), (0,))
        wanted = second.attach(NamespaceSpec("m", (GroupSpec(BLOCK, 4096),)), (0,), wait=False)
        until(lambda: wanted.refused, "the refusal")
        first.detach(taken)
        until(lambda: wanted.attached, "room for the second namespace")
        assert not wanted.refused
