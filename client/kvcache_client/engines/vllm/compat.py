"""The differences between vLLM 0.23 to 0.33. Each difference is found by feature, not by version number.

It imports nothing from vLLM before a function is called, and reads configurations by attribute.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

MEDIUM = "CPU"  # MEDIUM_CPU, which 0.23 does not have
SLEEPS = ("sleep", "discard")  # methods of a worker that unmap device memory; `discard` is new in 0.32


def ends_copies(method: Any) -> bool:
    """Return True if one of SLEEPS calls a connector's `unregister_kv_caches`, as vLLM's own do from 0.33 on.

    The worker of another package may not, with any version of vLLM.
    """
    return "unregister_kv_caches" in inspect.unwrap(method).__code__.co_names


def cache_hit_source() -> Any:
    """Return the connector's `_cache_hit_source`, None before 0.32."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def fixed_seed(hash_function: Any) -> str:
    """Return the seed of the chain of block hashes if PYTHONHASHSEED is not set, "" if it is random.

    From 0.32 on it is fixed for the cryptographic hash functions; before, each process draws it.
    """
    from vllm.v1.core import kv_cache_utils

    fixed = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "")
    weak = getattr(kv_cache_utils, "_NON_CRYPTO_HASH_FUNCTIONS", ())
    return "" if hash_function in weak else str(fixed)


def process_layout(vllm_config: Any, spec: Any = None) -> str:
    """Return the KV layout before 0.32, when it is a setting of the process; "" from 0.32 on: see `kv_layout`.

    An attention backend that requires a layout sets it in the process that makes the model. A process without the
    model, such as the scheduler's of an engine whose ranks are processes, passes the `spec` of a layer, and the backend
    is queried here. vLLM asserts that a configuration is current, and that process has none.
    """
    try:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout, set_kv_cache_layout
    except ImportError:
        return ""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config):
        if spec is None:
            return str(get_kv_cache_layout())
        from vllm.v1.attention.selector import get_attn_backend

        model, cache = vllm_config.model_config, vllm_config.cache_config
        try:
            backend = get_attn_backend(spec.head_size, model.dtype, cache.cache_dtype, use_mla=model.use_mla)
            required = backend.get_required_kv_cache_layout()
        except (AssertionError, AttributeError, ImportError, NotImplementedError, ValueError):  # it needs more facts
            required = None
        set_kv_cache_layout(None)  # the required layout is returned, and this process stays as it was
        return str(required or get_kv_cache_layout())


def kv_layout(kv_cache_config: Any) -> str:
    """Return the KV layout if the configuration has it, as from 0.32 on; else ""."""
    return str(getattr(kv_cache_config, "kv_cache_layout", None) or "")


def head_major_layout() -> str:
    """Return the name of the layout in which a layer's block has its heads one after another."""
    try:
        from vllm.v1 import kv_cache_layout  # noqa: F401
    except ImportError:
        return "HND"
    return "LBHNC"  # "HND" works, too, but other connectors of a MultiConnector request this name


def allocated_bytes(tensors: Sequence[Any]) -> int:
    """Return the bytes of all KV tensors of a rank.

    From 0.32 on, and before that if they are packed (0.27), tensors are views of one allocation, and each has its size.
    Otherwise each is its own allocation.
    """
    first = tensors[0]
    if hasattr(first, "layers") or getattr(first, "block_stride", 0) > 0:
        return int(first.size)
    return sum(int(tensor.size) for tensor in tensors)


def places_layers(kv_cache_config: Any) -> bool:
    """Return True if the configuration has the place of each layer's pages, as from 0.32 on.

    These versions also accept failed loads by request; earlier ones only by block, and only for one group.
    """
    tensors = kv_cache_config.kv_cache_tensors
    return bool(tensors) and all(hasattr(tensor, "layers") for tensor in tensors)


def page_bytes(kv_cache_config: Any) -> dict[str, int]:
    """Return the bytes from one page of each layer to the next, of the layer or of the block; {} before 0.32."""
    return {
        name: int(min(tensor.layer_stride, tensor.block_stride))
        for tensor in kv_cache_config.kv_cache_tensors
        for name in getattr(tensor, "layers", ())
    }


def page_strides(kv_cache_config: Any) -> Iterator[tuple[int, int]]:
    """Yield the bytes of a layer's page, and those from one page of it to the next."""
    for tensor in kv_cache_config.kv_cache_tensors:
        if hasattr(tensor, "layers"):
            yield int(min(tensor.layer_stride, tensor.block_stride)), int(tensor.block_stride)
        elif getattr(tensor, "block_stride", 0) == 0:
            size = int(tensor.size) // int(kv_cache_config.num_blocks)
            yield size, size
        else:  # packed, with no size of a page
            yield 1, int(tensor.block_stride)


def announces_layers(vllm_config: Any) -> bool:
    """Return True if an engine may call `wait_for_layer_load` whenever a layer of a prompt is computed.

    It does not if whole batches with prompts are replayed from a graph, or if two halves of a batch run side by side.
    """
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    mixed = mode.mixed_mode() if mode is not None and hasattr(mode, "mixed_mode") else mode
    parallel = vllm_config.parallel_config
    halves = getattr(parallel, "use_ubatching", getattr(parallel, "enable_dbo", False))
    return getattr(mixed, "name", "") != "FULL" and not halves


def boundary_states(scheduler_output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """Return the states at block boundaries that a step makes: by request, (group, device block, tokens before it)."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    return state.boundary_state_offloads if state is not None else {}


def evicted_next(block_pool: Any, count: int) -> Iterator[int]:
    """Yield `count` device blocks, fewer if no more are free, in the order in which vLLM gives them away."""
    block = block_pool.free_block_queue.fake_free_list_head.next_free_block if block_pool is not None else None
    while count and block is not None and block.next_free_block is not None:  # the last one is not a block
        yield block.block_id
        block, count = block.next_free_block, count - 1


def written_early(scheduler_output: Any) -> list[int]:
    """Return the blocks that a runner zeroes, or copies other blocks to, at the beginning of a step.

    A request that received some of them may have been preempted since, so that they belong to no request.
    """
    copies = getattr(scheduler_output, "kv_cache_block_copies", None) or ()  # from 0.27 on
    return [*(scheduler_output.new_block_ids_to_zero or ()), *(target for _, target in copies)]


def hash_of(block_pool: Any, block: int) -> bytes:
    """Return the hash of a device block of the first group in vLLM's prefix cache, b"" if it is not there."""
    key = block_pool.blocks[block].block_hash
    return bytes(_block_hash()(key)) if key is not None else b""


@functools.cache  # thousands are read together, and an import statement takes as long as all the rest
def _block_hash() -> Any:
    from vllm.v1.core.kv_cache_utils import get_block_hash

    return get_block_hash


def kv_replicas(kv_cache_config: Any) -> int | None:
    """Return the number of consecutive ranks that have the same KV, None before 0.32, which does not report it."""
    replicas: int | None = getattr(kv_cache_config, "kv_tp_replicas", None)
    return replicas


def hash_block_size(kv_cache_config: Any) -> int | None:
    """Return the tokens per block hash, None if it is not given: for one group it is the block size."""
    size: int | None = getattr(kv_cache_config, "hash_block_size", None)
    return size


class Contexts(NamedTuple):
    """How the tokens of a block are spread over ranks: in turn, `interleave` tokens to each of `number`."""

    number: int
    interleave: int


def contexts(parallel_config: Any, specs: Iterable[Any]) -> Contexts:
    """Return how decode context parallelism spreads the tokens of layers with these specifications.

    From 0.32 on, vLLM applies the older name of the interleave in the ranks only.
    """
    number = int(getattr(parallel_config, "decode_context_parallel_size", None) or 1)
    if number == 1 or not any(getattr(spec, "dcp_sharded", True) for spec in specs):
        return Contexts(1, 1)
    older = int(getattr(parallel_config, "dcp_kv_cache_interleave_size", 1))
    return Contexts(number, older if older > 1 else int(parallel_config.cp_kv_cache_interleave_size))


def prefill_ranks(parallel_config: Any) -> int:
    """Return the number of ranks among which prefill context parallelism divides a prompt."""
    return int(getattr(parallel_config, "prefill_context_parallel_size", None) or 1)


def prefill_ranks_hold_all() -> bool:
    """Return True if prefill context parallelism leaves each rank the KV of the whole prompt, as from 0.27 on.

    Before, it was spread, and vLLM itself had no backend that could do it.
    """
    from vllm.v1.worker import cp_utils

    return not hasattr(cp_utils, "get_total_cp_world_size")


def changes_interleave(vllm_config: Any) -> bool:
    """Return True if vLLM chooses the interleave in the ranks only, as from 0.32 on for a NixlConnector beside ours."""
    chooses = getattr(vllm_config.parallel_config, "_allow_auto_resolve_cp_interleave_size", False)
    return bool(chooses and vllm_config.kv_transfer_config.has_connector("NixlConnector"))


def computes_scales(cache_config: Any) -> bool:
    """Return True if scales of KV come from the first batch that the engine runs, as they may before 0.32."""
    return bool(getattr(cache_config, "calculate_kv_scales", False))


def quantizes_loaded_kv(vllm_config: Any) -> bool | None:
    """Return True if a vllm-ascend engine with that option quantizes KV: only if it loads KV. None without it."""
    if not getattr(getattr(vllm_config, "quant_config", None), "enable_fa_quant", False):
        return None
    return bool(vllm_config.kv_transfer_config.is_kv_consumer)


def lora_in_hashes(lora: Any) -> tuple[Any, ...]:
    """Return the part of block hashes that names a LoRA adapter: its name, from 0.32 on also its path."""
    from vllm.v1.core import kv_cache_utils

    return tuple(kv_cache_utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=lora)))


def event_fields(request: Any) -> dict[str, Any]:
    """Return the fields of a BlockStored that describe the request; `session_id` exists from 0.32 on."""
    lora = request.lora_request
    fields = {"lora_id": lora.adapter_id if lora else None, "lora_name": lora.name if lora else None}
    return fields | ({"session_id": request.session_id} if hasattr(request, "session_id") else {})


def event_extra_keys(keys: list[Any]) -> list[Any]:
    """Return the extra keys of blocks as in events: from 0.32 on without the tags that they have in hashes."""
    from vllm.v1.core import kv_cache_utils

    return list(getattr(kv_cache_utils, "to_event_extra_keys", list)(keys))


def reads_next_token(vllm_config: Any) -> bool:
    """Return True if a drafter's KV depends on the next token: vLLM then computes the last block of a hit again.

    From 0.32 on this is in the drafter's configuration, which has an option to keep that block.
    """
    drafter = vllm_config.speculative_config
    if drafter is None:
        return False
    return bool(getattr(drafter, "use_eagle_block_drop", drafter.use_eagle)())


def stops_before_loading_requests() -> bool:
    """Return True if a request that does not fit into device memory stops the engine from seeing requests that load.

    From 0.32 on, the scheduler keeps loading requests in a separate queue.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return "kv_holding_waiting" not in Scheduler.__init__.__code__.co_names


def asks_in_order(vllm_config: Any) -> bool:
    """Return True if each waiting request is seen before all later ones.

    It is not with priorities, or if requests are set aside because too many LoRA adapters are running.
    """
    policy = getattr(vllm_config.scheduler_config, "policy", "fcfs")
    return policy == "fcfs" and getattr(vllm_config, "lora_config", None) is None


def lookahead(vllm_config: Any) -> int:
    """Return the number of tokens beyond its own for which a request needs room in a step."""
    drafter = vllm_config.speculative_config
    return 1 + (int(drafter.num_speculative_tokens or 0) + 1 if drafter is not None else 0)
