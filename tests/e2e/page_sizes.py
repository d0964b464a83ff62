"""What vLLM itself makes of models, without weights: JSON in (a list of cases), a JSON line a case out.

A case: {"model": folder, "tp": 2, "kv": "auto" | "fp8", "hybrid": true, "memory": bytes, "lengths": [tokens, ...],
"amx": whether the processor has AMX, whatever it has: no instruction of it runs here}.

Each model is built by vLLM's own classes on torch's `meta` device, as one rank of `tp` whose others do not exist
(torch's `fake` process group), so that its layers say what they keep; vLLM's own functions make blocks of that.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from kvcache_client.engines.vllm.groups import Merged, boundary_tokens, group_spec, has_states, merged_groups
from kvcache_client.engines.vllm.identity import shards, unsupported_reason

BLOCK = 128


def alone() -> None:
    """Let one rank stand for all: groups that talk to nobody."""
    new_group, model_group = dist.new_group, parallel_state.init_model_parallel_group
    dist.new_group = lambda ranks=None, **_: new_group(ranks, backend="fake")

    def without_queue(*given: Any, **options: Any) -> Any:
        return model_group(*given, **{**options, "use_message_queue_broadcaster": False})

    parallel_state.init_model_parallel_group = without_queue
    # vLLM imports itself in a new process for each kind of model that it has not seen on this host, so as to touch no
    # device: with fourteen kinds that took most of the time.
    registry._run_in_subprocess = lambda look: look()
    plain = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: plain)
    # The CPU's platform has no backend for sparse attention; FlashMLA's, of which nothing runs here, says what
    # is kept.
    sparse, of_cpu = "vllm.v1.attention.backends.mla.flashmla_sparse", current_platform.get_attn_backend_cls
    importlib.import_module(sparse).current_workspace_manager = MagicMock()

    def backend(cls: Any, chosen: Any, attn_selector_config: Any, **more: Any) -> str:
        if attn_selector_config.use_sparse:
            return f"{sparse}.FlashMLASparseBackend"
        return str(of_cpu(chosen, attn_selector_config=attn_selector_config, **more))

    type(current_platform).get_attn_backend_cls = classmethod(backend)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    tp = case["tp"]
    torch.cpu._is_amx_tile_supported = lambda: case["amx"]
    config = EngineArgs(
        model=case["model"],
        tensor_parallel_size=tp,
        distributed_executor_backend="mp" if tp > 1 else None,
        kv_cache_dtype=case["kv"],
        block_size=BLOCK,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_hybrid_kv_cache_manager=None if case["hybrid"] else True,
    ).create_engine_config()
    # What the CPU's platform changes and others do not: states in float32, and the block size of MLA.
    config.cache_config.block_size = BLOCK
    model = json.loads(Path(case["model"], "config.json").read_text())
    if model["model_type"] != "nemotron_h":
        config.cache_config.mamba_ssm_cache_dtype = "auto"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        with set_current_vllm_config(config):
            parallel_state._WORLD = parallel_state.init_world_group(list(range(tp)), 0, "fake")
            parallel_state.initialize_model_parallel(tp, 1, backend="fake")
            with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
                built = initialize_model(config)
            current_platform.update_block_size_for_backend(config)
            config.cache_config.kv_cache_layout = "LBNHC"
            return figures(config, built, case)
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def figures(config: Any, model: Any, case: dict[str, Any]) -> dict[str, Any]:
    specs = get_kv_cache_spec(config)
    (cache,) = kv_cache_utils.get_kv_cache_configs(config, [dict(specs)], [case["memory"]])
    groups, limit = cache.kv_cache_groups, config.model_config.max_model_len
    per_block = kv_cache_utils._pool_bytes_per_block(config, groups)
    needed = []
    for length in case["lengths"]:
        config.model_config.max_model_len = length
        needed.append(kv_cache_utils._max_memory_usage_bytes_from_groups(config, groups) // per_block)
    config.model_config.max_model_len = limit
    small, grid = case["memory"] // 64, boundary_tokens(cache)
    split = shards(config, cache)
    tokens = grid if has_states(cache) else -(-BLOCK // grid) * grid
    return {
        "groups": [described(each) for each in groups],
        "bytes_per_block": per_block,
        "blocks": cache.num_blocks,
        "needed": needed,
        "longest_in_small": kv_cache_utils._estimate_max_model_len_from_groups(config, groups, small - per_block),
        "limit": limit,
        "in_flight": config.max_in_flight_tokens,
        "state_bytes": max(
            (each.state_content_size_bytes for each in specs.values() if kind(each) == "MambaSpec"), default=0
        ),
        "weights": sum(each.numel() * each.element_size() for each in model.parameters()),
        "declined": unsupported_reason(config, cache),
        "shards": split.number,
        "slots": [slot_of(each, tokens) for each in merged_groups(cache, tokens)],
        "compressed": [slot_of(each, tokens, split.parts, True) for each in merged_groups(cache, tokens)],
    }


def slot_of(merged: Merged, tokens: int, parts: int = 1, compress: bool = False) -> tuple[int, int]:
    """Return what a rank saves of a group in a cached block, and how many of these a prompt needs."""
    spec = group_spec(merged, tokens, 1, parts=parts, compress=compress)
    return parts * spec.block_bytes, spec.window_blocks


def described(group: Any) -> tuple[int, str, int, int]:
    """Return the number of layers, their kind, the tokens of a block, and its bytes in the first layer.

    A layer with an indexer keeps two pages.
    """
    spec, pages = group.kv_cache_spec, Counter[int]()
    each = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else dict.fromkeys(group.layer_names, spec)
    for name in group.layer_names:
        pages[extract_layer_index(name)] += each[name].page_size_bytes
    return len(pages), kind(spec), spec.block_size, next(iter(pages.values()))


def kind(spec: Any) -> str:
    return type(spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec).__name__


def main() -> None:
    alone()
    for case in json.load(sys.stdin):
        try:
            found = answer(case)
        except Exception:  # noqa: BLE001 - told to the test, case by case
            found = {"error": traceback.format_exc(limit=-3)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
