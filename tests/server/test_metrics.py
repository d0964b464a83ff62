"""`/metrics` of a real daemon reports what has happened."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcache_proto import messages as m
from kvcache_proto.counts import CLIENT_COUNTS
from kvcache_proto.endpoint import socket_path
from kvcache_proto.errors import BadArgument
from kvcache_proto.types import REF_BYTES, Breaker, Finding, GroupSpec, NamespaceSpec, Outcome
from kvcache_server.admin_client import AdminClient
from kvcache_server.http import metrics

SIZE = 512 << 10


class Engine(AdminClient):
    def __init__(self, endpoint: str, model: str = "m") -> None:
        super().__init__(endpoint, engine="engine")
        self.spec = NamespaceSpec(model, (GroupSpec(16, SIZE),))
        self.namespace = self.ask(m.Attach(0, b"", self.spec, (0,))).namespace

    def reserve(self, run: list[bytes]) -> m.Reserved:
        reserved: m.Reserved = self.ask(m.Reserve(0, b"", self.namespace, [m.Run(run)]))
        return reserved

    def store(self, run: list[bytes]) -> m.Reserved:
        reserved = self.reserve(run)
        if reserved.reservation:
            region, outcome = self.geometry.region_id, Outcome.COMMITTED
            self.ask(m.Settle(0, b"", region, reserved.reservation, (0,), outcome))
        return reserved

    def acquire(self, run: list[bytes], pin: bool = False) -> m.Acquired:
        acquired: m.Acquired = self.ask(m.Acquire(0, b"", self.namespace, run, pin=pin))
        return acquired


@pytest.fixture
def engine(daemon: Any) -> Iterator[Engine]:
    with Engine(daemon.endpoint) as engine:
        yield engine


def run_of(name: str, length: int) -> list[bytes]:
    return [f"{name} {number}".encode().rjust(32) for number in range(length)]


def scrape(daemon: Any) -> dict[str, float]:
    """Return every sample by name and labels, as in a query."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render(daemon.figures()).decode()):
        assert family.documentation and family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sample.labels.items())
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert name not in samples, f"{name} twice"
            samples[name] = sample.value
    return samples


def test_connections_are_counted(start_daemon: Any, short_folder: Path) -> None:
    daemon = start_daemon(events=f"ipc://{short_folder}/events.sock")
    with contextlib.ExitStack() as leave:

        def crowd(path: str, count: int) -> None:
            for _ in range(count):
                leave.enter_context(socket.socket(socket.AF_UNIX)).connect(path)

        leave.enter_context(Engine(daemon.endpoint))
        crowd(socket_path(daemon.endpoint), 3)
        crowd(f"{short_folder}/events.sock", 70)
        daemon.wait_status(lambda status: status["daemon"]["events"]["connections"]["cut"].get("crowded_out") == 6)
        daemon.wait_status(lambda status: status["daemon"]["connections"]["unbound"] == 3)
        found = scrape(daemon)
        assert found['kvcache_connections{state="unbound"}'] == 3
        assert found['kvcache_connections{state="session"}'] == 2  # the engine's, and that of who asks
        assert found['kvcache_connection_cuts_total{reason="crowded_out"}'] == 0
        assert found["kvcache_event_connections"] == 64
        assert found['kvcache_event_connection_cuts_total{reason="crowded_out"}'] == 6
        assert found['kvcache_event_connection_cuts_total{reason="not_permitted"}'] == 0


def test_activity_is_counted(daemon: Any, engine: Engine) -> None:
    engine.store(run_of("a", 4))
    assert engine.store(run_of("a", 4)).reservation == 0
    assert engine.acquire(run_of("a", 6), pin=True).hits == 4
    engine.acquire(run_of("b", 2))
    writing = engine.reserve(run_of("w", 3))
    with pytest.raises(BadArgument):
        engine.acquire([b"short"])
    found, where = scrape(daemon), f'{{namespace="{engine.spec.id}"}}'
    assert {name: found[f"kvcache_{name}"] for name in ("leases", "reservations", "engines", "namespaces")} == {
        "leases": 1,
        "reservations": 1,
        "engines": 1,
        "namespaces": 1,
    }
    assert found[f"kvcache_lookups_total{where}"] == 2
    assert found[f"kvcache_requested_blocks_total{where}"] == 8
    assert found[f'kvcache_hit_blocks_total{{namespace="{engine.spec.id}",tier="memory"}}'] == 4
    assert found[f"kvcache_unlimited_hit_blocks_total{where}"] == 4
    assert found[f"kvcache_saved_blocks_total{where}"] == 4
    assert found[f"kvcache_saved_bytes_total{where}"] == found[f"kvcache_hit_bytes_total{where}"] == 4 * SIZE
    assert found['kvcache_engine_copied_bytes_total{way="load"}'] == 0, "found, and not loaded"
    assert found["kvcache_needed_blocks_total"] == 0
    assert found['kvcache_deduplicated_blocks_total{state="cached"}'] == 4
    assert found['kvcache_class_hit_blocks_total{asked="once"}'] == 4
    assert found['kvcache_errors_total{code="bad_argument"}'] == 1
    assert found["kvcache_acquire_duration_seconds_count"] == 2
    assert 0 < found["kvcache_acquire_duration_seconds_sum"] < 2
    assert found["kvcache_pinned_bytes"] == 4 * SIZE
    assert found['kvcache_blocks{state="writing"}'] == len(writing.slots) // REF_BYTES == 3
    states = {name: value for name, value in found.items() if name.startswith("kvcache_pool_bytes")}
    assert sum(states.values()) == found["kvcache_pool_size_bytes"]
    assert states['kvcache_pool_bytes{state="writing"}'] == 3 * SIZE
    assert found['kvcache_sessions{state="attached"}'] == 1
    assert found["kvcache_start_time_seconds"] == pytest.approx(time.time(), abs=60)


def test_two_writers_of_one_block_count_as_deduplicated(daemon: Any, engine: Engine) -> None:
    with Engine(daemon.endpoint) as other:
        engine.reserve(run_of("a", 3))
        other.reserve(run_of("a", 5))
    assert scrape(daemon)['kvcache_deduplicated_blocks_total{state="in_flight"}'] == 3


def test_evictions_are_counted_by_cause_and_unread(daemon: Any, engine: Engine) -> None:
    slots = 0
    while not (found := scrape(daemon))['kvcache_evicted_blocks_total{cause="room"}']:
        engine.store(run_of(f"a{slots}", 1))
        slots += 1
    assert found['kvcache_pool_bytes{state="free"}'] < SIZE
    assert found["kvcache_evicted_unread_blocks_total"] == 1
    engine.acquire(run_of("a0", 1))  # the one that has gone
    found = scrape(daemon)
    assert found[f'kvcache_unlimited_hit_blocks_total{{namespace="{engine.spec.id}"}}'] == 1
    cleared = engine.clear()
    found = scrape(daemon)
    assert found['kvcache_evicted_blocks_total{cause="cleared"}'] == cleared == slots - 1
    assert found["kvcache_free_runs"] == 1


def test_wrong_blocks_are_counted_by_finding(daemon: Any, engine: Engine) -> None:
    slots = engine.store(run_of("a", 2)).slots
    region = engine.geometry.region_id
    engine.ask(m.Invalidate(0, b"", region, slots[:REF_BYTES], 0, Finding.CORRUPT))
    found = scrape(daemon)
    assert found['kvcache_wrong_blocks_total{finding="corrupt"}'] == 1
    assert found['kvcache_wrong_blocks_total{finding="different"}'] == 0
    assert found['kvcache_evicted_blocks_total{cause="invalidated"}'] == 2


def test_engine_counts_are_summed_and_unknown_names_hidden(daemon: Any, engine: Engine) -> None:
    engine.tell(
        m.ReportClient(0, b"", Breaker.OPEN, {"loaded_bytes": 300, "load_us": 2_000_000, "loads_failed": 1, "mine": 7})
    )
    engine.tell(m.ReportClient(0, b"", Breaker.OPEN, {"needed_blocks": 3, "needed_bytes": 301}))
    engine.ping()  # what is told has no answer; what comes after it has
    with Engine(daemon.endpoint) as other:
        other.tell(m.ReportClient(0, b"", Breaker.CLOSED, {"loads_failed": 2, "saved_bytes": 1}))
        other.ping()
        found = scrape(daemon)
        assert found['kvcache_engine_breakers{state="open"}'] == found['kvcache_engine_breakers{state="closed"}'] == 1
    found = scrape(daemon)
    assert found['kvcache_engine_breakers{state="closed"}'] == 0
    assert found['kvcache_engine_copied_bytes_total{way="load"}'] == 300
    assert found['kvcache_engine_copied_bytes_total{way="save"}'] == 1
    assert (found["kvcache_needed_blocks_total"], found["kvcache_needed_bytes_total"]) == (3, 301)
    assert found['kvcache_engine_copy_seconds_total{way="load"}'] == 2
    assert found['kvcache_engine_events_total{event="loads_failed"}'] == 3
    assert found['kvcache_engine_events_total{event="other"}'] == 7
    assert not any("mine" in name for name in found)


def test_operators_do_not_count_as_engines(daemon: Any, engine: Engine) -> None:
    before = scrape(daemon)
    with AdminClient(daemon.endpoint, "top"), AdminClient(daemon.endpoint, "status"):
        found = scrape(daemon)
    assert found['kvcache_sessions{state="attached"}'] == before['kvcache_sessions{state="attached"}'] + 2
    assert found["kvcache_engines"] == 1
    assert found['kvcache_engine_breakers{state="unknown"}'] == 1


def test_huge_counts_do_not_break_status(daemon: Any, engine: Engine) -> None:
    for _ in range(3):
        engine.tell(m.ReportClient(0, b"", Breaker.CLOSED, dict.fromkeys(CLIENT_COUNTS, 1 << 48)))
    engine.ping()
    assert scrape(daemon)['kvcache_engine_events_total{event="probes"}'] == 3 << 48
    engine.tell(m.ReportClient(0, b"", 7, {}))
    engine.tell(m.ReportClient(0, b"", Breaker.CLOSED, {"probes": -1}))
    engine.tell(m.ReportClient(0, b"", Breaker.CLOSED, {f"name {number}": 1 for number in range(257)}))
    daemon.wait_status(lambda status: status["daemon"]["errors"] == {"bad_argument": 3})
    assert scrape(daemon)['kvcache_engine_events_total{event="probes"}'] == 3 << 48


def test_evictions_that_were_early_and_hits_of_an_optimal_policy(daemon: Any, engine: Engine) -> None:
    slots = 0
    while not scrape(daemon)['kvcache_evicted_blocks_total{cause="room"}']:
        engine.store(run_of(f"a{slots}", 1))
        slots += 1
    assert 'kvcache_sampled_hit_ratio{policy="optimum"}' not in scrape(daemon)
    for each in range(slots):
        engine.acquire(run_of(f"a{each}", 1))
    daemon.wait_status(lambda status: status["hindsight"]["requested_blocks"] == slots)
    found = scrape(daemon)
    assert found["kvcache_evicted_early_blocks_total"] == 1
    assert found['kvcache_sampled_hit_ratio{policy="daemon"}'] == pytest.approx(1 - 1 / slots)
    assert found['kvcache_sampled_hit_ratio{policy="optimum"}'] == pytest.approx(1 - 1 / slots)
    assert found["kvcache_doubled_bytes"] == 0


def test_a_restart_and_the_blocks_it_recovers_are_counted(start_daemon: Any) -> None:
    daemon = start_daemon(keep="true")
    with Engine(daemon.endpoint) as engine:
        engine.store(run_of("a", 3))
    daemon.stop()
    found = scrape(start_daemon(keep="true"))
    assert (found["kvcache_restarts_total"], found["kvcache_recovered_blocks"]) == (1, 3)
    assert "kvcache_evicted_unread_blocks_total" in found


def test_metrics_start_at_0_so_that_the_first_event_is_a_rise(daemon: Any) -> None:
    found = scrape(daemon)
    for name in (
        'refused_blocks_total{reason="no_space"}',
        'refused_blocks_total{reason="quota"}',
        'refused_blocks_total{reason="not_worth_it"}',
        'class_evicted_blocks_total{asked="more"}',
        "eviction_switches_total",
        "eviction_by_age",
        'evicted_blocks_total{cause="room"}',
        'wrong_blocks_total{finding="corrupt"}',
        'errors_total{code="internal"}',
        'dropped_replies_total{reason="peer_slow"}',
        'handshake_refusals_total{reason="not_permitted"}',
        'engine_events_total{event="breaker_opened"}',
        "integrity_failures_total",
        "restarts_total",
    ):
        assert found[f"kvcache_{name}"] == 0


def test_the_number_of_series_is_bounded(daemon: Any) -> None:
    engines = [Engine(daemon.endpoint, f'model "{number}"\n') for number in range(metrics.MAX_NAMESPACES + 5)]
    try:
        found = scrape(daemon)
        assert found["kvcache_namespaces"] == len(engines)
        named = [name for name in found if name.startswith("kvcache_lookups_total")]
        assert len(named) == metrics.MAX_NAMESPACES
    finally:
        for engine in engines:
            engine.close()
