"""The connector's reports to vLLM, for the line in vLLM's log and for the metrics of vLLM's own server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvcache_client.session.counters import Gains
from kvcache_proto.counts import CLIENT_COUNTS, OTHER

EVERY = 1.0  # seconds: vLLM asks at every step
UP = "up"
_COPIES = {"load": ("loaded_bytes", "load_us"), "save": ("saved_bytes", "save_us")}
_OWN = {UP, *(name for pair in _COPIES.values() for name in pair)}


class CacheStats(KVConnectorStats):
    """Increases of counts since the last report, by name, of one rank, of the scheduler, or of all together.

    Only the scheduler has `up`: 1 if it uses the daemon, 0 if its breaker is open or there is no daemon.
    """

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> CacheStats:
        """Add the increases of `other`, which is later or another rank's."""
        for name, count in other.data.items():
            self.data[name] = count if name == UP else self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values that vLLM logs: copies as amounts and rates, and all other counts."""
        shown: dict[str, int | float] = {}
        for way, (size, duration) in _COPIES.items():
            if done := self.data.get(size, 0):
                shown[f"{way} MiB"] = round(done / (1 << 20), 1)
                shown[f"{way} GB/s"] = round(done / max(self.data.get(duration, 0), 1) / 1e3, 1)
        return shown | {name: count for name, count in sorted(self.data.items()) if name not in _OWN}

    def is_empty(self) -> bool:
        return not self.data


class CacheMetrics(KVConnectorPromMetrics):
    """The metrics `vllm:kvcache_*`, with the labels of vLLM's own and one more."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        doc = "Bytes loaded from and saved to the KV cache server, by way"
        self._bytes = counter("vllm:kvcache_copied_bytes", doc, labelnames=[*labelnames, "way"])
        doc = "Time that these copies took, one after the other, all ranks together"
        self._seconds = counter("vllm:kvcache_copy_seconds", doc, labelnames=[*labelnames, "way"])
        doc = "What the connector has counted besides, by name"
        self._events = counter("vllm:kvcache_events", doc, labelnames=[*labelnames, "event"])
        doc = "1 while the engine asks the KV cache server, 0 while it does without"
        self._up = gauge("vllm:kvcache_up", doc, labelnames=labelnames, multiprocess_mode="mostrecent")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, labels = transfer_stats_data, self._engines[engine_idx]
        if UP in data:
            self._up.labels(*labels).set(data[UP])
        for way, (size, duration) in _COPIES.items():
            self._bytes.labels(*labels, way).inc(data.get(size, 0))
            self._seconds.labels(*labels, way).inc(data.get(duration, 0) / 1e6)
        for name, count in data.items():
            if name not in _OWN:
                self._events.labels(*labels, name if name in CLIENT_COUNTS else OTHER).inc(count)


class Feed:
    """The reports of one side of the connector, at most once a second. Only the scheduler's has `up`."""

    def __init__(self, *sources: Callable[[], Mapping[str, int]], up: Callable[[], bool] | None = None) -> None:
        self._gains, self._up = Gains(*sources), up
        self._was_up: bool | None = None
        self._due = 0.0

    def take(self) -> CacheStats | None:
        """Return the increases since the last report, None if there are none or the last report was too recent."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + EVERY
        data: dict[str, Any] = self._gains.take()
        if self._up is not None and (up := self._up()) != self._was_up:
            data[UP], self._was_up = int(up), up
        return CacheStats(data) if data else None
