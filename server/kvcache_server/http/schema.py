"""The HTTP API as values: the routes, and their description in OpenAPI 3.1. Pure; status.py has the figures."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from kvcache_server.status import Away, Count, Level, Namespace, Session, Status


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
    """The number of blocks that were forgotten."""

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
        "Forget every cached block, also those that engines are reading, whose memory is freed later.",
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
        "Check the invariants: at one instant if no engine is attached, else one part after the other.",
        Checked,
    ),
)


def openapi(version: str) -> dict[str, Any]:
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
