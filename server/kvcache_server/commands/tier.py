"""`kvcache-server tier`: run a tier below the cache, as a separate program without any of the daemon's code."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from kvcache_proto.messages import SECOND, WRITE_POLICIES
from kvcache_server.commands.options import endpoint_option


@click.command()
@click.argument("url", envvar="KVCACHE_TIER_URL")
@endpoint_option
@click.option("--name", help="What status and metrics call it.  [default: the URL's scheme]")
@click.option(
    "--writes",
    type=click.Choice(WRITE_POLICIES),
    default=SECOND,
    show_default=True,
    help="When blocks are written to it: once they are found, or as soon as they are stored.",
)
def command(url: str, endpoint: str, name: str | None, writes: str) -> None:
    """Keep blocks in a store below the cache, too: URL says which.

    \b
    disk:/var/cache/kvcache?size=500GiB
    redis://host:6379/    (rediss, unix; Valkey)
    s3://bucket/prefix    (gs, az)
    mooncake://master-host:50051/

    It must run as the daemon's user. It waits for a daemon that is not there yet. A URL with a password belongs in
    $KVCACHE_TIER_URL, because other users can see a command's arguments.
    """
    arguments = ["--endpoint", endpoint, "--writes", writes, *(["--name", name] if name else [])]
    run_tier_module("__main__", url, *arguments)


def run_tier_module(module: str, url: str, *arguments: str) -> NoReturn:
    """Replace this process by a program of the package of tiers."""
    os.environ["KVCACHE_TIER_URL"] = url
    os.execv(sys.executable, [sys.executable, "-m", f"kvcache_tiers.{module}", *arguments])
