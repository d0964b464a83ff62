"""What the daemon knows of a tier, as a state machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_proto.errors import NotPermitted
from kvcache_proto.messages import Work
from kvcache_proto.types import GroupSpec
from kvcache_server.core.index import Group
from kvcache_server.core.slices import LOOK
from kvcache_server.tiering.tier import MOST_COMING, Looking, Tier
from kvcache_server.tiering.tiering import Tiering

SIZE = 1 << 20
BATCH = 8 << 20


@pytest.fixture
def tier() -> Tier:
    session: Any = SimpleNamespace(connected=True)
    return Tier(session, "disk", BATCH, "second")


@pytest.fixture
def group() -> Group:
    return Group(1, 0, GroupSpec(16, (SIZE,)), 32, None)


def names(count: int, of: str = "a") -> list[bytes]:
    return [f"{of}{number}".encode().ljust(32) for number in range(count)]


def bring(tier: Tier, group: Group, hashes: list[bytes], now: float, rate: float, at_once: int) -> float:
    """Have blocks found and brought, `at_once` parts in each burst; return when the last has come."""
    assert tier.ask(Looking("engine", group, None, hashes, now))
    tier.looking[1] = tier.looks.popleft()
    assert tier.found(1, b"\1" * len(hashes), now) is not None
    number = 10
    while True:
        burst = []
        while len(burst) < at_once and (part := tier.next_part(BATCH, now)) is not None:
            number += 1
            tier.parts[number] = part
            burst.append((number, part))
        if not burst:
            return now
        now += sum(part.end - part.begin for _, part in burst) * group.slot_bytes / rate
        for each, part in burst:
            assert tier.brought(each, b"\1" * (part.end - part.begin), now)


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_rate_of_a_tier_is_learned_also_from_parts_that_come_in_bursts(
    tier: Tier, group: Group, at_once: int
) -> None:
    now = 100.0
    for turn in range(10):
        now = bring(tier, group, names(64, f"{turn} "), now, 2e9, at_once) + 1.0
    assert tier.rate == pytest.approx(2e9, rel=0.1)
    assert not tier.coming and not tier.backlog and not tier.in_flight


def test_blocks_that_a_tier_did_not_have_are_not_asked_for_at_once_again(tier: Tier, group: Group) -> None:
    hashes = names(4)
    looking = Looking("engine", group, None, hashes, 100.0)
    assert tier.ask(looking) and tier.knows(group, hashes[0], 100.0)
    tier.looking[1] = tier.looks.popleft()
    assert tier.found(1, b"\1\1\0\1", 100.0) == (looking, 2)
    assert tier.knows(group, hashes[0], 100.0) and tier.knows(group, hashes[2], 104.9)
    assert not tier.knows(group, hashes[2], 105.1) and not tier.knows(group, hashes[3], 100.0)


def test_what_a_tier_had_is_forgotten_in_slices(tier: Tier) -> None:
    blocks: Any = [SimpleNamespace(ref=number.to_bytes(24, "little")) for number in range(3 * LOOK)]
    for block in blocks:
        tier.mark(block)
    assert all(map(tier.has, blocks))
    steps = tier.forget_marks()
    for left in (2, 1, 0):
        next(steps)
        assert sum(map(tier.has, blocks)) == left * LOOK
    assert next(steps, None) is None


def test_only_the_daemons_user_may_run_tiers() -> None:
    session: Any = SimpleNamespace(id=1, user=1000)
    cache: Any = SimpleNamespace(sessions={1: session})
    with pytest.raises(NotPermitted, match="must run as the daemon's user, 0, not as 1000"):
        Tiering(cache, 0).begin(1, Work(1, b"", "disk", BATCH), 0.0)


def test_a_tier_that_does_not_keep_up_is_not_asked_to_bring_more(tier: Tier, group: Group) -> None:
    most = 1 << 14
    for turn in range(6):
        tier.looking[turn] = looking = Looking("engine", group, None, names(most, f"{turn} "), 100.0)
        tier.asked[looking.hashes[0] + group.tag] = 100.0
        assert tier.found(turn, b"\1" * most, 100.0) == (looking, most)
    assert len(tier.coming) == MOST_COMING == 4 * most
    assert tier.backlog == MOST_COMING * SIZE and tier.counts["blocks_not_brought"] == 2 * most
