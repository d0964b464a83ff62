"""Pure: the NamespaceSpec of an engine's KV. Only engines with equal specs may share blocks.

The cache outlives engines, so a namespace names every fact that changes the bytes of a block, and no other facts (the
length limit, the batch size, a checkpoint's location). `vllm_config` and `kv_cache_config` are only read, by attribute;
facts of the running engine come as `RuntimeFacts`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcache_client import compression
from kvcache_client.engines.vllm import compat
from kvcache_client.engines.vllm.groups import (
    STATE,
    Member,
    Merged,
    boundary_tokens,
    bytes_in_slot,
    ends_within_blocks,
    first_spec,
    group_spec,
    hash_tokens,
    is_plain,
    kind_of,
    layer_specs,
    members_of,
    merged_groups,
    names,
    uncompressed_reason,
    unsupported_groups,
)
from kvcache_client.engines.vllm.multimodal import processor_digest
from kvcache_client.worker.places import Shards
from kvcache_proto.errors import ConfigError
from kvcache_proto.types import MAX_NAME, MAX_SHARDS, GroupSpec, NamespaceSpec

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_ORDINARY_FORMATS = {"auto", "hf", "safetensors", "pt", "fastsafetensors", "runai_streamer", "mistral"}
_NOT_CONTENT = {"_name_or_path", "_commit_hash", "transformers_version", "name_or_path"}
HEAD_MAJOR = ("HND", "LBHNC", "BLHNC", "BHLNC")  # layouts in which a block of a layer has its heads one after another
STRIPES = 8
_SAMPLES, _SAMPLE_BYTES = 16, 4096
_DESCRIBED = (
    *("num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode"),  # of attention
    *("shapes", "dtypes", "mamba_type"),  # of states
)
_LONGEST = 1024  # characters of the description of layers; longer ones are represented by their digest


class RuntimeFacts(NamedTuple):
    """Facts of the running engine."""

    version: str  # vLLM's
    device: str  # its kind and name
    hash_bytes: int  # length of a block hash
    seed: str  # of the hash chain; empty if each process draws it at random
    layout: str = ""  # of the KV cache, if the configuration does not have it
    transformers: str = ""  # the version of the package whose processors prepare images, audio and video


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the reason that this engine's blocks cannot be cached, "" if they can."""
    if _begins_from_nothing(vllm_config):
        return "vLLM computes a prompt of this model without what is cached of it (CPU_MLA)"
    if reason := unsupported_groups(vllm_config, kv_cache_config):
        return reason
    if reason := _unsupported_contexts(vllm_config, kv_cache_config):
        return reason
    hashed, tokens = compat.hash_block_size(kv_cache_config), engine_block_size(vllm_config, kv_cache_config)
    if is_plain(kv_cache_config) and hashed and hashed != tokens:
        return f"hashes of {hashed} tokens for blocks of {tokens}"
    return ""


def _unsupported_contexts(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the reason that blocks cannot be cached because context parallelism divides them, "" if they can."""
    prefill = compat.prefill_ranks(vllm_config.parallel_config)
    if prefill > 1 and not compat.prefill_ranks_hold_all():
        return f"prefill_context_parallel_size {prefill} before vLLM 0.27, which spreads KV over these ranks"
    contexts, _ = context_parallelism(vllm_config, kv_cache_config)
    if contexts == 1:
        return ""
    setting = f"decode_context_parallel_size {contexts}"
    if not is_plain(kv_cache_config):
        return f"{setting} with {names(kv_cache_config.kv_cache_groups)}: only with one of full attention"
    held = _held(vllm_config, kv_cache_config)
    if len({held.count(each) for each in held}) > 1:
        return f"{setting}, by which the number of ranks with the same KV heads cannot be divided"
    if compat.changes_interleave(vllm_config):
        return f"{setting} beside a NixlConnector, unless cp_kv_cache_interleave_size is set"
    return ""


def context_parallelism(vllm_config: Any, kv_cache_config: Any) -> compat.Contexts:
    specs = (spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec))
    return compat.contexts(vllm_config.parallel_config, specs)


def _begins_from_nothing(vllm_config: Any) -> bool:
    """Return True if the engine cannot continue a prompt: then vLLM turns off both features that would need this.

    The rule is from vLLM's platform for CPUs (`check_and_update_config`). Its CPU_MLA cannot; AMX_MLA, which it chooses
    on processors with AMX, can.
    """
    if not getattr(vllm_config.model_config, "use_mla", False) or vllm_config.device_config.device_type != "cpu":
        return False
    return not (vllm_config.cache_config.enable_prefix_caching or vllm_config.scheduler_config.enable_chunked_prefill)


def engine_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the tokens per block of the engine, of all ranks that they are spread over.

    For several groups, those after which blocks of all groups end.
    """
    if is_plain(kv_cache_config):
        contexts, _ = context_parallelism(vllm_config, kv_cache_config)
        return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size) * contexts
    return boundary_tokens(kv_cache_config)


def groups_of(kv_cache_config: Any, blocks_per_slot: int) -> list[Merged]:
    """Return the groups of the namespace, [] for an engine with one group of full attention."""
    if is_plain(kv_cache_config):
        return []
    return merged_groups(kv_cache_config, boundary_tokens(kv_cache_config) * blocks_per_slot)


def layer_spec(kv_cache_config: Any) -> Any:
    return first_spec(kv_cache_config.kv_cache_groups[0])


def rank_block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes that one rank stores for one block of the engine, all layers together.

    They come from the allocations, not from the layers' specifications: the scheduler sees only one layer's.
    """
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors:
        raise ConfigError("the engine has no KV cache")
    return compat.allocated_bytes(tensors) // int(kv_cache_config.num_blocks)


def plain_member(kv_cache_config: Any) -> Member:
    """Return the only group of an engine, as the allocations say."""
    spec, layers = layer_spec(kv_cache_config), tuple(kv_cache_config.kv_cache_groups[0].layer_names)
    alike = len({page for page, _ in compat.page_strides(kv_cache_config)}) == 1
    return Member(0, kind_of(spec), spec, int(spec.block_size), rank_block_bytes(kv_cache_config), layers, alike)


def kv_layout(kv_cache_config: Any, runtime_facts: RuntimeFacts) -> str:
    return compat.kv_layout(kv_cache_config) or runtime_facts.layout


def unsupported_by_head(vllm_config: Any, kv_cache_config: Any, layout: str) -> str:
    """Return the reason that heads cannot be shards, "" if they can. Not for MLA, which has one head."""
    parallel, specs = vllm_config.parallel_config, [layer_spec(kv_cache_config)]
    if not is_plain(kv_cache_config):
        specs = [member.spec for member in members_of(kv_cache_config)]
        if any(kind_of(spec) == STATE for spec in specs):
            return "states have no KV heads"
    if context_parallelism(vllm_config, kv_cache_config).number > 1:
        return "context parallelism spreads the tokens of a block over ranks"
    if layout not in HEAD_MAJOR:
        return f"the KV layout is {layout or 'not known'}, in which the heads of a token are together"
    heads = int(specs[0].num_kv_heads)
    if {int(spec.num_kv_heads) for spec in specs} != {heads}:
        return "KV cache groups have different numbers of KV heads"
    for spec in specs:
        page = int(spec.page_size_bytes)
        if page % heads or page != int(getattr(spec, "real_page_size_bytes", page)):
            return "blocks hold more than the KV of each head"
    if len(specs) > 1 and len({stride / page for page, stride in compat.page_strides(kv_cache_config)}) > 1:
        return "the heads of KV cache groups are not evenly spaced"
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    held = heads * int(parallel.tensor_parallel_size) // _replicas(vllm_config, kv_cache_config)
    if held != total:
        return f"the ranks hold {held} different heads, and the model has {total}"
    if (shards := total * int(parallel.pipeline_parallel_size)) > MAX_SHARDS:
        return f"{shards} shards: at most {MAX_SHARDS}"
    return ""


def shards(vllm_config: Any, kv_cache_config: Any, by_head: bool = False) -> Shards:
    """Return the shards of a block: those of each pipeline stage; one per KV head if blocks are cut `by_head`.

    Raises ConfigError if the protocol allows fewer.
    """
    held, stages = _held(vllm_config, kv_cache_config), int(vllm_config.parallel_config.pipeline_parallel_size)
    order, replicas = sorted(range(len(held)), key=lambda rank: held[rank]), len(held) // len(set(held))
    parts = 1
    if by_head:
        parts = int(layer_spec(kv_cache_config).num_kv_heads)
    elif getattr(vllm_config.model_config, "use_mla", False) and len({heads for heads, _ in held}) == stages == 1:
        parts = max(1, _stripes(kv_cache_config) // len(set(held)))
    number = len(set(held)) * stages * parts
    if number > MAX_SHARDS:
        raise ConfigError(f"{number} shards: at most {MAX_SHARDS}")
    return Shards(number, replicas, parts, by_head, tuple(order) if order != sorted(order) else ())


def uncompressible(kv_cache_config: Any, split: Shards) -> str:
    """Return the reason that none of an engine's KV can be stored compressed, "" if some can be."""
    members = [plain_member(kv_cache_config)] if is_plain(kv_cache_config) else members_of(kv_cache_config)
    reasons = [uncompressed_reason(member, split.parts) for member in members]
    return "" if "" in reasons else ", ".join(dict.fromkeys(reasons))


def _held(vllm_config: Any, kv_cache_config: Any) -> list[tuple[int, int]]:
    """Return for each rank of a pipeline stage the numbers of its KV heads, and of its slice of a block's tokens.

    vLLM's groups of ranks that share KV (`initialize_model_parallel`) first span the ranks of prefill context
    parallelism, each of which has all tensor-parallel ranks, and then these.
    """
    parallel, heads = vllm_config.parallel_config, _replicas(vllm_config, kv_cache_config)
    prefill, contexts = compat.prefill_ranks(parallel), context_parallelism(vllm_config, kv_cache_config).number
    ranks = range(int(parallel.tensor_parallel_size))
    return [(rank // heads, (rank * prefill + at) % contexts) for at in range(prefill) for rank in ranks]


def _stripes(kv_cache_config: Any) -> int:
    """Return the number of parts that MLA's KV is cut into. Ranks that hold the same save some parts each.

    It does not depend on the number of ranks, so that engines with different numbers share blocks.
    """
    if not is_plain(kv_cache_config):
        return 1
    found = {(page % STRIPES, stride * STRIPES / page) for page, stride in compat.page_strides(kv_cache_config)}
    even = len(found) == 1 and all(not rest and apart.is_integer() for rest, apart in found)
    return STRIPES if even else 1


def _replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the number of consecutive tensor-parallel ranks that hold the same KV heads."""
    replicas = compat.kv_replicas(kv_cache_config)
    if replicas is not None and context_parallelism(vllm_config, kv_cache_config).number == 1:
        return int(replicas)
    model, ranks = vllm_config.model_config, int(vllm_config.parallel_config.tensor_parallel_size)
    if getattr(model, "use_mla", False):
        return ranks
    return max(1, ranks // max(1, int(model.get_total_num_kv_heads())))


class Stored(NamedTuple):
    """What an engine stores of its blocks, and how."""

    blocks_per_slot: int = 1
    by_head: bool = False  # each KV head is a shard, so that engines with different numbers of ranks share blocks
    multimodal: bool = True  # also requests with images, audio or video
    compress: bool = False  # what can be compressed is


def namespace_spec(
    vllm_config: Any,
    kv_cache_config: Any,
    runtime_facts: RuntimeFacts,
    stored: Stored,
    engine_id: str,
    weights: str = "",
) -> NamespaceSpec:
    """Return the namespace of an engine's blocks, whose shards all have the size of this rank's: see `with_stages`.

    `weights` names the weights; if empty, they are the checkpoint's. Reads the checkpoint's files if the model is a
    directory.
    Raises ConfigError.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    blocks_per_slot, by_head, multimodal, compress = stored
    split = shards(vllm_config, kv_cache_config, by_head)
    merged = groups_of(kv_cache_config, blocks_per_slot)
    block_tokens = engine_block_size(vllm_config, kv_cache_config)
    tokens = block_tokens * blocks_per_slot
    identity = {
        "vllm": ".".join(runtime_facts.version.split(".")[:2]),
        "device": runtime_facts.device,
        "checkpoint": checkpoint_id(vllm_config),
        "config": config_digest(vllm_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "layout": kv_layout(kv_cache_config, runtime_facts),
        "group": _describe_all(merged, split) or _describe(layer_spec(kv_cache_config), by_head),
        "block": f"{block_tokens}x{blocks_per_slot}"
        + (f" by {hash_tokens(kv_cache_config)}" if merged and ends_within_blocks(kv_cache_config) else ""),
        "shards": "heads" if by_head else str(split.number),
        "hash": str(cache.prefix_caching_hash_algo),
        # A random seed is shared with no other engine; the engine's ranks still agree on this.
        "seed": runtime_facts.seed or f"engine {engine_id}",
        "weights": weights,
    }
    contexts = context_parallelism(vllm_config, kv_cache_config)
    if contexts.number > 1:
        identity["contexts"] = f"{contexts.number}, {contexts.interleave} tokens each"
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    if backend is not None:
        identity["attention"] = str(getattr(backend, "name", backend))
    if multimodal and (processor := processor_digest(vllm_config, runtime_facts.transformers)):
        identity["processor"] = processor
    draft = getattr(vllm_config, "speculative_config", None)
    if draft is not None:  # its layers share the blocks
        identity["draft"] = f"{draft.method} {getattr(draft, 'model', None) or ''}".strip()
    if compat.computes_scales(cache):
        identity["kv_scales"] = f"engine {engine_id}"  # computed from the first batch that this engine ran
    if (quantized := compat.quantizes_loaded_kv(vllm_config)) is not None:
        identity["fa_quant"] = str(quantized)
    needs_next_block = len(merged) > 1 and compat.reads_next_token(vllm_config)
    if needs_next_block:  # an engine set to keep the last block of a hit does not share blocks with others
        identity["draft"] += ", followed"

    def groups_stored(compress: bool) -> list[GroupSpec]:
        if merged:
            return [group_spec(each, tokens, split.number, needs_next_block, split.parts, compress) for each in merged]
        part = blocks_per_slot * bytes_in_slot(plain_member(kv_cache_config), split.parts, compress)
        return [GroupSpec(block_tokens=tokens, shard_bytes=part if split.number == 1 else (part,) * split.number)]

    groups = groups_stored(compress)
    if compress:
        size, raw = (sum(each.block_bytes for each in some) for some in (groups, groups_stored(False)))
        identity["compression"] = f"{compression.CODEC}: {size / raw:.1%} of the bytes"
    return NamespaceSpec(_name(model.model), groups, identity, runtime_facts.hash_bytes)


class Share(NamedTuple):
    """A rank's share of a slot. With pipeline parallelism, no other process of the engine knows it."""

    layers: int  # number of layers whose KV its stage has
    described: str  # these layers, as in the identity of a namespace
    sizes: tuple[int, ...]  # bytes in a slot of each group of the namespace
    tables: tuple[tuple[int, ...], ...]  # vLLM's groups in these slots; () with just one group, of full attention


def share_of_rank(spec: NamespaceSpec, merged: Sequence[Merged], kv_cache_config: Any) -> Share:
    """Return the share of this rank, which `spec` was made for."""
    layers = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    tables = tuple(tuple(table.number for table in each.group.tables) for each in merged)
    return Share(layers, spec.identity["group"], tuple(group.shards[0] for group in spec.groups), tables)


def with_stages(spec: NamespaceSpec, split: Shards, stages: Sequence[Sequence[Share]]) -> NamespaceSpec:
    """Return the namespace of an engine with several pipeline stages: its shards are those of the stages, in turn.

    `spec` was made for the first stage. `stages` are the shares of the ranks of each. Raises ConfigError unless all
    have the same kinds of layers.
    """
    if len({share.tables for stage in stages for share in stage}) > 1:
        raise ConfigError("a pipeline stage has no layer of a KV cache group that another stage has layers of")
    writers = [stage[0].sizes for stage in stages for _ in range(split.number // len(stages))]
    sizes = zip(*writers, strict=True)
    groups = [replace(group, shard_bytes=each) for group, each in zip(spec.groups, sizes, strict=True)]
    described = "; ".join(dict.fromkeys(stage[0].described for stage in stages))
    layers = " + ".join(str(stage[0].layers) for stage in stages)
    identity = spec.identity | {"group": _shortened(described), "stages": f"{layers} layers"}
    return NamespaceSpec(spec.model, groups, identity, spec.hash_bytes)


def checkpoint_id(vllm_config: Any) -> str:
    """Return an id of the weights, those of a drafter included: its layers share the blocks."""
    model, load = vllm_config.model_config, vllm_config.load_config
    name = _weights_id(model.model, model, load)
    draft = getattr(vllm_config, "speculative_config", None)
    path = getattr(draft, "model", None)
    if not path or path == model.model:  # no weights, or among the model's
        return name
    drafter = getattr(draft, "draft_model_config", None) or model
    return f"{name}, drafter {_weights_id(path, drafter, getattr(draft, 'draft_load_config', None) or load)}"


def _weights_id(path: str, model: Any, load: Any) -> str:
    """Return the hub's commit, or a digest of the files of a directory.

    Fine-tunes of one model have files of the same name, size and header; samples of the data distinguish them.
    """
    form = str(getattr(load.load_format, "value", load.load_format))
    if form == "dummy":
        return f"dummy seed {model.seed}"
    prefix = "" if form in _ORDINARY_FORMATS else f"{form} "
    folder = Path(path)
    if folder.is_dir():
        return f"{prefix}files {directory_digest(folder)}"
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision or ""
    return f"{prefix}{path} {commit}".strip()


def directory_digest(folder: Path) -> str:
    """Return a digest of config.json and of each weight file's name, size, header and samples."""
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for file in sorted({file for pattern in WEIGHT_FILES for file in folder.glob(pattern)}):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as data:
            if file.suffix == ".safetensors":
                digest.update(data.read(min(int.from_bytes(data.read(8), "little"), size)))
            for sample in range(_SAMPLES):
                data.seek(max(0, (size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1)))
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def config_digest(vllm_config: Any) -> str:
    """Return a digest of the model's configuration as resolved, overrides included."""
    model = vllm_config.model_config
    facts: dict[str, Any] = {"config": _content(model.hf_config.to_dict())}
    # These scale positions by the length limit, so here it does change the bytes.
    if any(kind in json.dumps(facts, default=str) for kind in ('"longrope"', '"su"', '"dynamic"')):
        facts["max_model_len"] = model.max_model_len
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def has_experts(vllm_config: Any) -> bool:
    """Return True if the model routes its tokens to experts."""

    def counts(config: Any) -> Iterator[Any]:
        for key, value in config.items() if isinstance(config, dict) else ():
            yield from counts(value)
            if "experts" in str(key):
                yield value

    return any(isinstance(count, int) and count > 1 for count in counts(vllm_config.model_config.hf_config.to_dict()))


def _content(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _content(item) for key, item in value.items() if key not in _NOT_CONTENT}
    if isinstance(value, list | tuple):
        return [_content(item) for item in value]
    return value


def _describe(first: Any, by_head: bool = False) -> str:
    """Describe the first layer, for all: the scheduler sees no other, and the block's size covers the rest."""
    names = [name for name in _DESCRIBED if hasattr(first, name) and not (by_head and name == "num_kv_heads")]
    return f"{type(first).__name__} {' '.join(f'{name}={getattr(first, name)!s}' for name in names)}"


def _describe_all(merged: Sequence[Merged], split: Shards) -> str:
    """Describe several groups: the contents of their slots, in their order. Equal members are counted."""
    said = []
    for group, members in merged:
        tables: dict[str, int] = {}
        for table, member in zip(group.tables, members, strict=True):
            size = f"{member.block_bytes // split.parts} bytes per {member.block_tokens} x {table.blocks}"
            line = f"{len(member.layers)} x {_describe(member.spec, split.by_head)} {size}"
            tables[line] = tables.get(line, 0) + 1
        said.append(f"window {group.kept} " * bool(group.kept) + ", ".join(f"{n} of {x}" for x, n in tables.items()))
    return _shortened("; ".join(said))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _name(model: str) -> str:
    """Return the last part of a path, or the name as it is: a checkpoint may be in any folder."""
    name = Path(model).name if model.startswith(("/", ".")) else model
    return name[-MAX_NAME:] or "model"
