"""Eviction by worth: the table against a naive one, the policy's choice against a naive choice, floors and restarts."""

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
from kvcache_server.core.eviction.ranking import Entry, Ranking
from kvcache_server.core.eviction.sketch import Sketch
from kvcache_server.core.eviction.worth import BINS, FACTOR_ONE_OFF, WIDTHS, bin_of, gittins
from kvcache_server.core.index import CLASS_MASK, TICKS_PER_SECOND, Block
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.sampling import KeyedHasher, keyed_draw

KIB = 1024
LOTS = KeyedHasher(keyed_draw(b"a secret"))


def naive_gittins(hazards: list[float]) -> list[float]:
    """The best ratio of expected hits to expected time, of keeping a block up to the end of some bin."""
    found = []
    for start in range(len(hazards)):
        best = hits = time = 0.0
        alive = 1.0
        for at in range(start, len(hazards)):
            hits += alive * hazards[at]
            time += alive * WIDTHS[at] * (1 - hazards[at] / 2)
            alive *= 1 - hazards[at]
            best = max(best, hits / time)
        found.append(best)
    return found


@given(st.lists(st.floats(1e-6, 0.99), min_size=BINS, max_size=BINS))
@settings(max_examples=200, deadline=None)
def test_the_worth_is_the_best_ratio_of_hits_to_time(hazards: list[float]) -> None:
    assert gittins(hazards) == pytest.approx(naive_gittins(hazards), rel=1e-9)


def test_ages_fall_into_two_bins_per_doubling() -> None:
    assert [bin_of(int(age * TICKS_PER_SECOND)) for age in (-5, 0, 0.4, 0.5, 1, 3, 7, 1e9)] == [0, 0, 0, 1, 2, 4, 6, 43]


def test_a_sketch_counts_to_three_and_knows_few_hashes_that_it_was_not_given() -> None:
    sketch, names = Sketch(1 << 13), [number.to_bytes(16, "big") for number in range(3000)]
    keyed = LOTS.of(b"".join(names), 16)
    sketch.put(keyed[:1000], [at % 4 for at in range(1000)])
    single = [sketch.ask(keyed[at : at + 1], [0])[0] for at in range(1000)]
    assert sum(asks == min(at % 4, 2) for at, asks in enumerate(single)) > 850
    assert sum(sketch.ask(keyed[at : at + 1], [0])[0] > 0 for at in range(1000, 1500)) < 10


def test_a_sketch_takes_a_request_for_a_block_as_one_for_those_above_it() -> None:
    sketch, names = Sketch(1 << 16), [number.to_bytes(9, "big") for number in range(20)]
    keyed = LOTS.of(b"".join(names), 9)
    sketch.put(keyed, [0, 0, 2, 0, 0] + [1, 0, 0, 0, 3] + 10 * [0])
    assert sketch.ask(keyed[:15], [0, 5, 10]) == [2, 2, 2, 0, 0] + [2, 2, 2, 2, 2] + 5 * [0]
    assert sketch.ask(keyed, [0]) == 10 * [2] + [1] * 5 + [0] * 5


def test_other_groups_have_other_lots() -> None:
    names = b"".join([number.to_bytes(32, "big") for number in range(100)])
    first, second = LOTS.of(names, 32, b"one"), LOTS.of(names, 32, b"two")
    assert len({*first.tolist(), *second.tolist()}) == 200
    assert first.tolist() == LOTS.of(names, 32, b"one").tolist()


class Checked(Ranking):
    """Compares each choice with a naive one."""

    choices = 0

    def least(self) -> Entry | None:
        self.expire()  # between two rankings time goes on, and a block may be one bin older than when it was ranked
        entry = super().least()
        coldest: dict[tuple[str, int], Block] = {}  # of each account and class
        for each in self._fair_share.accounts:
            if each.share.bytes > each.share.floor:
                for leaf in each.group.root.subtree()[1:]:
                    # One whose class has changed moves to its order when it is the coldest of its former one.
                    moved = (leaf.queued ^ leaf.tick) & CLASS_MASK
                    if leaf.account is each and each.group.is_evictable(leaf) and not moved:
                        at = each.engine, leaf.tick & CLASS_MASK
                        coldest[at] = min(leaf, coldest.get(at, leaf), key=lambda block: block.tick)
        if entry is not None and coldest:
            head = entry[3].head()
            assert head is not None
            assert self.key(head) <= min(map(self.key, coldest.values()))
            self.choices += 1
        return entry

    def key(self, leaf: Block) -> float:
        if self._guard.by_age:
            return float(leaf.tick >> 2)
        cls = leaf.tick & CLASS_MASK
        worth = self._worths.table[cls * BINS + bin_of(self._pool.tick - leaf.tick)]
        return worth * (leaf.account.share.factor if cls == 0 else 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_evicted_is_worth_least_of_the_coldest_of_each_account_and_class(
    seed: int,
) -> None:
    draw, cache = random.Random(seed), make_cache(124)
    cache.eviction.ranking.__class__ = Checked
    engines = [Engine(cache, name) for name in ("one", "two", "three")]
    now = 0.0
    for turn in range(600):
        now += draw.expovariate(0.5)
        engine = draw.choice(engines)
        engine.now = now
        prompt = chain(f"{int(draw.expovariate(1 / 15))}-", draw.randrange(1, 9))
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


def test_class_and_time_survive_a_restart() -> None:
    host = Host(186)
    spec = NamespaceSpec("m", (GroupSpec(16, 256 * KIB),), hash_bytes=8)
    engine = Client(host, "one", spec)
    engine.store(["a", "b", "c"])
    engine.acquire(["a", "b"])
    host.cache.eviction.learner.learn()
    group = host.cache.namespaces[1].groups[0]
    before = {name: (block.tick >> 2, block.tick & CLASS_MASK) for name, block in group.visible.items()}
    assert sorted(cls for _, cls in before.values()) == [0, 1, 1]
    host.restart(gone=(engine.session,))
    group = host.cache.namespaces[1].groups[0]
    assert {name: (block.tick >> 2, block.tick & CLASS_MASK) for name, block in group.visible.items()} == before
