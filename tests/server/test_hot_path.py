"""How much work the requests of each engine step are, counted in calls: time says less on a busy host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from small_cache import Engine, chain, hashes, make_cache

from kvcache_proto import messages as m
from kvcache_proto.types import MAX_BLOCKS, Outcome

RUN = 64
KIB = 1024


def calls(work: Callable[[], object]) -> int:
    """Return how many functions written in Python are called, or gone on with."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def store(engine: Engine, names: list[str]) -> tuple[float, float]:
    """Return the calls for each block that is reserved, and that is committed."""
    reserve = m.Reserve(1, b"", engine.namespace, [m.Run(hashes(names))])
    replies: list[m.Reserved] = []
    reserved = calls(lambda: replies.append(engine.ask(reserve)))
    region = engine.cache.geometry.region_id
    settle = m.Settle(1, b"", region, replies[0].reservation, (0,), Outcome.COMMITTED)
    return reserved / len(names), calls(lambda: engine.ask(settle)) / len(names)


def test_a_block_is_stored_in_few_calls() -> None:
    engine = Engine(make_cache(248, KIB), "one", block_bytes=1 * KIB)
    for length in (RUN, MAX_BLOCKS):
        reserved, committed = store(engine, chain(f"p{length}", length))
        assert reserved < 16 and committed < 7


def test_a_block_is_stored_in_few_calls_while_another_is_evicted() -> None:
    cache = make_cache(62, KIB)
    engine = Engine(cache, "one", block_bytes=1 * KIB)
    at = 0
    while not cache.eviction.evictions:
        store(engine, chain(f"p{at}", RUN))
        at += 1
    reserved, committed = store(engine, chain("new", RUN))
    assert reserved < 56 and committed < 7


def test_a_block_in_few_runs_is_stored_in_few_calls() -> None:
    """Each run is found at once, however many others are free."""
    cache = make_cache(62, KIB, pin_quota=1.0)
    engine, large = Engine(cache, "one", block_bytes=1 * KIB), Engine(cache, "large", 16 * KIB, "large")
    names = chain("p", cache.geometry.pages)
    for name in names:
        engine.store([name])
    for name in names[::2]:
        engine.acquire([name])
    engine.ask(m.Clear(1, b""))
    assert len(cache.pool.free.runs()) == cache.geometry.pages // 2
    reserved, committed = store(large, chain("l", RUN))
    assert reserved < 16 * 8 and committed < 7
