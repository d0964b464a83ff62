"""What the daemon knows of a tier, as a state machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import pytest
from small_cache import Engine, chain, hashes, make_cache

from kvcache_proto import messages as m
from kvcache_proto.errors import NotPermitted
from kvcache_proto.messages import PollJobs
from kvcache_proto.types import REF_BYTES, GroupSpec
from kvcache_server.commands.why import TIERS
from kvcache_server.core.effects import SessionGone
from kvcache_server.core.eviction.worth import FACTOR_ONE_OFF
from kvcache_server.core.index import Group
from kvcache_server.core.limits import LOOK
from kvcache_server.miss_report import TierRun
from kvcache_server.tiering.fetches import MOST_COMING
from kvcache_server.tiering.questions import MOST_QUESTIONS, Question
from kvcache_server.tiering.tier import Tier
from kvcache_server.tiering.tiering import STARTING, Tiering
from kvcache_server.tiering.writes import MOST_WRITES

SIZE = 1 << 20
BATCH = 8 << 20


@pytest.fixture
def tier() -> Tier:
    session: Any = SimpleNamespace(connected=True)
    return Tier(session, "disk", BATCH, "second", Counter())


@pytest.fixture
def group() -> Group:
    return Group(1, 0, GroupSpec(16, (SIZE,)), 32, 4096)


def names(count: int, of: str = "a") -> list[bytes]:
    return [f"{of}{number}".encode().ljust(32) for number in range(count)]


def bring(tier: Tier, group: Group, hashes: list[bytes], now: float, rate: float, at_once: int) -> float:
    """Have blocks found and brought, `at_once` parts in each burst; return when the last has come."""
    assert tier.questions.ask(Question("engine", group, None, hashes, now))
    tier.questions.sent[1] = tier.questions.waiting.popleft()
    assert tier.found(1, b"\1" * len(hashes), now) is not None
    number = 10
    while True:
        burst = []
        while len(burst) < at_once and (part := tier.fetches.next_part(BATCH, now)) is not None:
            number += 1
            tier.fetches.parts[number] = part
            burst.append((number, part))
        if not burst:
            return now
        now += sum(part.end - part.begin for _, part in burst) * group.allocated_bytes / rate
        for each, part in burst:
            assert tier.fetches.brought(each, b"\1" * (part.end - part.begin), now)


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_rate_of_a_tier_is_learned_also_from_parts_that_come_in_bursts(
    tier: Tier, group: Group, at_once: int
) -> None:
    now = 100.0
    for turn in range(10):
        now = bring(tier, group, names(64, f"{turn} "), now, 2e9, at_once) + 1.0
    assert tier.fetches.rate == pytest.approx(2e9, rel=0.1)
    assert not (tier.fetches.coming or tier.fetches.backlog or tier.fetches.in_flight)


def test_blocks_that_a_tier_did_not_have_are_not_asked_for_at_once_again(tier: Tier, group: Group) -> None:
    hashes = names(4)
    question = Question("engine", group, None, hashes, 100.0)
    assert tier.questions.ask(question) and tier.knows(group, hashes[0], 100.0)
    tier.questions.sent[1] = tier.questions.waiting.popleft()
    assert tier.found(1, b"\1\1\0\1", 100.0) is question and question.inquiry.found == 2
    assert tier.knows(group, hashes[0], 100.0) and tier.knows(group, hashes[2], 104.9)
    assert not tier.knows(group, hashes[2], 105.1) and not tier.knows(group, hashes[3], 100.0)


def test_what_a_tier_had_is_forgotten_in_slices(tier: Tier) -> None:
    blocks: Any = [SimpleNamespace(ref=number.to_bytes(REF_BYTES, "little")) for number in range(3 * LOOK)]
    for block in blocks:
        tier.writes.mark(block)
    assert all(map(tier.writes.has, blocks))
    for left in (2, 1, 0):
        assert tier.writes.forget_marks() == (left > 0)
        assert sum(map(tier.writes.has, blocks)) == left * LOOK


def test_only_the_daemons_user_may_run_tiers() -> None:
    session: Any = SimpleNamespace(id=1, user=1000)
    cache: Any = SimpleNamespace(sessions={1: session})
    with pytest.raises(NotPermitted, match="must run as the daemon's user, 0, not as 1000"):
        Tiering(cache, 0).begin(1, PollJobs(1, b"", "disk", BATCH), 0.0)


def test_a_tier_that_does_not_keep_up_is_not_asked_to_bring_more(tier: Tier, group: Group) -> None:
    most = 1 << 14
    for turn in range(6):
        tier.questions.sent[turn] = question = Question("engine", group, None, names(most, f"{turn} "), 100.0)
        tier.questions.asked[question.name] = question
        assert tier.found(turn, b"\1" * most, 100.0) is question and question.inquiry.found == most
    assert len(tier.fetches.coming) == MOST_COMING == 4 * most
    assert tier.fetches.backlog == MOST_COMING * SIZE and tier.counts["blocks_not_brought"] == 2 * most


# What `why` says of tiers.


class Host:
    """A cache with an engine and tiers, whose answers to jobs a test gives."""

    def __init__(self, *tiers: str) -> None:
        self.cache = make_cache()
        self.engine = Engine(self.cache, "engine")
        self.engine.store(chain("p", 2))
        session = self.cache.sessions[self.engine.session]
        self.group = session.group(self.engine.namespace, 0)[1]
        self.tiering = Tiering(self.cache, session.user)
        self.now = 100.0
        self.tiers = {name: self.cache.open_session(f"tier {name}", "", self.now) for name in tiers}
        for name in tiers:
            self.work(name)

    def work(self, name: str) -> None:
        self.tiering.begin(self.tiers[name], m.PollJobs(1, b"", name, 4 * self.group.allocated_bytes), self.now)

    def jobs(self, name: str) -> m.Jobs:
        jobs = self.tiering.jobs(self.tiers[name], 1, self.now)
        assert jobs is not None
        return jobs

    def worked(self, name: str, **outcomes: Any) -> None:
        self.tiering.begin(self.tiers[name], m.JobResults(1, b"", **outcomes), self.now)

    def has(self, name: str, blocks: int) -> None:
        """Let a tier have the first `blocks` of what it is asked for."""
        (look,) = self.jobs(name).exists
        self.worked(name, exists=[(look.number, b"\1" * blocks + bytes(len(look.hashes) - blocks))])

    def look_up(self, length: int = 12, of: str = "p") -> Callable[[], list[dict[str, Any]]]:
        """Look a chain up, of which two blocks are cached; return a function that says what `why` says of tiers."""
        hashes_of = hashes([*chain("p", 2), *chain(of, length)[2:]])
        now = self.now
        self.cache.tick(now)
        reply = self.cache.handle(self.engine.session, m.Acquire(1, b"", self.engine.namespace, hashes_of), now)
        assert isinstance(reply, m.Acquired) and reply.hits == 2
        self.reply = reply
        said = self.tiering.explain_misses(self.group, hashes_of, reply.hits, reply.pending, now)
        return lambda: [facts for each in said for facts in each.tier_runs(now)]


def told(*cause: Any, **facts: Any) -> TierRun:
    tier, which, first, last = cause
    assert which in TIERS
    return TierRun(tier, which, first, last, **facts)


def test_a_tier_that_has_not_answered_and_one_that_has_nothing() -> None:
    host = Host("disk", "redis")
    said = host.look_up()
    assert said() == [told("disk", "asked", 2, 11)], "the next tier is asked for what this one does not have"
    host.has("disk", 0)
    assert said() == [told("disk", "absent", 2, 11), told("redis", "asked", 2, 11)]
    host.has("redis", 0)
    assert said() == [told("disk", "absent", 2, 11), told("redis", "absent", 2, 11)]
    host.now += 1.0
    assert host.look_up()() == [told("disk", "absent", 2, 11), told("redis", "absent", 2, 11)], "what is known"


def test_a_tier_is_asked_for_the_first_blocks_of_a_long_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache_server.tiering.tiering.LONGEST", 6)
    host = Host("disk")
    said = host.look_up()
    assert said() == [told("disk", "asked", 2, 7), told("disk", "beyond", 8, 11)]
    host.has("disk", 0)
    assert said() == [told("disk", "absent", 2, 7), told("disk", "beyond", 8, 11)]


def test_blocks_of_two_tiers_that_come_too_late() -> None:
    host = Host("disk", "redis")
    said = host.look_up()
    host.has("disk", 4)
    assert said()[:2] == [told("disk", "coming", 2, 5), told("disk", "absent", 6, 11)]
    host.has("redis", 6)
    host.now += 0.02
    coming = host.look_up()
    assert coming() == [told("disk", "coming", 2, 5), told("disk", "absent", 6, 11), told("redis", "coming", 6, 11)]
    host.now += 0.03
    (bring,) = host.jobs("disk").fetches
    host.worked("disk", fetched=[(bring.number, b"\1" * 4)])
    late = {"brought": 4, "found": 4}
    assert said()[0] == told("disk", "late", 2, 5, **late, after_s=0.05)
    assert coming()[0] == told("disk", "late", 2, 5, **late, after_s=0.03)
    first, second = host.jobs("redis").fetches
    host.worked("redis", fetched=[(first.number, b"\1" * 4)])
    assert coming()[2] == told("redis", "coming", 6, 11), "not all have come"
    host.worked("redis", fetched=[(second.number, b"\1\0")])
    assert coming()[2] == told("redis", "lost", 6, 11, brought=5, found=6, after_s=0.03)


@pytest.mark.parametrize("brings", [False, True], ids=["asked", "coming"])
def test_what_is_late_is_expected_later_and_asked_for_ever_more_rarely(brings: bool) -> None:
    host = Host("disk")
    host.look_up()
    if brings:
        host.has("disk", 10)
    asked, began = 0, host.now
    while host.now < began + 5.0:
        assert host.look_up()() == [told("disk", "coming" if brings else "asked", 2, 11)]
        assert host.reply.coming == (10 if brings else 0) and host.reply.eta_ms
        host.now += host.reply.eta_ms / 1000
        asked += 1
    assert asked < 60


def test_a_tier_that_is_asked_for_too_much_is_asked_later() -> None:
    host = Host("disk")
    for number in range(MOST_QUESTIONS):
        host.look_up(of=f"q{number} ")
    said = host.look_up(of="r")
    assert said() == [told("disk", "not_asked", 2, 11)] and host.reply.eta_ms


def test_what_follows_blocks_that_others_write_is_coming() -> None:
    host = Host("disk")
    Engine(host.cache, "writer").reserve(chain("p", 5)[2:], chain("p", 2)[-1])
    host.look_up()
    host.has("disk", 7)
    host.look_up()
    assert (host.reply.pending, host.reply.coming) == (3, 10)


def test_tiers_that_are_starting_are_waited_for_until_they_fail_or_for_some_time() -> None:
    host = Host()

    def eta() -> int:
        host.look_up()
        return host.reply.eta_ms

    def expect() -> list[dict[str, Any]]:
        host.tiering.expect(["disk"], host.now)
        return host.look_up()()

    assert not eta()
    assert expect() == [told("disk", "starting", 2, 11)] and eta()
    host.tiering.expect_no_more("disk")
    assert not eta()
    assert expect() and eta()
    host.tiers["disk"] = host.cache.open_session("tier disk", "", host.now)
    host.worked("disk", off="no such folder")
    assert not eta()
    assert expect() and eta()
    host.now += STARTING
    assert not eta()
    expect()
    host.work("disk")
    assert host.look_up()() == [told("disk", "asked", 2, 11)]
    host.has("disk", 0)
    assert not eta(), "it has said that it has nothing"


def test_blocks_that_come_for_another_request_are_those_of_both() -> None:
    host = Host("disk")
    host.look_up(6)
    said = host.look_up(12)
    assert said() == [told("disk", "asked", 2, 5)]
    hashes_of = hashes([*chain("p", 4), *chain("q", 4)])
    (other,) = host.tiering.explain_misses(host.group, hashes_of, 2, 0, host.now)
    assert (other.first, other.blocks) == (2, 2), "and of one that goes on otherwise, the first ones"


def test_tiers_that_are_off() -> None:
    host = Host("disk", "redis")
    said = host.look_up()
    host.worked("disk", off="the disk is full")
    off = told("disk", "off", 2, 11, why="the disk is full")
    assert said() == [off], "it was asked, and will not answer"
    again = host.look_up()
    assert again() == [off, told("redis", "asked", 2, 11)]
    host.has("redis", 10)
    coming = host.look_up()
    host.worked("redis", off="no route to host")
    assert coming() == [off, told("redis", "off", 2, 11, why="no route to host")]
    host.work("disk")
    assert said() == [off], "as it was then"


def test_nothing_is_said_without_tiers() -> None:
    assert Host().look_up()() == []


# What is written.


class Stores(Engine):
    """An engine whose blocks the tiers of a host learn of, as in the daemon."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        super().__init__(host.cache, name)

    def ask(self, request: Any) -> Any:
        reply = self.cache.handle(self.session, request, self.now)
        changes, self.cache.effects.changes = self.cache.effects.changes, []
        self.host.tiering.follow(changes)
        return reply


@pytest.mark.parametrize(
    ("writes", "returning", "factor", "written"),
    [
        ("second", 0.0, 1.0, 0),
        ("second", 0.4, 1.0, 0),
        ("second", 0.6, 1.0, 5),
        ("second", 0.6, 0.9, 0),
        ("through", 0.0, 1.0, 5),
        ("ahead", 0.6, 1.0, 0),
    ],
)
def test_new_blocks_are_written_if_most_blocks_return_or_all_are_to_be(
    writes: str, returning: float, factor: float, written: int
) -> None:
    host = Host()
    host.tiers["disk"] = host.cache.open_session("tier disk", "", host.now)
    work = m.PollJobs(1, b"", "disk", 64 * host.group.allocated_bytes, writes=writes)
    host.tiering.begin(host.tiers["disk"], work, host.now)
    host.tiering.jobs(host.tiers["disk"], 1, host.now)
    engine = Stores(host, "other")
    host.cache.eviction.learner.worths.returning = returning
    engine.store(["first"])
    (account,) = (each for each in host.cache.eviction.fair_share.accounts if each.engine == "other")
    account.share.factor = factor
    host.tiering.jobs(host.tiers["disk"], 1, host.now)
    engine.store(chain("n", 5))
    jobs = host.tiering.jobs(host.tiers["disk"], 1, host.now)
    assert (sum(len(each.hashes) for each in jobs.stores) if jobs else 0) == written


def test_what_lies_above_new_blocks_is_written_with_them() -> None:
    """The daemon learns that blocks return while it stores a prompt."""
    host = Host("disk")
    host.tiering.jobs(host.tiers["disk"], 1, host.now)
    engine = Stores(host, "other")
    engine.store(chain("n", 5))
    assert host.tiering.jobs(host.tiers["disk"], 1, host.now) is None
    host.cache.eviction.learner.worths.returning = 0.6
    engine.store(chain("n", 10))
    jobs = host.tiering.jobs(host.tiers["disk"], 1, host.now)
    assert jobs is not None
    first = [name for each in jobs.stores for name in each.hashes]
    assert first and first == hashes(chain("n", 10))[: len(first)]
    assert host.tiering.report()[0].to_write_blocks == 10


@pytest.mark.parametrize(
    ("writes", "cls", "returning", "factor", "waiting", "stored"),
    [
        ("through", 0, 0.0, 1.0, 0, True),
        ("through", 0, 0.0, 1.0, MOST_WRITES, False),
        ("second", 0, 0.6, 1.0, 0, True),
        ("second", 0, 0.4, 1.0, 0, False),
        ("second", 0, 0.4, 2.0, 0, True),
        ("second", 0, 0.9, 0.9, 0, False),
        ("second", 1, 0.0, 1.0, 0, True),
        ("ahead", 1, 0.9, 1.0, 0, False),
    ],
)
def test_the_pool_stores_what_a_tier_gets(
    writes: str, cls: int, returning: float, factor: float, waiting: int, stored: bool
) -> None:
    host = Host()
    tier = host.cache.open_session("tier disk", "", host.now)
    host.tiering.begin(tier, m.PollJobs(1, b"", "disk", 1 << 20, writes=writes), host.now)
    (account,) = host.cache.eviction.fair_share.accounts
    account.share.factor, host.cache.eviction.learner.worths.returning = factor, returning
    host.tiering._tiers[tier].writes.waiting = waiting
    tiers = host.cache.eviction.tiers
    assert tiers is not None and tiers.will_store(account, cls) is stored


def test_what_is_about_to_be_evicted_is_written_ahead_if_a_lookup_ever_found_it() -> None:
    host = Host()
    tier = host.tiers["disk"] = host.cache.open_session("tier disk", "", host.now)
    size = 64 * host.group.allocated_bytes
    host.tiering.begin(tier, m.PollJobs(1, b"", "disk", size, writes="ahead"), host.now)
    engine = Stores(host, "other")
    engine.store(chain("found", 8))
    assert engine.hits(chain("found", 8)) == 8
    host.cache.tick(host.now)
    engine.store(chain("never", 8))
    assert host.tiering.jobs(tier, 1, host.now) is None, "there is room"
    new = count()
    while not host.cache.is_nearly_full:
        engine.store([f"new{next(new)}"])
    host.now += 1.0
    jobs = host.tiering.jobs(tier, 1, host.now)
    assert jobs is not None and [each.hashes for each in jobs.stores] == [hashes(chain("found", 8))]
    assert not host.cache.eviction.evictions


def test_blocks_of_little_worth_are_stored_for_a_tier() -> None:
    host = Host()
    reader, stream = Engine(host.cache, "reader"), Engine(host.cache, "stream")
    (account,) = (each for each in host.cache.eviction.fair_share.accounts if each.engine == "stream")
    account.share.factor, host.cache.eviction.learner.guard.by_age = FACTOR_ONE_OFF / 2, True
    tier = host.tiers["disk"] = host.cache.open_session("tier disk", "", host.now)
    new = count()

    def declined() -> int:
        for number in islice(new, 16):
            reader.store(chain(f"kept {number} ", 8))
        before = host.cache.eviction.declined
        for number in islice(new, 100):
            stream.store(chain(f"once {number} ", 8))
        return host.cache.eviction.declined - before

    assert declined()
    host.tiering.begin(tier, m.PollJobs(1, b"", "disk", 1 << 20, writes="through"), host.now)
    assert not declined(), "the tier gets them"
    host.worked("disk", off="the disk is full")
    assert declined()
    host.work("disk")
    assert not declined()
    host.tiering.follow([SessionGone(tier)])
    assert declined()


# Bounds of one answer, and writes that are refused.


def test_long_looks_leave_no_room_for_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is longer than usual has no writes in it; they are in the next one."""
    monkeypatch.setattr("kvcache_server.tiering.tiering.MESSAGE", 256)
    host = Host("disk")
    host.look_up(12)
    host.look_up(12, of="q")
    assert host.jobs("disk").stores == [], "and the daemon goes on"
    assert len(host.jobs("disk").stores) == 1


def test_a_tier_that_refuses_writes_gets_them_later_and_looks_at_once() -> None:
    host = Host("disk")
    tier, size = host.tiers["disk"], 4 * host.group.allocated_bytes
    host.tiering.begin(tier, m.JobResults(2, b"", writes_off="no right"), host.now)  # while a request for work waits
    host.look_up()
    jobs = host.jobs("disk")
    assert jobs.exists and not jobs.stores
    host.tiering.begin(tier, m.PollJobs(3, b"", "disk", size, writes_off="no right", removals_off="nor that"), host.now)
    host.look_up()
    assert host.tiering.jobs(tier, 3, host.now) is None
    (figures,) = host.tiering.report()
    assert (figures.off, figures.writes_off, figures.removals_off) == ("", "no right", "nor that")
    host.work("disk")
    assert host.jobs("disk").stores
    (figures,) = host.tiering.report()
    assert (figures.writes_off, figures.removals_off) == ("", "")
