"""Eviction by worth against eviction by age, on traces that it was not made for."""

from __future__ import annotations

import random
import time

import pytest
from stress_traces import PROMPT, STRESS

from kvcache_server.core.eviction.policy import LRU, WORTH
from kvcache_server.core.integrity import check_integrity
from kvcache_tools.replay.simulated_daemon import SimulatedDaemon, block_hash
from kvcache_tools.replay.simulation import Setup, make_rooms, play, routes, size_for

PROMPTS, SEED = 60, 2
LEARNABLE = {"loop", "scan", "zipf", "four"}  # where requests show what returns


def hits(name: str, seed: int, policy: str) -> int:
    requests = STRESS[name](PROMPTS, random.Random(seed))[: 20 * PROMPTS]
    setup = Setup(engines=2)
    room, _ = make_rooms(size_for(PROMPTS * PROMPT, setup), setup)
    daemon = SimulatedDaemon(room, setup.block_tokens, setup.engines, policy=policy)
    prompts = [[block_hash(block) for block in request.blocks] for request in requests]
    found, _ = play([daemon] * setup.engines, requests, prompts, routes(requests, setup), time.perf_counter)
    check_integrity(daemon.cache)
    return found


@pytest.mark.parametrize("name", STRESS)
def test_by_worth_is_never_much_worse_than_by_age_and_better_where_that_can_be_learned(name: str) -> None:
    by_age, by_worth = hits(name, SEED, LRU), hits(name, SEED, WORTH)
    assert by_worth >= 0.99 * by_age
    if name in LEARNABLE:
        assert by_worth > 1.08 * by_age
