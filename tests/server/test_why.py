"""Explanations of misses: with injected causes, on the real state machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from insights import insight
from worlds import BLOCK, IDENTITY, WAYS, Engine, Injector, World, fill

from kvcache_proto import messages as m
from kvcache_proto.codec import decode_request, encode
from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_server.commands.why import CAUSES, NOTES
from kvcache_server.core.eviction.policy import WORTH
from kvcache_server.core.integrity import check_integrity
from kvcache_server.insight import miss_causes, miss_log
from kvcache_tools.record import Recorder


def runs_of(told: dict[str, Any]) -> list[tuple[int, str]]:
    return [(run["last"] - run["first"] + 1, run["cause"]) for run in told["runs"]]


@pytest.mark.parametrize(
    ("count", "few"),
    [
        (2_000, miss_causes.FEW_BLOCKS),
        (1_000, 0),
        pytest.param(10_000, miss_causes.FEW_BLOCKS, marks=pytest.mark.long),
    ],
)
def test_misses_are_explained_correctly(count: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_causes, "FEW_BLOCKS", few)
    world = World(3)
    injector = Injector(world)
    lasting = {"room", "own_ceiling", "cleared", "writer_died", "write_failed", "told"}
    kept: list[tuple[str, list[tuple[int, str]]]] = []
    named: Counter[str] = Counter()
    wrong = []
    while sum(named.values()) < count:
        way = world.draw.choice(WAYS)
        engine, run, expected = getattr(injector, way)()
        expected = [each for each in expected if each[0]]
        request, _ = engine.look_up(run, salted=way == "salted")
        (told,) = world.why(request)["explained"]
        right = runs_of(told) == [each[:2] for each in expected] and all(
            found.get(key) == value
            for found, (_, _, facts) in zip(told["runs"], expected, strict=True)
            for key, value in facts.items()
        )
        if not right:
            wrong.append((way, expected, told["runs"]))
        named.update({cause: count for count, cause, _ in expected if cause != "hit"})
        if way in lasting:
            kept.append((request, runs_of(told)))
        injector.undo()
        injector.undo = lambda: None  # type: ignore[method-assign]
    assert not wrong, f"{len(wrong)} of {sum(named.values())}: {wrong[:3]}"
    assert len(named) >= (20 if count == 10_000 else 15), named
    assert named.keys() <= CAUSES.keys() | NOTES.keys()
    # Much later, with the memory many times as full, what is said of what left is the same.
    for request, before in kept[-200:]:
        (told,) = world.why(request)["explained"]
        assert runs_of(told) == before
    check_integrity(world.cache)


def causes(world: World, request: str) -> list[tuple[int, str]]:
    (told,) = world.why(request)["explained"]
    return runs_of(told)


def test_what_an_evicted_block_was_worth_less_than() -> None:
    world = World(policy=WORTH)
    a = Engine(world, "a")
    once, more = world.chain(3), world.chain(1)
    for run in (once, more):
        a.look_up(run)
        a.store(run)
    for _ in range(2):
        a.look_up(more)
    world.tick(180.0)
    while world.visible().keys() & {(a.number, once[0]), (a.number, more[0])}:
        a.store(world.chain(1))
    world.tick(12.0)
    told = world.told(a.look_up(once)[0])
    assert "  blocks 0-2  evicted 12 s earlier, to make room for blocks that engine a saved; asked for once" in told
    assert "once, last about 3 min before, and worth less than every other block that could go\n" in told
    (found,) = world.why(a.look_up(more)[0])["explained"]
    (run,) = found["runs"]
    assert (run["cause"], run["asked"], run["by_age"]) == ("room", "more", False)
    assert run["unused_s"] == [pytest.approx(183.0, rel=0.05)] * 2


def test_a_block_that_is_evicted_as_the_least_recently_used() -> None:
    world = World()
    a, bounded = Engine(world, "a"), Engine(world, "b", ceiling=2 * BLOCK)
    run = bounded.store(world.chain(2))
    world.tick(600.0)
    bounded.store(world.chain(1))
    world.tick(5.0)
    told = world.told(bounded.look_up(run)[0])
    assert "block 1  evicted 5 s earlier: engine b had reached its own num_cpu_blocks, and saved other blocks; " in told
    assert "asked for once, last about 10 min before, less recently than each other block of the engine" in told
    first = a.store(world.chain(1))
    while (a.number, first[0]) in world.visible():
        a.store(world.chain(1))
    assert "less recently than every other block that could go" in world.told(a.look_up(first)[0])


def test_blocks_that_are_worth_less_than_all_others_are_not_saved() -> None:
    world = World(policy=WORTH, blocks=31)
    a = Engine(world, "a")
    often = [world.chain(1) for _ in range(40)]
    while not world.cache.refusals["not_worth_it"]:
        assert world.requests < 20_000
        for run in [*often, world.chain(2)]:  # what is asked for again and again does not fit
            if a.look_up(run)[1].hits < len(run):
                reserved = a.reserve(run)
                if reserved.reservation:
                    a.settle(reserved)
                if world.cache.refusals["not_worth_it"]:
                    break
    told = world.told(a.look_up(run)[0])
    assert "not saved by engine a" in told and "worth less than each cached block that could have gone" in told


def test_blocks_of_another_size_take_room() -> None:
    world = World()
    a = Engine(world, "a")
    fill(a)
    large, before = Engine(world, "large", 3 * BLOCK, "large"), world.visible()
    large.store(world.chain(1))
    gone = next(block for number, block in before if (number, block) not in world.visible())
    request, _ = a.look_up([gone])
    (told,) = world.why(request)["explained"]
    (run,) = told["runs"]
    assert (run["cause"], run["engine"], run["namespace"], run["model"]) == ("room", "large", large.spec.id, "large")
    assert f"engine large saved in namespace {large.spec.id} (large)" in world.told(request)


def test_a_namespace_at_its_ceiling() -> None:
    world = World(namespace_ceiling=0.25, write_quota=1.0)
    a, b = Engine(world, "a"), Engine(world, "b")
    run = a.store(world.chain(2))
    slots = 248 // 4
    while (a.number, run[1]) in world.visible():
        b.store(world.chain(1))
    request, _ = a.look_up(run)
    assert causes(world, request) == [(1, "hit"), (1, "namespace_ceiling")]
    held = b.look_up(b.store(world.chain(slots // 2)), pin=True)
    assert held[1].lease
    run = world.chain(slots)
    a.settle(a.reserve(run))
    request, found = a.look_up(run)
    rest = slots - found.hits - 1
    assert causes(world, request) == [(found.hits, "hit"), (1, "refused_namespace_ceiling"), (rest, "no_parent")]


def test_cached_blocks_that_are_withheld() -> None:
    world = World(pin_quota=4 / 248, max_leases=2)
    a = Engine(world, "a")
    run = a.store(world.chain(6))
    request, found = a.look_up([*run, *world.chain(1)], pin=True)
    assert found.withheld == 2
    assert causes(world, request) == [(4, "hit"), (2, "quota"), (1, "new")]
    a.ask(m.Release(1, b"", [found.lease]))
    for _ in range(2):
        a.look_up(run[:1], pin=True)
    request, _ = a.look_up(run, pin=True)
    assert causes(world, request) == [(6, "leases")]
    rank = world.cache.open_session("two ranks", "", world.now)
    spec = NamespaceSpec("m", (GroupSpec(128, (BLOCK // 2, BLOCK // 2)),), IDENTITY | {"shards": "2"}, 16)
    number = world.cache.handle(rank, m.Attach(1, b"", spec, (0, 1)), world.now).namespace
    b = Engine(world, "two ranks")
    reserved = world.cache.handle(rank, m.Reserve(1, b"", number, [m.Run(run)]), world.now)
    region = world.cache.geometry.region_id
    world.cache.handle(rank, m.Settle(1, b"", region, reserved.reservation, (0, 1), 0), world.now)
    world.cache.handle(b.session, m.Attach(1, b"", spec), world.now)
    world.cache.handle(rank, m.Attach(1, b"", spec, (0,)), world.now)  # and the other rank is there no more
    b.number = number
    request, _ = b.look_up([*run, *world.chain(2)])
    assert causes(world, request) == [(6, "ranks_missing"), (2, "new")]
    assert "a rank of engine two ranks was not attached" in world.told(request)


def test_other_hashes_for_the_same_tokens() -> None:
    """Hashes with another seed never match; with another block length, every second one does."""
    world = World()
    a, seeded = Engine(world, "a"), Engine(world, "b", seed="engine b")
    seeded.store(world.chain(3))
    request, _ = a.look_up(world.chain(4))
    (told,) = world.why(request)["explained"]
    assert runs_of(told) == [(4, "other_hashes")]
    assert told["runs"][0]["fields"] == [["seed", "0", "engine b"]]
    assert "seed is '0' here and 'engine b' there" in world.told(request)
    doubled = Engine(world, "c", block="16x16")
    run = world.chain(6)
    doubled.store(run[1::2])
    request, _ = a.look_up([*run, *world.chain(1)])
    (told,) = world.why(request)["explained"]
    assert runs_of(told) == [(6, "elsewhere"), (1, "new")]
    assert told["runs"][0]["fields"] == [["block", "16x8", "16x16"]]


def test_a_namespace_that_used_to_hold_it() -> None:
    world = World()
    a, other = Engine(world, "a"), Engine(world, "b", weights="v1")
    run = other.store(world.chain(2))
    other.ask(m.Clear(1, b"", other.spec.id))
    other.leave()
    assert other.number not in world.cache.namespaces
    request, _ = a.look_up(run)
    (told,) = world.why(request)["explained"]
    assert runs_of(told) == [(2, "elsewhere")]
    assert told["runs"][0]["fields"] == [["weights", "", "v1"]]


def test_later_events_do_not_explain_a_lookup() -> None:
    world = World()
    a, other = Engine(world, "a"), Engine(world, "b", weights="v1")
    run = world.chain(3)
    request, _ = a.look_up(run)
    other.store(run)
    a.store(run)
    a.store(world.chain(1))  # from now on, other tokens go on where these would have
    assert causes(world, request) == [(3, "new")]
    assert "cached now" in world.told(request)
    a.ask(m.Clear(1, b""))
    assert causes(world, request) == [(3, "new")]
    request, _ = a.look_up(run)
    assert causes(world, request) == [(3, "cleared")]


def test_how_the_daemon_started() -> None:
    world = World()
    insight(world.cache).misses.started(1.0, "resized")
    a = Engine(world, "a")
    run = world.chain(2)
    request, _ = a.look_up(run)
    assert causes(world, request) == [(2, "began_empty")]
    assert "size or page_size had changed" in world.told(request)
    a.store(world.chain(2))
    request, _ = a.look_up(run)
    assert causes(world, request) == [(2, "diverged")]


def test_nothing_is_evicted_for_a_save_in_the_grace_after_a_restart() -> None:
    world = World()
    a = Engine(world, "a")
    fill(a)
    world.cache.eviction.frozen, world.cache.registry.not_reclaimed, world.cache._grace_until = (
        True,
        {99},
        world.now + 10,
    )
    run = world.chain(2)
    a.reserve(run)
    request, _ = a.look_up(run)
    assert causes(world, request) == [(1, "grace"), (1, "no_parent")]


def test_notes_of_an_engine() -> None:
    world = World()
    a, b = Engine(world, "a"), Engine(world, "b")
    a.ask(
        m.ReportMisses(
            1, b"", a.number, [m.MissNote("cmpl-7-0-abcd", "down", 2000), m.MissNote("cmpl-8-0-abcd", "lora")]
        )
    )
    (told,) = world.why("cmpl-7")["explained"]
    assert (told["engine"], told["runs"], [note["cause"] for note in told["notes"]]) == ("a", [], ["down"])
    assert 2.0 <= told["notes"][0]["age_s"] < 2.1
    assert "breaker open" in world.told("cmpl-7")
    for cause in ("room", "elsewhere", "other_hashes", "began_empty"):  # which the daemon alone should name
        a.ask(m.ReportMisses(1, b"", a.number, [m.MissNote(f"cmpl-{cause}", cause, 0, world.chain(1))]))
        assert "unknown" in world.told(f"cmpl-{cause}")
    run = world.chain(2)
    b.tell("save_prompt", run, "cmpl-9")
    assert "2 blocks not saved" in world.told("cmpl-9")
    b.store(run[:1])
    b.tell("paused", run)
    b.ask(m.Clear(1, b""))
    request, _ = a.look_up(run)
    assert causes(world, request) == [(1, "cleared"), (1, "paused")]
    for bad in (m.MissNote("r", "Evil\n"), m.MissNote("r", "down", -1), m.MissNote("r", "down", 0, [b"short"])):
        a.ask(m.ReportMisses(1, b"", a.number, [bad]))
    a.ask(m.ReportMisses(1, b"", 77, [m.MissNote("r", "down")]))
    assert world.cache.counters["notes_refused"] == 4
    assert not world.why("r\0")["explained"]


def test_a_request_is_found_by_part_of_its_id() -> None:
    world = World()
    a, b = Engine(world, "a"), Engine(world, "b")
    for name in ("cmpl-aa-0-1f", "cmpl-ab-0-2e", "7", "17"):
        a.look_up(world.chain(1), name)
    for part, whole in (("cmpl-aa", "cmpl-aa-0-1f"), ("aa-0", "cmpl-aa-0-1f"), ("2e", "cmpl-ab-0-2e"), ("7", "7")):
        assert [told["request"] for told in world.why(part)["explained"]] == [whole]
    several = world.why("cmpl")
    assert (several["matched"], several["matches"], several["explained"]) == (2, ["cmpl-aa-0-1f", "cmpl-ab-0-2e"], [])
    b.look_up(world.chain(1), "7")  # engines number their requests alike
    assert [told["engine"] for told in world.why("7")["explained"]] == ["a", "b"]
    for number in range(20):  # the answer to a name that everybody uses does not grow with them
        Engine(world, f"e{number}").look_up(world.chain(2), "7")
    answer = world.why("7")
    assert (answer["engines"], [told["engine"] for told in answer["explained"]]) == (
        22,
        [f"e{n}" for n in range(10, 20)],
    )
    assert "12 other engines had a request with this id" in world.told("7")
    for unknown in ("no such", ""):
        answer = world.why(unknown)
        assert (answer["matched"], answer["latest"][:2]) == (0, ["17", "7"]) or answer["latest"][0] == "17"
        assert "17" in world.told(unknown)
    assert "7,340" not in world.told("7")


def test_unnamed_lookups_and_full_hits_are_not_remembered() -> None:
    world = World()
    a = Engine(world, "a")
    run = a.store(world.chain(2))
    a.look_up(run, "full")
    frame = encode(m.Acquire(1, b"", a.number, world.chain(1)))
    asked = decode_request(frame)
    assert isinstance(asked, m.Acquire)
    a.ask(asked)
    assert not insight(world.cache).misses.lookups


def test_a_waiting_request_is_remembered_once_a_second_and_when_something_has_changed() -> None:
    world = World(3)
    engine, other = Engine(world, "one"), Engine(world, "two")
    log, run = insight(world.cache).misses, world.chain(4)
    for _ in range(10):
        engine.look_up(run, "waits")
        other.look_up(run, "waits too")
    assert [each.request for each in log.lookups] == ["waits", "waits too"]
    engine.store(run[:2])
    for _ in range(10):
        engine.look_up(run, "waits")
    world.tick(miss_log.REPEATED_AFTER)
    engine.look_up(run, "waits")
    assert [each.hits for each in log.lookups if each.engine == "one"] == [0, 2, 2]
    assert runs_of(*world.why("waits")["explained"])[0] == (2, "hit")


def test_the_memory_for_explanations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_log, "LOOKUPS", 40_000)
    monkeypatch.setattr(miss_log, "GENERATION", 50)
    world = World()
    a = Engine(world, "a")
    first = a.store(world.chain(1))
    a.ask(m.Clear(1, b""))
    assert causes(world, a.look_up(first)[0]) == [(1, "cleared")]
    long = [a.look_up(world.chain(100))[0] for _ in range(50)]
    assert not world.why(long[0])["explained"]
    assert world.why(long[-1])["explained"]
    assert sum(len(each.frame) + miss_log.EACH for each in insight(world.cache).misses.lookups) <= 40_000
    for _ in range(miss_log.GENERATIONS * 50):
        a.tell("paused", world.chain(1))
    assert insight(world.cache).misses.departures <= miss_log.GENERATIONS * 50
    assert causes(world, a.look_up(first)[0]) == [(1, "new")]  # and yet it says how far back it knows
    assert 0 < world.why(a.look_up(first)[0])["remembered"]["departures_since_s"] < world.now - 100.0
    assert len(insight(world.cache).misses.notes) <= miss_log.NOTES


def test_a_very_long_lookup_is_explained_in_part() -> None:
    world = World()
    a = Engine(world, "a")
    request, _ = a.look_up(world.chain(9000))
    assert causes(world, request) == [(8192, "new"), (808, "unexamined")]


def test_a_waiting_request_is_one_line_of_a_trace() -> None:
    chain = [bytes([number]) * 32 for number in range(3)]

    def seen(request: str, hashes: list[bytes], engine: str = "e") -> m.LookupRecord:
        return m.LookupRecord(0, engine, request, 1, 0, 16, 50, 0, hashes)

    recorder = Recorder()
    waiting = [seen("r", chain), *[seen("", chain)] * 9, seen("r", chain), seen("", chain)]
    assert len(list(recorder.lines(waiting))) == 1
    assert len(list(recorder.lines([seen("", chain, "nameless")] * 3))) == 3  # whose requests nobody can tell apart
    assert recorder.lookups == 4
