"""Which sessions of one engine id may write which shards of a namespace beside each other."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_proto.errors import NotPermitted
from kvcache_proto.types import Verdict

ONE, TWO = (NamespaceSpec("model", (GroupSpec(16, (4096,) * shards),)) for shards in (1, 2))
HASHES = [bytes([number]) * 32 for number in range(8)]
TAKEN = (
    r"shard 0 of namespace \w+ has two writers, session \d+ \(\w+ b\) and session \d+ \(\w+ a\), "
    "with the same engine id"
)


@pytest.fixture
def join(daemon: Any) -> Any:
    """`join(label, spec, shards)` returns a namespace as a new session of engine `prefill` has it.

    `join.sessions` has the sessions, the newest one last.
    """
    sessions: list[Session] = []

    def make(label: str, spec: NamespaceSpec, shards: tuple[int, ...], **options: Any) -> Any:
        session = Session.connect(daemon.endpoint, **{"engine": "prefill", "label": label, "deadline": 10.0, **options})
        sessions.append(session)
        return session.attach(spec, shards)

    make.sessions = sessions  # type: ignore[attr-defined]
    yield make
    for session in sessions:
        session.close()


@pytest.mark.parametrize("spec", [ONE, TWO])
def test_a_second_engine_of_the_same_id_is_refused_by_name(join: Any, daemon: Any, spec: NamespaceSpec) -> None:
    ranks = [join(f"rank{shard} a", spec, (shard,)) for shard in range(spec.shards)]
    scheduler = join("scheduler a", spec, ())
    reservation = scheduler.reserve(HASHES)
    for _ in range(3):
        with pytest.raises(NotPermitted, match=TAKEN):
            join("rank0 b", spec, (0,))
    # The first engine's blocks are its own: it settles them, and nobody waits for them.
    verdicts: list[Verdict] = []
    for rank, session in zip(ranks, join.sessions, strict=False):
        rank.settle(reservation.id, 0, then=verdicts.extend)
        session.ping()
    assert verdicts[-8:] == [Verdict.VISIBLE] * 8
    assert daemon.status()["pool"]["blocks_writing"] == 0
    lines = [line for line in daemon.log.splitlines() if "has two writers" in line]
    assert len(lines) == 3, "once a session"
    assert all("engine prefill (rank0 b)" in line and "(rank0 a)" in line for line in lines)


def test_repeated_refusals_of_a_session_are_logged_once(join: Any, daemon: Any) -> None:
    join("rank0 a", TWO, (0,))
    join("rank1 a", TWO, (1,))
    session = join.sessions[-1]
    for _ in range(5):
        with pytest.raises(NotPermitted):
            session.attach(TWO, (0, 1))
    assert daemon.log.count("has two writers") == 1


def test_ranks_that_attach_first_are_checked_when_their_schedulers_attach(join: Any) -> None:
    """Two that write all shards, each for itself, are fine until somebody relies on them."""
    for label in ("rank0 a", "rank0 b"):
        assert join(label, ONE, (0,)).reserve([label.encode().ljust(32)]).commit() == [Verdict.VISIBLE]
    with pytest.raises(NotPermitted, match="two writers"):
        join("scheduler a", ONE, ())


def test_sessions_that_each_write_every_shard_are_each_their_own_writer(join: Any) -> None:
    spaces = [join(f"whole {number}", TWO, (0, 1)) for number in range(3)]
    for number, namespace in enumerate(spaces):
        assert namespace.reserve([HASHES[number]]).commit() == [Verdict.VISIBLE]


def test_engines_with_ids_of_their_own_share_a_namespace(join: Any) -> None:
    for name in ("one", "two"):
        join("rank0", TWO, (0,), engine=name)
        join("rank1", TWO, (1,), engine=name)
        assert len(join("scheduler", TWO, (), engine=name).reserve([name.encode().ljust(32)]).granted) == 1


def test_disconnected_sessions_and_the_session_itself_are_not_rivals(join: Any, daemon: Any) -> None:
    join("rank0 a", TWO, (0,))
    session = join.sessions[-1]
    join("rank1 a", TWO, (1,))
    scheduler = join("scheduler a", TWO, ())
    assert session.attach(TWO, (0,)).attached
    session.close()
    daemon.wait_status(lambda s: len(s["sessions"]) == 2, "the end of the rank")
    join("rank0 b", TWO, (0,))
    assert len(scheduler.reserve(HASHES).granted) == 8
