"""Figures for operators: which blocks were lost and why, after how long, and what more memory would gain."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from insights import begin, figures, insight
from small_cache import KIB, MIB, Engine, chain, hashes, make_cache

from kvcache_proto import messages as m
from kvcache_proto.codec import MAX_FRAME, encode
from kvcache_proto.errors import NotPermitted
from kvcache_proto.types import BlockRef, Breaker, GroupSpec, NamespaceSpec, Outcome, Refusal
from kvcache_server.commands.describe import blocks, evicting, regretted
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import LRU, WORTH
from kvcache_server.core.index import Account, Block, Share
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.registry import MAX_ATTACHED
from kvcache_server.core.sampling import KeyedHasher, keyed_draw
from kvcache_server.insight.infinite_cache import InfiniteCache
from kvcache_server.insight.stats import MOST_IDENTITY, Residency
from kvcache_server.status import Eviction, Hindsight, Histogram, Status


def pool(cache: Cache) -> dict:
    stats = figures(cache, 0.0)["pool"]
    states = ("ready", "writing", "quarantined", "free")
    assert sum(stats[f"{state}_bytes"] for state in states) == stats["bytes"]
    return stats


def test_a_histogram_counts_each_value_up_to_its_bound():
    times = Histogram.of((1, 10))
    for value in (0.5, 1, 1.5, 10, 11):
        times.add(value)
    assert times == Histogram([1, 10], [2, 2, 1], 24.0)


def test_evicted_blocks_that_were_never_read_are_counted_separately():
    cache = make_cache(32)
    engine = Engine(cache, "one", block_bytes=500 << 10)  # four of them
    engine.store(chain("a", 3))
    engine.hits(chain("a", 2))  # and with the second the first
    engine.store(chain("b", 4))
    assert dict(cache.eviction.evictions) == {"room": 3}
    assert cache.eviction.evicted_unread == 1
    engine.store(["c"])  # takes the place of a `b`, of which none was read
    assert cache.eviction.evicted_unread == 2
    check_integrity(cache)


def test_an_eviction_was_early_if_a_lookup_misses_the_block_within_a_minute() -> None:
    cache = make_cache(32, policy=LRU)
    one, two = (Engine(cache, name, block_bytes=500 << 10, model=name) for name in "ab")  # room for four

    def early(engine: Engine, now: float, names: list[str]) -> int:
        engine.now = now
        engine.hits(names)
        return int(figures(cache, now)["evicted_early"])

    one.store(chain("a", 4))
    one.now = 100.0
    assert early(one, 100.0, chain("a", 4)) == 0
    one.store(chain("b", 4))
    assert cache.eviction.evictions == {"room": 4}
    assert early(two, 101.0, chain("a", 4)) == 0, "another model's blocks"
    one.ask(m.Acquire(1, b"", one.namespace, hashes(chain("a", 4)), start=4))  # its device has them
    assert early(one, 159.0, chain("a", 2)) == early(one, 159.0, chain("a", 2)) == 2, "only once"
    assert early(one, 160.0, chain("a", 3)) == 3
    assert early(one, 160.1, chain("a", 4)) == 3, "too late"


def test_an_eviction_is_early_even_if_a_shorter_prompt_was_refused_in_between() -> None:
    cache = make_cache(32, policy=LRU, pin_quota=1.0)
    engine = Engine(cache, "one", block_bytes=500 << 10)
    engine.store(chain("a", 4))
    engine.store(chain("b", 4))
    engine.now = 10.0
    engine.acquire(chain("b", 4))
    engine.hits(chain("a", 1))
    assert engine.store(chain("a", 1)) == [Refusal.NO_SPACE]
    engine.hits(chain("a", 4))
    assert figures(cache, 10.0)["evicted_early"] == 4


def requested(cache: Cache, now: float) -> tuple[float, ...]:
    found = figures(cache, now)["hindsight"]
    return tuple(found[key] for key in ("seconds", "requested_blocks", "hit_blocks", "optimum_blocks"))


def test_hits_are_compared_with_those_of_an_optimal_policy() -> None:
    cache = make_cache(32)
    engine = Engine(cache, "one", block_bytes=500 << 10)  # room for four: all requests are in the sample
    hits = []
    for turn in range(40):  # five blocks, over and over: it is best to keep the same four of them
        engine.now = turn * 10.0
        hits.append(engine.hits([name := f"a{turn % 5}"]))
        engine.store([name])
    assert requested(cache, 400.0) == (400.0, 40, sum(hits), 40 - 5 - 7)
    assert sum(hits) < 40 - 5 - 7
    engine.now = 405.0
    hits.append(engine.hits([name]))
    assert requested(cache, 406.0)[1] == 40, "as computed a moment ago"
    *found, best = requested(cache, 3650.0)
    assert found == [3600.0, 36, sum(hits[-36:])] and 36 - 5 - 6 <= best <= 36 - 6
    assert requested(cache, 9000.0) == (0, 0, 0, 0)


def test_a_sample_without_its_beginning_starts_with_what_is_cached() -> None:
    cache = make_cache(32)
    engine = Engine(cache, "one", block_bytes=500 << 10)
    engine.store(chain("a", 3))
    engine.now = 5000.0
    assert [engine.hits(chain("a", 3)), engine.hits(["b"])] == [3, 0]
    engine.now = 5000.5
    assert engine.hits(["b"]) == 0
    assert requested(cache, 5001.0) == (1.0, 5, 3, 4), "which would have stored the other block"


def test_no_policy_could_have_what_is_not_written_yet() -> None:
    cache = make_cache(32)
    engine = Engine(cache, "one", block_bytes=500 << 10)
    asked = m.Acquire(1, b"", engine.namespace, hashes(["a"]), pin=False)
    for _ in range(3):  # in one turn of the daemon
        cache.answer(engine.session, asked, 1.0)
    engine.now = 1.0
    engine.reserve(["a"])
    engine.now = 2.0
    assert engine.hits(["a"]) == 0
    assert requested(cache, 2.0) == (1.0, 1, 0, 0)


def test_storing_a_block_again_does_not_count_as_a_lookup():
    cache = make_cache(32)
    engine = Engine(cache, "one", block_bytes=500 << 10)
    engine.store(["a"])
    assert engine.store(["a"]) == [Refusal.PRESENT]
    engine.store(chain("b", 4))
    assert cache.eviction.evicted_unread == 1


def test_a_block_counts_as_read_if_a_descendant_was_read():
    cache = make_cache(32)
    engine = Engine(cache, "one", block_bytes=500 << 10)
    engine.store(chain("a", 2))
    engine.hits(chain("a", 2))
    engine.store(chain("a", 1))  # a later use, which is no lookup
    engine.store(chain("b", 4))
    assert cache.eviction.evicted_unread == 0


def test_each_eviction_has_its_cause():
    cache = make_cache(64, namespace_ceiling=0.5)
    engine = Engine(cache, "one", block_bytes=500 << 10)
    for name in chain("a", 5):  # half of the region holds four
        engine.store([name])
    assert dict(cache.eviction.evictions) == {"namespace_ceiling": 1}

    cache = make_cache(62)
    engine = Engine(cache, "one", block_bytes=500 << 10)
    (account,) = [cache.registry.account(cache.engines["one"], cache.namespaces[1].groups[0])]
    account.share.ceiling = 2 * account.group.allocated_bytes
    for name in chain("a", 3):
        engine.store([name])
    assert dict(cache.eviction.evictions) == {"own_ceiling": 1}

    cache = make_cache(32)
    engine = Engine(cache, "one", block_bytes=500 << 10)
    engine.store(chain("a", 4))
    Engine(cache, "two", block_bytes=MIB, model="larger").store(["x"])
    assert dict(cache.eviction.evictions) == {"room": 2}


def test_the_pool_by_state_adds_up():
    cache = make_cache(63, quarantine=10.0)
    size = 504 << 10
    engine = Engine(cache, "one", block_bytes=size)
    assert pool(cache)["free_runs"] == 1
    engine.store(chain("a", 4))
    reserved = engine.reserve(chain("b", 3))
    stats = pool(cache)
    assert (stats["ready_bytes"], stats["writing_bytes"], stats["free_bytes"]) == (4 * size, 3 * size, size)
    assert stats["free_runs"] == 1
    engine.settle(reserved, Outcome.FAILED, at=(0,))  # and with it those below, which are being written still
    assert pool(cache)["writing_bytes"] == 2 * size
    cache.end_session(engine.session, 0.0)
    stats = pool(cache)
    assert (stats["quarantined_bytes"], stats["writing_bytes"]) == (2 * size, 0)
    cache.tick(11.0)
    assert pool(cache)["free_bytes"] == 4 * size


def tick(cache: Cache, now: float) -> None:
    cache.tick(now)
    insight(cache).tick(now)


def test_how_long_evicted_blocks_were_cached():
    cache = make_cache(34)
    engine = Engine(cache, "one", block_bytes=32 << 10)  # 68 of them
    tick(cache, 1000.0)
    engine.store(chain("a", 68))
    for now in (1000.25, 1030.0):
        tick(cache, now)
    engine.store(chain("b", 64))
    tick(cache, 1031.0)
    tick(cache, 5030.5)
    engine.store(chain("c", 64))
    residence = figures(cache, 0.0)["pool"]["residence"]
    counts = dict(zip([*residence["bounds"], "more"], residence["counts"], strict=True))
    # 64 after 29.75 s, 4 after 4,030 s, 60 after 4,000 s; one in eight of them is counted.
    assert counts[60] == 8
    assert counts[4 * 3600] in (7, 8, 9)
    assert sum(residence["counts"]) == counts[60] + counts[4 * 3600]
    assert residence["sum"] == pytest.approx(8 * 29.75 + counts[4 * 3600] * 4000, rel=0.01)


def block_of(generation: int) -> Block:
    return Block(0, 0, b"", BlockRef(0, generation).pack(), Account(Share("", 0), None))


def test_ages_stay_accurate_in_a_long_running_daemon():
    ages = Residency()
    for tick in range(20_000):
        ages.tick(8 * tick, float(tick))
    assert len(ages._times) <= 4096
    now = 19_999
    for given in (19_000, 15_000, 10_000):
        before = ages.residence.sum
        ages.evicted([block_of(8 * given)])
        assert ages.residence.sum - before == pytest.approx(now - given, rel=0.05)


def test_blocks_of_an_earlier_daemon_have_no_age():
    ages = Residency()
    ages.evicted([block_of(8)])
    ages.tick(80, 1.0)
    ages.evicted([block_of(80)])
    assert not sum(ages.residence.counts)


def named(path: str) -> str:
    return hashlib.blake2b(path.encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize("policy", [LRU, WORTH])
@pytest.mark.parametrize("seed", range(5))
def test_hits_and_lost_blocks_are_the_hits_of_an_infinite_pool(seed: int, policy: str):
    draw = random.Random(seed)
    small, large = make_cache(62, policy=policy), make_cache(1984)
    engines = [Engine(cache, "one", block_bytes=200 << 10) for cache in (small, large)]
    trunk = chain("trunk", 4)
    for turn in range(300):
        asked = trunk[: draw.randrange(5)] + chain(f"{min(draw.randrange(40), turn)}-", draw.randrange(1, 6))
        asked = [named("/".join(asked[: at + 1])) for at in range(len(asked))]
        for engine in engines:
            engine.hits(asked)
            engine.store(asked)
    (few,), (all_of_them,) = (figures(cache, 0.0)["namespaces"] for cache in (small, large))
    assert not large.eviction.evictions and small.eviction.evictions["room"] > 100
    assert bool(small.eviction.declined) == (policy == WORTH), "refused blocks would have been hits, too"
    assert few["requested_blocks"] == all_of_them["requested_blocks"]
    assert few["hit_blocks"] < all_of_them["hit_blocks"]
    assert few["hit_blocks"] + few["lost_blocks"] == all_of_them["hit_blocks"]


def test_a_request_that_is_looked_up_again_counts_once_with_the_most_that_it_found():
    cache = make_cache(62, policy=LRU, pin_quota=1.0)
    engine = Engine(cache, "one", block_bytes=200 << 10)
    room = cache.pool.blocks_of(200 << 10)
    blocks = chain("a", room)
    engine.store(blocks[:8])

    def look_up(names: list[str], request: str) -> tuple[int, ...]:
        lease = engine.ask(m.Acquire(1, b"", engine.namespace, hashes(names), request=request)).lease
        engine.ask(m.Release(1, b"", [lease]))
        (space,) = figures(cache, 0.0)["namespaces"]
        assert space["hit_bytes"] == space["hit_blocks"] * (200 << 10)
        return tuple(space[key] for key in ("lookups", "requested_blocks", "hit_blocks", "lost_blocks"))

    assert look_up(blocks[:8], "r") == (1, 8, 8, 0)
    assert look_up(blocks[:8], "r") == (2, 8, 8, 0)
    assert look_up(blocks[:10], "r") == (3, 10, 8, 0), "it has generated more, and was preempted"
    engine.store(blocks[:10])
    assert look_up(blocks[:10], "r") == (4, 10, 10, 0), "it waited, and more has come"
    assert look_up(blocks[:4], "r") == (5, 10, 10, 0)
    assert look_up(blocks[:4], "s") == (6, 14, 14, 0)
    assert look_up(blocks[:4], "") == (7, 18, 18, 0)
    assert look_up(blocks[:4], "") == (8, 22, 22, 0), "two requests, as far as is known"
    engine.store(chain("b", room))
    assert look_up(blocks[:10], "t") == (9, 32, 22, 10)
    assert look_up(blocks[:10], "t") == (10, 32, 22, 10)


def test_many_lost_blocks_are_estimated_from_a_sample():
    draw = random.Random(3)
    lost, blocks = InfiniteCache(1, KeyedHasher(keyed_draw(b"a"))), [draw.randbytes(32) for _ in range(200_000)]
    for block in blocks:
        lost.add([block])
    assert len(lost) <= 1 << 14
    for at in range(0, len(blocks), 64):
        lost.missed(blocks[at : at + 64])
    lost.missed([draw.randbytes(32) for _ in range(50_000)])  # never stored
    assert lost.missed_blocks == pytest.approx(len(blocks), rel=0.05)


def test_a_long_prompt_is_counted_up_to_the_last_stored_block():
    draw = random.Random(5)
    lost, chain = InfiniteCache(1, KeyedHasher(keyed_draw(b"a"))), [draw.randbytes(32) for _ in range(2000)]
    for block in chain[:1000]:
        lost.add([block])
    lost.missed(chain)
    assert lost.missed_blocks == 1000


def counters(count: int) -> list[bytes]:
    """Hashes that are no digests: nearly all of their bits are equal."""
    return [number.to_bytes(16, "big") for number in range(count)]


@pytest.mark.parametrize("reverse", [False, True])
def test_hashes_that_are_counters_are_sampled_like_digests(reverse: bool):
    cache = make_cache(11, 64)
    engine = Engine(cache, "one", block_bytes=64)
    names = [each[::-1] if reverse else each for each in counters(30_000)]
    for at in range(0, len(names), 100):
        engine.settle(engine.ask(m.Reserve(1, b"", engine.namespace, [m.Run([name]) for name in names[at : at + 100]])))
    evicted = cache.eviction.evictions["room"]
    assert evicted > 18_000
    visible = cache.namespaces[1].groups[0].visible
    for name in [name for name in names if name not in visible]:
        engine.ask(m.Acquire(1, b"", engine.namespace, [name]))
    (space,) = figures(cache, 0.0)["namespaces"]
    assert encode(m.Report(1, figures(cache, 0.0)))
    assert space["lost_blocks"] == pytest.approx(evicted, rel=0.05)
    (group,) = cache.namespaces[1].groups
    assert len(insight(cache)._infinite[group.tag]) <= 1 << 14


def test_a_sample_is_bounded_for_any_lots():
    class Zeros(KeyedHasher):
        def of(self, hashes, size, salt=b""):
            return np.zeros(len(hashes) // size, np.uint64)

    lost = InfiniteCache(1, Zeros(keyed_draw(b"")))
    for name in counters(1 << 15):
        lost.add([name])
        assert len(lost) <= 1 << 14
    lost.missed(counters(1 << 15))
    assert encode(m.Report(1, {"lost": lost.missed_blocks}))


def test_telemetry_of_clients_always_fits_in_a_report():
    cache = make_cache()
    engine = Engine(cache, "one")
    tell = m.ReportClient(1, b"", Breaker.CLOSED, {"probes": 1 << 48})
    for _ in range(1 << 17):
        engine.ask(tell)
    assert encode(m.Report(1, figures(cache, 0.0)))
    assert insight(cache).telemetry.total["probes"] >= 1 << 60


class Walked(list):  # type: ignore[type-arg]
    """A list that counts how often it is gone through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()


def test_a_report_scans_the_accounts_once_for_any_number_of_namespaces() -> None:
    walks = []
    for count in (1, 40):
        cache = make_cache()
        for number in range(count):
            Engine(cache, "one", model=f"m{number}")
        accounts = cache.eviction.fair_share._accounts = Walked(cache.eviction.fair_share.accounts)
        assert len(figures(cache, 0.0)["namespaces"]) == count
        walks.append(accounts.walks)
    assert walks[0] == walks[1]


def test_an_engine_s_bytes_include_all_groups_of_the_namespace() -> None:
    cache = make_cache()
    session = cache.open_session("one", "", 0.0)
    spec = NamespaceSpec("m", (GroupSpec(16, 64 * KIB), GroupSpec(16, 32 * KIB)), hash_bytes=16)
    namespace = cache.handle(session, m.Attach(1, b"", spec, (0,)), 0.0).namespace
    for group, names in enumerate((["a", "b"], ["c"])):
        reserved = cache.handle(session, m.Reserve(1, b"", namespace, [m.Run(hashes(names))], group), 0.0)
        settle = m.Settle(1, b"", cache.geometry.region_id, reserved.reservation, (0,), Outcome.COMMITTED)
        cache.handle(session, settle, 0.0)
    (space,) = figures(cache, 0.0)["namespaces"]
    assert space["engines"] == {"one": space["bytes"]}
    assert space["bytes"] >= (2 * 64 + 32) * KIB


def attach(cache: Cache, block_bytes: int) -> float:
    """Attach a model with such blocks, and return its overhead as `status` shows it."""
    Engine(cache, f"of {block_bytes}", block_bytes, model=f"of {block_bytes}")
    return float(figures(cache, 0.0)["namespaces"][-1]["overhead"])


def test_a_namespace_reports_its_overhead():
    cache = make_cache()
    assert attach(cache, 64 * KIB) == attach(cache, 100 * KIB) == 0
    assert attach(cache, 62 * KIB) == pytest.approx(2 / 64, abs=0.001)
    assert attach(cache, 1 * KIB) == pytest.approx(3 / 4, abs=0.001)


def test_a_report_of_many_sessions_comes_in_slices_and_fits_a_frame() -> None:
    cache = make_cache(max_sessions=600, max_namespaces=600)
    for number in range(300):
        session = cache.open_session(f"{number:04}" + "e" * 250, "l" * 256, 0.0)
        for other in range(MAX_ATTACHED):
            spec = NamespaceSpec(
                model="m" * 256,
                groups=[GroupSpec(16, (64,) * 64)],
                hash_bytes=16,
                identity={"weights": f"{(number + other) % 500}" + "w" * 4000},
            )
            cache.answer(session, m.Attach(0, b"", spec, tuple(range(64))), 0.0)
    steps = begin(cache, session, m.Stats(1, b""), 1.0)
    slices = 1
    while True:
        try:
            next(steps)
        except StopIteration as done:
            report = done.value
            break
        slices += 1
    assert slices > 8
    assert len(encode(report)) < MAX_FRAME
    found = msgspec.msgpack.decode(report.stats)
    spaces = found["namespaces"]
    assert len(found["sessions"]) == 300
    assert 0 < sum(bool(space["identity"]) for space in spaces) * 4000 <= MOST_IDENTITY < len(spaces) * 4000
    assert all(bool(space["groups"]) == bool(space["identity"]) for space in spaces)


def test_a_session_attaches_a_few_namespaces() -> None:
    cache = make_cache()
    session = cache.open_session("one", "", 0.0)

    def attach(number: int) -> Any:
        spec = NamespaceSpec(model=f"model {number}", groups=[GroupSpec(16, 64)], hash_bytes=16)
        return cache.handle(session, m.Attach(0, b"", spec, (0,)), 0.0)

    first = attach(0)
    for number in range(1, MAX_ATTACHED):
        attach(number)
    with pytest.raises(NotPermitted, match="detach one first"):
        attach(MAX_ATTACHED)
    attach(0)  # once more, which adds none
    cache.handle(session, m.Detach(0, b"", first.namespace), 0.0)
    attach(MAX_ATTACHED)


def test_hits_and_evictions_are_counted_by_class() -> None:
    cache = make_cache(32)
    engine = Engine(cache, "one", block_bytes=500 << 10)  # four of them
    engine.hits(["a"])
    engine.store(["a"])
    for _ in range(4):
        assert engine.hits(["a"]) == 1
    found = figures(cache, 0.0)["eviction"]
    assert found["hit_blocks_by_class"] == {"once": 1, "twice": 1, "more": 2}
    for name in chain("b", 5):
        engine.hits([name])
        engine.store([name])
    found = figures(cache, 0.0)["eviction"]
    assert found["hit_blocks_by_class"] == {"once": 1, "twice": 1, "more": 2}
    assert found["evicted_blocks_by_class"] == {"once": 1, "twice": 0, "more": 1}
    assert (found["by_age"], found["switches"], found["declined_blocks"]) == (False, 0, 0)


def test_status_says_what_is_evicted() -> None:
    eviction = msgspec.convert(figures(make_cache(), 0.0)["eviction"], Eviction)
    eviction.hit_blocks_by_class.more = 1234
    text = "\n".join(evicting(eviction))
    assert "what is worth least goes first" in text and "more often 1,234" in text
    eviction.by_age = True
    assert "least recently used goes first" in "\n".join(evicting(eviction))


def test_status_says_what_was_regretted_and_what_devices_hold() -> None:
    found = msgspec.convert(figures(make_cache(), 0.0), Status)
    assert regretted(found) == [] and "devices" not in blocks(found.pool)
    found.evictions, found.evicted_early, found.pool.doubled_bytes = {"room": 150, "dropped": 50}, 30, 3 * MIB
    found.hindsight = Hindsight(3500.0, 1000, 643, 821)
    assert "3.0 MiB also on devices" in blocks(found.pool)
    early, sample = regretted(found)
    assert early.endswith("within a minute: 30, 15.0% of the evicted")
    assert sample.endswith("the last 58.3 min: 64.3%; a policy that knows the future: 82.1%")
