"""The command line. Each way to fail has an exit code of its own, and its message says what helps."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import click

from kvcache_proto import __version__
from kvcache_proto.endpoint import default_endpoint
from kvcache_proto.errors import (
    ConfigError,
    EndpointLost,
    EndpointTaken,
    KVCacheError,
    NotPermitted,
    RegionError,
    Unavailable,
)
from kvcache_proto.text import escaped
from kvcache_server import signals
from kvcache_server.config import format_size, load, settings

EXIT_CODES: tuple[tuple[type[KVCacheError], int, str], ...] = (
    (ConfigError, 2, "a flag, a file or a variable that cannot be used"),
    (EndpointTaken, 3, "another daemon serves the endpoint"),
    (Unavailable, 4, "no daemon there"),
    (RegionError, 5, "the region is too large for this host, or strict is set and the last daemon's cannot be trusted"),
    (NotPermitted, 6, "no permission"),
    (EndpointLost, 7, "somebody removed its sockets"),
)
_LATER = {
    "bench": "kvcache_server.commands.bench",
    "dashboard": "kvcache_server.http.dashboard",
    "demo": "kvcache_server.commands.demo",
    "doctor": "kvcache_server.doctor",
    "install-service": "kvcache_server.commands.install_service",
    "plan": "kvcache_server.capacity",
    "record": "kvcache_server.commands.record",
    "replay": "kvcache_server.replay",
    "top": "kvcache_server.commands.top",
    "why": "kvcache_server.commands.why",
}


class Commands(click.Group):
    """The commands; those that need more than the daemon does are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LATER])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LATER:
            command: click.Command = importlib.import_module(_LATER[cmd_name]).command
            return command
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 other failures, " + ", ".join(f"{code} {why}" for _, code, why in EXIT_CODES) + ".",
)
@click.version_option(__version__, prog_name="kvcache-server")
def commands() -> None:
    """A host daemon that keeps the KV cache of LLM engines in shared memory."""


def _flags(command: click.Command) -> click.Command:
    """Give `command` a flag for each setting; the struct documents them."""
    for row in settings():
        default = row.default.replace("`", "")
        # `--strict` and `--strict true` say the same.
        optional: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if row.type == "bool" else {}
        command.params.append(
            click.Option(
                ["--" + row.name.replace("_", "-")],
                type=click.Choice(row.choices) if row.choices else str,
                metavar=None if row.choices else row.type.upper().replace(" ", "-"),
                **optional,
                help=f"{row.doc.replace('`', '')}  [default: {default}]",
            )
        )
    return command


@commands.command()
@click.option("--config", "path", metavar="FILE", help="TOML file; KVCACHE_* variables and flags override it.")
@click.option("--fresh", is_flag=True, help="Discard the region that the last daemon left, and begin empty.")
def serve(path: str | None, fresh: bool, **flags: Any) -> None:
    """Run the daemon in the foreground, until SIGTERM or Ctrl-C. It finds again what the last one cached."""
    # What is imported starts threads (numpy's), and a signal must not choose one of them: they inherit what is blocked.
    signals.block()
    from kvcache_server import logs
    from kvcache_server.daemon import lifecycle

    config = load(path, flags=flags)
    logs.set_up(config.log_level, config.log_format)
    bar = _progress_bar() if sys.stderr.isatty() and config.log_format == "text" else None
    lifecycle.serve(config, lambda: load(path, flags=flags), fresh, bar)


_flags(serve)


def _progress_bar() -> Any:
    width, shown = 40, -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        percent = done * 100 // total
        if percent != shown:
            shown = percent
            bar = "#" * (width * done // total)
            end = "\n" if done == total else ""
            click.echo(f"\rpreparing {format_size(total)} [{bar:<{width}}] {percent:3d}%{end}", err=True, nl=False)

    return progress


_endpoint_option = click.option(
    "--endpoint", metavar="ENDPOINT", help="Where the daemon is; else $KVCACHE_ENDPOINT, else the default."
)


@commands.command()
@_endpoint_option
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def status(endpoint: str | None, as_json: bool) -> None:
    """Say what the daemon holds and who is attached."""
    from kvcache_server.admin_client import AdminClient
    from kvcache_server.commands.describe import describe

    with AdminClient(endpoint or default_endpoint(), "status") as admin:
        stats = admin.stats()
    click.echo(json.dumps(stats, indent=2) if as_json else describe(stats))


@commands.command()
@_endpoint_option
@click.option("--namespace", default="", metavar="ID", help="Only this one; `status` lists the ids.")
def clear(endpoint: str | None, namespace: str) -> None:
    """Forget every cached block that nobody is reading or writing."""
    from kvcache_server.admin_client import AdminClient

    with AdminClient(endpoint or default_endpoint(), "clear") as admin:
        click.echo(f"cleared {admin.clear(namespace):,} blocks")


@commands.group()
def session() -> None:
    """What an operator may do about one session; `status` lists them."""


@session.command("fence-off")
@_endpoint_option
@click.argument("number", type=int)
def fence_off(endpoint: str | None, number: int) -> None:
    """Give up session NUMBER, which is away and keeps slots that it may be writing.

    For a process that is stuck and will never write again: what it writes after this, it writes into others' blocks.
    """
    from kvcache_server.admin_client import AdminClient

    with AdminClient(endpoint or default_endpoint(), "fence-off") as admin:
        click.echo(f"session {number} is fenced off: {admin.fence_off(number):,} reservations ended")


@commands.command()
@click.option("--config", "path", metavar="FILE", help="As for serve.")
@_endpoint_option
@click.option("--region-dir", metavar="FOLDER", help="As for serve.")
def discard(path: str | None, endpoint: str | None, region_dir: str | None) -> None:
    """Free the memory of a daemon that has stopped: its cached blocks are gone then."""
    from kvcache_server.storage.folder import EndpointLock
    from kvcache_server.storage.warm_start import discard as remove

    config = load(path, flags={"endpoint": endpoint, "region_dir": region_dir})
    lock = EndpointLock(config.endpoint)
    try:
        click.echo("discarded" if remove(config, lock.folder) else f"nothing is there of a daemon at {config.endpoint}")
    finally:
        lock.release()


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        try:
            commands(prog_name="kvcache-server", standalone_mode=True)
        finally:
            sys.stdout.flush()  # a full disk is told now, or never
    except KVCacheError as error:
        click.echo(f"kvcache-server: {escaped(str(error))}", err=True)
        sys.exit(next((code for kind, code, _ in EXIT_CODES if isinstance(error, kind)), 1))
    except OSError as error:
        if sys.argv[1:2] == ["serve"]:  # a defect of the daemon's: all that is known of it
            raise
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"kvcache-server: {escaped(f'{where}{error.strerror or error}')}", err=True)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left in it would be tried again, and told again
        sys.exit(1)
