"""The result of `kvcache-server plan`, as one value that `--json` prints and the text is made from. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvcache_proto.errors import ConfigError
from kvcache_proto.region import default_page
from kvcache_tools.plan.device import Device, device
from kvcache_tools.plan.host import (
    GIB,
    INDEX_BYTES,
    LEFT_LEAST,
    LEFT_PER_RANK,
    LEFT_SHARE,
    PAGE_INDEX_BYTES,
    check_block,
    left_for_host,
)
from kvcache_tools.plan.models import MOST, Attention, Latent, Model, State, read_model
from kvcache_tools.plan.pages import Pages, Slot, page, pages, shards, slots, stripes
from kvcache_tools.plan.room import room
from kvcache_tools.plan.weights import weight_bytes

KV_ITEMS = {"bf16": 2, "fp8": 1}
ENDLESS = 1 << 22  # tokens, if the model does not state its limit
# The connector's defaults: at each multiple within a prompt, windows are saved. The second one is for windows only.
CHECKPOINT_TOKENS, CHECKPOINT_TOKENS_ALONE = 16384, 2048
DEFAULT_BLOCK_TOKENS = 128


class Options(msgspec.Struct, frozen=True):
    """The options of `plan`; sizes are in bytes, and None is derived from the others. Raises ConfigError."""

    tp: int = 1
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    engine_block: int | None = None
    ram: int = 512 * GIB
    leave: int | None = None
    engines: int = 1
    page_size: int = 0
    kv_dtype: str = "auto"
    device: int = 80 * GIB
    utilization: float = 0.92
    weights: int | None = None
    overhead: int = 4 * GIB
    kv_memory: int | None = None
    length: int | None = None
    batched_tokens: int = 8192

    def __post_init__(self) -> None:
        counts = ("tp", "block_tokens", "engine_block", "engines", "length", "batched_tokens")
        for name in (*counts, "ram", "leave", "device", "page_size", "weights", "overhead", "kv_memory"):
            value = getattr(self, name)
            if value is None:
                continue
            least = 0 if name in ("leave", "page_size", "overhead") else 1
            if value < least:
                raise ConfigError(f"{name} {value}: at least {least}")
            if name in counts and value > MOST:
                raise ConfigError(f"{name} {value}: at most {MOST}")
        if self.kv_dtype not in ("auto", *KV_ITEMS):
            raise ConfigError(f"kv_dtype {self.kv_dtype!r}: auto, {', '.join(KV_ITEMS)}")
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization {self.utilization}: above 0, at most 1")


def figures(config: object, name: str, options: Options) -> dict[str, Any]:
    """Return the plan for the model that `config`, a parsed config.json, describes. Raises ConfigError."""
    model = read_model(config, name)
    assert isinstance(config, Mapping)
    number = shards(model, options.tp)
    engine_block = options.engine_block or (64 if _kinds(model) == {"latent"} else 16)
    if options.block_tokens % engine_block:
        raise ConfigError(f"--block-size {options.block_tokens}: a multiple of the engine's expected, {engine_block}")
    kv_dtype = _kv_dtype(model, options)
    item = KV_ITEMS[kv_dtype]
    laid_out = _pages(model, options, engine_block, item)
    block_tokens, slots_of_block = slots(model, laid_out, options.tp, item, options.block_tokens)
    shard_bytes = slots_of_block[0].bytes
    for slot in slots_of_block:
        check_block(number, slot.bytes)
    length = options.length or min(8192, model.longest or 8192)
    estimated = options.weights is None
    weights = weight_bytes(model, config, options.tp) if options.weights is None else options.weights // options.tp
    host, suffixes = _held(options, number, block_tokens, slots_of_block, length)
    compressed = None
    if kv_dtype == "bf16" and model.dtype == "bfloat16":
        _, smaller = slots(model, laid_out, options.tp, item, options.block_tokens, compress=True)
        if smaller != slots_of_block:
            more, _ = _held(options, number, block_tokens, smaller, length)
            compressed = {key: more[key] for key in ("blocks", "tokens", "conversations")}
    cuts = stripes(model, laid_out)
    devices = {kind: _device(model, options, engine_block, each, weights, length) for kind, each in KV_ITEMS.items()}
    return {
        "model": {
            "name": name,
            "layers": len(model.layers),
            "kinds": sorted(_kinds(model)),
            "dtype": model.dtype,
            "max_position_embeddings": model.longest,
            "tp": options.tp,
            "kv_dtype": kv_dtype,
        },
        "kv": {
            "token_bytes": _token_bytes(model, 1, item),
            "block_tokens": block_tokens,
            "shards": number * cuts,
            "shard_bytes": shard_bytes // cuts,
            "block_bytes": number * shard_bytes,
            "copies": number * _token_bytes(model, options.tp, 1) / max(_token_bytes(model, 1, 1), 1),
            "suffixes": suffixes,
        },
        "engine": {
            "block_size": laid_out.groups[0].block_tokens,
            "groups": [
                {
                    "kind": _kind(group.spec),
                    "layers": group.layers,
                    "block_size": group.block_tokens,
                    "page_bytes": group.page,
                }
                for group in laid_out.groups
            ],
            "bytes_per_block": laid_out.block_bytes,
        },
        "host": host | {"compressed": compressed},
        "device": {
            "bytes": options.device,
            "utilization": options.utilization,
            "weights_bytes": weights,
            "weights_estimated": estimated,
            "overhead_bytes": options.overhead,
            "kv_bytes_given": options.kv_memory is not None,
            "length": length,
            **{kind: found._asdict() for kind, found in devices.items()},
        },
        "paste": _paste(model, options, engine_block, host, devices[kv_dtype]),
    }


def _kinds(model: Model) -> set[str]:
    return {_kind(layer) for layer in model.layers}


def _kind(layer: Attention | Latent | State) -> str:
    if isinstance(layer, Attention):
        return "sliding" if layer.window else "chunked" if layer.chunk else "full"
    return "latent" if isinstance(layer, Latent) else "state"


def _kv_dtype(model: Model, options: Options) -> str:
    if options.kv_dtype != "auto":
        return options.kv_dtype
    return "fp8" if model.kv_dtype == "fp8" else "bf16"


def _token_bytes(model: Model, tp: int, item: int) -> int:
    """Return one rank's bytes per token in the layers that keep all tokens."""
    kept = [layer for layer in model.layers if _kind(layer) in ("full", "latent", "chunked")]
    return sum(page(layer, 1, tp, item, model) for layer in kept)


def _pages(model: Model, options: Options, engine_block: int, item: int) -> Pages:
    # With asynchronous scheduling, two steps are in flight. With chunks, vLLM disables its hybrid manager.
    hybrid = "chunked" not in _kinds(model)
    return pages(model, options.tp, item, engine_block, 2 * options.batched_tokens, hybrid)


def _suffix(slot: Slot, number: int, block_tokens: int, length: int, every: int) -> dict[str, Any]:
    """Return the saved parts of a window or a state: per boundary where prompts may continue, and per conversation of
    `length` tokens, in which windows may overlap. Windows are saved every `every` tokens."""
    boundaries = 1 + (length - 1) // every if slot.window else 1
    blocks = max(length // block_tokens, 1)
    return {
        "kind": slot.kind,
        "layers": slot.layers,
        "window": slot.window,
        "checkpoint_tokens": every if slot.window else 0,
        "bytes": number * slot.bytes * slot.window_blocks,
        "conversation_bytes": number * slot.bytes * min(slot.window_blocks * boundaries, blocks),
    }


def _held(
    options: Options, number: int, block_tokens: int, slots_of_block: Sequence[Slot], length: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the host holds of blocks with these slots on each of `number` ranks, and their suffixes."""
    first, *others = slots_of_block
    block_bytes = number * first.bytes
    every = CHECKPOINT_TOKENS_ALONE if first.window_blocks else CHECKPOINT_TOKENS
    rest = others if not first.window_blocks else slots_of_block
    suffixes = [_suffix(slot, number, block_tokens, length, every) for slot in rest]
    conversation = sum(suffix["conversation_bytes"] for suffix in suffixes)
    if not first.window_blocks:  # only full blocks are kept
        conversation += length // block_tokens * block_bytes
    host = _host(options, block_bytes)
    return host | _conversations(host["blocks"], block_tokens, length, block_bytes, conversation), suffixes


def _host(options: Options, block_bytes: int) -> dict[str, Any]:
    leave = left_for_host(options.ram, options.tp * options.engines) if options.leave is None else options.leave
    size = options.ram - leave
    unit = GIB if size >= 16 * GIB else 1 << 20
    size -= size % unit
    if size <= 0:
        raise ConfigError(f"--ram {options.ram:,} bytes: {leave:,} are left for the host; reduce that with --leave")
    chosen = room(size, block_bytes, options.page_size)
    return {
        "ram_bytes": options.ram,
        "leave_bytes": leave,
        "leave_rule": {
            "share": LEFT_SHARE,
            "least": LEFT_LEAST,
            "a_rank": LEFT_PER_RANK,
            "given": options.leave is not None,
        },
        "size_bytes": size,
        "page_bytes": chosen.geometry.page_bytes,
        "page_given": chosen.geometry.page_bytes != default_page(size),
        "pages": chosen.geometry.pages,
        "region_bytes": chosen.geometry.region_bytes,
        "blocks": chosen.blocks,
        "unused_share": chosen.waste,
        "index_bytes": chosen.blocks * INDEX_BYTES + chosen.geometry.pages * PAGE_INDEX_BYTES,
    }


def _conversations(blocks: int, block_tokens: int, length: int, block_bytes: int, each: int) -> dict[str, Any]:
    """Return the number of conversations of `each` bytes that fit."""
    return {
        "tokens": blocks * block_tokens,
        "length": length,
        "conversations": blocks * block_bytes // each if each else 0,
    }


def _device(model: Model, options: Options, engine_block: int, item: int, weights: int, length: int) -> Device:
    left = options.kv_memory or int(options.device * options.utilization) - weights - options.overhead
    return device(_pages(model, options, engine_block, item), left, model.longest or ENDLESS, length)


def _paste(model: Model, options: Options, engine_block: int, host: Mapping[str, Any], found: Device) -> dict[str, str]:
    serve = f"kvcache-server serve --size {_size(host['size_bytes'])}"
    if host["page_given"]:
        serve += f" --page-size {host['page_bytes'] >> 10}KiB"
    flags = [f"vllm serve {model.name}"]
    flags += [f"--tensor-parallel-size {options.tp}"] if options.tp > 1 else []
    if "state" in _kinds(model):
        flags.append("--enable-prefix-caching --mamba-cache-mode align")
    else:
        flags.append(f"--block-size {engine_block}")
    if options.kv_dtype == "fp8":
        flags.append("--kv-cache-dtype fp8")
    if found.longest:
        flags.append(f"--max-model-len {found.longest}")
    if found.at_once:
        flags.append(f"--max-num-seqs {min(found.at_once, 1024)}")
    transfer: dict[str, Any] = {"kv_connector": "KVCacheServerConnector", "kv_role": "kv_both"}
    if options.block_tokens != DEFAULT_BLOCK_TOKENS:
        transfer["kv_connector_extra_config"] = {"block_size": options.block_tokens}
    flags.append(f"--kv-transfer-config '{json.dumps(transfer)}'")
    return {"daemon": serve, "engine": " ".join(flags)}


def _size(size: int) -> str:
    return f"{size // GIB}GiB" if size % GIB == 0 else f"{size >> 20}MiB"
