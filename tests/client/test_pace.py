"""Loads that a thread must carry are offered only where they beat computing."""

from __future__ import annotations

from kvcache_client.scheduler.pace import LEAST_TOKENS, Pace


def paced(tokens: int, seconds: float) -> Pace:
    """An engine that computes so many tokens in so many seconds."""
    pace = Pace()
    pace.step(tokens, 100.0)
    pace.step(0, 100.0 + seconds)
    return pace


def test_what_goes_straight_is_always_worth_loading() -> None:
    assert Pace().worth_loading(64, 1024)
    pace = Pace()
    pace.carried({0: 1.0})
    pace.carried({0: 0.0})
    assert pace.worth_loading(64, 1024)


def test_what_a_thread_carries_must_beat_computing() -> None:
    pace = paced(1000, 0.1)  # 1.6 ms a block of 16 tokens
    pace.carried({0: 0.001})
    assert pace.worth_loading(64, 1024)
    pace.carried({1: 0.002})  # the slowest rank decides
    assert not pace.worth_loading(64, 1024)


def test_as_long_as_nothing_is_known_nothing_is_carried() -> None:
    pace = Pace()
    pace.carried({0: 1e-9})
    assert not pace.worth_loading(64, 1024)
    few = paced(LEAST_TOKENS - 1, 5.0)  # launches take that long, whatever they compute
    few.carried({0: 1e-9})
    assert not few.worth_loading(64, 1024)
