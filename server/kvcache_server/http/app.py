"""HTTP in the daemon's own loop: health, figures and an operator's actions. `schema.py` says what there is.

Off unless `http` names an address. Errors are JSON: {"code", "message"}. How clients come in, and what they cannot do
to the loop: `connection_limiter.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvcache_proto import __version__
from kvcache_proto.endpoint import socket_path
from kvcache_proto.errors import BadArgument, ClientError, ConfigError, KVCacheError, Unavailable
from kvcache_server.config import Config, parse_address
from kvcache_server.duty_cycle import DutyCycle
from kvcache_server.http import metrics, schema
from kvcache_server.http.admin_ops import AdminOps
from kvcache_server.http.auth import BearerToken
from kvcache_server.http.connection_limiter import LINES_A_MINUTE, ConnectionLimiter, listen, quiet, where
from kvcache_server.http.host_header import is_ours
from kvcache_server.rates import Rate

log = logging.getLogger(__name__)

BODY = 16 << 10  # bytes of a request's body
SHARE = 0.05  # of the loop's time, that may go into answers; a larger one waits for its turn
_JSON = "application/json"
_Body = TypeVar("_Body")


class HttpApp:
    """Serves the API from now on until `close`, within `loop`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: Config,
        admin_ops: AdminOps,
        failed: Callable[[int, Exception], object],
    ) -> None:
        """Bind the address; what is asked is answered once the loop runs. `failed(0, error)` notes a defect of ours.

        Raises ConfigError where the address cannot be had, or the token's file is not to be trusted.
        """
        self._loop, self._admin_ops, self._failed = loop, admin_ops, failed
        self._answers: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        self._duty_cycle = DutyCycle(SHARE)  # it outlives who is answered
        self._lines = Rate(LINES_A_MINUTE / 60, LINES_A_MINUTE)
        self._names = {"localhost"} | (_own_names() if config.http_anywhere else set())
        self._listener = listen("http", *parse_address(config.http))
        try:
            self._bearer_token = BearerToken(socket_path(config.endpoint).removesuffix(".sock") + ".token")
        except ConfigError:
            self._listener.close()
            raise
        self.address = where(self._listener)
        self._description = msgspec.json.encode(schema.openapi(__version__))
        self._runner = web.AppRunner(
            self._app(),
            access_log=None,
            logger=quiet(f"{__name__}.aiohttp", self._malformed),
            auto_decompress=False,  # a small body could become a large one
            lingering_time=0,
            handler_cancellation=True,
        )
        self._limiter: ConnectionLimiter | None = None
        self._opening = loop.create_task(self._open())

    async def _open(self) -> None:
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._limiter = ConnectionLimiter(self._loop, self._listener, server)
        log.info("http at %s; changes want the token in %s", self.address, self._bearer_token.path)

    def close(self) -> None:
        """Close all connections. The loop has stopped, and is run for that."""
        self._listener.close() if self._limiter is None else self._limiter.close()
        self._opening.cancel()
        self._loop.run_until_complete(self._runner.cleanup())

    def collect(self) -> None:
        """Free what connections have left behind. O(what is new)."""
        if self._limiter:
            self._limiter.collect()

    def figures(self) -> dict[str, Any]:
        cuts = self._limiter.cuts if self._limiter else {}
        return {"address": self.address, "answers": dict(self._answers), "cuts": dict(cuts)}

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._around], client_max_size=BODY)
        for route in schema.ROUTES:
            handler = getattr(self, "_" + route.name)
            app.router.add_route(route.method, route.path, self._guarded(handler) if route.changes else handler)
        app.router.add_get("/openapi.json", self._openapi, allow_head=False)
        return app

    def _malformed(self) -> bool:
        """Count a request that is no HTTP; return whether the log may tell of it."""
        self._answers["malformed"] += 1
        return self._lines.allow(None, self._loop.time())

    # Around every request.

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_host(request)
            response = await handler(request)
        except web.HTTPException as error:
            told = "no such path: /openapi.json has them all" if error.status == 404 else error.text or error.reason
            response = _error(error.status, error.reason.lower().replace(" ", "_"), told)
            response.headers.update({key: error.headers[key] for key in ("Allow",) if key in error.headers})
        except KVCacheError as error:
            response = _error(_status(error), error.code, str(error))
        except Exception as error:  # noqa: BLE001 - a defect of ours is answered and logged; the others are served on
            self._failed(0, error)
            response = _error(500, "internal", f"{type(error).__name__}: {error}")
        if response.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        response.headers["Server"] = "kvcache-server"
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.force_close()  # one request a connection: see connection_limiter.py
        self._answers[str(response.status)] += 1
        return response

    def _check_host(self, request: web.Request) -> None:
        host = request.headers.get("Host", "")
        if not is_ours(host, self._names):
            raise web.HTTPMisdirectedRequest(text=f"Host {host!r}: ask by address, or as localhost")

    def _guarded(self, handler: Handler) -> Handler:
        """Let `handler` be asked by who has the token alone."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            authorization = request.headers.get("Authorization", "")
            if not authorization:
                raise web.HTTPUnauthorized(
                    text=f"changes want `Authorization: Bearer` and the token in {self._bearer_token.path}"
                )
            if not self._bearer_token.admits(authorization):
                raise web.HTTPForbidden(text=f"this is not the token in {self._bearer_token.path}")
            return await handler(request)

        return guarded

    async def _answer(self, make: Callable[[dict[str, Any]], bytes], content_type: str = _JSON) -> web.Response:
        """Answer what `make` makes of a report, one request after the other; the loop is the engines' for a while then.

        Who asked has the answer at once, and the next one waits; that somebody leaves makes the wait no shorter.
        """
        async with self._turn:
            await asyncio.sleep(self._duty_cycle.wait(time.monotonic()))
            began = time.monotonic()
            try:
                return web.Response(body=make(await self._admin_ops.report()), headers={"Content-Type": content_type})
            finally:
                self._duty_cycle.spent(began, time.monotonic())

    # What is asked.

    async def _healthz(self, request: web.Request) -> web.Response:
        return _response(schema.Alive(True))

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._admin_ops.in_grace:
            raise Unavailable("sessions of the last daemon are awaited, and nothing is evicted meanwhile")
        return _response(schema.Ready(True))

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=self._description, content_type=_JSON)

    async def _metrics(self, request: web.Request) -> web.Response:
        return await self._answer(metrics.render, metrics.CONTENT_TYPE)

    async def _status(self, request: web.Request) -> web.Response:
        return await self._answer(partial(_as_json, schema.Status))

    async def _namespaces(self, request: web.Request) -> web.Response:
        return await self._answer(partial(_as_json, schema.Namespaces))

    async def _sessions(self, request: web.Request) -> web.Response:
        return await self._answer(partial(_as_json, schema.Sessions))

    # What is done.

    async def _clear(self, request: web.Request) -> web.Response:
        body = await _body(request, schema.Clear)
        return _response(schema.Cleared(await self._admin_ops.clear(body.namespace, _who(request))))

    async def _resize(self, request: web.Request) -> web.Response:
        body = await _body(request, schema.Resize)
        try:
            return _response(schema.Resized(self._admin_ops.resize(body.bytes, _who(request))))
        except BadArgument as error:
            raise web.HTTPConflict(text=str(error)) from None

    async def _log_level(self, request: web.Request) -> web.Response:
        level = (await _body(request, schema.LogLevel)).level
        return _response(
            msgspec.convert(
                {"level": level, "before": self._admin_ops.set_log_level(level, _who(request))}, schema.LogLevelSet
            )
        )

    async def _fence_off(self, request: web.Request) -> web.Response:
        text = request.match_info["id"]
        if not (text.isascii() and text.isdigit() and 0 < len(text) < 20 and int(text)):
            raise BadArgument(f"session {text[:40]!r}: its number, as the list of sessions has it")
        return _response(schema.FencedOff(int(text), self._admin_ops.fence_off(int(text), _who(request))))

    async def _token(self, request: web.Request) -> web.Response:
        return _response(schema.Known(True))

    async def _check(self, request: web.Request) -> web.Response:
        began = time.perf_counter()
        finding = await self._admin_ops.check()
        return _response(schema.Checked(not finding, finding, time.perf_counter() - began))


def _own_names() -> set[str]:
    with contextlib.suppress(OSError):
        return {socket.gethostname().lower(), socket.getfqdn().lower()}
    return set()


def _who(request: web.Request) -> str:
    return f"the token's bearer at {request.remote}"


async def _body(request: web.Request, kind: type[_Body]) -> _Body:
    """Return what was sent. Raises BadArgument."""
    try:
        sent = msgspec.json.decode(await request.read())
        if isinstance(sent, dict):  # to JSON Schema, and so to clients, 4.0 is an integer
            sent = {key: int(each) if _is_whole(each) else each for key, each in sent.items()}
        return msgspec.convert(sent, kind)
    except (msgspec.MsgspecError, RecursionError) as error:  # RecursionError: brackets without end
        raise BadArgument(f"the body: {error}") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()


def _as_json(form: type, report: dict[str, Any]) -> bytes:
    return msgspec.json.encode(msgspec.convert(report, form))


def _response(answer: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type=_JSON)


def _error(status: int, code: str, message: str) -> web.Response:
    response = _response(schema.Error(code, message))
    response.set_status(status)
    return response


def _status(error: KVCacheError) -> int:
    if isinstance(error, Unavailable):
        return 503
    if isinstance(error, BadArgument):
        return 400
    return 404 if isinstance(error, ClientError) else 500
