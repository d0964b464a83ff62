"""What vLLM itself shows of the cache: in its metrics and in its log."""

from __future__ import annotations

import importlib
import signal
import warnings
from typing import Any

import pytest
from cache_state import BLOCK, BLOCK_BYTES
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvcache_client import Session


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    """The modules that import vLLM, whose own imports warn of each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: importlib.import_module(f"kvcache_client.engines.vllm.{name}") for name in ("connector", "stats")}


class Metrics:
    """vLLM's side: metrics of an engine with the labels that it gives them."""

    def __init__(self, connector: Any) -> None:
        self.registry = CollectorRegistry()
        types = {kind: lambda *a, kind=kind, **k: kind(*a, registry=self.registry, **k) for kind in (Counter, Gauge)}
        config = type("Config", (), {"kv_transfer_config": None})()
        labels = {0: ["model", "0"], 1: ["model", "1"]}
        names = ["model_name", "engine"]
        types[Histogram] = Histogram
        self.prom = connector.build_prom_metrics(config, types, names, labels)

    def value(self, name: str, engine: int = 0, **labels: str) -> float | None:
        labels |= {"model_name": "model", "engine": str(engine)}
        return self.registry.get_sample_value(f"vllm:kvcache_{name}", labels)


def test_ranks_and_steps_add_up_and_unknown_names_make_no_series(modules: dict[str, Any]) -> None:
    connector = modules["connector"].KVCacheServerConnector
    build, metrics = connector.build_kv_connector_stats, Metrics(connector)
    first, second = build({"loaded_bytes": 3 << 20, "load_us": 1000, "probes": 1}), build({"loaded_bytes": 1 << 20})
    scheduler = build({"up": 0, "loads_failed": 2, "of a newer client": 5})
    all_of_them = first.aggregate(second).aggregate(scheduler)
    metrics.prom.observe(all_of_them.data, 1)
    metrics.prom.observe(build({"up": 1}).data, 1)
    assert metrics.value("copied_bytes_total", 1, way="load") == 4 << 20
    assert metrics.value("copy_seconds_total", 1, way="load") == 0.001
    assert metrics.value("events_total", 1, event="loads_failed") == 2
    assert metrics.value("events_total", 1, event="other") == 5
    assert metrics.value("up", 1) == 1
    assert metrics.value("up", 0) is None
    shown = all_of_them.reduce()
    assert shown["load MiB"] == 4.0
    assert shown["load GB/s"] == 4.2
    assert (shown["probes"], "up" in shown) == (1, False)
    assert build(None).is_empty() and not all_of_them.is_empty()


def test_what_is_gained_is_handed_over_once(
    daemon: Any, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = modules["stats"]
    monkeypatch.setattr(stats, "EVERY", 0.0)
    with Session.connect(daemon.endpoint, engine="e", deadline=10.0) as session:
        feed = stats.Feed(lambda: session.counters, up=lambda: session.up)
        session.daemon.count("probes", 2)
        taken = feed.take()
        assert taken is not None and taken.data == {"probes": 2, "up": 1}
        assert feed.take() is None
    taken = feed.take()
    assert taken is not None and taken.data == {"up": 0}


def test_an_engines_own_metrics_show_what_it_loaded_and_saved(engines: Any, daemon: Any, prompt: Any) -> None:
    engine = engines("stats", daemon.endpoint)

    def value(name: str) -> float:
        return float(engine.ask("metric", name=f"vllm:kvcache_{name}")["value"])

    def shows(name: str, wanted: float) -> bool:
        """Let the engine take steps until it has told: once a second at most."""
        for _ in range(500):
            if value(name) == wanted:
                return True
            engine.generate(prompt(3), max_tokens=16)  # less than a block
        return False

    asked = prompt(8 * BLOCK + 3)
    engine.generate(asked)
    daemon.wait_status(lambda s: s["pool"]["blocks"] == 8 and not s["pool"]["blocks_writing"], "its blocks")
    engine.ask("reset")
    engine.generate(asked)
    assert shows("copied_bytes", 16 * BLOCK_BYTES)  # 8 blocks saved, and 8 loaded
    assert shows("up", 1)
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    assert shows("up", 0)
    assert value("events") > 0
