"""The HTTP API as values: the figures that it reports, the routes, and their description in OpenAPI 3.1. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Counts = dict[str, Count]
Level = Literal["debug", "info", "warning", "error"]


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Error(msgspec.Struct):
    """Any answer other than the one asked for."""

    code: Annotated[str, _doc("For programs")]
    message: Annotated[str, _doc("For people")]


class Alive(msgspec.Struct):
    """The daemon's event loop answers."""

    alive: bool


class Ready(msgspec.Struct):
    """The region is mapped, engines may attach, and recovery after a restart is complete."""

    ready: bool


class Pool(msgspec.Struct):
    """The region and its contents."""

    region_id: str
    bytes: Annotated[Count, _doc("Memory for blocks")]
    used_bytes: Count
    pages: Count
    page_bytes: Count
    blocks: Annotated[Count, _doc("Blocks that lookups can find")]
    blocks_writing: Count
    blocks_hidden: Annotated[Count, _doc("Complete blocks that wait for their parent")]
    blocks_quarantined: Count
    pinned_bytes: Annotated[
        Count,
        _doc("Bytes of the blocks that leases hold; a block counts once, however many hold it"),
    ]
    ready_bytes: Annotated[Count, _doc("This and the next three add up to the whole pool")]
    writing_bytes: Count
    quarantined_bytes: Count
    free_bytes: Count
    free_runs: Annotated[Count, _doc("Runs of free pages; one, if memory is not fragmented")]


class Group(msgspec.Struct):
    """The geometry of a KV cache group."""

    block_tokens: Count
    shard_bytes: Annotated[list[Count], _doc("Per shard of a block")]
    kind: Annotated[str, _doc("`full`: an engine needs all blocks of a prefix to continue; `tail`: only the last ones")]
    reach: Annotated[Count, _doc("Of a tail, how many blocks at the end of a prefix an engine needs")]
    period: Annotated[Count, _doc("Of a tail, after how many blocks an engine needs none from before; 0 for never")]
    followed: Annotated[bool, _doc("Whether the block after a prefix must be cached, too")]


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
    lookups: Annotated[Count, _doc("Lookups")]
    requested_blocks: Annotated[
        Count, _doc("Blocks that requests asked for, once per request however often it is looked up")
    ]
    hit_blocks: Annotated[Count, _doc("Blocks that requests found, once per request")]
    hit_bytes: Annotated[
        Count,
        _doc("Bytes of the blocks that requests found; engines load only what their devices lack"),
    ]
    lost_blocks: Annotated[
        Count, _doc("Estimated misses of evicted blocks: lookups would have hit them with more memory")
    ]
    saved_blocks: Annotated[Count, _doc("Blocks that were stored completely")]
    saved_bytes: Annotated[Count, _doc("Bytes of the blocks that were stored completely")]
    blocks: Annotated[Count, _doc("Blocks that lookups can find")]
    bytes: Annotated[Count, _doc("Memory that the blocks take")]
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


class Away(msgspec.Struct):
    """A session whose connection has closed although its process lives: it keeps the slots that it may be writing."""

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
    dropped_blocks: Annotated[Count, _doc("Blocks that requests gave up for eviction")]
    refused: Annotated[Counts, _doc("Blocks that were not retained, by reason")]
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

    by_age: Annotated[bool, _doc("1 while the least recently used blocks are evicted, because that finds more")]
    switches: Annotated[Count, _doc("Changes between eviction by worth and by age")]
    declined_blocks: Annotated[Count, _doc("Blocks that were not stored: they were worth less than each cached one")]
    hit_blocks_by_class: Annotated[ByClass, _doc("Blocks that first lookups of requests found")]
    evicted_blocks_by_class: Annotated[ByClass, _doc("Evicted blocks")]


class Integrity(msgspec.Struct):
    """Checks of the invariants."""

    checks: Annotated[Count, _doc("Checks of the invariants")]
    failures: Annotated[Count, _doc("Checks that found an invariant violated")]


class Http(msgspec.Struct):
    """How this API is used."""

    address: str
    answers: Annotated[Counts, _doc("Answers over HTTP, by status")]
    cuts: Annotated[Counts, _doc("HTTP connections that were cut off, by reason")]


class Tier(msgspec.Struct):
    """An attached tier, and what it has done: also before it was attached, since the daemon's start."""

    name: str
    off: Annotated[str, _doc("Why it is not used; empty while it is")]
    writes_off: Annotated[str, _doc("Why it is read, and not written to; empty while it is")]
    removals_off: Annotated[str, _doc("Why wrong values stay in its store; empty while they are removed")]
    writes: Annotated[str, _doc("When it gets blocks: `second`, asked for again; `through`, stored; `ahead`, evicted")]
    rate: Annotated[Count, _doc("Bytes per second that it brings, of late")]
    latency_ms: Annotated[float, _doc("How long it takes to say what it has, of late")]
    to_look_up: Annotated[Count, _doc("Lookups that it has not answered")]
    to_bring_bytes: Count
    to_write_blocks: Count
    looks: Annotated[Count, _doc("Lookups that it was asked about")] = 0
    looks_dropped: Annotated[Count, _doc("Lookups that it was not asked about, because too many waited")] = 0
    blocks_looked_up: Annotated[Count, _doc("Blocks that lookups missed and that it was asked for")] = 0
    blocks_found: Annotated[Count, _doc("Of these, what it had")] = 0
    blocks_brought: Annotated[Count, _doc("Of these, what it has brought into memory")] = 0
    bytes_brought: Count = 0
    blocks_not_brought: Annotated[Count, _doc("What it had and could not bring")] = 0
    blocks_written: Count = 0
    bytes_written: Count = 0
    blocks_not_written: Annotated[Count, _doc("What it could not write")] = 0
    writes_dropped: Annotated[Count, _doc("Blocks that were not written, because too many waited")] = 0
    writes_too_late: Annotated[Count, _doc("Blocks that were evicted before they were written")] = 0


class TierProcess(msgspec.Struct):
    """The process of a tier that the daemon starts."""

    name: str
    starts: Count
    ended: Annotated[str, _doc("How it has ended; empty while it runs")]


class Daemon(msgspec.Struct):
    """The process."""

    version: str
    pid: Count
    uptime_s: float
    endpoint: str
    region: str
    region_bytes: Count
    present_bytes: Count
    locked: Annotated[bool, _doc("1 where the region is locked into memory")]
    log_level: Level
    messages: Annotated[Count, _doc("Messages received")]
    sessions_opened: Annotated[Count, _doc("Sessions opened")]
    errors: Annotated[Counts, _doc("Requests answered with an error, by code")]
    drops: Annotated[Counts, _doc("Replies that could not be delivered, by reason")]
    door_refused: Annotated[Counts, _doc("Handshakes refused, by reason")]
    integrity: Integrity
    http: Http
    tiers: list[Tier]
    tier_processes: list[TierProcess]


class Status(msgspec.Struct):
    """Everything."""

    pool: Pool
    namespaces: list[Namespace]
    sessions: list[Session]
    away: list[Away]
    grace: Annotated[bool, _doc("1 while engines reconnect after a restart and nothing is evicted")]
    life: Annotated[Count, _doc("How many daemons have served this region, this one included")]
    evictions: Annotated[Counts, _doc("Blocks, by cause")]
    evicted_unread: Annotated[Count, _doc("Evicted blocks that no lookup had found")]
    eviction: Eviction
    hints: Hints
    refusals: Annotated[Counts, _doc("Blocks that were neither granted nor given out, by reason")]
    counters: Counts
    told: Annotated[Counts, _doc("Sums of what clients count; loaded_bytes and saved_bytes are counted by ranks")]
    daemon: Daemon


class Namespaces(msgspec.Struct):
    """All known namespaces."""

    namespaces: list[Namespace]


class Sessions(msgspec.Struct):
    """The sessions that are attached, and those that are away."""

    sessions: list[Session]
    away: list[Away]


class Clear(msgspec.Struct, forbid_unknown_fields=True):
    """What to clear."""

    namespace: Annotated[str, _doc("Its id; empty means every namespace")]


class Cleared(msgspec.Struct):
    """What was cleared: the blocks that nobody was reading or writing."""

    blocks: Count


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """The least severity to log."""

    level: Level


class LogLevelSet(msgspec.Struct):
    """The least severity that is logged now, and the one before."""

    level: Level
    before: Level


class FencedOff(msgspec.Struct):
    """The session was fenced off."""

    session: Count
    reservations: Annotated[Count, _doc("Reservations that ended with it")]


class Checked(msgspec.Struct):
    """Whether the invariants hold."""

    sound: bool
    finding: Annotated[str, _doc("The invariant that is violated")]
    seconds: float


class Known(msgspec.Struct):
    """The token is valid."""

    known: bool


class Route(NamedTuple):
    """One request that the API takes; `{id}` in the path is a session's number. A POST needs the token."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    summary: str
    answer: type
    body: type | None = None
    errors: tuple[int, ...] = ()

    @property
    def changes(self) -> bool:
        return self.method == "POST"


_WHY = {
    400: "The request is not valid.",
    401: "No token was given.",
    403: "The token is wrong.",
    404: "There is no such thing.",
    503: "Not yet: sessions of the previous daemon are expected to reconnect.",
}

ROUTES = (
    Route("healthz", "GET", "/healthz", "Whether the event loop answers.", Alive),
    Route("readyz", "GET", "/readyz", "Whether engines find the whole cache.", Ready, None, (503,)),
    Route("metrics", "GET", "/metrics", "The figures in the format of Prometheus.", str),
    Route("status", "GET", "/api/v1/status", "All figures.", Status),
    Route("namespaces", "GET", "/api/v1/namespaces", "What is cached, by namespace.", Namespaces),
    Route("sessions", "GET", "/api/v1/sessions", "The attached sessions, and those that are away.", Sessions),
    Route(
        "clear",
        "POST",
        "/api/v1/clear",
        "Forget every cached block that nobody is reading or writing, in steps: what is stored meanwhile stays.",
        Cleared,
        Clear,
        (400, 404, 503),
    ),
    Route(
        "log_level",
        "POST",
        "/api/v1/log-level",
        "Change the log level until the next start.",
        LogLevelSet,
        LogLevel,
        (400,),
    ),
    Route(
        "fence_off",
        "POST",
        "/api/v1/sessions/{id}/fence-off",
        "Give up a session that is away and will never write again: anything it still writes corrupts others' blocks.",
        FencedOff,
        None,
        (400, 404),
    ),
    Route("token", "POST", "/api/v1/token", "Say whether the token is valid, and change nothing.", Known),
    Route(
        "check",
        "POST",
        "/api/v1/check",
        "Check the invariants: at one instant where no engine is attached, else one part after the other.",
        Checked,
    ),
)


def openapi(version: str) -> dict[str, Any]:
    """Return the OpenAPI description for a daemon of `version`."""
    bodies = [each for route in ROUTES for each in (route.answer, route.body) if each and each is not str]
    structs = list(dict.fromkeys([*bodies, Error]))
    refs, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    ref_of = dict(zip(structs, refs, strict=True))
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, ref_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvcache-server",
            "version": version,
            "description": "Figures and actions of one host's KV cache. Reading needs no token, every change does. "
            "The token is in the file that ends in `.token`, beside the daemon's endpoint.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, ref_of: dict[type, Any]) -> dict[str, Any]:
    answers = {200: ("Text." if route.answer is str else str(route.answer.__doc__), route.answer)}
    answers |= {status: (_WHY[status], Error) for status in (*route.errors, *((401, 403) if route.changes else ()))}
    responses: dict[str, Any] = {
        str(status): {"description": text, "content": _content(struct, ref_of)}
        for status, (text, struct) in sorted(answers.items())
    }
    responses["default"] = {
        "description": "Any other error.",
        "content": _content(Error, ref_of),
    }
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary, "responses": responses}
    if "{id}" in route.path:
        schema = {"type": "integer", "minimum": 1, "maximum": (1 << 63) - 1}
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": schema}]
    if route.body:
        operation["requestBody"] = {"required": True, "content": _content(route.body, ref_of)}
    if route.changes:
        operation["security"] = [{"token": []}]
    return operation


def _content(kind: type, ref_of: dict[type, Any]) -> dict[str, Any]:
    if kind is str:
        return {"text/plain": {"schema": {"type": "string"}}}
    return {"application/json": {"schema": ref_of[kind]}}
