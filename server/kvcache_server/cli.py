"""The command line. Each kind of failure has its own exit code, and a message with the remedy."""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import time
from typing import Any

import click

from kvcache_proto import __version__
from kvcache_proto.errors import (
    ConfigError,
    EndpointLost,
    EndpointTaken,
    KVCacheError,
    NotPermitted,
    RegionError,
    Unavailable,
)
from kvcache_proto.sizes import format_size
from kvcache_proto.text import escaped
from kvcache_server import signals
from kvcache_server.commands.options import endpoint_option
from kvcache_server.config import load, read_file, settings

PROGRESS_EVERY = 5.0  # seconds between lines while memory is made

EXIT_CODES: tuple[tuple[type[KVCacheError], int, str], ...] = (
    (ConfigError, 2, "an invalid flag, file or environment variable"),
    (EndpointTaken, 3, "another daemon serves the endpoint"),
    (Unavailable, 4, "no daemon answers at the endpoint"),
    (RegionError, 5, "the region does not fit this host, or strict is set and the previous region cannot be trusted"),
    (NotPermitted, 6, "no permission"),
    (EndpointLost, 7, "the daemon's sockets were removed or replaced"),
)
_LATER = {
    "bench": "kvcache_tools.bench",
    "dashboard": "kvcache_tools.dashboard",
    "demo": "kvcache_tools.demo",
    "doctor": "kvcache_tools.doctor",
    "install-service": "kvcache_tools.install_service",
    "pin": "kvcache_server.commands.pins:pin",
    "pins": "kvcache_server.commands.pins:pins",
    "plan": "kvcache_tools.plan",
    "prove": "kvcache_tools.prove",
    "record": "kvcache_tools.record",
    "replay": "kvcache_tools.replay",
    "tier": "kvcache_server.commands.tier",
    "top": "kvcache_server.commands.top",
    "unpin": "kvcache_server.commands.pins:unpin",
    "why": "kvcache_server.commands.why",
}


class Commands(click.Group):
    """The commands; those that need more imports than the daemon are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_LATER])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _LATER:
            module, _, name = _LATER[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(module), name or "command")
            return command
        return super().get_command(ctx, cmd_name)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success, 1 other failures, "
    + ", ".join(f"{code} {why}" for _, code, why in EXIT_CODES)
    + ".",
)
@click.version_option(__version__, prog_name="kvcache-server")
def commands() -> None:
    """A host daemon that keeps the KV cache of LLM engines in shared memory."""


def _flags(command: click.Command) -> click.Command:
    """Add a flag for each setting to `command`, with the description in the struct."""
    for row in settings():
        default = row.default.replace("`", "")
        # `--strict` means `--strict true`.
        optional: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if row.type == "bool" else {}
        if row.name == "tier":
            optional = {"multiple": True, "callback": lambda context, option, given: given or None}
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
@click.option("--fresh", is_flag=True, help="Discard the region of the previous daemon and start empty.")
def serve(path: str | None, fresh: bool, **flags: Any) -> None:
    """Run the daemon in the foreground.

    It reuses what the previous daemon cached, and stops at SIGTERM or Ctrl-C.
    """
    # The imports may start threads (numpy's). They inherit the blocked signals, so that none is delivered to them.
    signals.block()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one per processor would be idle here
    from kvcache_server import logs
    from kvcache_server.daemon import lifecycle

    config = load(path, flags=flags)
    logs.set_up(config.log_level, config.log_format)
    bar = sys.stderr.isatty() and config.log_format == "text"
    lifecycle.serve(config, lambda: load(path, flags=flags), fresh, _progress_bar() if bar else _progress_lines())


_flags(serve)


def _progress_lines() -> Any:
    """Return a callback that logs one line at once, and one every few seconds."""
    said = -math.inf

    def progress(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now >= said + PROGRESS_EVERY:
            said = now
            logging.getLogger(__name__).info("preparing memory: %s of %s", format_size(done), format_size(total))

    return progress


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


@commands.command()
@endpoint_option
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--compare",
    "other",
    metavar="FILE",
    help="Show only which namespaces are shared with another host, or why not. FILE has the output of `status --json` "
    "there; `-` is standard input.",
)
def status(endpoint: str, as_json: bool, other: str | None) -> None:
    """Show what is cached and which engines are attached."""
    from kvcache_server.admin_client import AdminClient
    from kvcache_server.commands import sharing
    from kvcache_server.commands.describe import describe, json_text

    if other is not None and as_json:
        raise ConfigError("status: --compare has no output in JSON: leave --json out")
    there = sharing.read(*_content(other)) if other is not None else None
    with AdminClient(endpoint, "status") as admin:
        figures = admin.status()
    if there is not None:
        click.echo("\n".join(map(escaped, sharing.between(sharing.spaces_of(figures), there))))
    else:
        click.echo(json_text(figures) if as_json else describe(figures))


def _content(path: str) -> tuple[bytes, str]:
    """Return the content of a file, or of standard input for `-`, and its name. Raises ConfigError."""
    return (sys.stdin.buffer.read(), "standard input") if path == "-" else (read_file(path), path)


@commands.command()
@endpoint_option
@click.option("--namespace", default="", metavar="ID", help="Clear only this namespace; `status` lists the ids.")
def clear(endpoint: str, namespace: str) -> None:
    """Forget every cached block."""
    from kvcache_server.admin_client import AdminClient

    with AdminClient(endpoint, "clear") as admin:
        click.echo(f"cleared {admin.clear(namespace):,} blocks")


@commands.group()
def session() -> None:
    """Act on one session; `status` lists them."""


@session.command("fence-off")
@endpoint_option
@click.argument("number", type=int)
def fence_off(endpoint: str, number: int) -> None:
    """End session NUMBER, which is away but still holds slots because its process exists.

    Use this only for a stuck process that will never write again: anything it still wrote would corrupt others' blocks.
    """
    from kvcache_server.admin_client import AdminClient

    with AdminClient(endpoint, "fence-off") as admin:
        click.echo(f"session {number} is fenced off: {admin.fence_off(number):,} reservations ended")


@commands.command()
@click.option("--config", "path", metavar="FILE", help="As for serve.")
@click.option("--endpoint", metavar="ENDPOINT", help="As for serve.")
@click.option("--region-dir", metavar="FOLDER", help="As for serve.")
def discard(path: str | None, endpoint: str | None, region_dir: str | None) -> None:
    """Free the memory that a stopped daemon has kept.

    The cached blocks are lost.
    """
    from kvcache_server.storage.folder import EndpointLock
    from kvcache_server.storage.warm_start import discard as remove

    config = load(path, flags={"endpoint": endpoint, "region_dir": region_dir})
    lock = EndpointLock(config.endpoint)
    try:
        click.echo("discarded" if remove(config, lock.folder) else f"nothing to discard at {config.endpoint}")
    finally:
        lock.release()


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        try:
            commands(prog_name="kvcache-server", standalone_mode=True)
        finally:
            sys.stdout.flush()  # the last chance to report a full disk
    except KVCacheError as error:
        click.echo(f"kvcache-server: {escaped(str(error))}", err=True)
        sys.exit(next((code for kind, code, _ in EXIT_CODES if isinstance(error, kind)), 1))
    except OSError as error:
        if sys.argv[1:2] == ["serve"]:  # a defect of the daemon: keep the traceback
            raise
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"kvcache-server: {escaped(f'{where}{error.strerror or error}')}", err=True)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - at exit, its buffer would be flushed, and fail, again
        sys.exit(1)
