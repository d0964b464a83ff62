"""The pin quota: how many leases of shared prefixes count together, and the cost of counting."""

from __future__ import annotations

from itertools import pairwise

from insights import figures
from small_cache import KIB, MIB, Engine, chain, make_cache

from kvcache_proto import messages as m
from kvcache_server.core.cache import Cache
from kvcache_server.core.integrity import check_integrity
from kvcache_server.core.pins import STEPS


def prefix_cache(blocks: int, quota_blocks: int) -> tuple[Cache, Engine]:
    """Return a cache with a chain "p" of `blocks`, of which an engine may pin `quota_blocks` at one time."""
    cache = make_cache(256, KIB, pin_quota=quota_blocks * KIB / (16 * MIB))
    engine = Engine(cache, "one", block_bytes=1024)
    for at in range(0, blocks, 1024):
        engine.store(chain("p", blocks)[at : at + 1024], f"p{at - 1}" if at else None)
    return cache, engine


def test_many_leases_of_one_prefix_count_it_once():
    cache, engine = prefix_cache(8192, quota_blocks=10_000)
    for _ in range(8):  # the chain is told apart bit by bit, and offered less meanwhile
        engine.acquire(chain("p", 8192))
    leases = [engine.acquire(chain("p", 8192)) for _ in range(100)]
    assert all((each.hits, each.withheld) == (8192, 0) for each in leases)
    for name in ("q", "r"):
        engine.store(chain(name, 64), "p8191")
        assert engine.acquire(chain("p", 8192) + chain(name, 64)).hits == 8256
    engine.store(chain("s", 2000), None)
    assert engine.acquire(chain("s", 2000)).hits == 10_000 - 8192 - 128
    check_integrity(cache)
    cache.disconnect_session(engine.session, 0.0)
    cache.tick(9.0)
    check_integrity(cache)
    pins = cache.engines["one"].pins
    assert pins.bytes > 0
    for tick in range(3):
        cache.tick(10.0 + tick)
    assert pins.bytes == 0
    cache.end_session(engine.session, 13.0)
    check_integrity(cache)


def test_the_figures_count_a_block_once_however_many_leases_hold_it():
    cache = make_cache(page_bytes=KIB)
    engines = [Engine(cache, name, block_bytes=KIB) for name in ("one", "two")]
    engines[0].store(chain("p", 8))
    for name in ("q", "r"):
        engines[0].store(chain(name, 2), "p7")
    leases = [
        (engine, engine.acquire(names).lease)
        for engine in engines
        for names in (chain("p", 3), chain("p", 8), chain("p", 8), chain("p", 8) + chain("q", 2))
    ]

    def pinned() -> float:
        return figures(cache, 0.0)["pool"]["pinned_bytes"] / 1024

    assert pinned() == 10
    leases.append((engines[1], engines[1].acquire(chain("p", 8) + chain("r", 1)).lease))
    assert pinned() == 11
    for engine, lease in leases[1:]:
        engine.ask(m.Release(1, b"", [lease]))
    assert pinned() == 3
    engines[0].ask(m.Release(1, b"", [leases[0][1]]))
    assert pinned() == 0


def test_a_lookup_beyond_the_quota_takes_a_bounded_number_of_steps():
    cache, engine = prefix_cache(12_000, quota_blocks=13_000)
    pins = cache.engines["one"].pins
    for _ in range(2):
        engine.acquire(chain("p", 12_000))
    counts = [0]
    for _ in range(6):
        reply = engine.acquire(chain("p", 64))
        counts.append(len(pins._covers))
    assert max(after - before for before, after in pairwise(counts)) <= STEPS
    assert reply.withheld == 0 and counts[-1] == counts[-2] <= 12_000, "on until the request fits, no further"
    check_integrity(cache)


def test_a_lease_may_end_while_its_chain_is_being_covered():
    cache, engine = prefix_cache(12_000, quota_blocks=13_000)
    for calls in range(5):
        held = [engine.acquire(chain("p", 12_000)).lease]
        held += [engine.acquire(chain("p", 11_000)).lease for _ in range(calls)]
        for lease in held[::-1] if calls % 2 else held:
            engine.ask(m.Release(1, b"", [lease]))
            check_integrity(cache)
        for tick in range(4):
            cache.tick(float(tick))
        assert cache.engines["one"].pins.bytes == 0
        engine.store([f"n{calls}"])


def test_released_blocks_may_be_evicted_before_they_are_uncovered():
    cache = make_cache(32, pin_quota=0.5)
    engine = Engine(cache, "one", block_bytes=128 * KIB)
    engine.store(chain("a", 6))
    leases = [engine.acquire(chain("a", 6)).lease for _ in range(3)]
    engine.ask(m.Release(1, b"", leases))
    engine.store(chain("b", 16))  # takes all of "a"
    assert engine.hits(["a0"]) == 0
    check_integrity(cache)
    assert engine.acquire(chain("b", 16)).hits == 8
    check_integrity(cache)
