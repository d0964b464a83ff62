"""The daemon's HTTP API, as the dashboard asks it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvcache_proto.errors import ConfigError, Unavailable

SECONDS = 10.0
MOST = 32 << 20  # bytes of an answer


class _Daemon(msgspec.Struct):
    pid: int
    region: str


class _Pool(msgspec.Struct):
    region_id: str
    used_bytes: int


class _Space(msgspec.Struct):
    id: str
    lost_blocks: int
    saved_bytes: int


class _Report(msgspec.Struct):
    """What the dashboard itself reads of a report; the page reads more, and shows a dash where there is none."""

    daemon: _Daemon
    life: int
    pool: _Pool
    counters: dict[str, int]
    namespaces: list[_Space]
    told: dict[str, int] = {}


class Relay:
    """Asks one daemon. Between `open` and `close`, within one loop."""

    def __init__(self, api: str) -> None:
        """Raises ConfigError where `api` is no URL, or one to which a token must not be sent in the clear."""
        self.api = api.rstrip("/")
        try:
            parts = urlsplit(self.api)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            parts, host, port = urlsplit(""), "", None
        if (
            parts.scheme not in ("http", "https")
            or not host
            or parts.path
            or parts.query
            or parts.username
            or port == 0
        ):
            raise ConfigError(f"--api {api}: a URL, as in http://127.0.0.1:9464")
        if parts.scheme == "http" and not _is_loopback(host):
            raise ConfigError(f"--api {api}: the token would travel in the clear: loopback, or https")
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS), auto_decompress=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def status(self) -> dict[str, Any]:
        """Return all figures. Raises Unavailable."""
        code, body = await self._ask("GET", "/api/v1/status", b"", {})
        if code != 200:
            raise Unavailable(f"it answers {code} to /api/v1/status")
        try:
            found = msgspec.json.decode(body, type=dict[str, Any])
            msgspec.convert(found, _Report)
        except (msgspec.MsgspecError, RecursionError) as error:  # RecursionError: brackets without end
            raise Unavailable(f"what answers is no kvcache-server, or another version's: {error}") from None
        return found

    async def post(self, path: str, body: bytes, authorization: str) -> tuple[int, bytes]:
        """Have it do something in the name of who has that authorization. Raises Unavailable."""
        return await self._ask("POST", path, body, {"Authorization": authorization} if authorization else {})

    async def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        assert self._session is not None
        try:
            async with self._session.request(
                method, self.api + path, data=body or None, headers=headers, allow_redirects=False
            ) as response:
                answer = await response.content.read(MOST)
                while not response.content.at_eof() and len(answer) < MOST:
                    answer += await response.content.read(MOST - len(answer))
                return response.status, answer
        except asyncio.TimeoutError:
            raise Unavailable(f"no answer within {SECONDS:.0f} s from {self.api}") from None
        except (aiohttp.ClientError, OSError) as error:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
            raise Unavailable(f"{self.api}: {why}") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
