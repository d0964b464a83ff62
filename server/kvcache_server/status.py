"""The daemon's figures, as `status`, `/api/v1/status` and `/metrics` report them. Sizes are in bytes. Pure.

Each figure is declared once: with its description and, if it is a metric by itself, with the metric's name. Names are a
promise: programs, dashboards and alerts depend on them. A field is never removed; a new one has a default, so that
`status` also reads the figures of an older daemon.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from functools import partial
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvcache_proto.types import GroupSpec

Count = Annotated[int, msgspec.Meta(ge=0)]
Counts = dict[str, Count]
Level = Literal["debug", "info", "warning", "error"]

_TURNED_AWAY = ("attach_rate", "bad_frame", "not_permitted", "unavailable", "version_mismatch")


Kind = Literal["counter", "gauge", "histogram"]


class Metric(NamedTuple):
    """The metric `kvcache_NAME` of a figure. If the figure is a dict, `label` is the label of its keys, and `known` are
    the keys that are shown before they occur: the first occurrence is then a rise from 0, which an alert sees."""

    kind: Kind
    name: str
    label: str = ""
    known: Collection[str] = ()


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


def _metric(kind: Kind, name: str, text: str, label: str = "", known: Collection[str] = ()) -> msgspec.Meta:
    return msgspec.Meta(description=text, extra={"metric": Metric(kind, name, label, known)})


_gauge, _counter, _histogram = partial(_metric, "gauge"), partial(_metric, "counter"), partial(_metric, "histogram")


class Histogram(msgspec.Struct):
    """`counts[i]` values are at most `bounds[i]` and above the previous bound; the last count is above all bounds."""

    bounds: list[float]
    counts: list[Count]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: Collection[float]) -> Histogram:
        """Return an empty histogram with these upper bounds, which ascend."""
        return cls(list(bounds), [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Memory(msgspec.Struct):
    """The region's memory, by state."""

    region_id: str
    bytes: Annotated[Count, _gauge("pool_size_bytes", "Memory for blocks")]
    used_bytes: Count
    pages: Count
    page_bytes: Count
    blocks_quarantined: Count
    ready_bytes: Annotated[Count, _doc("This and the next three add up to the whole pool")]
    writing_bytes: Count
    quarantined_bytes: Count
    free_bytes: Count
    free_runs: Annotated[Count, _gauge("free_runs", "Runs of free pages: one, if memory is not fragmented")]


class Pool(Memory):
    """The region and its contents."""

    blocks: Annotated[Count, _doc("Blocks that lookups can find")]
    blocks_writing: Count
    blocks_hidden: Annotated[Count, _doc("Complete blocks that wait for their parent")]
    pinned_bytes: Annotated[
        Count, _gauge("pinned_bytes", "Bytes of the blocks that leases hold; a block counts once, however many hold it")
    ]
    leases: Annotated[Count, _gauge("leases", "Leases held")]
    reservations: Annotated[Count, _gauge("reservations", "Reservations with unsettled shards")]
    residence: Annotated[
        Histogram, _histogram("residence_seconds", "How long evicted blocks were cached; a sample of one in 8")
    ]
    doubled_bytes: Annotated[
        Count, _gauge("doubled_bytes", "Bytes of the blocks that engines' devices hold, too, as far as is known")
    ] = 0


class Group(msgspec.Struct):
    """The geometry of a KV cache group."""

    block_tokens: Count
    shard_bytes: Annotated[list[Count], _doc("Per shard of a block")]
    kind: Annotated[str, _doc("`full`: an engine needs all blocks of a prefix; `suffix`: the last ones")]
    window_blocks: Annotated[Count, _doc("Of a suffix group, how many blocks at the end of a prefix an engine needs")]
    chunk_blocks: Annotated[Count, _doc("Of a suffix group, after how many blocks none before is needed; 0: never")]
    needs_next_block: Annotated[bool, _doc("Whether the block after a prefix must be cached, too")]

    @classmethod
    def of(cls, spec: GroupSpec) -> Group:
        rule = spec.kind, spec.window_blocks, spec.chunk_blocks, spec.needs_next_block
        return cls(spec.block_tokens, list(spec.shards), *rule)


class Namespace(msgspec.Struct):
    """What is cached of one model, and how often it was requested."""

    id: str
    model: str
    identity: Annotated[dict[str, str], _doc("Every fact that makes the bytes of equal hashes differ")]
    groups: Annotated[
        list[Group], _doc("The KV cache groups; empty, as the identity, if there are too many namespaces to say")
    ]
    hash_bytes: Annotated[Count, _doc("Bytes of a block's hash")]
    block_tokens: Annotated[list[Count], _doc("Per KV cache group")]
    block_bytes: Annotated[list[Count], _doc("Per KV cache group")]
    overhead: Annotated[float, _doc("Part of their pages that the blocks leave unused")]
    lookups: Annotated[Count, _counter("lookups", "Lookups")]
    requested_blocks: Annotated[
        Count,
        _counter("requested_blocks", "Blocks that requests asked for, once per request however often it is looked up"),
    ]
    hit_blocks: Annotated[Count, _doc("Blocks that requests found, once per request")]
    hit_bytes: Annotated[
        Count,
        _counter("hit_bytes", "Bytes of the blocks that requests found; engines load only what their devices lack"),
    ]
    lost_blocks: Annotated[
        Count, _doc("Estimated misses of evicted blocks: lookups would have hit them with more memory")
    ]
    saved_blocks: Annotated[Count, _counter("saved_blocks", "Blocks that were stored completely")]
    saved_bytes: Annotated[Count, _counter("saved_bytes", "Bytes of the blocks that were stored completely")]
    blocks: Annotated[Count, _gauge("namespace_blocks", "Blocks that lookups can find")]
    bytes: Annotated[Count, _gauge("namespace_bytes", "Memory that the blocks take")]
    engines: Annotated[Counts, _doc("Bytes that each engine stored")]


class Session(msgspec.Struct):
    """One attached process."""

    id: Count
    engine: str
    label: str
    age_s: float
    leases: Count
    reservations: Count
    namespaces: Annotated[dict[str, list[Count]], _doc("Shards that it writes, by namespace")]
    breaker: Annotated[str, _doc("State of its client's circuit breaker: whether it asks the daemon at all")]
    counts: Annotated[Counts, _doc("What its client has counted")]


class Away(msgspec.Struct):
    """A session whose handshake connection has closed although its process lives. It keeps slots that it may write."""

    id: Count
    engine: str
    reservations: Count


class Retainer(msgspec.Struct):
    """What the requests of one engine have retained."""

    engine: str
    retentions: Count
    bytes: Count
    last_ends_s: float


class Pin(msgspec.Struct):
    """A prompt that an operator has pinned."""

    pin: Annotated[Count, _doc("Its number")]
    label: str
    namespace: str
    blocks: Annotated[Count, _doc("Blocks that are cached, and kept")]
    wanted: Annotated[Count, _doc("Blocks of the prompt")]
    bytes: Count


class Hints(msgspec.Struct):
    """What requests of engines have said of their blocks, and what operators have pinned."""

    retained_bytes: Annotated[Count, _doc("Bytes that hints of requests keep from eviction")]
    retentions: Count
    waiting: Annotated[Count, _doc("Retentions and pins with blocks that are not cached")]
    quota_bytes: Annotated[Count, _doc("Bytes that one engine may retain")]
    pinned_bytes: Annotated[Count, _doc("Bytes that pins keep from eviction")]
    pin_quota_bytes: Annotated[Count, _doc("Bytes that pins may keep")]
    dropped_blocks: Annotated[Count, _counter("dropped_blocks", "Blocks that requests gave up for eviction")]
    refused: Annotated[
        Counts,
        _counter(
            "unretained_blocks",
            "Blocks that requests asked to retain, and that are not retained, by reason",
            "reason",
            ("quota", "count"),
        ),
    ]
    ended: Annotated[Counts, _doc("Retentions and pins that ended, by cause")]
    engines: Annotated[list[Retainer], _doc("Those that retain most")]
    pins: list[Pin]


class ByClass(msgspec.Struct):
    """Blocks, by how often they had been asked for."""

    once: Count
    twice: Count
    more: Count


class Eviction(msgspec.Struct):
    """How well the daemon decides which blocks to keep."""

    by_age: Annotated[
        bool,
        _gauge(
            "eviction_by_age",
            "1 while the least recently used blocks are evicted, because that finds more than eviction by worth",
        ),
    ]
    switches: Annotated[Count, _counter("eviction_switches", "Changes between eviction by worth and by age")]
    declined_blocks: Annotated[Count, _doc("Blocks that were not stored: they were worth less than each cached one")]
    hit_blocks_by_class: Annotated[
        ByClass,
        _counter(
            "class_hit_blocks",
            "Blocks that first lookups of requests found, by how often they had been asked for",
            "asked",
        ),
    ]
    evicted_blocks_by_class: Annotated[
        ByClass,
        _counter("class_evicted_blocks", "Blocks that were evicted, by how often they had been asked for", "asked"),
    ]
    due_bytes: Annotated[
        Count,
        _gauge("due_bytes", "Bytes of cached blocks that queued requests need, counted once per engine"),
    ] = 0


class Hindsight(msgspec.Struct):
    """The daemon's hits, and those of an optimal policy that knows the future, in a sample of the last hour's requests:
    all that asked for some of the blocks, at most the latest 16,384."""

    seconds: Annotated[float, _doc("Since the first of them")] = 0.0
    requested_blocks: Count = 0
    hit_blocks: Count = 0
    optimum_blocks: Annotated[Count, _doc("Hits of the optimal policy with as much memory")] = 0


class Integrity(msgspec.Struct):
    """Checks of the invariants."""

    checks: Annotated[Count, _counter("integrity_checks", "Checks of the invariants")] = 0
    failures: Annotated[Count, _counter("integrity_failures", "Checks that found an invariant violated")] = 0


class Connections(msgspec.Struct):
    """The connections to a kind of sockets."""

    open: Count
    unbound: Annotated[Count, _doc("Of these, connections that belong to no session yet")]
    cut: Annotated[Counts, _doc("Connections that were refused or cut off, by reason")]


class Events(msgspec.Struct):
    """KV events."""

    endpoint: str
    replay: str
    subscriptions: Annotated[Count, _gauge("event_subscriptions", "Topics of KV events that have a subscriber")]
    batches: Annotated[Count, _counter("event_batches", "Batches of KV events published")]
    batches_lost: Annotated[
        Count, _counter("event_batches_lost", "Batches that subscribers missed, counted per subscriber")
    ]
    replays: Count
    replays_cut: Count
    subscriptions_cut: Count
    nonsense: Annotated[Count, _doc("Requests for a replay that were invalid")]
    connections: Connections


class Http(msgspec.Struct):
    """How this API is used."""

    address: str
    answers: Annotated[Counts, _counter("http_answers", "Answers over HTTP, by status", "status")]
    cuts: Annotated[Counts, _counter("http_cuts", "HTTP connections that were cut off, by reason", "reason")]


class Tier(msgspec.Struct):
    """An attached tier, and what it has done: also before it was attached, since the daemon's start."""

    name: str
    off: Annotated[str, _doc("Why it is not used; empty while it is")]
    writes_off: Annotated[str, _doc("Why it is read, and not written to; empty while it is")]
    removals_off: Annotated[str, _doc("Why wrong values stay in its store; empty while they are removed")]
    writes: Annotated[str, _doc("When it gets blocks: `second`, asked for again; `through`, stored; `ahead`, evicted")]
    rate: Annotated[Count, _gauge("tier_read_rate", "Bytes per second at which a tier brings blocks, of late")]
    latency_ms: Annotated[float, _doc("How long it takes to say what it has, of late")]
    to_look_up: Annotated[Count, _doc("Lookups that it has not answered")]
    to_bring_bytes: Annotated[Count, _gauge("tier_queued_read_bytes", "Bytes of blocks that a tier is to bring")]
    to_write_blocks: Annotated[Count, _gauge("tier_queued_write_blocks", "Blocks that are to be written to a tier")]
    looks: Annotated[Count, _doc("Lookups that it was asked about")] = 0
    looks_dropped: Annotated[
        Count,
        _counter("tier_dropped_lookups", "Lookups that a tier was not asked about, because too many waited"),
    ] = 0
    blocks_looked_up: Annotated[Count, _doc("Blocks that lookups missed and that it was asked for")] = 0
    blocks_found: Annotated[Count, _doc("Of these, what it had")] = 0
    blocks_brought: Annotated[Count, _doc("Of these, what it has brought into memory")] = 0
    bytes_brought: Annotated[
        Count, _counter("tier_read_bytes", "Bytes of blocks that a tier has brought into memory")
    ] = 0
    blocks_not_brought: Annotated[Count, _doc("What it had and could not bring")] = 0
    blocks_written: Count = 0
    bytes_written: Annotated[Count, _counter("tier_written_bytes", "Bytes of blocks written to a tier")] = 0
    blocks_not_written: Annotated[Count, _doc("What it could not write")] = 0
    writes_dropped: Annotated[Count, _doc("Blocks that were not written, because too many waited")] = 0
    writes_too_late: Annotated[Count, _doc("Blocks that were evicted before they were written")] = 0


class TierProcess(msgspec.Struct):
    """The process of a tier that the daemon starts."""

    name: str
    starts: Annotated[Count, _counter("tier_starts", "Starts of a tier's process by the daemon")]
    ended: Annotated[str, _doc("How it has ended; empty while it runs")]


class Daemon(msgspec.Struct):
    """The process."""

    version: str
    pid: Count
    started_at: Annotated[float, _gauge("start_time_seconds", "When the daemon started, in seconds since the epoch")]
    uptime_s: float
    endpoint: str
    region: str
    region_bytes: Count
    present_bytes: Count
    locked: Annotated[bool, _gauge("region_locked", "1 if the region is locked into memory")]
    log_level: Level
    messages: Annotated[Count, _counter("messages", "Messages received")]
    sessions_opened: Annotated[Count, _counter("sessions_opened", "Sessions opened")]
    max_sessions: Annotated[Count, _gauge("sessions_limit", "Most sessions that may be open at one time")]
    acquire: Annotated[
        Histogram,
        _histogram("acquire_duration_seconds", "Time that the daemon took to find and pin the blocks of a lookup"),
    ]
    errors: Annotated[Counts, _counter("errors", "Requests answered with an error, by code", "code", ("internal",))]
    drops: Annotated[
        Counts,
        _counter(
            "dropped_replies",
            "Replies that could not be delivered, by reason",
            "reason",
            ("peer_gone", "peer_slow"),
        ),
    ]
    handshakes_refused: Annotated[
        Counts, _counter("handshake_refusals", "Handshakes refused, by reason", "reason", _TURNED_AWAY)
    ]
    connections: Connections
    integrity: Integrity
    http: Http | None
    tiers: list[Tier]
    tier_processes: list[TierProcess]
    events: Events | None


class Status(msgspec.Struct):
    """Everything."""

    pool: Pool
    namespaces: list[Namespace]
    sessions: list[Session]
    away: list[Away]
    grace: Annotated[bool, _gauge("grace", "1 while engines reconnect after a restart and nothing is evicted")]
    life: Annotated[Count, _doc("How many daemons have served this region, this one included")]
    evictions: Annotated[Counts, _doc("Blocks, by cause")]
    evicted_unread: Annotated[Count, _counter("evicted_unread_blocks", "Evicted blocks that no lookup had found")]
    eviction: Eviction
    hints: Hints
    refusals: Annotated[Counts, _doc("Blocks that were neither granted nor given out, by reason")]
    counters: Counts
    client_counts: Annotated[
        Counts, _doc("Sums of what clients count; loaded_bytes and saved_bytes are counted by ranks")
    ]
    daemon: Daemon
    evicted_early: Annotated[
        Count, _counter("evicted_early_blocks", "Blocks that lookups missed within a minute of their eviction")
    ] = 0
    hindsight: Hindsight = msgspec.field(default_factory=Hindsight)
