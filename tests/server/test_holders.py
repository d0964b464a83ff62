"""Host memory need not double what devices have: which copies are evicted first, and when they come back."""

from __future__ import annotations

import pytest
from small_cache import Engine, audit, hashes, make_cache

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import Refusal
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import LRU, WORTH

BLOCKS = 16


@pytest.fixture(params=[WORTH, LRU])
def cache(request) -> Cache:
    made = make_cache(BLOCKS, policy=request.param)
    yield made
    audit(made)


def engine(cache: Cache, name: str, reports: bool = True) -> Engine:
    made = Engine(cache, name)
    made.ask(m.Attach(1, b"", cache.namespaces[made.namespace].spec, (0,), reports_leaving=reports))
    return made


def chain(name: str) -> list[str]:
    return [f"{name}{at}" for at in range(4)]


def keeps(one: Engine, kept: list[str] = (), evicted: list[str] = ()) -> None:
    one.ask(m.ReportDevice(1, b"", one.namespace, hashes(kept), hashes(evicted)))


def found(one: Engine, name: str, start: int = 0) -> int:
    reply = one.ask(m.Acquire(1, b"", one.namespace, hashes(chain(name)), request=f"{name}{one.now}", start=start))
    if reply.lease:
        one.ask(m.Release(1, b"", [reply.lease]))
    return reply.hits


def leave(one: Engine, name: str, leaving: int = 4, idle: float = 1.0, found: int = 0) -> list[Refusal]:
    run = m.Run(hashes(chain(name)), None, 0, leaving, int(idle * 1000), found)
    reserved = one.ask(m.Reserve(1, b"", one.namespace, [run]))
    if reserved.reservation:
        one.settle(reserved)
    return [Refusal(answer) for answer in reserved.answers]


def test_copies_of_what_a_device_keeps_are_evicted_first(cache: Cache) -> None:
    one = engine(cache, "one")
    for at, name in enumerate("abcd"):
        one.now = at
        one.store(chain(name))
    keeps(one, ["c3"])
    one.now = 10
    one.store(chain("e"))
    assert [found(one, name) for name in "abcde"] == [4, 4, 0, 4, 4]


def test_what_leaves_a_device_is_stored_again_or_stays(cache: Cache) -> None:
    one = engine(cache, "one")
    for at, name in enumerate("abcd"):
        one.now = at
        one.store(chain(name))
    keeps(one, ["c3", "d3"])
    one.now = 10
    one.store(chain("e"))
    gone = "c" if not found(one, "c", 4) else "d"
    there = "d" if gone == "c" else "c"
    assert leave(one, there) == [Refusal.PRESENT] * 4
    assert leave(one, gone) == [Refusal.GRANTED] * 4
    assert [found(one, name) for name in "acde"] == [0, 4, 4, 4]


@pytest.mark.parametrize("sticky", [True, False])
def test_copies_that_another_engine_will_need_are_not_evicted_first(cache: Cache, sticky: bool) -> None:
    """It depends on whether requests return to the engine that has their blocks."""
    engines = one, two = engine(cache, "one"), engine(cache, "two")
    one.store(chain("a"))
    keeps(one, ["a3"])
    for turn in range(1, 40):
        asker = one if turn < 8 or sticky else engines[turn % 2]
        asker.now = turn
        assert found(asker, "a") == 4
        keeps(asker, ["a3"])
        if asker is two or not sticky:
            keeps(one if asker is two else two, evicted=["a3"])
    for each in engines:
        keeps(each, evicted=["a3"])
    for at, name in enumerate("bcd", 41):
        one.now = at
        one.store(chain(name))
    keeps(one, ["d3"])
    one.now = two.now = 50
    one.store(chain("e"))
    assert found(two, "d") == (0 if sticky else 4)


@pytest.mark.parametrize("ends", ["a session", "a report", "a request"])
def test_a_copy_is_needed_again_once_its_device_does_not_keep_it(cache: Cache, ends: str) -> None:
    one, two = engine(cache, "one"), engine(cache, "two", reports=False)
    for at, name in enumerate("abcd"):
        one.now = two.now = at
        one.store(chain(name))
    keeps(one, ["d3"])
    if ends == "a session":
        cache.end_session(one.session, 5.0)
        engine(cache, "one")
    elif ends == "a report":
        keeps(one, evicted=["d3"])
    else:
        found(one, "d")
    two.now = 10
    two.store(chain("e"))
    assert found(two, "d") == 4


def test_a_block_comes_back_with_its_last_use(cache: Cache) -> None:
    one = engine(cache, "one")
    for at, name in enumerate("abcd"):
        one.now = 10 * at
        one.store(chain(name))
    keeps(one, ["b3", "c3"])
    one.now = 40
    one.store(chain("e"))
    assert leave(one, "c", idle=1) == [Refusal.PRESENT] * 4, "it was used again on the device, 20 s after the host"
    assert leave(one, "b", idle=15) == [Refusal.GRANTED] * 4, "in place of a"
    one.now = 41
    one.store(chain("f"))
    one.store(chain("g"))
    assert [name for name in "abcdefg" if found(one, name)] == ["c", "e", "f", "g"], "b and d were used before c"


def test_requests_that_found_a_block_on_the_device_count(cache: Cache) -> None:
    one = engine(cache, "one")
    for name in "abcd":
        one.store(chain(name))
    keeps(one, ["d3"])
    one.now = 20
    one.store(chain("e"))
    before = cache.eviction.figures().hit_blocks_by_class
    assert leave(one, "d", idle=0.5, found=5) == [Refusal.GRANTED] * 4
    assert found(one, "d") == 4
    after = cache.eviction.figures().hit_blocks_by_class
    counts = [getattr(after, each) - getattr(before, each) for each in after.__struct_fields__]
    assert counts == ([0, 0, 4] if cache.eviction.learner._enabled else [0, 0, 0])


@pytest.mark.parametrize(
    ("leaving", "idle_ms", "times"), [(5, 0, 0), (-1, 0, 0), (1, -1, 0), (1, 0, -1), (1, 1 << 50, 0)]
)
def test_impossible_reports_are_refused(cache: Cache, leaving: int, idle_ms: int, times: int) -> None:
    one = engine(cache, "one")
    with pytest.raises(BadArgument):
        one.ask(m.Reserve(1, b"", one.namespace, [m.Run(hashes(chain("a")), None, 0, leaving, idle_ms, times)]))
    with pytest.raises(BadArgument):
        one.ask(m.ReportDevice(1, b"", one.namespace, [b"short"]))


def test_status_estimates_what_host_memory_doubles(cache: Cache) -> None:
    one = engine(cache, "one")
    for name in "abcd":
        one.store(chain(name))
    assert cache.doubled_bytes() == 0
    keeps(one, ["b3", "c1"])
    assert cache.doubled_bytes() == 6 * 64 * 1024
    leave(one, "b", leaving=2)
    keeps(one, ["b1"])
    assert cache.doubled_bytes() == 4 * 64 * 1024
    cache.end_session(one.session, 5.0)
    assert cache.doubled_bytes() == 0
