"""The dashboard's client of the daemon's HTTP API."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvcache_proto.errors import ConfigError, Unavailable
from kvcache_server.status import Status

SECONDS = 10.0
MOST = 32 << 20  # bytes of an answer


class Relay:
    """A client of one daemon, to be used between `open` and `close`, in one loop."""

    def __init__(self, api: str) -> None:
        """Raises ConfigError if `api` is not a URL, or one to which the token would be sent unencrypted."""
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
            raise ConfigError(f"--api {api}: a URL expected, as in http://127.0.0.1:9464")
        if parts.scheme == "http" and not _is_loopback(host):
            raise ConfigError(f"--api {api}: the token would be sent unencrypted: use loopback or https")
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(SECONDS), auto_decompress=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def status(self) -> Status:
        """Return the daemon's figures. Raises Unavailable."""
        code, body = await self._ask("GET", "/api/v1/status", b"", {})
        if code != 200:
            raise Unavailable(f"it answers /api/v1/status with {code}")
        try:
            return msgspec.json.decode(body, type=Status)
        except (msgspec.MsgspecError, RecursionError) as error:  # RecursionError: brackets nested without end
            raise Unavailable(f"not the answer of a kvcache-server of this version: {error}") from None

    async def post(self, path: str, body: bytes, authorization: str) -> tuple[int, bytes]:
        """Forward an action with the visitor's `Authorization` header; return status and body. Raises Unavailable."""
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
            raise Unavailable(f"{self.api} did not answer within {SECONDS:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
            raise Unavailable(f"{self.api}: {why}") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
