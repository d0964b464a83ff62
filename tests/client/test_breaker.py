"""When the breaker opens, probes and closes; how the backoff grows."""

from __future__ import annotations

from kvcache_client.session.breaker import Backoff, CircuitBreaker


def test_backoff_doubles_to_its_longest_and_starts_anew_after_a_reset() -> None:
    backoff = Backoff(first=1.0, longest=5.0, draw=lambda: 1.0)
    assert [backoff.next() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next() == 1.0


def test_backoff_jitter_takes_at_most_half_off() -> None:
    assert Backoff(first=1.0, draw=lambda: 0.0).next() == 0.5


def test_one_miss_opens_and_an_answer_in_time_closes() -> None:
    breaker = CircuitBreaker()
    assert breaker.closed
    assert breaker.failed(10.0)
    assert not breaker.closed
    assert not breaker.failed(11.0), "it is open already"
    assert breaker.answered()
    assert breaker.closed
    assert not breaker.answered(), "it was closed already"


def test_probes_are_due_at_once_and_then_by_the_backoff() -> None:
    breaker = CircuitBreaker(Backoff(first=1.0, longest=2.0, draw=lambda: 1.0))
    assert not breaker.probe_due(0.0), "closed: nothing to find out"
    breaker.failed(10.0)
    due = [now / 2 for now in range(20, 36) if breaker.probe_due(now / 2)]
    assert due == [10.0, 11.0, 13.0, 15.0, 17.0]
    breaker.answered()
    assert not breaker.probe_due(100.0)


def test_what_opens_again_soon_stays_open_for_longer() -> None:
    breaker = CircuitBreaker(Backoff(first=1.0, longest=4.0, draw=lambda: 1.0))
    waits = []
    for now in (0.0, 3.0, 6.0, 12.0, 100.0):
        assert breaker.failed(now)
        assert breaker.probe_at is not None
        waits.append(breaker.probe_at - now)
        assert breaker.answered()
    assert waits == [0.0, 1.0, 2.0, 4.0, 0.0]


def test_a_late_answer_brings_the_next_probe_near_and_closes_nothing() -> None:
    breaker = CircuitBreaker(Backoff(first=1.0, longest=8.0, draw=lambda: 1.0))
    breaker.answered_late(0.0)
    assert breaker.closed
    breaker.failed(0.0)
    for now in (0.0, 1.0, 3.0):
        assert breaker.probe_due(now)
    breaker.answered_late(5.0)
    assert (breaker.closed, breaker.probe_at) == (False, 6.0)
