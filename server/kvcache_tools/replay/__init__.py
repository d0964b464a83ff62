"""`kvcache-server replay`: runs a trace through the daemon's own index, to show how much sharing would help."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kvcache_proto.errors import ConfigError
from kvcache_proto.sizes import format_size, parse_size
from kvcache_server.core.eviction.policy import POLICIES, WORTH
from kvcache_tools.plan import load_config
from kvcache_tools.plan.figures import Options, figures
from kvcache_tools.replay.simulation import ROUTINGS, Setup, distinct, replay, size_for
from kvcache_tools.replay.trace import BLOCK_TOKENS, read_trace

BAR = 60  # characters of a hit ratio of 100 %
_PARTS = ("device", "host", "misses")  # where the shared cache's engines find the blocks
FACTORS = "0.05x,0.1x,0.2x,0.4x,0.8x"


def parse_capacities(text: str, blocks: int, setup: Setup, sized: bool) -> list[int]:
    """Return the bytes for "10GiB,50GiB", or for "0.5x" of the size of all `blocks` of the trace. Raises
    ConfigError."""
    found = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        if each.endswith("x"):
            try:
                factor = float(each[:-1])
            except ValueError:
                factor = 0.0
            if not 0 < factor <= 1000:
                raise ConfigError(f"--capacity {each!r}: a size or a factor above 0 expected, as in 0.5x")
            found.append(size_for(round(factor * blocks), setup))
        elif sized:
            found.append(parse_size(each))
        else:
            raise ConfigError(f"--capacity {each}: give the size of a block, by --model CONFIG_JSON or --block-bytes")
    if not found:
        raise ConfigError(f"--capacity {text!r}: sizes or factors expected, as in {FACTORS}")
    return sorted(set(found))


@click.command()
@click.argument("path", metavar="TRACE")
@click.option("--capacity", default=FACTORS, show_default=True, help="Sizes, or multiples of the whole trace's size.")
@click.option("--engines", type=click.IntRange(1, 1024), default=8, show_default=True, help="Number of engines.")
@click.option("--model", metavar="CONFIG_JSON", help="Model, for the size of a block: its config.json or folder.")
@click.option("--tp", type=int, default=1, show_default=True, help="As for plan.")
@click.option("--kv-dtype", type=click.Choice(["auto", "bf16", "fp8"]), default="auto", help="As for plan.")
@click.option("--block-bytes", metavar="SIZE", help="Size of a block, instead of --model.")
@click.option(
    "--block-tokens", type=click.IntRange(1), default=BLOCK_TOKENS, show_default=True, help="Tokens per block."
)
@click.option(
    "--routing",
    type=click.Choice(ROUTINGS),
    default=ROUTINGS[0],
    show_default=True,
    help="Which engine serves a request: each in turn, or the one that had its first block before.",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(POLICIES),
    multiple=True,
    default=(WORTH,),
    show_default=True,
    help="How blocks are chosen for eviction. Give it several times to compare policies of the shared cache.",
)
@click.option(
    "--device-blocks",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Blocks in the device cache of each engine, above these caches.",
)
@click.option(
    "--device-aware",
    type=click.Choice(["auto", "off"]),
    default="auto",
    show_default=True,
    help="As the connector's setting: whether engines report the blocks that their devices evict.",
)
@click.option("--page-size", metavar="SIZE", help="As for serve.")
@click.option("--png", metavar="FILE", help="Draw a chart; needs pip install 'kvcache-server[replay]'.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(  # noqa: PLR0913 - one for each option
    path: str,
    capacity: str,
    engines: int,
    model: str | None,
    tp: int,
    kv_dtype: str,
    block_bytes: str | None,
    block_tokens: int,
    routing: str,
    policies: tuple[str, ...],
    device_blocks: int,
    device_aware: str,
    page_size: str | None,
    png: str | None,
    as_json: bool,
) -> None:
    """Replay a trace through the daemon's own index.

    TRACE has requests in Mooncake's format, plain or gzip. Each capacity is tried as one cache that all engines share,
    and divided into private caches, one per engine. No engine runs, and no block is copied. With --routing prefix, a
    conversation stays with the engine that started it.
    """
    picture = _picture() if png else None
    requests = read_trace(path, block_tokens)
    sized = bool(model or block_bytes)
    setup = Setup(
        engines,
        _block_bytes(model, tp, kv_dtype, block_bytes, block_tokens),
        block_tokens,
        routing,
        parse_size(page_size) if page_size else 0,
        tuple(dict.fromkeys(policies)),
        device_blocks,
        device_aware != "off",
    )
    sizes = parse_capacities(capacity, distinct(requests), setup, sized)
    found = replay(requests, sizes, setup, time.perf_counter, lambda line: click.echo(line, err=True))
    name = Path(path).name
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(describe(found, name, sized)))
    if picture is not None and png:
        title = f"{name}: {found['requests']:,} requests, {found['blocks']:,} blocks of {block_tokens} tokens"
        try:
            picture.draw(found, title, png, sized)
        except (OSError, ValueError) as error:  # ValueError: a format unknown to matplotlib
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"--png {png}: cannot be written: {why}") from None


def _picture() -> Any:
    try:
        return importlib.import_module("kvcache_tools.replay.plot")
    except ModuleNotFoundError as error:
        raise ConfigError(f"--png: {error.name} is missing: pip install 'kvcache-server[replay]'") from None


def _block_bytes(model: str | None, tp: int, kv_dtype: str, block_bytes: str | None, block_tokens: int) -> int:
    if block_bytes:
        return max(1, parse_size(block_bytes))
    if not model:
        return Setup().block_bytes
    config, name = load_config(model)
    options = Options(tp=tp, kv_dtype=kv_dtype, block_tokens=block_tokens, engine_block=block_tokens)
    found: int = figures(config, name, options)["kv"]["block_bytes"]
    return found


def describe(found: Mapping[str, Any], name: str, sized: bool) -> Iterator[str]:
    engines = found["engines"]
    whole = f", {format_size(found['distinct_blocks'] * found['block_bytes'])}" if sized else ""
    yield (
        f"{name}: {found['requests']:,} requests of {engines} engines, {found['blocks']:,} blocks of "
        f"{found['block_tokens']} tokens, {found['distinct_blocks']:,} of them distinct{whole}"
    )
    yield (
        f"unlimited memory: {found['unlimited']:.1%} of the blocks hit; the busiest engine requests "
        f"{found['busiest']:.1%} of them"
    )
    if found["device_blocks"]:
        yield (
            f"{found['device_blocks']:,} more blocks in the device cache of each engine, whose hits count; optimum: of "
            "one cache with the blocks of the host and of all devices"
        )
    yield ""
    yield (
        f"{'capacity':>10}{'blocks':>10}{'each of ' + str(engines):>12}{'private':>10}{'shared':>10}{'optimum':>10}"
        f"{'lookup p50':>13}{'p99':>9}"
    )
    for row in found["rows"]:
        yield (
            f"{_capacity(row, found, sized):>10}{row['blocks']:>10,}{row['private_blocks']:>12,}{row['private']:>10.1%}"
            f"{row['shared']:>10.1%}{row['optimum']:>10.1%}"
            f"{row['lookup_p50_us']:>10.1f} us{row['lookup_p99_us']:>6.0f} us"
        )
    if found["device_blocks"]:
        yield ""
        yield f"{'capacity':>10}{'blocks':>10}" + "".join(f"{name:>10}" for name in _PARTS)
        for row in found["rows"]:
            parts = "".join(f"{row[name]:>10.1%}" for name in _PARTS)
            yield f"{_capacity(row, found, sized):>10}{row['blocks']:>10,}{parts}"
    if len(found["rows"][0]["policies"]) > 1:
        names = list(found["rows"][0]["policies"])
        yield ""
        yield f"{'capacity':>10}{'blocks':>10}" + "".join(f"{name:>10}" for name in (*names, "optimum"))
        for row in found["rows"]:
            ratios = "".join(f"{each:>10.1%}" for each in (*row["policies"].values(), row["optimum"]))
            yield f"{_capacity(row, found, sized):>10}{row['blocks']:>10,}{ratios}"
    yield ""
    for row in found["rows"]:
        yield f"{_capacity(row, found, sized):>10} {_bar(row, found['unlimited'])}"
    yield f"{'':>10} █ {engines} private caches  ▓ gained by sharing  ░ gained by an optimal policy  · unlimited memory"


def _capacity(row: Mapping[str, Any], found: Mapping[str, Any], sized: bool) -> str:
    return format_size(row["bytes"]) if sized else f"{row['blocks'] / found['distinct_blocks']:.2g}x"


def _bar(row: Mapping[str, Any], unlimited: float) -> str:
    bar = ""
    for key, mark in (("private", "█"), ("shared", "▓"), ("optimum", "░")):
        bar = bar.ljust(round(row[key] * BAR), mark)
    return bar.ljust(round(unlimited * BAR), "·")
