"""Requests in engines' queues: their blocks outlive others of greater worth, within bounds. On the real state
machine."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from insights import figures
from small_cache import KIB, Engine, chain, hashes, make_cache, pass_time

from kvcache_proto import messages as m
from kvcache_proto.types import SUFFIX, GroupSpec, NamespaceSpec
from kvcache_server.commands.describe import evicting
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.due import MOST, SECONDS
from kvcache_server.core.integrity import check_integrity

BLOCKS, FLOOR = 128, 4  # of 64 KiB; an engine keeps fewer than FLOOR whatever the others store


def look_up(engine: Engine, names: list[str], request: str, pin: bool = True) -> int:
    found = engine.ask(m.Acquire(1, b"", engine.namespace, hashes(names), pin=pin, request=request))
    if found.lease:
        engine.ask(m.Release(1, b"", [found.lease]))
    return int(found.hits)


def announce(engine: Engine, names: list[str], request: str = "r") -> int:
    return look_up(engine, names, request, pin=False)


def flood(engine: Engine, blocks: int = 4 * BLOCKS) -> None:
    """Fill the pool several times with prompts that are asked for again at once."""
    for number in range(blocks // 8):
        engine.now = engine.cache.pool.now + 0.1
        names = chain(f"{engine.cache.generation} {number} ", 8)
        for _ in range(4):
            engine.hits(names)
            engine.store(names)


def due_bytes(cache: Cache) -> int:
    return int(figures(cache, 0.0)["eviction"]["due_bytes"])


@pytest.fixture(params=["worth", "lru"])
def cache(request: Any) -> Any:
    made = make_cache(BLOCKS, policy=request.param)
    yield made
    check_integrity(made)


@pytest.fixture
def engine(cache: Cache) -> Engine:
    """An engine with ten cached blocks."""
    made = Engine(cache, "one")
    made.store(chain("a", 10))
    return made


def test_what_waits_in_a_queue_outlives_blocks_of_greater_worth_until_it_is_scheduled(
    cache: Cache, engine: Engine
) -> None:
    engine.store(chain("b", 10))
    assert announce(engine, chain("a", 10)) == 10
    assert due_bytes(cache) == 10 * 64 * KIB
    assert "640.0 KiB that queued requests wait for go last" in evicting(cache.eviction.figures())[0]
    flood(Engine(cache, "two"))
    assert engine.hits(chain("b", 10)) < FLOOR
    assert look_up(engine, chain("a", 10), "r") == 10
    assert due_bytes(cache) == 0
    flood(Engine(cache, "three"))
    assert engine.hits(chain("a", 10)) < FLOOR or not cache.evicts_by_age, "what has returned is worth more"


def test_requests_of_the_same_name_in_two_engines_are_different_ones(cache: Cache, engine: Engine) -> None:
    other = Engine(cache, "two")
    announce(engine, chain("a", 10))
    announce(other, chain("a", 10))
    assert due_bytes(cache) == 2 * 10 * 64 * KIB, "counted for each"
    look_up(other, chain("a", 10), "r")
    flood(other)
    assert engine.hits(chain("a", 10)) == 10


def test_an_aborted_request_is_due_for_a_minute_after_its_last_announcement(cache: Cache, engine: Engine) -> None:
    announce(engine, chain("a", 10))
    engine.now = SECONDS - 1
    announce(engine, chain("a", 10))
    pass_time(cache, 2 * SECONDS - 2)
    flood(Engine(cache, "two"))
    assert engine.hits(chain("a", 10)) == 10
    pass_time(cache, 2 * SECONDS)
    assert due_bytes(cache) == 0
    flood(Engine(cache, "three"))
    assert engine.hits(chain("a", 10)) < FLOOR or not cache.evicts_by_age, "what has returned is worth more"


@pytest.mark.parametrize("suffixes", [(), (GroupSpec(16, 64 * KIB, SUFFIX, 2),)], ids=["full", "hybrid"])
def test_a_request_that_is_announced_without_blocks_waits_no_more(cache: Cache, suffixes: tuple[GroupSpec]) -> None:
    engine = Engine(cache, "one", suffixes=suffixes)
    announce(engine, chain("a", 10))
    assert cache.eviction.due.waiting
    assert announce(engine, []) == 0
    assert not cache.eviction.due.waiting
    announce(engine, [])


@pytest.mark.parametrize("leaves", ["ends", "detaches"])
def test_nothing_is_due_for_an_engine_that_leaves(cache: Cache, engine: Engine, leaves: str) -> None:
    announce(engine, chain("a", 10))
    other = Engine(cache, "two")
    if leaves == "ends":
        cache.end_session(engine.session, 0.0)
    else:
        engine.ask(m.Detach(1, b"", engine.namespace))
    assert due_bytes(cache) == 0
    flood(other)
    assert other.hits(chain("a", 10)) < FLOOR


@pytest.mark.parametrize("others", [0, 6])
def test_an_engine_that_announces_everything_keeps_half_of_its_share(cache: Cache, others: int) -> None:
    hostile = Engine(cache, "hostile")
    for number in range(BLOCKS // 8):
        hostile.store(chain(f"{number} ", 8))
    victims = [Engine(cache, f"victim {number}") for number in range(others + 1)]
    for number in range(BLOCKS // 8):
        announce(hostile, chain(f"{number} ", 8), f"r{number}")
    most = BLOCKS // 2 // (others + 2)
    assert due_bytes(cache) == most * 64 * KIB
    assert cache.counters["announcements_refused"] == (BLOCKS - most) // 8
    flood(victims[0])
    left = [hostile.hits(chain(f"{number} ", 8)) for number in range(BLOCKS // 8)]
    assert left[: most // 8] == [8] * (most // 8), "those that were announced first"
    assert sum(left[most // 8 :]) <= 8, "and its floor"


def test_a_long_prompt_counts_as_a_whole_however_little_of_it_is_cached(cache: Cache, engine: Engine) -> None:
    names = hashes(chain("a", BLOCKS // 2 + 1))
    reply = engine.ask(m.Acquire(1, b"", engine.namespace, names, pin=False, request="r"))
    assert (reply.hits, reply.withheld) == (0, len(names)), "refused"
    assert due_bytes(cache) == 0


def test_what_requests_share_counts_once(cache: Cache, engine: Engine) -> None:
    """Compared with a count of all distinct blocks."""
    draw, waiting = random.Random(3), dict[str, list[str]]()
    stored = {"".join(path[:end]) for path in product("ab", repeat=5) for end in range(1, 6)}
    for path in map("".join, product("ab", repeat=5)):
        engine.store([path[:end] for end in range(1, 6)])
    for turn in range(2000):
        request, path = f"r{draw.randrange(9)}", "".join(draw.choices("ab", k=draw.randrange(1, 8)))
        if draw.random() < 0.3:
            waiting.pop(request, None)
            look_up(engine, ["c"], request)
        else:
            waiting[request] = [path[:end] for end in range(1, len(path) + 1)]
            announce(engine, waiting[request], request)
        needed = {name for names in waiting.values() for name in names}
        assert due_bytes(cache) == len(needed & stored) * 64 * KIB, turn
    assert not cache.counters["announcements_refused"]


def test_other_namespaces_share_nothing(cache: Cache, engine: Engine) -> None:
    engine.namespace = engine.ask(
        m.Attach(1, b"", NamespaceSpec("n", (GroupSpec(16, 64 * KIB),), hash_bytes=16), (0,))
    ).namespace
    engine.store(chain("a", 3))
    announce(engine, chain("a", 3), "r1")
    engine.namespace = 1
    announce(engine, chain("a", 10), "r2")
    assert due_bytes(cache) == 13 * 64 * KIB


def test_so_many_requests_of_an_engine_are_due() -> None:
    cache = make_cache(2 * BLOCKS)
    engine = Engine(cache, "one", 4 * KIB)
    names = chain("a", MOST + 1)
    for name in names:
        engine.store([name])
        announce(engine, [name], name)
    assert due_bytes(cache) == MOST * 4 * KIB
    look_up(engine, names[7:8], names[7])
    announce(engine, names[-1:], names[-1])
    assert due_bytes(cache) == MOST * 4 * KIB


def test_if_all_is_due_what_was_announced_last_goes_first_and_its_rest_is_still_due(cache: Cache) -> None:
    engine, other = Engine(cache, "one"), Engine(cache, "two")
    spec = cache.namespaces[engine.namespace].spec
    engine.ask(m.Attach(1, b"", spec, (0,), 8 * 64 * KIB))
    for name in "ba":
        engine.store(chain(name, 4))
    for name in "aba":
        announce(engine, chain(name, 4), name)
    for number in range(3):
        engine.store([f"n{number}"])
    assert (engine.hits(chain("a", 4)), engine.hits(chain("b", 4)), engine.hits(["n2"])) == (4, 3, 1)
    flood(other)
    assert (engine.hits(chain("a", 4)), engine.hits(chain("b", 4)), engine.hits(["n2"])) == (4, 3, 0)


def test_blocks_that_come_while_the_request_waits_are_due_too(cache: Cache, engine: Engine) -> None:
    other = Engine(cache, "two")
    announce(engine, chain("a", 14))
    announce(engine, chain("b", 2), "another")
    other.store(chain("b", 3))
    writing = other.reserve(chain("a", 13)[10:], "a9")
    for position in (2, 1, 0):
        other.settle(writing, at=(position,))
    assert due_bytes(cache) == (13 + 2) * 64 * KIB
    flood(other)
    assert (engine.hits(chain("a", 14)), engine.hits(chain("b", 3))) == (13, 2)


def test_the_blocks_of_suffix_groups_are_due_too(cache: Cache) -> None:
    group = GroupSpec(16, 64 * KIB, SUFFIX, 2)
    engine = Engine(cache, "one", suffixes=(group,), model="hybrid")
    names = hashes(chain("a", 4))
    engine.settle(engine.ask(m.Reserve(1, b"", engine.namespace, [m.Run(names), m.Run(names[2:], None, 1)])))
    announce(engine, chain("a", 4))
    flood(Engine(cache, "two"))
    assert engine.hits(chain("a", 4)) == 4


def test_the_blocks_of_suffix_groups_count(cache: Cache) -> None:
    engine = Engine(cache, "one", suffixes=(GroupSpec(16, 64 * KIB, SUFFIX, BLOCKS),), model="hybrid")
    names = hashes(chain("a", 33))
    engine.settle(engine.ask(m.Reserve(1, b"", engine.namespace, [m.Run(names), m.Run(names, None, 1)])))
    for length, due in ((33, 0), (32, 32)):
        announce(engine, chain("a", length))
        assert due_bytes(cache) == due * 64 * KIB


def test_what_an_engine_drops_stays_while_another_waits_for_it(cache: Cache, engine: Engine) -> None:
    other = Engine(cache, "two")
    announce(other, chain("a", 10))
    engine.ask(m.Drop(1, b"", engine.namespace, hashes(chain("a", 10))))
    flood(engine)
    assert look_up(other, chain("a", 10), "r") == 10


def test_nothing_refers_to_a_namespace_that_is_gone(cache: Cache, engine: Engine) -> None:
    away = Engine(cache, "two", model="without blocks")
    announce(away, chain("b", 2))
    cache.disconnect_session(away.session, 0.0)
    assert cache.eviction.due.waiting, "its process may live, and has its queue"
    engine.ask(m.Detach(1, b"", engine.namespace))
    assert away.namespace not in cache.namespaces
    assert not cache.eviction.due.waiting
