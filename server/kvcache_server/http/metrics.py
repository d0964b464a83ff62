"""`/metrics`: the figures of `status` in the text format of Prometheus.

Names, labels and units are a promise: dashboards and alerts depend on them. There are few labels: engines and sessions
come and go under new names, so none of them is a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache_proto.types import Breaker, Finding, Refusal
from kvcache_server.core.eviction.policy import EVICTED_FOR
from kvcache_server.core.limits import OPERATOR

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_NAMESPACES = 50  # that have series of their own, the oldest ones; `kvcache_namespaces` counts them all

_TIER = "memory"
_POOL_STATES = ("ready", "writing", "quarantined", "free")
_TIER_EVENTS = {  # as in `status`
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
# Shown before they occur: the first occurrence is then a rise from 0, which an alert sees.
_REFUSED = (*(each.name.lower() for each in Refusal if each > Refusal.IN_FLIGHT), "leases", "not_worth_it")
_UNRETAINED = ("quota", "count")
_DROPS = ("peer_gone", "peer_slow")
_TURNED_AWAY = ("attach_rate", "bad_frame", "not_permitted", "unavailable", "version_mismatch")
_CUTS = ("bad_protocol", "crowded_out", "not_permitted")  # of connections to the wire and to KV events
_FINDINGS = {Finding.CORRUPT: "blocks_corrupt", Finding.DIFFERENT: "canary_mismatches"}
# Counters that have a metric of their own, in another form.
_TOLD = {"blocks_evicted", "blocks_cleared", "blocks_distrusted", "blocks_recovered"}
_TOLD |= {*_FINDINGS.values()}
_BREAKERS = (*(each.name.lower() for each in Breaker), "unknown")  # unknown: clients of 0.1, or only just attached
_COPIED = {"load": ("loaded_bytes", "load_us"), "save": ("saved_bytes", "save_us")}
_ENGINE_EVENTS = ("breaker_opened", "links_lost", "loads_failed", "saves_failed", "lookups_unanswered")


def render(stats: Mapping[str, Any]) -> bytes:
    """Return the text for `stats`, as the `report` message has them. About 4 us per line; no state is kept."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(stats))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield from _daemon(stats, stats["daemon"])
        yield from _pool(stats, stats["pool"])
        yield from _tiers(stats["daemon"])
        yield from _namespaces(stats["namespaces"])
        yield from _lookups(stats)
        yield from _eviction(stats["eviction"])
        yield from _hints(stats["hints"])
        yield from _told(stats["told"])


def _daemon(stats: Mapping[str, Any], daemon: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("build_info", "Version of the daemon", {daemon["version"]: 1}, "version")
    yield _gauge("start_time_seconds", "When the daemon started, in seconds since the epoch", daemon["started_at"])
    yield _counter("restarts", "Daemons that have taken this region over from an earlier one", stats["life"] - 1)
    recovered = stats["counters"].get("blocks_recovered", 0)
    yield _gauge("recovered_blocks", "Blocks of the previous daemon that this one found", recovered)
    yield _gauge("grace", "1 while engines reconnect after a restart and nothing is evicted", int(stats["grace"]))
    yield _gauge("region_locked", "1 if the region is locked into memory", int(daemon["locked"]))
    yield _counter("messages", "Messages received", daemon["messages"])
    yield _counter("errors", "Requests answered with an error, by code", {"internal": 0} | daemon["errors"], "code")
    drops = dict.fromkeys(_DROPS, 0) | daemon["drops"]
    yield _counter("dropped_replies", "Replies that could not be delivered, by reason", drops, "reason")
    refused = dict.fromkeys(_TURNED_AWAY, 0) | daemon["door_refused"]
    yield _counter("door_refusals", "Handshakes refused, by reason", refused, "reason")
    wire = daemon["connections"]
    states = {"session": wire["open"] - wire["unbound"], "unbound": wire["unbound"]}
    doc = "Connections to the wire: of a session, or of a peer that has shown no token yet"
    yield _gauge("connections", doc, states, "state")
    cuts = dict.fromkeys(_CUTS, 0) | wire["cut"]
    yield _counter("connection_cuts", "Connections to the wire that were refused or cut off, by reason", cuts, "reason")
    if http := daemon.get("http"):
        yield _counter("http_answers", "Answers over HTTP, by status", http["answers"], "status")
        yield _counter("http_cuts", "HTTP connections that were cut off, by reason", http["cuts"], "reason")
    if events := daemon.get("events"):
        yield _gauge("event_subscriptions", "Topics of KV events that have a subscriber", events["subscriptions"])
        connections = events["connections"]
        yield _gauge("event_connections", "Connections to the sockets of KV events", connections["open"])
        cuts = dict.fromkeys(_CUTS, 0) | connections["cut"]
        doc = "Connections to the sockets of KV events that were refused or cut off, by reason"
        yield _counter("event_connection_cuts", doc, cuts, "reason")
        yield _counter("event_batches", "Batches of KV events published", events["batches"])
        yield _counter(
            "event_batches_lost", "Batches that subscribers missed, counted per subscriber", events["batches_lost"]
        )
    checks = daemon["integrity"]
    yield _counter("integrity_checks", "Checks of the invariants", checks["checks"])
    yield _counter("integrity_failures", "Checks that found an invariant violated", checks["failures"])
    sessions = {"attached": len(stats["sessions"]), "away": len(stats["away"])}
    yield _gauge("sessions", "Sessions: attached, or away while their process lives", sessions, "state")
    others = (OPERATOR, *(f"tier {each['name']}" for each in daemon.get("tiers", ())))
    engines = [session for session in stats["sessions"] if session["engine"] not in others]
    yield _gauge("engines", "Engines with an open session", len({session["engine"] for session in engines}))
    breakers = Counter(session["breaker"] for session in engines)
    doc = "Sessions by the state of their client's breaker: an open one asks nothing until the daemon answers in time"
    yield _gauge("engine_breakers", doc, {state: breakers[state] for state in _BREAKERS}, "state")
    yield _gauge("sessions_limit", "Most sessions that may be open at one time", daemon["max_sessions"])
    yield _counter("sessions_opened", "Sessions opened", daemon["sessions_opened"])


def _pool(stats: Mapping[str, Any], pool: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("pool_size_bytes", "Memory for blocks", pool["bytes"])
    states = {state: pool[f"{state}_bytes"] for state in _POOL_STATES}
    yield _gauge("pool_bytes", "The pool by state; the states add up to its size", states, "state")
    yield _gauge(
        "pinned_bytes",
        "Bytes of the blocks that leases hold; a block counts once, however many hold it",
        pool["pinned_bytes"],
    )
    yield _gauge("free_runs", "Runs of free pages: one, if memory is not fragmented", pool["free_runs"])
    yield _gauge("leases", "Leases held", pool["leases"])
    yield _gauge("reservations", "Reservations with unsettled shards", pool["reservations"])
    blocks = {"visible": pool["blocks"], "writing": pool["blocks_writing"], "hidden": pool["blocks_hidden"]}
    yield _gauge("blocks", "Blocks by state; hidden ones wait for their parent", blocks, "state")
    counters = stats["counters"]
    causes = {cause: stats["evictions"].get(cause, 0) for cause in EVICTED_FOR}
    causes |= {cause: counters.get(f"blocks_{cause}", 0) for cause in ("cleared", "distrusted")}
    yield _counter("evicted_blocks", "Blocks that were forgotten, by cause", causes, "cause")
    yield _counter("evicted_unread_blocks", "Evicted blocks that no lookup had found", stats["evicted_unread"])
    doc = "How long evicted blocks were cached; a sample of one in 8"
    yield _histogram("residence_seconds", doc, pool["residence"])


def _tiers(daemon: Mapping[str, Any]) -> Iterator[Metric]:
    tiers = {each["name"]: each for each in daemon.get("tiers", ())}

    def of(key: str, scale: float = 1) -> dict[str, float]:
        return {name: each.get(key, 0) * scale for name, each in tiers.items()}

    up = {each["name"]: 0 for each in daemon.get("tier_processes", ())}  # one whose process has ended is off, too
    up |= {name: int(not each["off"]) for name, each in tiers.items()}
    yield _gauge("tier_up", "1 while a tier is used, 0 while it is off", up, "tier")
    writable = {name: int(not each.get("writes_off")) for name, each in tiers.items()}
    yield _gauge("tier_writable", "0 while a tier refuses writes, which may be read nevertheless", writable, "tier")
    blocks = CounterMetricFamily("kvcache_tier_blocks", "Blocks, by what a tier did", labels=("tier", "event"))
    for name, each in tiers.items():
        for key, event in _TIER_EVENTS.items():
            blocks.add_metric((name, event), each.get(key, 0))
    yield blocks
    yield _counter(
        "tier_read_bytes", "Bytes of blocks that a tier has brought into memory", of("bytes_brought"), "tier"
    )
    yield _counter("tier_written_bytes", "Bytes of blocks written to a tier", of("bytes_written"), "tier")
    doc = "Lookups that a tier was not asked about, because too many waited"
    yield _counter("tier_dropped_lookups", doc, of("looks_dropped"), "tier")
    yield _gauge(
        "tier_lookup_seconds", "How long a tier takes to say what it has, of late", of("latency_ms", 1e-3), "tier"
    )
    yield _gauge("tier_read_rate", "Bytes per second at which a tier brings blocks, of late", of("rate"), "tier")
    yield _gauge("tier_queued_read_bytes", "Bytes of blocks that a tier is to bring", of("to_bring_bytes"), "tier")
    yield _gauge("tier_queued_write_blocks", "Blocks that are to be written to a tier", of("to_write_blocks"), "tier")
    if processes := daemon.get("tier_processes"):
        starts = {each["name"]: each["starts"] for each in processes}
        yield _counter("tier_starts", "Starts of a tier's process by the daemon", starts, "tier")


def _namespaces(namespaces: list[Mapping[str, Any]]) -> Iterator[Metric]:
    yield _gauge("namespaces", "Known namespaces", len(namespaces))
    shown = namespaces[:MAX_NAMESPACES]
    info = GaugeMetricFamily("kvcache_namespace_info", "Model of a namespace", labels=("namespace", "model"))
    hits = CounterMetricFamily(
        "kvcache_hit_blocks", "Blocks that requests found, by the tier that had them", labels=("namespace", "tier")
    )
    for each in shown:
        info.add_metric((each["id"], each["model"]), 1)
        hits.add_metric((each["id"], _TIER), each["hit_blocks"])
    yield info
    yield hits

    def of(key: str) -> dict[str, float]:
        return {each["id"]: each[key] for each in shown}

    where = "namespace"
    yield _counter("lookups", "Lookups", of("lookups"), where)
    yield _counter(
        "requested_blocks", "Blocks that requests asked for, once per request", of("requested_blocks"), where
    )
    unlimited = {each["id"]: each["hit_blocks"] + each["lost_blocks"] for each in shown}
    doc = "Estimated blocks that lookups would have found if nothing had ever been evicted"
    yield _counter("unlimited_hit_blocks", doc, unlimited, where)
    yield _counter("hit_bytes", "Bytes of the blocks that requests found", of("hit_bytes"), where)
    doc = "Deprecated, removed in 0.3: use kvcache_hit_bytes_total; engines loaded kvcache_engine_copied_bytes_total"
    yield _counter("loaded_bytes", doc, of("hit_bytes"), where)
    yield _counter("saved_blocks", "Blocks that were stored completely", of("saved_blocks"), where)
    yield _counter("saved_bytes", "Bytes of the blocks that were stored completely", of("saved_bytes"), where)
    yield _gauge("namespace_blocks", "Blocks that lookups can find", of("blocks"), where)
    yield _gauge("namespace_bytes", "Memory that the blocks take", of("bytes"), where)


def _lookups(stats: Mapping[str, Any]) -> Iterator[Metric]:
    doc = "Time that the daemon took to find and pin the blocks of a lookup"
    yield _histogram("acquire_duration_seconds", doc, stats["daemon"]["acquire"])
    refusals, counters = stats["refusals"], stats["counters"]
    refused = dict.fromkeys(_REFUSED, 0) | {key: n for key, n in refusals.items() if key not in _DEDUPLICATED}
    yield _counter("refused_blocks", "Blocks that were neither stored nor given out, by reason", refused, "reason")
    saved = {state: refusals.get(reason, 0) for reason, state in _DEDUPLICATED.items()}
    doc = "Blocks that need not be stored again: they are cached, or another engine is writing them"
    yield _counter("deduplicated_blocks", doc, saved, "state")
    wrong = {finding.name.lower(): counters.get(key, 0) for finding, key in _FINDINGS.items()}
    yield _counter("wrong_blocks", "Blocks that did not hold what was stored, by finding", wrong, "finding")
    events = {key: n for key, n in counters.items() if key not in _TOLD}
    yield _counter("events", "Everything else that the daemon counts", events, "event")


def _eviction(eviction: Mapping[str, Any]) -> Iterator[Metric]:
    """The quality of the daemon's decisions on which blocks to keep."""
    doc = "1 while the least recently used blocks are evicted, because that finds more than eviction by worth"
    yield _gauge("eviction_by_age", doc, int(eviction["by_age"]))
    yield _counter("eviction_switches", "Changes between eviction by worth and by age", eviction["switches"])
    for what, doc in (("hit", "that first lookups of requests found"), ("evicted", "that were evicted")):
        by_class = eviction[f"{what}_blocks_by_class"]
        yield _counter(f"class_{what}_blocks", f"Blocks {doc}, by how often they had been asked for", by_class, "asked")


def _hints(hints: Mapping[str, Any]) -> Iterator[Metric]:
    """The hints of requests on their blocks, and the pins of operators."""
    kept = {"request": hints["retained_bytes"], "operator": hints["pinned_bytes"]}
    yield _gauge("kept_bytes", "Bytes kept from eviction: retained by requests, or pinned by operators", kept, "by")
    counts = {"request": hints["retentions"], "operator": len(hints["pins"])}
    yield _gauge("kept_prompts", "Prompts kept from eviction, or their beginnings", counts, "by")
    refused = dict.fromkeys(_UNRETAINED, 0) | hints["refused"]
    doc = "Blocks that requests asked to retain, and that are not retained, by reason"
    yield _counter("unretained_blocks", doc, refused, "reason")
    yield _counter("dropped_blocks", "Blocks that requests gave up for eviction", hints["dropped_blocks"])


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


def _gauge(name: str, doc: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return _fill(GaugeMetricFamily(f"kvcache_{name}", doc, labels=(label,) * bool(label)), value)


def _counter(name: str, doc: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return _fill(CounterMetricFamily(f"kvcache_{name}", doc, labels=(label,) * bool(label)), value)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]) -> Metric:
    for label, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
        family.add_metric(() if label is None else (label,), each)
    return family


def _histogram(name: str, doc: str, figures: Mapping[str, Any]) -> Metric:
    bounds = [*(str(float(bound)) for bound in figures["bounds"]), "+Inf"]
    buckets = list(zip(bounds, accumulate(figures["counts"]), strict=True))
    return HistogramMetricFamily(f"kvcache_{name}", doc, buckets=buckets, sum_value=figures["sum"])
