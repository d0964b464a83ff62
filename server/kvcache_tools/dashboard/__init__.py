"""`kvcache-server dashboard`: a web page over the daemon's HTTP API, served by a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import click
from aiohttp import web

from kvcache_proto.errors import ConfigError
from kvcache_server import logs
from kvcache_server.config import parse_address
from kvcache_server.http import connection_limiter
from kvcache_server.http.replies import make_runner
from kvcache_server.rates import Rate
from kvcache_tools.dashboard.app import Dashboard
from kvcache_tools.dashboard.env_folder import EnvFolder
from kvcache_tools.dashboard.host_figures import HostFigures
from kvcache_tools.dashboard.relay import Relay
from kvcache_tools.dashboard.units import Units

SECONDS = 60.0  # for which a connection may last: the daemon and systemd take up to 10 s per request


@click.command()
@click.option("--api", default="http://127.0.0.1:9464", show_default=True, help="The daemon's `http` address.")
@click.option(
    "--listen", default="127.0.0.1:9465", show_default=True, help="Address and port of the page, on loopback."
)
@click.option(
    "--token-file",
    default="",
    metavar="FILE",
    help="Check visitors' tokens against this file, so that engines can be managed while the daemon is down; by "
    "default, the daemon checks them.",
)
@click.option("--manage", metavar="PATTERN", help="systemd units of engines to list, start and edit, as in 'vllm@*'.")
@click.option("--env-folder", default="/etc/vllm", show_default=True, help="Folder of their environment files.")
@click.option("--user", "of_user", is_flag=True, help="Manage units of the user's own systemd.")
def command(api: str, listen: str, token_file: str, manage: str | None, env_folder: str, of_user: bool) -> None:
    """Show the cache on a web page.

    The page is live and covers the last hour. Actions need the daemon's token.
    """
    address, port = parse_address(listen)
    if not address.is_loopback:
        raise ConfigError(
            f"--listen {listen}: only loopback addresses; from elsewhere, use ssh -L 9465:127.0.0.1:{port} HOST"
        )
    if token_file and not os.access(token_file, os.R_OK):
        raise ConfigError(f"--token-file {token_file}: cannot be read")
    folder = EnvFolder(env_folder)
    units = Units(manage, folder, of_user) if manage is not None else None
    logs.set_up("info", "text")
    dashboard = Dashboard(Relay(api), HostFigures(), token_file, units, folder)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(dashboard.app(), connection_limiter.listen("--listen", address, port)))


async def _serve(app: web.Application, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    lines = Rate(connection_limiter.LINES_A_MINUTE / 60, connection_limiter.LINES_A_MINUTE)
    logger = connection_limiter.quiet_logger(f"{__name__}.aiohttp", lambda: lines.allow(None, loop.time()))
    runner = make_runner(app, logger)
    await runner.setup()
    assert runner.server is not None
    limiter = connection_limiter.ConnectionLimiter(loop, listener, runner.server, SECONDS)
    try:
        click.echo(f"dashboard at {connection_limiter.url_of(listener)}")
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        await stopped.wait()
    finally:
        limiter.close()
        await runner.cleanup()
