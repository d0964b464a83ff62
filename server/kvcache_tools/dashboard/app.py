"""The dashboard's own HTTP server: one page, its data, and the actions that it forwards to the daemon.

It listens on loopback, and all who can reach it may read. Every action needs the daemon's token, given by the visitor,
and a header that a page of another site cannot send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvcache_proto.errors import BadArgument, KVCacheError, NotPermitted, Unavailable
from kvcache_server.http import schema
from kvcache_server.http.auth import bears_token
from kvcache_server.http.replies import decode, finish_replies, json_response
from kvcache_server.status import Status
from kvcache_tools.dashboard import engine_fields
from kvcache_tools.dashboard.env_folder import Changed, EnvFolder
from kvcache_tools.dashboard.history import EVERY, History
from kvcache_tools.dashboard.host_figures import Host, HostFigures
from kvcache_tools.dashboard.relay import Relay
from kvcache_tools.dashboard.units import NoSystemd, Units

log = logging.getLogger(__name__)

HEADER = "X-KVCache-Dashboard"  # pages of other sites would need our permission to send it, which we do not give
BODY = 64 << 10
TOKEN = 4096  # bytes read from its file; a token has at most 256
ACTIONS = ("clear", "log_level", "fence_off", "token")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
# NotPermitted: the dashboard lacks the permission; 403 is for visitors.
_STATUS: dict[type[KVCacheError], int] = {Changed: 409, NoSystemd: 503, NotPermitted: 500}


class Edit(msgspec.Struct, forbid_unknown_fields=True):
    """New values of an engine's fields; `version` is that of the file that the old values were read from."""

    version: str
    values: dict[str, str]


class Dashboard:
    """The page, its data and its actions."""

    def __init__(
        self, relay: Relay, host: HostFigures, token_file: str, units: Units | None, folder: EnvFolder
    ) -> None:
        """`token_file` may be "": then the daemon checks tokens."""
        self._relay, self._host, self._token_file = relay, host, token_file
        self._units, self._folder = units, folder
        self._history = History()
        self._began = time.time()
        self._status: Status | None = None
        self._away: tuple[float, str] | None = (self._began, "not asked yet")
        self._answered = 0.0
        self._region = ""
        self._figures: Host | None = None
        self._done = asyncio.Event()  # set after an action, to poll at once

    def app(self) -> web.Application:
        replies = finish_replies(("localhost",), _failed, headers=_HEADERS, statuses=_STATUS)
        app = web.Application(middlewares=[replies], client_max_size=BODY)
        for file in sorted(resources.files("kvcache_tools.dashboard").joinpath("page").iterdir(), key=str):
            kind = _TYPES[Path(file.name).suffix]
            path = "/" if file.name == "index.html" else f"/{file.name}"
            app.router.add_get(path, _static(file.read_bytes(), kind))
        app.router.add_get("/data", self._data)
        for route in schema.ROUTES:
            if route.name in ACTIONS:
                path = route.path.replace("{id}", "{id:[0-9]{1,19}}")
                app.router.add_post(path, _from_our_page(self._pass_on))
        app.router.add_get("/engines", _from_our_page(self._engines))
        app.router.add_put("/engines/{name}", _from_our_page(self._edit))
        app.router.add_post("/engines/{name}/{verb}", _from_our_page(self._order))
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, app: web.Application) -> Any:
        await self._relay.open()
        task = asyncio.get_running_loop().create_task(self._look())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await self._relay.close()

    # Data.

    async def _look(self) -> None:
        """Poll the daemon and the host every two seconds, even without visitors: the page shows the last hour."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                status = await self._relay.status()
            except Unavailable as error:
                self._gone(str(error))
            else:
                self._region = status.daemon.region
                self._history.add(time.time(), status)
                self._status, self._away, self._answered = status, None, time.time()
            try:
                self._figures = await asyncio.to_thread(self._host.figures, self._region)
            except (OSError, RuntimeError) as error:  # out of descriptors or threads: keep the old figures
                log.warning("the host's figures cannot be read: %s", error)
            due = max(due + EVERY, loop.time())
            # Not wait_for: before Python 3.12, it may swallow a cancellation that coincides with `_done`.
            done = loop.create_task(self._done.wait())
            try:
                await asyncio.wait({done}, timeout=due - loop.time())
            finally:
                done.cancel()
            self._done.clear()

    def _gone(self, why: str) -> None:
        self._away = (self._away[0] if self._away else time.time(), why)

    async def _data(self, request: web.Request) -> web.Response:
        since = request.query.get("since", "0")
        number = int(since) if since.isascii() and since.isdigit() and len(since) < 16 else 0
        return json_response(
            {
                "now": time.time(),
                "began": self._began,
                "every": EVERY,
                "api": self._relay.api,
                "answered": self._answered,
                "away": {"since": self._away[0], "why": self._away[1]} if self._away else None,
                "status": self._status,
                "history": self._history.since(number),
                "host": self._figures,
                "manages": self._units.pattern if self._units else "",
            }
        )

    # Actions.

    async def _pass_on(self, request: web.Request) -> web.Response:
        code, body = await self._relay.post(
            request.path, await request.read(), request.headers.get("Authorization", "")
        )
        self._done.set()
        return web.Response(status=code, body=body, content_type="application/json")

    async def _permit(self, request: web.Request) -> None:
        """Check the visitor's token, against the token file if there is one, else by asking the daemon."""
        authorization = request.headers.get("Authorization", "")
        if not authorization:
            raise web.HTTPUnauthorized(text="managing engines needs the daemon's token")
        if self._token_file:
            try:
                with open(self._token_file, "rb") as file:
                    token = file.read(TOKEN + 1).strip()
            except OSError as error:
                raise Unavailable(f"{self._token_file}: {error.strerror}") from None
            known = bool(token) and bears_token(authorization, token)
        else:
            code, answer = await self._relay.post("/api/v1/token", b"", authorization)
            if code not in (200, 401, 403):
                raise Unavailable(f"the daemon answers {code}: {answer[:200].decode(errors='replace')}")
            known = code == 200
        if not known:
            raise web.HTTPForbidden(text="the token is wrong")

    async def _permitted_units(self, request: web.Request) -> Units:
        await self._permit(request)
        if self._units is None:
            raise web.HTTPNotFound(text="engines are not managed: start the dashboard with --manage")
        return self._units

    async def _engines(self, request: web.Request) -> web.Response:
        units = await self._permitted_units(request)
        try:
            found = await units.all()
        except NoSystemd as error:
            return json_response({"pattern": units.pattern, "problem": str(error), "units": []})
        engines = [unit._asdict() | await asyncio.to_thread(self._settings, unit.file) for unit in found]
        return json_response({"pattern": units.pattern, "problem": "", "units": engines})

    def _settings(self, file: str) -> dict[str, object]:
        if not file:
            return {"version": "", "fields": [], "problem": f"it has no environment file in {self._folder.path}"}
        try:
            text, version = self._folder.read(file)
            return {"version": version, "fields": engine_fields.read(text), "problem": ""}
        except KVCacheError as error:
            return {"version": "", "fields": [], "problem": str(error)}

    async def _order(self, request: web.Request) -> web.Response:
        units = await self._permitted_units(request)
        name, verb = request.match_info["name"], request.match_info["verb"]
        await units.order(name, verb)
        log.warning("%s %s, asked by the token's bearer at %s", verb, name, request.remote)
        return json_response({"name": name, "verb": verb})

    async def _edit(self, request: web.Request) -> web.Response:
        units = await self._permitted_units(request)
        edit = decode(await request.read(), Edit)
        unit = await units.get(request.match_info["name"])
        if not unit.file:
            raise BadArgument(f"{unit.name} has no environment file in {self._folder.path}")
        version = await asyncio.to_thread(self._folder.change, unit.file, edit.version, edit.values)
        log.warning("%s changed, asked by the token's bearer at %s", self._folder.path / unit.file, request.remote)
        return json_response({"version": version})


def _failed(error: Exception) -> None:
    log.error("a request failed inside the dashboard: %s", error, exc_info=error)


def _static(body: bytes, kind: str) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset=None if kind == "image/svg+xml" else "utf-8")

    return handler


def _from_our_page(handler: Callable[[web.Request], Awaitable[web.Response]]) -> Handler:
    """Refuse requests that a page of another site could have sent (cross-site request forgery)."""

    async def checked(request: web.Request) -> web.StreamResponse:
        if request.headers.get(HEADER) != "1":
            raise web.HTTPForbidden(text=f"actions need the header {HEADER}: 1")
        return await handler(request)

    return checked
