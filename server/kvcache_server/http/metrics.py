"""`/metrics`: the figures of `status` in the text format of Prometheus.

Figures that are a metric by themselves are declared in status.py; those that are derived from several follow here.
Names, labels and units are a promise: dashboards and alerts depend on them. There are few labels: engines and sessions
come and go under new names, so none of them is a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, get_type_hints

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache_proto.types import Breaker, Finding, Refusal
from kvcache_server import status
from kvcache_server.core.eviction.policy import EVICTED_FOR
from kvcache_server.core.limits import OPERATOR
from kvcache_server.status import Histogram, Status, Tier

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_NAMESPACES = 50  # that have series of their own, the oldest ones; `kvcache_namespaces` counts them all

_TIER = "memory"
_TIER_EVENTS = {  # by field of Tier
    "blocks_looked_up": "looked_up",
    "blocks_found": "found",
    "blocks_brought": "brought",
    "blocks_not_brought": "not_brought",
    "blocks_written": "written",
    "blocks_not_written": "not_written",
    "writes_dropped": "write_dropped",
    "writes_too_late": "write_too_late",
}
_DEDUPLICATED = {Refusal.PRESENT.name.lower(): "cached", Refusal.IN_FLIGHT.name.lower(): "in_flight"}
# Shown before they occur, like `known` in status.py.
_REFUSED = (*(each.name.lower() for each in Refusal if each > Refusal.IN_FLIGHT), "leases", "not_worth_it")
_CUTS = ("bad_protocol", "crowded_out", "not_permitted")  # of connections to the wire and to KV events
_FINDINGS = {Finding.CORRUPT: "blocks_corrupt", Finding.DIFFERENT: "canary_mismatches"}
# Counters that have a metric of their own, in another form.
_TOLD = {"blocks_evicted", "blocks_cleared", "blocks_invalidated", "blocks_recovered"}
_TOLD |= {*_FINDINGS.values()}
_BREAKERS = (*(each.name.lower() for each in Breaker), "unknown")  # unknown: clients of 0.1, or only just attached
_COPIED = {"load": ("loaded_bytes", "load_us"), "save": ("saved_bytes", "save_us")}
_ENGINE_EVENTS = ("breaker_opened", "links_lost", "loads_failed", "saves_failed", "lookups_unanswered")


def render(figures: Status) -> bytes:
    """Return the text. About 4 us per line; no state is kept."""
    return generate_latest(_Figures(figures))


class _Figures(Collector):
    def __init__(self, figures: Status) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        figures, daemon = self._figures, self._figures.daemon
        parts = (figures, figures.pool, figures.eviction, figures.hints, daemon, daemon.integrity)
        for part in (*parts, daemon.http, daemon.events):
            if part is not None:
                yield from _declared([part])
        yield from _declared(figures.namespaces[:MAX_NAMESPACES], status.Namespace, "namespace", "id")
        yield from _declared(daemon.tiers, Tier, "tier", "name")
        if daemon.tier_processes:
            yield from _declared(daemon.tier_processes, status.TierProcess, "tier", "name")
        yield from _daemon(figures, daemon)
        yield from _pool(figures, figures.pool)
        yield from _hindsight(figures.hindsight)
        yield from _tiers(daemon)
        yield from _namespaces(figures.namespaces)
        yield from _lookups(figures)
        yield from _hints(figures.hints)
        yield from _told(figures.client_counts)


@cache
def _metrics_of(kind: type[msgspec.Struct]) -> list[tuple[str, status.Metric, str]]:
    """Return the fields of `kind` that are metrics, with their descriptions."""
    return [
        (field, meta.extra["metric"], meta.description or "")
        for field, hint in get_type_hints(kind, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.extra
    ]


def _declared(
    parts: Sequence[msgspec.Struct], kind: type[msgspec.Struct] | None = None, label: str = "", key: str = ""
) -> Iterator[Metric]:
    """Yield the metrics declared for one struct; or for several of one kind, of which `key` is the value of `label`."""
    for field, metric, doc in _metrics_of(kind or type(parts[0])):
        value: Any = (
            getattr(parts[0], field) if not label else {getattr(each, key): getattr(each, field) for each in parts}
        )
        if isinstance(value, Histogram):
            yield _histogram(metric.name, doc, value)
            continue
        if isinstance(value, msgspec.Struct):
            value = msgspec.structs.asdict(value)
        if metric.label:
            value = dict.fromkeys(metric.known, 0) | value
        make = _counter if metric.kind == "counter" else _gauge
        yield make(metric.name, doc, value, label or metric.label)


def _daemon(figures: Status, daemon: status.Daemon) -> Iterator[Metric]:
    yield _gauge("build_info", "Version of the daemon", {daemon.version: 1}, "version")
    yield _counter("restarts", "Daemons that have taken this region over from an earlier one", figures.life - 1)
    recovered = figures.counters.get("blocks_recovered", 0)
    yield _gauge("recovered_blocks", "Blocks of the previous daemon that this one found", recovered)
    wire = daemon.connections
    states = {"session": wire.open - wire.unbound, "unbound": wire.unbound}
    doc = "Connections to the wire: of a session, or of a peer that has shown no token yet"
    yield _gauge("connections", doc, states, "state")
    cuts = dict.fromkeys(_CUTS, 0) | wire.cut
    yield _counter("connection_cuts", "Connections to the wire that were refused or cut off, by reason", cuts, "reason")
    if daemon.events:
        connections = daemon.events.connections
        yield _gauge("event_connections", "Connections to the sockets of KV events", connections.open)
        cuts = dict.fromkeys(_CUTS, 0) | connections.cut
        doc = "Connections to the sockets of KV events that were refused or cut off, by reason"
        yield _counter("event_connection_cuts", doc, cuts, "reason")
    sessions = {"attached": len(figures.sessions), "away": len(figures.away)}
    yield _gauge("sessions", "Sessions: attached, or away while their process lives", sessions, "state")
    others = (OPERATOR, *(f"tier {each.name}" for each in daemon.tiers))
    engines = [session for session in figures.sessions if session.engine not in others]
    yield _gauge("engines", "Engines with an open session", len({session.engine for session in engines}))
    breakers = Counter(session.breaker for session in engines)
    doc = "Sessions by the state of their client's breaker: an open one asks nothing until the daemon answers in time"
    yield _gauge("engine_breakers", doc, {state: breakers[state] for state in _BREAKERS}, "state")


def _pool(figures: Status, pool: status.Pool) -> Iterator[Metric]:
    states = {
        "ready": pool.ready_bytes,
        "writing": pool.writing_bytes,
        "quarantined": pool.quarantined_bytes,
        "free": pool.free_bytes,
    }
    yield _gauge("pool_bytes", "The pool by state; the states add up to its size", states, "state")
    blocks = {"visible": pool.blocks, "writing": pool.blocks_writing, "hidden": pool.blocks_hidden}
    yield _gauge("blocks", "Blocks by state; hidden ones wait for their parent", blocks, "state")
    causes = {cause: figures.evictions.get(cause, 0) for cause in EVICTED_FOR}
    causes |= {cause: figures.counters.get(f"blocks_{cause}", 0) for cause in ("cleared", "invalidated")}
    yield _counter("evicted_blocks", "Blocks that were forgotten, by cause", causes, "cause")


def _hindsight(found: status.Hindsight) -> Iterator[Metric]:
    if asked := found.requested_blocks:
        ratios = {"daemon": found.hit_blocks / asked, "optimum": found.optimum_blocks / asked}
        doc = "Hits in a sample of the last hour's requested blocks, and those of a policy that knows the future"
        yield _gauge("sampled_hit_ratio", doc, ratios, "policy")


def _tiers(daemon: status.Daemon) -> Iterator[Metric]:
    tiers = daemon.tiers
    up = {each.name: 0 for each in daemon.tier_processes}  # one whose process has ended is off, too
    up |= {each.name: int(not each.off) for each in tiers}
    yield _gauge("tier_up", "1 while a tier is used, 0 while it is off", up, "tier")
    writable = {each.name: int(not each.writes_off) for each in tiers}
    yield _gauge("tier_writable", "0 while a tier refuses writes, which may be read nevertheless", writable, "tier")
    blocks = CounterMetricFamily("kvcache_tier_blocks", "Blocks, by what a tier did", labels=("tier", "event"))
    for each in tiers:
        for field, event in _TIER_EVENTS.items():
            blocks.add_metric((each.name, event), getattr(each, field))
    yield blocks
    latencies = {each.name: each.latency_ms / 1000 for each in tiers}
    yield _gauge("tier_lookup_seconds", "How long a tier takes to say what it has, of late", latencies, "tier")


def _namespaces(namespaces: Sequence[status.Namespace]) -> Iterator[Metric]:
    yield _gauge("namespaces", "Known namespaces", len(namespaces))
    shown = namespaces[:MAX_NAMESPACES]
    info = GaugeMetricFamily("kvcache_namespace_info", "Model of a namespace", labels=("namespace", "model"))
    hits = CounterMetricFamily(
        "kvcache_hit_blocks", "Blocks that requests found, by the tier that had them", labels=("namespace", "tier")
    )
    for each in shown:
        info.add_metric((each.id, each.model), 1)
        hits.add_metric((each.id, _TIER), each.hit_blocks)
    yield info
    yield hits
    unlimited = {each.id: each.hit_blocks + each.lost_blocks for each in shown}
    doc = "Estimated blocks that lookups would have found if nothing had ever been evicted"
    yield _counter("unlimited_hit_blocks", doc, unlimited, "namespace")


def _lookups(figures: Status) -> Iterator[Metric]:
    refusals, counters = figures.refusals, figures.counters
    refused = dict.fromkeys(_REFUSED, 0) | {key: n for key, n in refusals.items() if key not in _DEDUPLICATED}
    yield _counter("refused_blocks", "Blocks that were neither stored nor given out, by reason", refused, "reason")
    saved = {state: refusals.get(reason, 0) for reason, state in _DEDUPLICATED.items()}
    doc = "Blocks that need not be stored again: they are cached, or another engine is writing them"
    yield _counter("deduplicated_blocks", doc, saved, "state")
    wrong = {finding.name.lower(): counters.get(key, 0) for finding, key in _FINDINGS.items()}
    yield _counter("wrong_blocks", "Blocks that did not hold what was stored, by finding", wrong, "finding")
    events = {key: n for key, n in counters.items() if key not in _TOLD}
    yield _counter("events", "Everything else that the daemon counts", events, "event")


def _hints(hints: status.Hints) -> Iterator[Metric]:
    """The hints of requests on their blocks, and the pins of operators."""
    kept = {"request": hints.retained_bytes, "operator": hints.pinned_bytes}
    yield _gauge("kept_bytes", "Bytes kept from eviction: retained by requests, or pinned by operators", kept, "by")
    counts = {"request": hints.retentions, "operator": len(hints.pins)}
    yield _gauge("kept_prompts", "Prompts kept from eviction, or their beginnings", counts, "by")


def _told(told: Mapping[str, int]) -> Iterator[Metric]:
    """The counts of engines, as far as their clients have reported them."""
    done = {way: told.get(size, 0) for way, (size, _) in _COPIED.items()}
    yield _counter("engine_copied_bytes", "Bytes that engines have loaded to and saved from their devices", done, "way")
    seconds = {way: told.get(time, 0) / 1e6 for way, (_, time) in _COPIED.items()}
    yield _counter("engine_copy_seconds", "Sum of the time that these copies took", seconds, "way")
    doc = "{} that engines asked their ranks to load: those that lookups found and no device's own cache had"
    yield _counter("needed_blocks", doc.format("Blocks"), told.get("needed_blocks", 0))
    yield _counter("needed_bytes", doc.format("Bytes"), told.get("needed_bytes", 0))
    own = {key for pair in _COPIED.values() for key in pair} | {"needed_blocks", "needed_bytes"}
    events = dict.fromkeys(_ENGINE_EVENTS, 0) | {key: n for key, n in told.items() if key not in own}
    yield _counter("engine_events", "Everything else that engines count", events, "event")


def _family(
    make: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    doc: str,
    value: float | Mapping[str, float],
    label: str = "",
) -> Metric:
    family = make(f"kvcache_{name}", doc, labels=(label,) if label else ())
    for key, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
        family.add_metric(() if key is None else (key,), each)
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _histogram(name: str, doc: str, histogram: Histogram) -> Metric:
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(f"kvcache_{name}", doc, buckets=buckets, sum_value=histogram.sum)
