"""`kvcache-server plan`: sizes a model's KV cache for a host and its devices, and prints the flags to paste."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from kvcache_proto.errors import ConfigError
from kvcache_proto.sizes import format_size, parse_size
from kvcache_server.config import read_file
from kvcache_tools.plan.figures import Options, figures

RUNNING = (
    "The KV of each running request must fit on the device: the host holds the KV of requests that are not running and "
    "does not make longer requests possible. Counting host blocks towards vLLM's check of max_model_len is not safe: a "
    "step reads all of a request's KV from the device, so a request that is admitted but does not fit is preempted "
    "forever, or crashes the engine."
)


def load_config(path: str) -> tuple[object, str]:
    """Return the parsed config.json at `path`, a file or a model's folder, and the model's name. Raises ConfigError."""
    file = Path(os.path.join(path, "config.json") if os.path.isdir(path) else path)
    data = read_file(str(file))
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from None
    name = config.get("_name_or_path") if isinstance(config, dict) else ""
    stem = file.absolute().parent.name if file.name == "config.json" else file.stem
    return config, str(name or stem or "model")


def _sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(given)
    for key in ("ram", "leave", "page_size", "device", "weights", "overhead", "kv_memory"):
        try:
            found[key] = parse_size(given[key]) if given[key] is not None else None
        except ConfigError as error:
            raise ConfigError(f"--{key.replace('_', '-')}: {error}") from None
    return {key: value for key, value in found.items() if value is not None}


@click.command()
@click.argument("config_json", metavar="CONFIG_JSON")
@click.option("--tp", type=int, help="Tensor-parallel ranks of an engine.  [default: 1]")
@click.option(
    "--block-size",
    "block_tokens",
    type=int,
    help="Tokens per cached block; with KV events from the engine, its own block size.  [default: 128]",
)
@click.option("--engine-block-size", "engine_block", type=int, help="vLLM's own --block-size.  [default: 16; MLA 64]")
@click.option("--ram", metavar="SIZE", help="Memory of the host.  [default: 512GiB]")
@click.option("--leave", metavar="SIZE", help="Memory that the region leaves free.  [default: a rule of thumb]")
@click.option("--engines", type=int, help="Engines on the host, for --leave.  [default: 1]")
@click.option("--page-size", metavar="SIZE", help="As for serve.")
@click.option("--kv-dtype", type=click.Choice(["auto", "bf16", "fp8"]), help="Type of the cache.  [default: auto]")
@click.option("--device-memory", "device", metavar="SIZE", help="Memory of one device.  [default: 80GiB]")
@click.option("--utilization", type=float, help="vLLM's --gpu-memory-utilization.  [default: 0.92]")
@click.option("--weights", metavar="SIZE", help="Weights of the whole model.  [default: estimated]")
@click.option("--overhead", metavar="SIZE", help="Activations and graphs on a device.  [default: 4GiB]")
@click.option(
    "--kv-memory", metavar="SIZE", help='"Available KV cache memory" in vLLM\'s log; replaces the four options above.'
)
@click.option("--length", type=int, help="Tokens per conversation.  [default: 8192]")
@click.option("--max-num-batched-tokens", "batched_tokens", type=int, help="As for vLLM.  [default: 8192]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes are in bytes.")
def command(config_json: str, as_json: bool, **given: Any) -> None:
    """Plan the memory of host and device for a model. CONFIG_JSON is its config.json or the folder that contains it.

    This is arithmetic: nothing is loaded or downloaded.
    """
    config, name = load_config(config_json)
    found = figures(config, name, Options(**_sizes(given)))
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(describe(found)))


def describe(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the plan as text."""
    model, kv, host = found["model"], found["kv"], found["host"]
    yield (
        f"{model['name']}: {model['layers']} layers ({', '.join(model['kinds'])}), TP {model['tp']}, "
        f"KV in {model['kv_dtype']}"
    )
    if kv["token_bytes"]:
        yield f"  per token {format_size(kv['token_bytes']):>10}   layers that keep all tokens, all ranks"
    yield (
        f"  per block {format_size(kv['block_bytes']):>10}   {kv['block_tokens']} tokens, "
        f"{kv['shards']} shard{'s' * (kv['shards'] > 1)} of {format_size(kv['shard_bytes'])}"
    )
    if kv["copies"] > 1:
        yield f"            KV heads are fewer than ranks: each is kept {kv['copies']:g} times"
    for suffix in kv["suffixes"]:
        what = f"{suffix['layers']} layers, {suffix['kind']}" + f" {suffix['window']:,} tokens" * (suffix["window"] > 0)
        yield f"  saved     {format_size(suffix['bytes']):>10}   {what}: at the end of a prompt" + (
            f", and at every {suffix['checkpoint_tokens']:,} tokens in it" if suffix["window"] else ""
        )
    yield from _describe_host(host)
    yield from _describe_device(found)
    yield from _describe_paste(found)


def _describe_host(host: Mapping[str, Any]) -> Iterator[str]:
    rule = host["leave_rule"]
    why = "as given"
    if not rule["given"]:
        why = f"{rule['share']:.0%}, at least {format_size(rule['least'])}, and {format_size(rule['a_rank'])} per rank"
    yield ""
    yield f"host, {format_size(host['ram_bytes'])}"
    index = format_size(host["index_bytes"])
    yield f"  left      {format_size(host['leave_bytes']):>10}   {why}; the daemon itself takes {index}"
    yield f"  size      {format_size(host['size_bytes']):>10}   {host['unused_share']:.1%} of it unusable for blocks"
    yield f"  blocks    {host['blocks']:>10,}   {host['tokens']:,} tokens"
    yield f"  holds     {host['conversations']:>10,}   conversations of {host['length']:,} tokens"
    if more := host["compressed"]:
        yield f"            {more['conversations']:>10,}   on NVIDIA GPUs, where they are compressed"
    if host["size_bytes"] > host["ram_bytes"] // 2:
        yield "            tmpfs is limited to half of the memory by default: mount -o remount,size=... /dev/shm"


def _describe_device(found: Mapping[str, Any]) -> Iterator[str]:
    device, engine = found["device"], found["engine"]
    yield ""
    weights = format_size(device["weights_bytes"]) + " (estimated)" * device["weights_estimated"]
    if device["kv_bytes_given"]:
        yield "device, with the KV memory given"
    else:
        yield (
            f"device, {format_size(device['bytes'])} x {device['utilization']:g}, weights {weights}, "
            f"{format_size(device['overhead_bytes'])} for activations"
        )
    yield f"  {'':<34}{'bf16':>12}{'fp8':>12}"
    rows = (
        ("KV memory", "kv_bytes", lambda value: format_size(value) if value > 0 else "none"),
        ("blocks", "blocks", "{:,}".format),
        ("max_model_len", "longest", "{:,}".format),
        (f"requests of {device['length']:,} tokens at once", "at_once", "{:,}".format),
    )
    for label, key, form in rows:
        yield f"  {label:<34}{form(device['bf16'][key]):>12}{form(device['fp8'][key]):>12}"
    kinds = [f"{group['layers']} {group['kind']}" for group in engine["groups"]]
    block = format_size(engine["bytes_per_block"])
    yield f"  blocks of {engine['block_size']} tokens, {block}; groups of layers: {', '.join(kinds)}"
    if not device["bf16"]["longest"] and not device["fp8"]["longest"]:
        yield "  the weights leave no room: use more ranks (--tp) or a larger device"


def _describe_paste(found: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "paste"
    yield "  " + found["paste"]["daemon"]
    yield "  " + found["paste"]["engine"]
    yield ""
    if found["kv"]["suffixes"]:
        yield (
            "The connector needs vLLM 0.32 or later for this model. Before, it declines models with several kinds of "
            "layers; without states, --disable-hybrid-kv-cache-manager makes all layers keep all tokens."
        )
    yield RUNNING
