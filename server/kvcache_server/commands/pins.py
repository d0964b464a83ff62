"""`kvcache-server pin`, `unpin` and `pins`: prompts that an operator keeps cached."""

from __future__ import annotations

import click

from kvcache_proto import messages as m
from kvcache_proto.errors import BadArgument
from kvcache_proto.sizes import format_size
from kvcache_proto.text import escaped
from kvcache_proto.types import MAX_HASH_BYTES, MAX_NAME, MIN_HASH_BYTES
from kvcache_server.admin_client import AdminClient
from kvcache_server.commands.describe import json_text, table
from kvcache_server.commands.options import endpoint_option


@click.command()
@click.argument("request", default="")
@endpoint_option
@click.option(
    "--hash",
    "block",
    default="",
    metavar="HASH",
    help="Instead of REQUEST: the hash of the prompt's last block in hexadecimal digits, or the last 16 or more of "
    "these digits; or the number by which a KV event names the block.",
)
@click.option("--tokens", type=click.IntRange(1), help="Pin only this many tokens, from the first one on.")
@click.option("--namespace", default="", metavar="ID", help="The namespace to search; `status` lists the ids.")
@click.option("--label", default="", help="A name for `pins` to show.")
def pin(request: str, endpoint: str, block: str, tokens: int | None, namespace: str, label: str) -> None:
    """Keep a prompt cached until it is unpinned.

    REQUEST is the id in vLLM's answer, or a part of it that no other request's id contains; the daemon remembers
    requests that had a miss. To pin a system prompt, send a request that begins with it, and give its length in
    --tokens: only whole blocks are pinned. Pins survive restarts of the daemon.
    """
    if bool(request) == bool(block):
        raise click.UsageError("give either REQUEST or --hash")
    if max(len(request), len(label)) > MAX_NAME:
        raise click.UsageError(f"names have at most {MAX_NAME} characters")
    with AdminClient(endpoint, "pin") as admin:
        found: m.Chained = admin.ask(m.Chain(0, b"", request, _hash(block) if block else b"", namespace))
        if len(found.matches) != 1:
            raise click.ClickException(_not_one(request or block, found, by_request=bool(request)))
        blocks = len(found.hashes) if tokens is None else tokens // found.block_tokens
        if not blocks:
            raise click.ClickException(f"no whole block: a block has {found.block_tokens} tokens")
        hashes = found.hashes[:blocks]
        made: m.Pinned = admin.ask(m.Pin(0, b"", found.namespace, hashes, found.group, label or request[:MAX_NAME]))
    click.echo(
        f"pin {made.pin}: {len(hashes):,} blocks of {found.block_tokens} tokens in namespace {found.namespace} "
        f"({escaped(found.model)}), {made.blocks:,} of them cached now"
    )


def _hash(text: str) -> bytes:
    try:
        if text.isdecimal() and len(text) != 2 * MIN_HASH_BYTES and int(text) < 1 << 64:
            return int(text).to_bytes(8, "big")
        found = bytes.fromhex(text.removeprefix("0x"))
        if not MIN_HASH_BYTES <= len(found) <= MAX_HASH_BYTES:
            raise ValueError
    except ValueError:
        digits = f"{2 * MIN_HASH_BYTES} to {2 * MAX_HASH_BYTES} hexadecimal digits"
        raise BadArgument(f"hash {text!r}: {digits}, or a number below 2^64") from None
    return found


def _not_one(asked: str, found: m.Chained, by_request: bool) -> str:
    if by_request and found.matches:
        return f"{asked!r} is part of the ids of several requests: {', '.join(map(escaped, found.matches))}"
    if by_request:
        return f"no request {asked!r} is remembered (`why` of any other id lists the latest), or its namespace is gone"
    if found.matches:
        return f"{asked} is in several namespaces, give one with --namespace: {', '.join(found.matches)}"
    return f"no cached block has the hash {asked}"


@click.command()
@click.argument("number", type=click.IntRange(1), required=False)
@endpoint_option
@click.option("--all", "every", is_flag=True, help="End all pins.")
def unpin(number: int | None, endpoint: str, every: bool) -> None:
    """End pin NUMBER; `pins` lists them.

    The blocks stay cached until their room is needed.
    """
    if (number is None) != every:
        raise click.UsageError("give either NUMBER or --all")
    with AdminClient(endpoint, "unpin") as admin:
        click.echo(f"pins ended: {admin.ask(m.Unpin(0, b'', number or 0)).pins:,}")


@click.command()
@endpoint_option
@click.option("--json", "as_json", is_flag=True, help="Print the pins as JSON.")
def pins(endpoint: str, as_json: bool) -> None:
    """List the pinned prompts."""
    with AdminClient(endpoint, "pins") as admin:
        listed = admin.status().hints.pins
    rows = [
        (
            *(str(each.pin), each.namespace, each.label),
            *(f"{each.blocks:,}", f"{each.wanted:,}", format_size(each.bytes)),
        )
        for each in listed
    ]
    head = ("pin", "namespace", "label", "cached", "blocks", "size")
    click.echo(json_text(listed) if as_json else "\n".join(table(head, rows, left=3)))
