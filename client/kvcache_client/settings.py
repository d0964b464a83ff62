"""The keys of `kv_connector_extra_config`, checked in one place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from kvcache_proto.errors import ConfigError
from kvcache_proto.types import MAX_NAME

CONNECTOR = "KVCacheServerConnector"  # as vLLM knows it

# Each block is looked up, reserved, settled and indexed by itself. Blocks of 16 tokens, an engine's default on GPUs,
# mean eight times the work, and save the computation of 64 tokens per prompt.
BLOCK_TOKENS = 128
# Windows are also saved where prompts part, so that the second of two that begin alike has no more than this to compute
# again. In replayed traces, fewer tokens find less: the windows take the room of other blocks. See
# tests/bench/hybrids.py. With only windows, it is not known where prompts part.
CHECKPOINT_TOKENS = 16384
CHECKPOINT_TOKENS_ALONE = 2048
RESETS = ("new", "keep")  # any other value of `on_reset` is a version
CHOICES = {
    "save": ("all", "prompt"),
    "save_mode": ("eager", "lazy"),
    "device_aware": ("auto", "off"),
    "gate": ("auto", "off"),
    "overlap": ("auto", "off"),
    "compress": ("off", "auto"),
    "peer_loads": ("auto", "off"),
    "verify": ("off", "sample", "all"),
    "multimodal": ("on", "uuids", "off"),
    "kv_load_failure_policy": ("recompute", "fail"),
}

# Keys of other connectors, and what replaces them here.
_MEMORY = "the daemon owns the memory: `kvcache-server serve --size 30GiB`; `num_cpu_blocks` bounds one engine's share"
_NOT_HERE = "nothing replaces it, leave it out"
FOREIGN = {
    "cpu_bytes_to_use": _MEMORY,
    "cpu_bytes_to_use_per_rank": _MEMORY,
    "kv_connector_module_path": "it belongs beside kv_connector_extra_config, not inside it",
    "canonical_layout": "`share_tp`",
    "self_describing_kv_events": "the daemon's `events`, or vLLM's --kv-events-config",
    "use_layerwise": "`overlap`; blocks are saved whole, beside the forward pass",
    "eviction_policy": "the daemon evicts what is worth least; there is nothing to choose",
    "store_threshold": "`min_hits`",
    "offload_prompt_only": "`save: prompt`",
    "save_decode_cache": "`save: all`",
    "blocks_per_chunk": "`block_size`, in tokens",
    "lazy_offload": "`save_mode: lazy`",
    "load_async": "loads are asynchronous; see `overlap`",
    "lookup_async": "`deadline_ms` bounds every lookup",
    **dict.fromkeys(
        (
            *("spec_name", "spec_module_path", "kv_offload_backend", "backpressure", "enable_telemetry"),
            *("max_tracker_size", "cache_policy_module_path", "num_workers"),
        ),
        _NOT_HERE,
    ),
    **dict.fromkeys(
        ("disk_path", "disk_capacity_bytes", "disk_buffer_slots", "use_page_cache", "secondary_tiers"),
        "tiers belong to the daemon: `kvcache-server serve --tier`",
    ),
}
_FOREIGN_PREFIXES = ("lmcache", "mooncake")


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one engine's connector; client/README.md describes them for operators."""

    endpoint: str = ""  # where the daemon listens; "" takes KVCACHE_ENDPOINT, or the default path
    block_size: int = 0  # tokens of a cached block; 0 is BLOCK_TOKENS or a little more, or what KV events require
    num_cpu_blocks: int = 0  # cached blocks that this engine's saves may occupy; 0 is no bound
    deadline_ms: float = 50.0  # of the scheduler's requests to the daemon
    save: str = "all"  # full blocks, or only those of the `prompt`
    save_mode: str = "eager"  # once blocks are full, or once the device is about to evict them (`lazy`)
    device_aware: str = "auto"  # report what the device is about to evict, so that the daemon need not double it
    min_hits: int = 0  # requests of this engine that must have asked for a block before it is saved
    checkpoint_tokens: int | None = None  # between positions to continue at in a model with windows; None: see above
    drain_ms: float = 5000.0  # how long a shutdown waits for running saves
    share_tp: bool = False  # share blocks with engines that have another number of tensor-parallel ranks
    weights_version: str = ""  # engines that name the same one have the same weights
    on_reset: str = "new"  # the weights after a reset of the cache: `new`, the present ones (`keep`), or a version
    gate: str = "auto"  # load hits only if that is faster than computing them, or always (`off`)
    overlap: str = "auto"  # compute a request that is alone while it loads, or not (`off`)
    compress: str = "auto"  # store KV of bfloat16 in fewer bytes, on devices that have the kernels, or not (`off`)
    peer_loads: str = "auto"  # ranks with the same KV load a part each, and the rest from each other, or not (`off`)
    multimodal: str = "on"  # cache images, audio and video by digests, also by texts of users (`uuids`), or not (`off`)
    verify: str = "off"  # blocks whose checksums are taken and compared: `off`, `sample` (one in 16), `all`
    canary_every: int = 10_000  # of so many requests with a hit, one is computed as well, to compare; 0 is none
    kv_load_failure_policy: str = "recompute"  # vLLM's own setting
    server_uids: str | tuple[int | str, ...] = ""  # users whose daemon is trusted besides root's and the engine's


def parse_settings(extra: Mapping[str, Any]) -> tuple[ConnectorSettings, list[str]]:
    """Return the settings in `extra`, and a log line for each key of another connector, which is ignored.

    Raises ConfigError, naming the key and a close match or the bounds.
    """
    known: dict[str, Any] = {}
    notes = []
    for key, value in extra.items():
        if key in ConnectorSettings.__struct_fields__:
            known[key] = value
        elif key in FOREIGN or key.startswith(_FOREIGN_PREFIXES):
            notes.append(f"{key} is a setting of another connector and is ignored; {FOREIGN.get(key, _NOT_HERE)}")
        else:
            close = difflib.get_close_matches(key, ConnectorSettings.__struct_fields__, n=1)
            hint = (
                f"did you mean {close[0]!r}?"
                if close
                else f"known are {', '.join(ConnectorSettings.__struct_fields__)}"
            )
            raise _wrong(f"unknown key {key!r}; {hint}")
    try:
        settings = msgspec.convert(known, ConnectorSettings)
    except msgspec.ValidationError as error:
        raise _wrong(f"{error}") from None
    _check(settings)
    return settings, notes


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {text}")


def _check(settings: ConnectorSettings) -> None:
    for name in ("block_size", "num_cpu_blocks", "drain_ms", "canary_every", "checkpoint_tokens", "min_hits"):
        if (getattr(settings, name) or 0) < 0:
            raise _wrong(f"{name} {getattr(settings, name)} is negative")
    if not 1 <= settings.deadline_ms <= 10_000:
        raise _wrong(f"deadline_ms {settings.deadline_ms}: 1 to 10000")
    version = settings.on_reset
    if version not in RESETS and (version in ("", settings.weights_version) or len(version) > MAX_NAME):
        raise _wrong(
            f"on_reset {settings.on_reset!r}: new, keep, or the version of other weights than the engine starts with"
        )
    for name, allowed in CHOICES.items():
        if getattr(settings, name) not in allowed:
            raise _wrong(f"{name} {getattr(settings, name)!r}: one of {', '.join(allowed)}")


def blocks_per_slot(settings: ConnectorSettings, engine_block_size: int, least: int = BLOCK_TOKENS) -> int:
    """Return how many of the engine's blocks one cached block holds. Raises ConfigError unless it is a whole number.

    Where `settings` do not say it, a cached block has `least` tokens, or a little more.
    """
    tokens = settings.block_size or -(-least // engine_block_size) * engine_block_size
    if tokens % engine_block_size:
        raise _wrong(f"block_size {tokens}: a multiple of the engine's {engine_block_size}")
    return tokens // engine_block_size
