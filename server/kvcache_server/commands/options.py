"""Command line options that several commands share."""

from __future__ import annotations

import click

from kvcache_proto.endpoint import default_endpoint

endpoint_option = click.option(
    "--endpoint",
    type=str,
    default=default_endpoint,
    metavar="ENDPOINT",
    help="The daemon's endpoint.  [default: $KVCACHE_ENDPOINT, or that of `serve` without flags]",
)
