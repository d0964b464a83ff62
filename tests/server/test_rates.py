"""Rate limits, checked against a count of the allowed events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache_server import rates
from kvcache_server.rates import Rate


@given(st.lists(st.floats(0, 3), max_size=300), st.sampled_from([0.5, 2.0, 10.0]), st.sampled_from([1, 3, 20]))
def test_no_interval_exceeds_burst_and_rate(waits: list[float], rate: float, burst: int) -> None:
    bucket, now, allowed = Rate(rate, burst), 0.0, []
    for wait in waits:
        now += wait
        if bucket.allow("one", now):
            allowed.append(now)
    for first, begin in enumerate(allowed):
        for count, end in enumerate(allowed[first:], 1):
            assert count <= burst + rate * (end - begin) + 1


@given(st.sampled_from([0.5, 1.0, 50.0, 1e6]), st.integers(1, 2000))
def test_after_a_pause_a_burst_is_allowed_and_then_the_rate(rate: float, burst: int) -> None:
    bucket = Rate(rate, burst)
    for now in (0.0, 1e6):
        assert [bucket.allow("one", now) for _ in range(burst)] == [True] * burst
        assert not bucket.allow("one", now)
        assert bucket.allow("other", now)
    assert not bucket.allow("one", 1e6 + 0.4 / rate)
    assert bucket.allow("one", 1e6 + 1.1 / rate)


def test_idle_keys_are_forgotten() -> None:
    bucket = Rate(1.0, 1)
    for number in range(10 * rates._MANY):
        assert bucket.allow(number, float(number))
    assert len(bucket._paid_until) <= rates._MANY
