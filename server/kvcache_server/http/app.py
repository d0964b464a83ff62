"""HTTP in the daemon's own loop: health, figures and operators' actions. `schema.py` lists the routes.

Off unless `http` names an address. Errors are JSON: {"code", "message"}. `connection_limiter.py` bounds the loop's time
that clients take.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvcache_proto import __version__
from kvcache_proto.endpoint import socket_path
from kvcache_proto.errors import BadArgument, ConfigError, Unavailable
from kvcache_server.config import Config, parse_address
from kvcache_server.http import metrics, schema
from kvcache_server.http.admin_ops import AdminOps
from kvcache_server.http.auth import bears_token, read_token
from kvcache_server.http.connection_limiter import LINES_A_MINUTE, ConnectionLimiter, listen, quiet_logger, url_of
from kvcache_server.http.replies import JSON, decode, finish_replies, json_response, make_runner
from kvcache_server.rates import DutyCycle, Rate
from kvcache_server.status import Http, Status

log = logging.getLogger(__name__)

BODY = 16 << 10  # bytes of a request's body
SHARE = 0.05  # of the loop's time that reports may take


class HttpApp:
    """Serves the API in `loop` until `close`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: Config,
        admin_ops: AdminOps,
        failed: Callable[[int, Exception], object],
    ) -> None:
        """Bind the address; requests are answered once the loop runs. `failed(0, error)` records a defect of ours.

        Raises ConfigError if the address cannot be bound or the token's file cannot be trusted.
        """
        self._loop, self._admin_ops, self._failed = loop, admin_ops, failed
        self._answers: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        self._duty_cycle = DutyCycle(SHARE)  # shared by all requests, so that reconnecting gains nothing
        self._lines = Rate(LINES_A_MINUTE / 60, LINES_A_MINUTE)
        self._names = {"localhost"} | (_own_names() if config.http_anywhere else set())
        self._listener = listen("http", *parse_address(config.http))
        self._token_path = socket_path(config.endpoint).removesuffix(".sock") + ".token"
        try:
            self._secret = read_token(self._token_path)
        except ConfigError:
            self._listener.close()
            raise
        self.address = url_of(self._listener)
        self._description = msgspec.json.encode(schema.openapi(__version__))
        self._runner = make_runner(self._app(), quiet_logger(f"{__name__}.aiohttp", self._malformed))
        self._limiter: ConnectionLimiter | None = None
        self._opening = loop.create_task(self._open())

    async def _open(self) -> None:
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self._limiter = ConnectionLimiter(self._loop, self._listener, server)
        log.info("http at %s; changes need the token in %s", self.address, self._token_path)

    def close(self) -> None:
        """Close all connections. Call it when the loop has stopped; it runs the loop for the clean-up."""
        self._listener.close() if self._limiter is None else self._limiter.close()
        self._opening.cancel()
        self._loop.run_until_complete(self._runner.cleanup())

    def collect(self) -> None:
        """Free the memory left by closed connections. O(new objects)."""
        if self._limiter:
            self._limiter.collect()

    def figures(self) -> Http:
        cuts = self._limiter.cuts if self._limiter else {}
        return Http(self.address, dict(self._answers), dict(cuts))

    def _app(self) -> web.Application:
        replies = finish_replies(
            self._names,
            lambda error: self._failed(0, error),
            answered=self._count,
            not_found="no such path: /openapi.json lists them",
        )
        app = web.Application(middlewares=[replies], client_max_size=BODY)
        for route in schema.ROUTES:
            handler = getattr(self, "_" + route.name)
            app.router.add_route(route.method, route.path, self._guarded(handler) if route.changes else handler)
        app.router.add_get("/openapi.json", self._openapi, allow_head=False)
        return app

    def _count(self, status: int) -> None:
        self._answers[str(status)] += 1

    def _malformed(self) -> bool:
        """Count a request that is not HTTP; return whether to log it."""
        self._answers["malformed"] += 1
        return self._lines.allow(None, self._loop.time())

    def _guarded(self, handler: Handler) -> Handler:
        """Return `handler` behind a check of the token."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            authorization = request.headers.get("Authorization", "")
            if not authorization:
                raise web.HTTPUnauthorized(
                    text=f"changes need `Authorization: Bearer` and the token in {self._token_path}"
                )
            if not bears_token(authorization, self._secret):
                raise web.HTTPForbidden(text=f"not the token in {self._token_path}")
            return await handler(request)

        return guarded

    async def _answer(self, make: Callable[[Status], bytes], content_type: str = JSON) -> web.Response:
        """Answer with the result of `make` for a report.

        Reports are made one at a time. Each is followed by a pause, in which the loop serves engines; the next request
        waits for its end, even if the one before was cancelled.
        """
        async with self._turn:
            await asyncio.sleep(self._duty_cycle.wait(time.monotonic()))
            began = time.monotonic()
            try:
                return web.Response(body=make(await self._admin_ops.report()), headers={"Content-Type": content_type})
            finally:
                self._duty_cycle.spent(began, time.monotonic())

    # Reading.

    async def _healthz(self, request: web.Request) -> web.Response:
        return json_response(schema.Alive(True))

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._admin_ops.in_grace:
            raise Unavailable("sessions of the previous daemon are reconnecting, and nothing is evicted meanwhile")
        return json_response(schema.Ready(True))

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=self._description, content_type=JSON)

    async def _metrics(self, request: web.Request) -> web.Response:
        return await self._answer(metrics.render, metrics.CONTENT_TYPE)

    async def _status(self, request: web.Request) -> web.Response:
        return await self._answer(msgspec.json.encode)

    async def _namespaces(self, request: web.Request) -> web.Response:
        return await self._answer(lambda figures: msgspec.json.encode(schema.Namespaces(figures.namespaces)))

    async def _sessions(self, request: web.Request) -> web.Response:
        return await self._answer(lambda figures: msgspec.json.encode(schema.Sessions(figures.sessions, figures.away)))

    # Changes.

    async def _clear(self, request: web.Request) -> web.Response:
        namespace = decode(await request.read(), schema.Clear).namespace
        return json_response(schema.Cleared(self._admin_ops.clear(namespace, _who(request))))

    async def _log_level(self, request: web.Request) -> web.Response:
        level = decode(await request.read(), schema.LogLevel).level
        before = self._admin_ops.set_log_level(level, _who(request))
        return json_response(schema.LogLevelSet(level, before))

    async def _fence_off(self, request: web.Request) -> web.Response:
        text = request.match_info["id"]
        if not (text.isascii() and text.isdigit() and 0 < len(text) < 20 and int(text)):
            raise BadArgument(f"session {text[:40]!r}: a number from the list of sessions expected")
        return json_response(schema.FencedOff(int(text), self._admin_ops.fence_off(int(text), _who(request))))

    async def _token(self, request: web.Request) -> web.Response:
        return json_response(schema.Known(True))

    async def _check(self, request: web.Request) -> web.Response:
        began = time.perf_counter()
        finding = await self._admin_ops.check()
        return json_response(schema.Checked(not finding, finding, time.perf_counter() - began))


def _own_names() -> set[str]:
    with contextlib.suppress(OSError):
        return {socket.gethostname().lower(), socket.getfqdn().lower()}
    return set()


def _who(request: web.Request) -> str:
    return f"the token's bearer at {request.remote}"
