"""The HTTP API as values: what is asked and answered, the routes, and their description in OpenAPI 3.1. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Level = Literal["debug", "info", "warning", "error"]


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class Error(msgspec.Struct):
    """Every answer that is not what was asked for."""

    code: Annotated[str, _doc("for programs")]
    message: Annotated[str, _doc("for people")]


class Alive(msgspec.Struct):
    """The daemon's loop answers."""

    alive: bool


class Ready(msgspec.Struct):
    """The region is there, engines may attach, and what the last daemon left is sorted out."""

    ready: bool


class Pool(msgspec.Struct):
    """The region and what is in it."""

    region_id: str
    bytes: Count
    wanted_bytes: Annotated[Count, _doc("what a resize makes of it, little by little")]
    given_back_bytes: Annotated[Count, _doc("of the region, by resizes")]
    used_bytes: Count
    extents: Count
    extent_bytes: Count
    uncut_extents: Count
    blocks: Annotated[Count, _doc("that lookups find")]
    blocks_writing: Count
    blocks_hidden: Annotated[Count, _doc("whole, and waiting for their parent")]
    slots_quarantined: Count
    pinned_bytes: Annotated[Count, _doc("under leases of engines")]
    ready_bytes: Annotated[Count, _doc("this and the next four are the whole pool")]
    writing_bytes: Count
    quarantined_bytes: Count
    free_bytes: Count
    overhead_bytes: Annotated[Count, _doc("rows, and the ends of extents")]
    largest_free_bytes: Annotated[Count, _doc("the largest block that fits without an eviction")]


class Namespace(msgspec.Struct):
    """What is cached of one model, and how often it was asked for."""

    id: str
    model: str
    identity: Annotated[dict[str, str], _doc("every fact that makes the bytes of equal hashes differ")]
    block_tokens: Annotated[list[Count], _doc("by KV cache group")]
    block_bytes: Annotated[list[Count], _doc("by KV cache group")]
    overhead: Annotated[float, _doc("part of an extent that holds none of its blocks: rows, and the end")]
    better_extent_bytes: Annotated[
        Count, _doc("the `extent_size` that would waste less; 0 where that is little or none")
    ]
    lookups: Count
    requested_blocks: Count
    hit_blocks: Count
    hit_bytes: Annotated[Count, _doc("that lookups found; engines need and load only what their devices have not")]
    lost_blocks: Annotated[
        Count, _doc("asked for after they were evicted: more memory would have hit them; an estimate")
    ]
    saved_blocks: Count
    saved_bytes: Count
    blocks: Count
    bytes: Count
    engines: Annotated[dict[str, Count], _doc("bytes that each engine stored")]


class Session(msgspec.Struct):
    """One attached process."""

    id: Count
    engine: str
    label: str
    age_s: float
    leases: Count
    reservations: Count
    namespaces: Annotated[dict[str, list[Count]], _doc("shards that it writes, by namespace")]
    breaker: Annotated[str, _doc("its client's: whether it asks the daemon at all")]


class Away(msgspec.Struct):
    """A session whose door has closed, while its process lives: it keeps the slots that it may be writing."""

    id: Count
    engine: str
    reservations: Count


class Integrity(msgspec.Struct):
    """How often all that must always hold was looked at, and how often it did not."""

    checks: Count
    failures: Count


class Http(msgspec.Struct):
    """How this API is used."""

    address: str
    answers: Annotated[dict[str, Count], _doc("by status")]
    cuts: Annotated[dict[str, Count], _doc("connections that were ended early, by reason")]


class Daemon(msgspec.Struct):
    """The process."""

    version: str
    pid: Count
    uptime_s: float
    endpoint: str
    region: str
    region_bytes: Count
    locked: Annotated[bool, _doc("in memory")]
    log_level: Level
    messages: Count
    sessions_opened: Count
    errors: Annotated[dict[str, Count], _doc("answered to engines, by code")]
    drops: Annotated[dict[str, Count], _doc("answers that could not be delivered, by reason")]
    door_refused: Annotated[dict[str, Count], _doc("handshakes, by reason")]
    integrity: Integrity
    http: Http


class Status(msgspec.Struct):
    """Everything."""

    pool: Pool
    namespaces: list[Namespace]
    sessions: list[Session]
    away: list[Away]
    grace: Annotated[bool, _doc("sessions of the last daemon are awaited, and nothing is evicted")]
    life: Annotated[Count, _doc("daemons that this region has had")]
    evictions: Annotated[dict[str, Count], _doc("blocks, by cause")]
    evicted_unread: Annotated[Count, _doc("of them, those that no lookup had found")]
    refusals: Annotated[dict[str, Count], _doc("blocks that were not granted or not given, by reason")]
    counters: dict[str, Count]
    told: Annotated[dict[str, Count], _doc("what clients count, all together: loaded_bytes and saved_bytes by ranks")]
    daemon: Daemon


class Namespaces(msgspec.Struct):
    """All that are known."""

    namespaces: list[Namespace]


class Sessions(msgspec.Struct):
    """Who is attached, and who is away."""

    sessions: list[Session]
    away: list[Away]


class Clear(msgspec.Struct, forbid_unknown_fields=True):
    """What to forget."""

    namespace: Annotated[str, _doc("its id; empty is every namespace")]


class Cleared(msgspec.Struct):
    """What was forgotten: what nobody was reading or writing."""

    blocks: Count


class Resize(msgspec.Struct, forbid_unknown_fields=True):
    """How small the pool shall be. It never grows while the daemon runs."""

    bytes: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class Resized(msgspec.Struct):
    """What the pool will have, in whole extents, once nobody reads or writes what has to go."""

    bytes: Count


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """The least severity that is to be logged."""

    level: Level


class LogLevelSet(msgspec.Struct):
    """The least severity that is logged."""

    level: Level
    before: Level


class FencedOff(msgspec.Struct):
    """The session was given up."""

    session: Count
    reservations: Annotated[Count, _doc("that ended with it")]


class Checked(msgspec.Struct):
    """Whether all that must always hold does."""

    sound: bool
    finding: Annotated[str, _doc("what is broken")]
    seconds: float


class Known(msgspec.Struct):
    """The token is the right one."""

    known: bool


class Route(NamedTuple):
    """One thing that can be asked; `{id}` in the path is a session's number. Who posts something needs the token."""

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
    400: "What was sent does not fit.",
    401: "No token was given.",
    403: "Another token was given.",
    404: "There is no such thing.",
    409: "The pool has not so much, or an extent is more.",
    503: "Not yet: sessions of the last daemon are awaited.",
}

ROUTES = (
    Route("healthz", "GET", "/healthz", "Whether the loop answers.", Alive),
    Route("readyz", "GET", "/readyz", "Whether engines find a whole cache.", Ready, None, (503,)),
    Route("metrics", "GET", "/metrics", "The figures as Prometheus reads them.", str),
    Route("status", "GET", "/api/v1/status", "All figures.", Status),
    Route("namespaces", "GET", "/api/v1/namespaces", "What is cached, by namespace.", Namespaces),
    Route("sessions", "GET", "/api/v1/sessions", "Who is attached, and who is away.", Sessions),
    Route(
        "clear",
        "POST",
        "/api/v1/clear",
        "Forget every cached block that nobody is reading or writing, bit by bit: what is stored meanwhile stays.",
        Cleared,
        Clear,
        (400, 404, 503),
    ),
    Route(
        "resize",
        "POST",
        "/api/v1/resize",
        "Make the pool smaller, and give the memory back to the host, until the region's end.",
        Resized,
        Resize,
        (400, 409),
    ),
    Route(
        "log_level",
        "POST",
        "/api/v1/log-level",
        "Change what is logged, until the next start.",
        LogLevelSet,
        LogLevel,
        (400,),
    ),
    Route(
        "fence_off",
        "POST",
        "/api/v1/sessions/{id}/fence-off",
        "Give up a session that is away and will never write again: what it still writes goes into others' blocks.",
        FencedOff,
        None,
        (400, 404),
    ),
    Route("token", "POST", "/api/v1/token", "Say whether the token is right, and change nothing.", Known),
    Route(
        "check",
        "POST",
        "/api/v1/check",
        "Look at what must always hold: all at one instant where nobody is attached, else one part after the other.",
        Checked,
    ),
)


def openapi(version: str) -> dict[str, Any]:
    """Return the description of the API of the daemon of that version."""
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
            "description": "Figures and actions of one host's KV cache. Reading wants no token; every change does: "
            "it is in the file beside the daemon's endpoint that ends in `.token`.",
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
        "description": "Anything else that is wrong.",
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
