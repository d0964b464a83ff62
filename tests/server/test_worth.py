"""Eviction by worth: life tables, paces, the policy's choice against a naive one, floors and restarts."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest
from host import Client, Host
from hypothesis import given, settings
from hypothesis import strategies as st
from insights import follow, insight
from small_cache import Engine, chain, hashes, make_cache, pass_time

from kvcache_proto import messages as m
from kvcache_proto.types import GroupSpec, NamespaceSpec
from kvcache_server.core.cache import Cache
from kvcache_server.core.eviction.policy import LRU, WORTH
from kvcache_server.core.eviction.ranking import SAMPLE, Entry, Ranking
from kvcache_server.core.eviction.sketch import Sketch
from kvcache_server.core.eviction.worth import FACTOR_ONE_OFF, Worths, gittins
from kvcache_server.core.index import (
    CLASS_MASK,
    EVICT_FIRST,
    FIRST_TICK,
    MOST_PACE,
    PACE_MASK,
    PACE_SHIFT,
    PACES,
    TICK_MASK,
    TICKS_PER_SECOND,
    Share,
    later,
    pace_of,
)
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.sampling import KeyedHasher, keyed_draw

KIB = 1024
LOTS = KeyedHasher(keyed_draw(b"a secret"))


def naive_gittins(hazards: list[float], widths: list[float]) -> list[float]:
    """The best ratio of expected hits to expected time, of keeping a block up to the end of some bin."""
    found = []
    for start in range(len(hazards)):
        best = hits = time = 0.0
        alive = 1.0
        for at in range(start, len(hazards)):
            hits += alive * hazards[at]
            time += alive * widths[at] * (1 - hazards[at] / 2)
            alive *= 1 - hazards[at]
            best = max(best, hits / time)
        found.append(best)
    return found


@given(st.lists(st.tuples(st.floats(1e-6, 0.99), st.floats(0.1, 1e6)), min_size=1, max_size=44))
@settings(max_examples=200, deadline=None)
def test_the_worth_is_the_best_ratio_of_hits_to_time(bins: list[tuple[float, float]]) -> None:
    hazards, widths = [hazard for hazard, _ in bins], [width for _, width in bins]
    assert gittins(hazards, widths) == pytest.approx(naive_gittins(hazards, widths), rel=1e-9)


def test_a_pace_is_within_a_tenth_of_the_time_between_two_requests() -> None:
    for seconds in (0.06, 0.1, 1, 7, 60, 3600, 86_400 * 30):
        pace = PACES[pace_of(int(seconds * TICKS_PER_SECOND)) >> PACE_SHIFT]
        assert pace == pytest.approx(seconds, rel=0.1)
    assert pace_of(0) == pace_of(TICKS_PER_SECOND // 50) == 0, "they belong together"
    assert pace_of(1 << 62) == PACE_MASK


def tick_of(seconds: float, pace: float = 0.0, cls: int = 0) -> int:
    return FIRST_TICK + (int(seconds * TICKS_PER_SECOND) & ~TICK_MASK) | pace_of(int(pace * TICKS_PER_SECOND)) | cls


def worths_of(returns: list[tuple[float, float]]) -> Worths:
    """Worths that have seen blocks of class 1 return, each with its pace and the time after which it did, and as many
    that did not."""
    worths, share = Worths(), Share("one", 1)
    for number, (pace, after) in enumerate(returns):
        worths.returned(tick_of(0, pace, 1), tick_of(after), share)
        worths.given_up(tick_of(0, pace, 1), tick_of(50_000), share)
        if number % 200 == 199:
            worths.refresh((), (), tick_of(0))
    return worths


def test_a_block_that_is_overdue_by_its_pace_is_worth_less_than_an_older_one_that_is_not() -> None:
    draw = random.Random(1)
    paces = [2 ** draw.uniform(0, 12) for _ in range(3000)]
    worths = worths_of([(pace, pace * draw.uniform(0.7, 1.4)) for pace in paces])
    assert worths.weights[1] > 0.9, "paces predict better than ages"
    now, share = tick_of(10_000), Share("one", 1)
    overdue, due = tick_of(10_000 - 60, 5, 1), tick_of(10_000 - 600, 700, 1)
    assert worths.worth(overdue, now, share) < worths.worth(due, now, share) / 4
    soon, late = tick_of(10_000 - 8, 10, 1), tick_of(10_000 - 8, 1000, 1)
    assert worths.worth(soon, now, share) > 4 * worths.worth(late, now, share)


def test_paces_that_predict_nothing_are_ignored() -> None:
    draw = random.Random(1)
    worths = worths_of([(2 ** draw.uniform(0, 12), draw.expovariate(1 / 50)) for _ in range(3000)])
    assert worths.weights[1] < 0.1
    share, now = Share("one", 1), tick_of(500)
    one, other = (worths.worth(tick_of(400, pace, 1), now, share) for pace in (2, 2000))
    assert one == pytest.approx(other, rel=0.1)


def test_a_sketch_counts_to_three_and_knows_few_hashes_that_it_was_not_given() -> None:
    sketch, names = Sketch(1 << 13), [number.to_bytes(16, "big") for number in range(3000)]
    keyed = LOTS.of(b"".join(names), 16)
    sketch.put(keyed[:1000], [tick_of(0, cls=at % 3) for at in range(1000)])
    single = [sketch.ask(keyed[at : at + 1], [0], tick_of(0))[0] for at in range(1000)]
    assert sum(asks == min(at % 3 + 1, 2) for at, asks in enumerate(single)) > 850
    assert sum(sketch.ask(keyed[at : at + 1], [0], tick_of(0))[0] > 0 for at in range(1000, 1500)) < 10


def test_a_sketch_takes_a_request_for_a_block_as_one_for_those_above_it() -> None:
    sketch, names, now = Sketch(1 << 16), [number.to_bytes(9, "big") for number in range(20)], tick_of(0)
    keyed = LOTS.of(b"".join(names), 9)
    sketch.ask(keyed[:10], [0], now)
    sketch.put(keyed[[2, 9]], [tick_of(0, cls=1)] * 2)
    assert sketch.ask(keyed[:15], [0, 5, 10], now) == [2, 2, 2, 1, 1] + [2] * 5 + [0] * 5
    assert sketch.ask(keyed, [0], now) == [2] * 10 + [1] * 5 + [0] * 5


def test_a_sketch_knows_the_time_since_the_last_request() -> None:
    sketch, keyed = Sketch(1 << 16), LOTS.of(b"".join(number.to_bytes(9, "big") for number in range(3)), 9)
    sketch.put(keyed[:2], [tick_of(100), tick_of(160)])
    assert sketch.ask(keyed, [0, 1, 2], tick_of(190)) == [
        tick & TICK_MASK for tick in (tick_of(0, 90, 1), tick_of(0, 30, 1), 0)
    ]
    assert sketch.ask(keyed, [0, 1, 2], tick_of(190)) == [2, 2, 1], "at once"


def test_other_groups_have_other_lots() -> None:
    names = b"".join([number.to_bytes(32, "big") for number in range(100)])
    first, second = LOTS.of(names, 32, b"one"), LOTS.of(names, 32, b"two")
    assert len({*first.tolist(), *second.tolist()}) == 200
    assert first.tolist() == LOTS.of(names, 32, b"one").tolist()


class Checked(Ranking):
    """Compares each choice with a naive one."""

    choices = 0

    def least(self) -> Entry | None:
        entry = super().least()
        leaves = [
            leaf
            for account in self._fair_share.accounts
            if account.share.bytes > account.share.floor
            for leaf in account.group.root.subtree()[1:]
            if leaf.account is account and account.group.is_evictable(leaf)
        ]
        assert (entry is None) == (not leaves)
        if entry is not None:
            assert entry[3] in leaves and entry[0] == pytest.approx(self._worth(entry[3]), rel=0.1)
            if len(leaves) < SAMPLE:
                assert entry[0] == min(map(self._worth, leaves))
            self.choices += 1
        return entry


@pytest.mark.parametrize("blocks", [62, 248])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_evicted_is_worth_least_of_a_sample_of_those_above_their_floors(seed: int, blocks: int) -> None:
    draw, cache = random.Random(seed), make_cache(blocks)
    cache.eviction.ranking.__class__ = Checked
    engines = [Engine(cache, name) for name in ("one", "two", "three")]
    now = 0.0
    for turn in range(600):
        now += draw.expovariate(0.5)
        engine = draw.choice(engines)
        engine.now = now
        prompt = chain(f"{int(draw.expovariate(1 / 30))}-", draw.randrange(1, 9))
        engine.hits(prompt)
        engine.store(prompt)
        if turn % 50 == 0:
            check_integrity(cache)
    assert cache.eviction.ranking.choices > 100  # type: ignore[attr-defined]


@given(st.integers(0, 1 << 30), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_no_account_loses_blocks_to_others_below_its_floor(seed: int, others: int) -> None:
    draw, cache = random.Random(seed), make_cache(124, namespace_floor=0.2)
    quiet = Engine(cache, "quiet", model="quiet")
    mine = chain("mine-", 40)
    quiet.store(mine)
    (account,) = (each for each in cache.eviction.fair_share.accounts if each.engine == "quiet")
    engines = [Engine(cache, f"other {number}") for number in range(others)]
    for turn in range(150):
        engine = draw.choice(engines)
        engine.now += draw.random()
        prompt = chain(f"{turn if draw.random() < 0.5 else draw.randrange(9)}-", draw.randrange(1, 20))
        engine.hits(prompt)
        engine.store(prompt)
        assert account.share.bytes >= min(
            40 * account.group.allocated_bytes, account.share.floor - account.group.allocated_bytes
        )
    assert cache.eviction.evictions and quiet.hits(mine) >= 20


def test_of_prompts_that_nobody_has_repeated_yet_the_last_ones_stay() -> None:
    """How old they are is no reason to keep them before blocks have returned at any age."""
    cache = make_cache(124)
    engine = Engine(cache, "one")
    prompts = [chain(f"{number} ", 16) for number in range(100)]
    for prompt in prompts:
        engine.now += 0.02
        engine.hits(prompt)
        assert not any(engine.store(prompt))
    assert not cache.eviction.declined and cache.eviction.evictions["room"] > 1400
    assert sum(engine.hits(prompt) for prompt in prompts[-10:]) > 60


@pytest.mark.parametrize("model", ["model", "another"])
def test_a_stream_that_nobody_reads_stays_at_its_floor_even_by_age(model: str) -> None:
    cache = make_cache(124)
    reader, stream = Engine(cache, "reader"), Engine(cache, "stream", model=model)
    kept = [chain(f"kept {number} ", 8) for number in range(15)]
    for prompt in kept:
        reader.store(prompt)
    (account,) = (each for each in cache.eviction.fair_share.accounts if each.engine == "stream")
    account.share.factor, cache.eviction.learner.guard.by_age = FACTOR_ONE_OFF / 2, True
    for number in range(100):
        stream.store(chain(f"once {number} ", 8))
    assert account.share.bytes <= account.share.floor + 6 * account.group.allocated_bytes, (
        "the floor, and what was free"
    )
    assert cache.eviction.learner.guard.by_age and cache.eviction.declined
    assert [reader.hits(prompt) for prompt in kept] == [8] * 15
    follow(cache)
    log = insight(cache).misses
    found = [log.find(name, math.inf) for names in log.names() for name in names]
    assert "room" in {each.cause for each in found if each}
    assert not any(each.by_age for each in found if each), "none went as the least recently used"
    account.share.factor = 1.0
    cache.eviction.ranking.expire()
    for number in range(100):
        stream.store(chain(f"more {number} ", 8))
    assert account.share.bytes > cache.pool.capacity / 2


def test_a_request_counts_once_however_often_it_asks() -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.store(["a"])
    group = cache.namespaces[engine.namespace].groups[0]

    def ask(request: str) -> int:
        lease = engine.ask(m.Acquire(1, b"", engine.namespace, hashes(["a"]), request=request)).lease
        engine.ask(m.Release(1, b"", [lease]))
        cache.eviction.learner.learn()
        return next(iter(group.visible.values())).tick & CLASS_MASK

    assert [ask(name) for name in ("r1", "r1", "r1", "r2", "r2", "r3")] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7])
def test_how_many_blocks_return_is_learned_from_those_that_had_the_time(part: float) -> None:
    draw, cache = random.Random(5), make_cache(124)
    engine = Engine(cache, "one")
    again: defaultdict[int, list[list[str]]] = defaultdict(list)
    assert cache.eviction.learner.worths.returning == 0
    for turn in range(600):
        engine.now += 0.1
        pass_time(cache, engine.now)
        new = chain(f"{turn} ", 4)
        if draw.random() < part:
            again[turn + draw.randrange(5, 60)].append(new)
        for prompt in [new, *again.pop(turn, [])]:
            engine.hits(prompt)
            engine.store(prompt)
    assert cache.eviction.learner.worths.returning == pytest.approx(part, abs=0.1)


def test_the_blocks_above_a_hit_go_up_one_class_too() -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    names = chain("a", 6)
    engine.store(names)
    engine.hits(names[:4])
    engine.hits(names[:2])
    cache.eviction.learner.learn()
    visible = cache.namespaces[engine.namespace].groups[0].visible
    assert [visible[name].tick & CLASS_MASK for name in hashes(names)] == [2, 2, 1, 1, 0, 0]
    engine.now = 3.0
    engine.hits(names)
    cache.eviction.learner.learn()
    assert [visible[name].tick & CLASS_MASK for name in hashes(names)] == [2, 2, 2, 2, 1, 1]


def test_a_small_cache_of_the_guard_is_an_lru_cache() -> None:
    cache = make_cache(31)
    engine = Engine(cache, "one", block_bytes=32 << 10)
    blocks = cache.pool.blocks_of(32 << 10)
    draw = random.Random(1)
    loop = [f"l{at % (blocks + 20)}" for at in range(1000)]
    mixed = [f"m{int(draw.paretovariate(0.7))}" for _ in range(1000)]
    by_age = cache.eviction.learner.guard._by_age
    for at, name in enumerate(loop + mixed):
        if not engine.hits([name]):
            engine.store([name])
        if at % 100 == 99:
            cache.eviction.learner.learn()
            latest = list(dict.fromkeys((loop + mixed)[at::-1]))[:blocks]
            assert list(by_age) == hashes(latest[::-1])
            guard = cache.eviction.learner.guard
            assert guard._names == sorted(guard._by_worth, key=lambda each: guard._by_worth[each][2])
            assert len(guard._names) <= blocks


def agents(draw: random.Random, count: int, turns: int) -> list[tuple[float, list[str]]]:
    """Prompts by time: conversations that go on at a pace of their own, from seconds to an hour, and end."""
    found = []
    for number in range(count):
        now, pace, length = draw.uniform(0, 3600), 2 ** draw.uniform(1, 12), draw.randrange(2, 6)
        for turn in range(turns):
            found.append((now, chain(f"{number}-", length + turn)))
            now += pace * draw.uniform(0.8, 1.25)
    return sorted(found)


def test_conversations_that_go_on_at_a_pace_find_more_than_by_age() -> None:
    hits = {}
    for policy in (LRU, WORTH):
        cache = make_cache(248, policy=policy)
        engine, hits[policy] = Engine(cache, "one"), 0
        for engine.now, prompt in agents(random.Random(3), 150, 12):
            hits[policy] += engine.hits(prompt)
            engine.store(prompt)
        check_integrity(cache)
    assert hits[WORTH] > 1.1 * hits[LRU]


def paces(cache: Cache, names: list[str]) -> list[float]:
    """The paces of cached blocks, in seconds."""
    cache.eviction.learner.learn()
    visible = cache.namespaces[1].groups[0].visible
    return [PACES[visible[name].tick >> PACE_SHIFT & MOST_PACE] for name in hashes(names)]


def test_a_prompt_that_is_continued_has_the_pace_of_its_last_block_in_each_new_one() -> None:
    cache = make_cache()
    engine = Engine(cache, "one")
    engine.store(chain("a", 2))
    for engine.now in (10.0, 50.0):
        engine.hits(chain("a", 2))
        cache.eviction.learner.learn()
    engine.store(["b"], "a1")
    engine.store(["c"], "a1")
    assert paces(cache, ["a1", "b", "c"]) == pytest.approx([40, 40, 0], rel=0.1), "another prompt parts there"


def test_a_block_that_was_evicted_gets_its_pace_when_it_is_requested_and_stored_again() -> None:
    cache = make_cache(31, namespace_floor=0.0)
    engine = Engine(cache, "one")
    engine.store(["a"])
    engine.now = 10.0
    for number in range(40):
        engine.store([f"x{number}"])
    engine.now = 100.0
    assert not engine.hits(["a"])
    engine.store(["a"])
    assert paces(cache, ["a"]) == pytest.approx([100], rel=0.1)


def test_a_parent_inherits_the_last_use_the_class_and_the_shortest_pace() -> None:
    parent, child = tick_of(100, 500, 1), tick_of(130, 60, 2)
    assert later(parent, child) == tick_of(130, 30, 2), "the child's last use was one of the parent, too"
    assert later(parent, tick_of(90, 60)) == tick_of(100, 500, 1), "the child was never requested again"
    assert later(EVICT_FIRST, tick_of(130, cls=2)) == tick_of(130, cls=2)


def test_leaves_that_a_tier_stores_ahead_are_the_next_victims() -> None:
    cache = make_cache(620, policy=LRU)
    engine = Engine(cache, "one")
    for number in range(300):
        engine.store([f"x{number}"])
    ahead = [leaf.hash for leaf in cache.next_evictable(20)]
    assert len(ahead) == 20 and set(ahead) <= set(hashes([f"x{number}" for number in range(40)]))
    for number in range(22):
        engine.store(chain(f"y{number}-", 16))
    visible = cache.namespaces[1].groups[0].visible
    evicted = cache.eviction.evictions.total()
    assert evicted and sum(name not in visible for name in ahead) >= min(evicted, 20)


def test_class_pace_and_time_survive_a_restart() -> None:
    host = Host(186)
    spec = NamespaceSpec("m", (GroupSpec(16, 256 * KIB),), hash_bytes=8)
    engine = Client(host, "one", spec)
    engine.store(["a", "b", "c"])
    for host.now in (10.0, 40.0):
        engine.acquire(["a", "b"])
        host.cache.eviction.learner.learn()
    before = {name: block.tick for name, block in host.cache.namespaces[1].groups[0].visible.items()}
    assert sorted(tick & CLASS_MASK for tick in before.values()) == [0, 2, 2]
    assert sorted(tick & PACE_MASK for tick in before.values()) == [0, 0, pace_of(30 * TICKS_PER_SECOND)]
    host.restart(gone=(engine.session,))
    assert {name: block.tick for name, block in host.cache.namespaces[1].groups[0].visible.items()} == before


def test_ticks_of_an_older_version_have_no_pace_but_keep_their_time_and_class() -> None:
    """It wrote 2^59 + time * 4 + class, in units of 2^-20 s, and 4 for a block that is evicted first."""
    host = Host(186)
    spec = NamespaceSpec("m", (GroupSpec(16, 256 * KIB),), hash_bytes=8)
    engine = Client(host, "one", spec)
    host.now = 50.0
    engine.store(["a", "b", "c"])
    pool, visible = host.cache.pool, host.cache.namespaces[1].groups[0].visible
    old = [(1 << 59) + (at << 22) + cls for at, cls in ((10, 0), (20, 2))]
    for block, tick in zip(visible.values(), [*old, 4], strict=True):
        pool.rows.set_tick(pool.row(block), tick)
    host.restart(gone=(engine.session,))
    assert host.cache.pool.now == pytest.approx(50.0)
    ticks = [block.tick for block in host.cache.namespaces[1].groups[0].visible.values()]
    assert sorted(ticks) == [EVICT_FIRST, tick_of(10), tick_of(20, cls=2)]
