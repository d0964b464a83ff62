"""Sessions that report what no sound tier does: the daemon goes on, and engines are served."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest
from conftest import Daemon, StartDaemon
from tiered import SPEC, ToyEngine, all_is_free, hashes, tier_of, wait_for

from kvcache_client import Session
from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument, Unavailable
from kvcache_proto.types import MAX_HASHES

Rogue = Callable[[], Session]
ABSURD = [(0, b""), (1, b"\1"), (-1, b"\1" * 1000), (2**63, b"\0"), (2**64 - 1, b"\1" * (1 << 20)), (-(2**63), b"\xff")]


@pytest.fixture
def tier(daemon: Daemon) -> Iterator[Session]:
    """A session that asks for work, and does what the test says."""
    with Session.connect(daemon.endpoint, engine="tier rogue", label="tier", deadline=5.0) as session:
        yield session


def ask(tier: Session, wanted: str = "", batch_bytes: int = 8 << 20) -> m.Jobs:
    """Return jobs, among them some of the kind `wanted`."""
    found = [tier.poll_jobs("rogue", batch_bytes, m.SECOND)]
    wait_for(lambda: not wanted or bool(getattr(found[0], wanted)) or found.insert(0, ask(tier)) is not None, wanted)
    return found[0]


def check_service(daemon: Daemon, engine: ToyEngine) -> None:
    names = hashes(1000, 20)
    engine.save(names)
    assert engine.load(names) == 20
    assert daemon.status()["daemon"]["errors"].get("internal", 0) == 0, daemon.log


def test_reports_with_absurd_numbers(daemon: Daemon, engine: ToyEngine, tier: Session) -> None:
    ask(tier)
    for session in (tier, engine.session):  # an engine is no tier
        for field in ("exists", "fetched", "stored"):
            session.report_jobs(**{field: ABSURD})
        session.report_jobs(off="x" * 256)
    unknown = 3 * len(ABSURD) + 4  # each answer of the tier, each report of the engine
    wait_for(lambda: daemon.status()["counters"]["jobs_unknown"] == unknown, "their count")
    check_service(daemon, engine)


@pytest.mark.parametrize("batch_bytes", [-1, 0, 1 << 40])
def test_batches_of_absurd_sizes(daemon: Daemon, engine: ToyEngine, tier: Session, batch_bytes: int) -> None:
    with pytest.raises(BadArgument, match="batch_bytes"):
        tier.poll_jobs("rogue", batch_bytes, m.SECOND)
    check_service(daemon, engine)


@pytest.mark.parametrize("flags", [b"", b"\1", b"\1" * 1000, b"\0" * 1000, b"\xff" * 20, b"\1" * 19 + b"\0"])
def test_answers_of_any_length(daemon: Daemon, engine: ToyEngine, tier: Session, flags: bytes) -> None:
    ask(tier)
    assert engine.load(hashes(1, 20)) == 0
    (look,) = ask(tier, "exists").exists
    tier.report_jobs(exists=[(look.number, flags), (look.number, flags)])
    found = min(len(flags.partition(b"\0")[0]), 20)
    if found:
        (bring,) = ask(tier, "fetches").fetches
        assert len(bring.hashes) == found
        tier.report_jobs(fetched=[(bring.number, flags), (bring.number, flags)])
    names = hashes(2, 20)
    engine.save(names)
    engine.load(names)
    (write,) = ask(tier, "stores").stores
    tier.report_jobs(stored=[(write.number, flags), (write.number, flags)])
    wait_for(lambda: daemon.status()["counters"]["jobs_unknown"] == 2 + bool(found), "the count of the second ones")
    figures = tier_of(daemon)
    written = sum(flags[:20].ljust(20, b"\0")[at] > 0 for at in range(20))
    assert (figures["to_look_up"], figures["to_bring_bytes"], figures["to_write_blocks"]) == (0, 0, 0)
    assert (figures.get("blocks_written", 0), figures.get("blocks_found", 0)) == (written, found)
    wait_for(lambda: all_is_free(daemon), "free slots")
    check_service(daemon, engine)


def test_blocks_that_were_not_written_are_written_later_with_those_below_them(
    daemon: Daemon, engine: ToyEngine, tier: Session
) -> None:
    """Without their parents nobody would find them."""
    size = SPEC.groups[0].block_bytes
    names = hashes(1, 12)
    ask(tier, batch_bytes=4 * size)
    engine.save(names)
    engine.load(names)
    first, second, third = ask(tier, "stores", 4 * size).stores
    tier.report_jobs(stored=[(second.number, b"\1\1\1\1"), (third.number, b"\1\1\1\1"), (first.number, b"\1\0\1\1")])
    wait_for(lambda: tier_of(daemon)["to_write_blocks"] == 0, "the reports")
    engine.load(names)
    again = [name for write in ask(tier, "stores", 4 * size).stores for name in write.hashes]
    assert again == names[1:]


def test_a_tier_that_leaves_jobs_unanswered(daemon: Daemon, engine: ToyEngine, tier: Session) -> None:
    """It is not asked for more than some; what it holds ends with it."""
    ask(tier)
    names = hashes(0, 20)
    engine.save(names)
    engine.load(names)
    for chain in range(1, 400):
        assert engine.load(hashes(chain, 2)) == 0
        if chain % 20 == 0:
            ask(tier)
    figures = tier_of(daemon)
    assert figures["to_look_up"] == 256
    assert figures["looks_dropped"] == 399 - 256
    assert daemon.status()["pool"]["pinned_bytes"] > 0
    tier.close()
    wait_for(lambda: all_is_free(daemon), "free slots")
    check_service(daemon, engine)


def test_jobs_fit_into_a_message(daemon: Daemon, engine: ToyEngine, tier: Session) -> None:
    """A longer one would end the tier's session."""
    ask(tier)
    for chain in range(20):
        names = [hashlib.sha256(b"%d %d" % (chain, at)).digest() for at in range(MAX_HASHES // 4)]
        assert engine.load(names) == 0
    looks = 0
    while looks < 16:
        jobs = ask(tier, "exists")
        looks += len(jobs.exists)
        tier.report_jobs(exists=[(each.number, b"") for each in jobs.exists])
    assert looks == 16 and tier_of(daemon)["looks_dropped"] == 4, "more would take too much memory"
    longest = [hashlib.sha256(b"%d" % at).digest() for at in range(MAX_HASHES)]
    assert engine.load(longest) == 0
    (look,) = ask(tier, "exists").exists
    tier.report_jobs(exists=[(look.number, b"\1" * len(look.hashes))])
    brought = 0
    while brought < len(look.hashes):
        brings = ask(tier, "fetches").fetches
        tier.report_jobs(fetched=[(each.number, b"\1" * len(each.hashes)) for each in brings])
        brought += sum(len(each.hashes) for each in brings)
    check_service(daemon, engine)


def test_a_name_that_is_taken(daemon: Daemon, engine: ToyEngine, tier: Session) -> None:
    ask(tier)
    with (
        Session.connect(daemon.endpoint, engine="another", deadline=5.0) as other,
        pytest.raises(Unavailable, match="another tier is called 'rogue'"),
    ):
        ask(other)
    check_service(daemon, engine)


def test_a_report_to_the_last_daemon(start_daemon: StartDaemon) -> None:
    """Numbers of jobs differ from daemon to daemon: one that came late is no answer to another job."""
    seen = set()
    for _ in range(2):
        daemon = start_daemon()
        engine = ToyEngine(daemon.endpoint)
        with Session.connect(daemon.endpoint, engine="tier rogue", deadline=5.0) as tier:
            ask(tier)
            engine.load(hashes(1, 4))
            seen.update(look.number for look in ask(tier, "exists").exists)
        engine.close()
        daemon.stop()
    assert len(seen) == 2
