"""`/metrics`: the figures of `status` in Prometheus' text format.

Names, labels and units are promised: dashboards and alerts of others read them. Labels are few: engines and sessions
come and go under new names, so that none of these is a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcache_proto.types import Breaker, Finding, Refusal
from kvcache_server.core.eviction.policy import EVICTED_FOR
from kvcache_server.core.limits import OPERATOR

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_NAMESPACES = 50  # with series of their own: those known longest; `kvcache_namespaces` has them all

_TIER = "memory"
_POOL_STATES = ("ready", "writing", "quarantined", "free", "overhead")
_DEDUPLICATED = {Refusal.PRESENT.name.lower(): "cached", Refusal.IN_FLIGHT.name.lower(): "in_flight"}
# Named although they have not happened yet: the first time is a rise from 0, which an alert sees.
_REFUSED = (*(each.name.lower() for each in Refusal if each > Refusal.IN_FLIGHT), "leases")
_DROPS = ("peer_gone", "peer_slow")
_TURNED_AWAY = ("attach_rate", "bad_frame", "not_permitted", "unavailable", "version_mismatch")
_CUTS = ("bad_protocol", "crowded_out", "not_permitted")  # of the wire's connections, and of those to KV events
_FINDINGS = {Finding.CORRUPT: "blocks_corrupt", Finding.DIFFERENT: "canary_mismatches"}
# What has a metric of its own, in another form.
_TOLD = {"blocks_evicted", "blocks_cleared", "blocks_distrusted", "extents_recut", "blocks_recovered"}
_TOLD |= {*_FINDINGS.values()}
_BREAKERS = (*(each.name.lower() for each in Breaker), "unknown")  # unknown: a client of 0.1, or one that has just come
_COPIED = {"load": ("loaded_bytes", "load_us"), "save": ("saved_bytes", "save_us")}
_ENGINE_EVENTS = ("breaker_opened", "links_lost", "loads_failed", "saves_failed", "lookups_unanswered")


def render(stats: Mapping[str, Any]) -> bytes:
    """Return the text for `stats`, which are those of the `report` message. About 4 us a line, and no state kept."""
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
        yield from _namespaces(stats["namespaces"])
        yield from _traffic(stats)
        yield from _told(stats["told"])


def _daemon(stats: Mapping[str, Any], daemon: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("build_info", "Version of the daemon", {daemon["version"]: 1}, "version")
    yield _gauge("start_time_seconds", "When the daemon started, since the epoch", daemon["started_at"])
    yield _counter("restarts", "Daemons that have taken this region over from an earlier one", stats["life"] - 1)
    recovered = stats["counters"].get("blocks_recovered", 0)
    yield _gauge("recovered_blocks", "Blocks of the last daemon that this one found", recovered)
    yield _gauge("grace", "1 while engines come back after a restart and nothing is evicted", int(stats["grace"]))
    yield _gauge("region_locked", "1 where the region is locked into memory", int(daemon["locked"]))
    yield _counter("messages", "Messages received", daemon["messages"])
    yield _counter("errors", "Requests answered with an error", {"internal": 0} | daemon["errors"], "code")
    drops = dict.fromkeys(_DROPS, 0) | daemon["drops"]
    yield _counter("dropped_replies", "Replies that could not be delivered", drops, "reason")
    refused = dict.fromkeys(_TURNED_AWAY, 0) | daemon["door_refused"]
    yield _counter("door_refusals", "Handshakes refused", refused, "reason")
    wire = daemon["connections"]
    states = {"session": wire["open"] - wire["unbound"], "unbound": wire["unbound"]}
    doc = "Connections to the wire: of a session, or of whoever has shown no token yet"
    yield _gauge("connections", doc, states, "state")
    cuts = dict.fromkeys(_CUTS, 0) | wire["cut"]
    yield _counter("connection_cuts", "Connections to the wire that were refused or ended, by reason", cuts, "reason")
    if http := daemon.get("http"):
        yield _counter("http_answers", "Answers over HTTP, by status", http["answers"], "status")
        yield _counter("http_cuts", "Connections over HTTP that were cut, by reason", http["cuts"], "reason")
    if events := daemon.get("events"):
        yield _gauge(
            "event_subscriptions", "Topics of KV events that somebody has subscribed to", events["subscriptions"]
        )
        guests = events["connections"]
        yield _gauge("event_connections", "Connections to the sockets of KV events", guests["open"])
        cuts = dict.fromkeys(_CUTS, 0) | guests["cut"]
        doc = "Connections to the sockets of KV events that were refused or ended, by reason"
        yield _counter("event_connection_cuts", doc, cuts, "reason")
        yield _counter("event_batches", "Batches of KV events published", events["batches"])
        yield _counter(
            "event_batches_lost", "Batches that subscribers did not get, counted for each", events["batches_lost"]
        )
    checks = daemon["integrity"]
    yield _counter("integrity_checks", "Checks of all that must always hold", checks["checks"])
    yield _counter("integrity_failures", "Integrity checks that found something broken", checks["failures"])
    sessions = {"attached": len(stats["sessions"]), "away": len(stats["away"])}
    yield _gauge("sessions", "Sessions: attached, or away with a process that lives", sessions, "state")
    engines = [session for session in stats["sessions"] if session["engine"] != OPERATOR]
    yield _gauge("engines", "Engines with an open session", len({session["engine"] for session in engines}))
    breakers = Counter(session["breaker"] for session in engines)
    doc = "Sessions by what their clients say: open ones ask no more until the daemon answers in time"
    yield _gauge("engine_breakers", doc, {state: breakers[state] for state in _BREAKERS}, "state")
    yield _gauge("sessions_limit", "Sessions that may be open at one time", daemon["max_sessions"])
    yield _counter("sessions_opened", "Sessions opened", daemon["sessions_opened"])


def _pool(stats: Mapping[str, Any], pool: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("pool_size_bytes", "Memory for blocks", pool["bytes"])
    states = {state: pool[f"{state}_bytes"] for state in _POOL_STATES}
    yield _gauge("pool_bytes", "The pool by state; the states add up to its size", states, "state")
    yield _gauge(
        "pinned_bytes",
        "Bytes that leases hold; a shared prefix counts for each, near the quota once",
        pool["pinned_bytes"],
    )
    yield _gauge("largest_free_bytes", "Largest block that fits without an eviction", pool["largest_free_bytes"])
    yield _gauge("leases", "Leases held", pool["leases"])
    yield _gauge("reservations", "Reservations with shards that are not settled", pool["reservations"])
    blocks = {"visible": pool["blocks"], "writing": pool["blocks_writing"], "hidden": pool["blocks_hidden"]}
    yield _gauge("blocks", "Blocks by state; hidden ones wait for the block before them", blocks, "state")
    counters = stats["counters"]
    causes = {cause: stats["evictions"].get(cause, 0) for cause in EVICTED_FOR}
    causes |= {cause: counters.get(f"blocks_{cause}", 0) for cause in ("cleared", "distrusted")}
    yield _counter("evicted_blocks", "Blocks forgotten, by cause", causes, "cause")
    yield _counter("evicted_unread_blocks", "Blocks evicted that no lookup had found", stats["evicted_unread"])
    yield _counter("recut_extents", "Extents cut anew for slots of another size", counters.get("extents_recut", 0))
    doc = "How long evicted blocks were cached; a sample of one in 8"
    yield _histogram("residence_seconds", doc, pool["residence"])


def _namespaces(namespaces: list[Mapping[str, Any]]) -> Iterator[Metric]:
    yield _gauge("namespaces", "Namespaces known", len(namespaces))
    shown = namespaces[:MAX_NAMESPACES]
    info = GaugeMetricFamily("kvcache_namespace_info", "Model of a namespace", labels=("namespace", "model"))
    hits = CounterMetricFamily(
        "kvcache_hit_blocks", "Blocks found by lookups, by the tier that had them", labels=("namespace", "tier")
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
    yield _counter("requested_blocks", "Blocks asked for by lookups", of("requested_blocks"), where)
    unlimited = {each["id"]: each["hit_blocks"] + each["lost_blocks"] for each in shown}
    doc = "Blocks that lookups would have found had nothing ever been evicted; an estimate"
    yield _counter("unlimited_hit_blocks", doc, unlimited, where)
    yield _counter("hit_bytes", "Bytes of the blocks that lookups found", of("hit_bytes"), where)
    doc = "Deprecated, goes with 0.3: the same as kvcache_hit_bytes_total; kvcache_engine_copied_bytes_total was loaded"
    yield _counter("loaded_bytes", doc, of("hit_bytes"), where)
    yield _counter("saved_blocks", "Blocks stored whole", of("saved_blocks"), where)
    yield _counter("saved_bytes", "Bytes of blocks stored whole", of("saved_bytes"), where)
    yield _gauge("namespace_blocks", "Blocks that lookups can find", of("blocks"), where)
    yield _gauge("namespace_bytes", "Memory that the blocks take", of("bytes"), where)


def _traffic(stats: Mapping[str, Any]) -> Iterator[Metric]:
    doc = "Time that the daemon took to find and pin what a lookup asked for"
    yield _histogram("acquire_duration_seconds", doc, stats["daemon"]["acquire"])
    refusals, counters = stats["refusals"], stats["counters"]
    refused = dict.fromkeys(_REFUSED, 0) | {key: n for key, n in refusals.items() if key not in _DEDUPLICATED}
    yield _counter("refused_blocks", "Blocks neither stored nor given out, by reason", refused, "reason")
    saved = {state: refusals.get(reason, 0) for reason, state in _DEDUPLICATED.items()}
    yield _counter("deduplicated_blocks", "Blocks that need not be stored twice: somebody has or does", saved, "state")
    wrong = {finding.name.lower(): counters.get(key, 0) for finding, key in _FINDINGS.items()}
    yield _counter("wrong_blocks", "Blocks that did not hold what was stored, by what was found", wrong, "finding")
    events = {key: n for key, n in counters.items() if key not in _TOLD}
    yield _counter("events", "What else the daemon counts", events, "event")


def _told(told: Mapping[str, int]) -> Iterator[Metric]:
    """What engines have counted, as far as their clients have told."""
    done = {way: told.get(size, 0) for way, (size, _) in _COPIED.items()}
    yield _counter("engine_copied_bytes", "Bytes that engines have loaded to and saved from their devices", done, "way")
    seconds = {way: told.get(time, 0) / 1e6 for way, (_, time) in _COPIED.items()}
    yield _counter("engine_copy_seconds", "Time that these copies took, one after the other", seconds, "way")
    doc = "{} that engines asked their ranks to load: of those that lookups found, what no device's own cache had"
    yield _counter("needed_blocks", doc.format("Blocks"), told.get("needed_blocks", 0))
    yield _counter("needed_bytes", doc.format("Bytes"), told.get("needed_bytes", 0))
    own = {key for pair in _COPIED.values() for key in pair} | {"needed_blocks", "needed_bytes"}
    events = dict.fromkeys(_ENGINE_EVENTS, 0) | {key: n for key, n in told.items() if key not in own}
    yield _counter("engine_events", "What engines have counted besides", events, "event")


def _gauge(name: str, doc: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return _fill(GaugeMetricFamily(f"kvcache_{name}", doc, labels=(label,) * bool(label)), value)


def _counter(name: str, doc: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    return _fill(CounterMetricFamily(f"kvcache_{name}", doc, labels=(label,) * bool(label)), value)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, value: float | Mapping[str, float]) -> Metric:
    for label, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
        family.add_metric(() if label is None else (label,), each)
    return family


def _histogram(name: str, doc: str, figures: Mapping[str, Any]) -> Metric:
    bounds: Iterable[str] = [*map(_bound, figures["bounds"]), "+Inf"]
    buckets = list(zip(bounds, accumulate(figures["counts"]), strict=True))
    return HistogramMetricFamily(f"kvcache_{name}", doc, buckets=buckets, sum_value=figures["sum"])


def _bound(bound: float) -> str:
    return str(float(bound))
