"""The common parts of the daemon's and the dashboard's HTTP servers: JSON in and out, and errors in one form."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from kvcache_proto.errors import BadArgument, ClientError, KVCacheError, Unavailable
from kvcache_server.http import schema

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware  # not in every version that we support

JSON = "application/json"
_STATUS: dict[type[KVCacheError], int] = {Unavailable: 503, BadArgument: 400, ClientError: 404}
_HEADERS = {"Server": "kvcache-server", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_Body = TypeVar("_Body")


def json_response(answer: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), status=status, content_type=JSON)


def decode(body: bytes, kind: type[_Body]) -> _Body:
    """Return a request's body as a `kind`. Raises BadArgument."""
    try:
        sent = msgspec.json.decode(body)
        if isinstance(sent, dict):  # in JSON Schema, 4.0 is an integer
            whole = {key: int(each) for key, each in sent.items() if isinstance(each, float) and each.is_integer()}
            sent |= whole
        return msgspec.convert(sent, kind)
    except (msgspec.MsgspecError, RecursionError) as error:  # RecursionError: brackets nested without end
        raise BadArgument(f"the body: {error}") from None


def finish_replies(
    names: Collection[str],
    failed: Callable[[Exception], object],
    *,
    headers: Mapping[str, str] | None = None,
    statuses: Mapping[type[KVCacheError], int] | None = None,
    answered: Callable[[int], object] = lambda status: None,
    not_found: str = "",
) -> Middleware:
    """Return a middleware that refuses foreign hosts, turns exceptions into JSON, and sets the headers of all replies.

    Args:
        names: host names by which the server may be addressed, in lower case, besides its addresses.
        failed: called with each defect of ours, which is answered with 500.
        headers: headers of every reply, besides the common ones.
        statuses: statuses of further errors; the first class that an error is an instance of counts.
        answered: called with the status of every reply.
        not_found: text for unknown paths.
    """
    of_errors, common = {**(statuses or {}), **_STATUS}, _HEADERS | dict(headers or {})

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        response: web.StreamResponse
        try:
            if not is_ours(host, names):
                raise web.HTTPMisdirectedRequest(text=f"Host {host!r}: use the address, or localhost")
            response = await handler(request)
        except web.HTTPException as error:
            text = not_found if error.status == 404 and not_found else error.text or error.reason
            response = _error(error.status, error.reason.lower().replace(" ", "_"), text)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except KVCacheError as error:
            status = next((status for kind, status in of_errors.items() if isinstance(error, kind)), 500)
            response = _error(status, error.code, str(error))
        except Exception as error:  # noqa: BLE001 - a defect of ours is answered and logged; other requests go on
            failed(error)
            response = _error(500, "internal", f"{type(error).__name__}: {error}")
        if response.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        response.headers.update(common)
        response.force_close()  # one request per connection: see connection_limiter.py
        answered(response.status)
        return response

    return middleware


def is_ours(host: str, names: Collection[str]) -> bool:
    """Return True if `host` is an address or one of `names`, which are in lower case.

    Against DNS rebinding: another site can make its own host name resolve to this host and let its page read our
    answers, but it cannot do that with an address.
    """
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def make_runner(app: web.Application, logger: logging.Logger) -> web.AppRunner:
    """Return a runner of `app` for connections of one request each; aiohttp logs to `logger`."""
    return web.AppRunner(
        app,
        access_log=None,
        logger=logger,
        auto_decompress=False,  # a small body could become a large one
        lingering_time=0,
        handler_cancellation=True,
    )


def _error(status: int, code: str, message: Any) -> web.Response:
    return json_response(schema.Error(code, str(message)), status)
