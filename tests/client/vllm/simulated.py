"""The vLLM that can be imported here, real but for the model: a worker of numpy writes KV where the runner would.

EngineCore, its scheduler, its KV cache manager and the classes through which a model runner calls a connector are
vLLM's own, of the version on `sys.path`; so is our connector, on both sides, with a real daemon. Simulated is what
needs a model or a device: `Runner` writes the KV of a token as a digest of all tokens up to it, and in each step checks
what attention would read. A wrong byte anywhere is an AssertionError in the step that would have computed with it.

What a version lacks or names differently is found by feature, as in `engines.vllm.compat`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import registry
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends import utils as layouts
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.worker import cp_utils
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvcache_client.devices import CopyError
from kvcache_client.engines.vllm import running_engine
from kvcache_client.settings import CONNECTOR

VERSION = vllm.__version__
BLOCK = 32
HEADS, HEAD, ITEM = 2, 8, 4  # float32
PAGE = 2 * BLOCK * HEADS * HEAD * ITEM
VOCABULARY = 512
PATIENCE = 30.0
ALL = slice(None)
NOISY = 0  # of so many tokens, one has KV of bfloat16 that cannot be compressed
# Attention backends lay a block out by head from 0.27 on, with key and value in one; before, keys precede values.
BY_HEAD = hasattr(KVCacheTensor, "block_stride") or hasattr(KVCacheTensor, "layers")
# From 0.27 on, blocks are also zeroed where KV has several precisions.
HAS_PRECISIONS = hasattr(KVCacheConfig, "has_mixed_precision_kv_cache")
HAS_GROUPS = hasattr(KVCacheTensor, "__dataclass_fields__") and "layers" in KVCacheTensor.__dataclass_fields__
# Before 0.27, prefill context parallelism spreads KV over its ranks, too.
SPREADS_PREFILL = hasattr(cp_utils, "get_total_cp_world_size")

# Specifications of the layers.


def full(
    layers: int = 3,
    block: int = BLOCK,
    heads: int = HEADS,
    total: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return layers of full attention. A rank has `heads`, of `total` that the model has."""
    some = {"max_tp_shards": total} if total and hasattr(FullAttentionSpec, "max_tp_shards") else {}
    spec = FullAttentionSpec(**_attention(block) | {"num_kv_heads": heads, "dtype": dtype} | some)
    return {f"model.layers.{n}.attn": spec for n in range(layers)}


def latent(layers: int = 3, dtype: torch.dtype = torch.float32, size: int = HEADS * HEAD) -> dict[str, Any]:
    """Return layers of MLA, of which each rank has all, with so many values of a token."""
    some = {"max_tp_shards": 1} if hasattr(MLAAttentionSpec, "max_tp_shards") else {}
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=size, dtype=dtype, **some)
    return {f"model.layers.{n}.attn": spec for n in range(layers)}


def windows(
    layers: int,
    window: int,
    first: int = 0,
    block: int = BLOCK,
    dtype: torch.dtype = torch.float32,
    heads: int = HEADS,
    total: int = 0,
) -> dict[str, Any]:
    """Return layers of sliding-window attention; `heads` and `total` are as in `full`."""
    facts = _attention(block) | {"dtype": dtype, "num_kv_heads": heads} | ({"max_tp_shards": total} if total else {})
    spec = SlidingWindowSpec(**facts, sliding_window=window)
    return {f"model.layers.{n}.attn": spec for n in range(first, first + layers)}


def states(layers: int, first: int = 0, mode: str = "none", drafts: int = 0, block: int = BLOCK) -> dict[str, Any]:
    """Return Mamba layers whose states are as large as a page of attention. `mode` is vLLM's mamba_cache_mode.

    Of a model with a drafter, which proposes so many `drafts`, there is also a state after each of these.
    """
    values = PAGE // BLOCK * block // ITEM
    shapes = ((4, values // 8), (values // 2,))
    facts = {"mamba_cache_mode": mode, "num_speculative_blocks": drafts}
    spec = MambaSpec(block, shapes=shapes, dtypes=(torch.float32, torch.float32), **facts)
    return {f"model.layers.{n}.mixer": spec for n in range(first, first + layers)}


def sparse_latent(layers: int) -> dict[str, Any]:
    """Return layers of sparse MLA: each has a latent vector of 16 bits, and bytes of its indexer."""
    found: dict[str, Any] = {}
    for n in range(layers):
        for at, (kind, dtype, size) in enumerate((("attn", torch.bfloat16, 36), ("indexer", torch.uint8, 24))):
            spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=size, dtype=dtype)
            found[f"model.layers.{2 * n + at}.{kind}"] = spec
    return found


def drafter(layer: int, block: int = BLOCK, window: int = 0) -> dict[str, Any]:
    """Return the layer of a drafter as Eagle's: the KV of a token depends on the next token, too."""
    some = _attention(block)
    spec = SlidingWindowSpec(**some, sliding_window=window) if window else FullAttentionSpec(**some)
    return {f"model.layers.{layer}.draft": spec}


def _attention(block: int) -> dict[str, Any]:
    return {"block_size": block, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": torch.float32}


# What tokens' KV is.


def chain(tokens: Iterable[int], above: int = 7) -> list[int]:
    """Return for each token a digest of all tokens up to it, of which those before have the digest `above`."""
    mask = (1 << 64) - 1
    digests = itertools.accumulate(tokens, lambda above, token: hash((above, token)) & mask, initial=above)
    return list(itertools.islice(digests, 1, None))


def kv(digests: np.ndarray, layer: int, parts: int, size: int) -> np.ndarray:
    """Return the bytes of a layer for tokens with these digests: [token, part, byte]."""
    salts = np.arange(1, parts * size // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(layer)
    values = (digests[:, None] ^ salts) * (salts | np.uint64(1))
    return values.view(np.uint8).reshape(len(digests), parts, size)


def tame(values: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """Return KV of bfloat16 whose exponents are as few as those of a model; but not in one of NOISY tokens."""
    high = values[..., 1::2]
    calm = high & 0x83 | 0x3C
    values[..., 1::2] = np.where((digests % NOISY == 0)[:, None, None], high, calm) if NOISY else calm
    return values


def embedded(embeddings: Any) -> list[int]:
    """Return tokens of which each stands for a row of embeddings."""
    rows = embeddings.float().numpy()
    return [VOCABULARY + int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=6).digest()) for row in rows]


def image(offset: int, length: int, identifier: str) -> Any:
    """Return an image of a prompt as vLLM's front end describes it, in place of `length` tokens from `offset` on."""
    digest = hashlib.sha256(identifier.encode()).hexdigest()
    return MultiModalFeatureSpec(None, "image", digest, PlaceholderRange(offset, length))


def seen(tokens: Sequence[int], images: Sequence[Any]) -> list[int]:
    """Return the tokens, with those that stand for rows of an image's embeddings in place of its placeholders."""
    found = list(tokens)
    for each in images:
        at, length = each.mm_position.offset, each.mm_position.length
        rows = (f"{each.identifier} {row}".encode() for row in range(length))
        found[at : at + length] = [
            VOCABULARY + int.from_bytes(hashlib.blake2b(row, digest_size=6).digest()) for row in rows
        ]
    return found


def write_adapter(folder: Path, weights: str) -> Path:
    """Write a LoRA adapter: its weights may be any text. Files that are there are replaced."""
    folder.mkdir(exist_ok=True)
    for name, text in (("adapter_config.json", '{"peft_type": "LORA"}'), ("adapter_model.safetensors", weights)):
        (folder / f"{name}.new").write_text(text)
        (folder / f"{name}.new").rename(folder / name)
    return folder


def adapter_of(folder: Path) -> int:
    """Return a digest of an adapter's weights."""
    digest = hashlib.blake2b((folder / "adapter_model.safetensors").read_bytes(), digest_size=8).digest()
    return int.from_bytes(digest)


# Device memory.


class Layer(NamedTuple):
    """One layer's memory: what the connector registers, and `cells`, the same bytes as [block, part, token, byte]."""

    number: int
    group: int
    window: int  # 0: all tokens are read
    is_state: bool
    is_aligned: bool  # there is a state at the end of each chunk, in a block of its own
    is_draft: bool
    registered: Any
    pages: Any  # all bytes of each block
    cells: np.ndarray
    heads: Sequence[int] = ()  # of an engine that is asked for them, those of the rank, among all of the model
    is_tame: bool = False  # whether its KV can be compressed

    def content(self, digests: np.ndarray, weights: int = 0) -> np.ndarray:
        """Return what the layer has for tokens with these digests: [token, part, byte]. That of a head is its own."""
        found = self._noise(digests, weights)
        return tame(found, digests) if self.is_tame else found

    def _noise(self, digests: np.ndarray, weights: int) -> np.ndarray:
        _, parts, _, size = self.cells.shape
        if not self.heads or self.is_state:
            return kv(digests, self.number + weights, parts, size)
        numbers = [
            self.number + 1000 * (2 * head + at) for at in range(parts // len(self.heads)) for head in self.heads
        ]
        return np.concatenate([kv(digests, number + weights, 1, size) for number in numbers], axis=1)


def allocate(config: KVCacheConfig, rank: int, heads: Sequence[int] = (), head_major: bool = True) -> dict[str, Layer]:
    """Return the memory that the runner of this version allocates, in the layout that its CPU or GPU backend has.

    A layer's number differs between ranks, because their KV does, but for those with given `heads`.
    """
    pages = dict(_pages(config))
    layers: dict[str, Layer] = {}
    for group, held in enumerate(config.kv_cache_groups):
        specs = getattr(held.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
            held.layer_names, held.kv_cache_spec
        )
        for name in held.layer_names:
            spec, memory = specs[name], pages[name]
            registered, cells = _views(spec, memory, head_major)
            window = getattr(spec, "sliding_window", None) or 0
            is_state = isinstance(spec, MambaSpec)
            is_aligned = is_state and spec.mamba_cache_mode == "align"
            number, is_draft = int(name.split(".")[2]) + (0 if heads else 1000 * rank), name.endswith(".draft")
            layers[name] = Layer(
                *(number, group, window, is_state, is_aligned, is_draft, registered, memory, cells, heads),
                getattr(spec, "dtype", None) == torch.bfloat16,
            )
    return layers


def _pages(config: KVCacheConfig) -> Iterator[tuple[str, Any]]:
    """Yield each layer's pages, as uint8 [block, byte]."""
    shared: Any = None
    for tensor in config.kv_cache_tensors:
        if hasattr(tensor, "layers"):  # from 0.32 on: views of one allocation
            shared = torch.zeros(tensor.size, dtype=torch.uint8) if shared is None else shared
            for at, name in enumerate(tensor.layers):
                begin = tensor.offset + at * tensor.layer_stride
                size = _page_bytes(config, name)
                yield name, torch.as_strided(shared, (config.num_blocks, size), (tensor.block_stride, 1), begin)
        elif getattr(tensor, "block_stride", 0):  # 0.27's packed ones are views of one allocation, too
            shared = torch.zeros(tensor.size, dtype=torch.uint8) if shared is None else shared
            for name in tensor.shared_by:
                size = _page_bytes(config, name)
                strides = (tensor.block_stride, 1)
                yield name, torch.as_strided(shared, (config.num_blocks, size), strides, tensor.offset)
        else:
            memory = torch.zeros(tensor.size, dtype=torch.uint8).view(config.num_blocks, -1)
            for name in tensor.shared_by:
                yield name, memory


def _page_bytes(config: KVCacheConfig, name: str) -> int:
    (spec,) = (group.kv_cache_spec for group in config.kv_cache_groups if name in group.layer_names)
    return int(getattr(spec, "kv_cache_specs", {name: spec})[name].page_size_bytes)


def _views(spec: Any, pages: Any, head_major: bool) -> tuple[Any, np.ndarray]:
    values = pages.view(getattr(spec, "dtype", torch.float32))
    item = values.element_size()
    if isinstance(spec, MambaSpec):
        tensors, begin = [], 0
        for shape in spec.shapes:
            end = begin + int(np.prod(shape))
            tensors.append(values[:, begin:end].unflatten(1, shape))
            begin = end
        return tensors, pages.numpy()[:, None, None, : begin * ITEM]
    heads = spec.num_kv_heads
    if isinstance(spec, MLAAttentionSpec):
        shape = (spec.block_size, spec.head_size)
        return values.unflatten(1, shape), _numpy(pages.unflatten(1, (1, shape[0], shape[1] * item)))
    if BY_HEAD and head_major:
        shape = (heads, spec.block_size, 2 * HEAD)
        return values.unflatten(1, shape), _numpy(pages.unflatten(1, (*shape[:2], 2 * HEAD * item)))
    if head_major:
        inner = (2, heads, spec.block_size, HEAD)
        cells = pages.unflatten(1, (2 * heads, spec.block_size, HEAD * item))
        return values.unflatten(1, inner).transpose(2, 3), _numpy(cells)
    inner = (2, spec.block_size, heads, HEAD)
    return values.unflatten(1, inner), _numpy(pages.unflatten(1, (*inner[:2], heads * HEAD * item)))


def _numpy(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.numpy()
    return array


# The worker.


@dataclasses.dataclass
class Held:
    """What a runner keeps of a request."""

    tokens: list[int]
    tables: list[list[int]]
    drafts: list[int] = dataclasses.field(default_factory=list)  # what the drafter proposes after the last token
    lora: Any = None
    prompt: int = 0  # its tokens
    images: Sequence[Any] = ()
    column: int | None = None  # of its tables, where its state is before any draft
    kept: int = 0  # how many columns behind that its state is now: one for each draft that was kept
    _digests: list[int] = dataclasses.field(default_factory=list)
    _adapters: list[int] = dataclasses.field(default_factory=list)  # of each position, that which its KV is of

    def forget(self, known: int) -> None:
        """Forget the tokens after the first `known` ones."""
        del self.tokens[known:], self._digests[known:]

    def digests(self, drafts: Sequence[int] = ()) -> np.ndarray:
        """Return those of its tokens, and of `drafts` after them."""
        if len(self._digests) < len(self.tokens):
            self._digests += chain(self.tokens[len(self._digests) :], *self._digests[-1:])
        return np.array([*self._digests, *chain(drafts, self._digests[-1])], np.uint64)

    def adapted(self, digests: np.ndarray, begin: int, adapter: int) -> np.ndarray:
        """Return these with an adapter's weights: where it was replaced, what was computed before is of the old one."""
        if not self._adapters:
            self._adapters = [adapter] * begin
        self._adapters[begin:] = [adapter] * (len(digests) - begin)
        return digests ^ np.array(self._adapters, np.uint64)


class Jobs:
    """Follows the copies of devices, from their submission to their end."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._running: list[tuple[str, Any]] = []
        self.fenced = 0  # blocks that were given away while they were saved
        for device in devices:
            device.save, device.load = self._noted("save", device.save), self._noted("load", device.load)
            device.fence = self._counted(device.fence)

    def blocks(self, kind: str) -> set[int]:
        """Return the device blocks of copies that run."""
        return {block for each, job in list(self._running) if each == kind for block in job.blocks.tolist()}

    def _noted(self, kind: str, start: Callable[[Any], None]) -> Callable[[Any], None]:
        def begin(job: Any) -> None:
            entry, ended = (kind, job), job.ended

            def end(job: Any) -> None:
                self._running.remove(entry)
                ended(job)

            job.ended = end
            self._running.append(entry)
            start(job)

        return begin

    def _counted(self, fence: Callable[[Any], None]) -> Callable[[Any], None]:
        def count(blocks: Any) -> None:
            self.fenced += len({*blocks} & self.blocks("save"))
            fence(blocks)

        return count


class Runner:
    """One rank: vLLM's own calls of the connector around a simulated forward pass.

    With `v2`, in the order of Model Runner V2: before it first calls the connector, it updates its requests, zeroes
    blocks, and moves states.
    """

    def __init__(self, config: VllmConfig, rank: int, v2: bool, heads: Sequence[int] = ()) -> None:
        self.config, self.rank, self.v2, self.heads = config, rank, v2, heads
        self.layers: dict[str, Layer] = {}
        self.held: dict[str, Held] = {}
        self.connector: Any = None
        self._announced: set[str] = set()  # layers that this step has begun to compute
        self._left: set[str] = set()  # layers whose attention it has computed
        self._connectors: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self.hooks: ActiveKVConnector | None = None
        # Whether it may write to what a step gives to requests right after `handle_preemptions`, as vllm-ascend's V1.
        self.writes_at_once = False
        self.repeats = False  # whether each step's metadata is bound twice, as some runners do
        self.unmapped: list[bool] = []  # for each time that its memory was unmapped, whether copies ran
        self.received: list[str] = []  # requests whose loads were reported, as often as they were
        self.computed = 0  # tokens
        self.pools = config.model_config.runner_type == "pooling"
        drafter = config.speculative_config
        self.drafts = drafter.num_speculative_tokens if drafter is not None else 0
        parallel = config.parallel_config
        self.contexts, self.interleave = parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
        ranks, divided = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size
        tensor, prefill = rank % ranks, rank // ranks % divided
        # As vLLM's `initialize_model_parallel` and block tables have it.
        self.context = (tensor * divided + prefill) % self.contexts
        if SPREADS_PREFILL:
            self.context = prefill * self.contexts + tensor % self.contexts
            self.contexts *= divided
        self.weights = 0  # KV of other weights is other KV
        self.zeroed = 0  # blocks, as often as they were
        self.adapters: dict[int, int] = {}  # what their files had when they were loaded; the latest used is the last

    def initialize(self, config: KVCacheConfig) -> None:
        with self.current():
            if self.config.kv_transfer_config is not None:
                self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, config)
        self.layers = allocate(config, self.rank, self.heads, BY_HEAD or bool(self.heads))
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self.state_block = next((spec.block_size for spec in specs if isinstance(spec, MambaSpec)), BLOCK)
        if self.connector is not None:
            caches = {name: layer.registered for name, layer in self.layers.items()}
            context = self.config.compilation_config.static_forward_context
            context.update({name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()})
            with self.current():
                if self.v2:
                    self.hooks = ActiveKVConnector(self.config, caches)
                else:
                    self.connector.register_kv_caches(caches)
        self.jobs = Jobs(self.devices)

    @property
    def devices(self) -> list[Any]:
        """The connector's devices, one per layout of a block; none where it takes no part."""
        found = [getattr(each, "_worker", None) for each in getattr(self.connector, "_connectors", [self.connector])]
        several = [worker._device for worker in found if worker is not None and worker._device is not None]
        return [device for each in several for device in getattr(each, "devices", [each])]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Be the process's rank: what vLLM and the connector keep once per process is this one's."""
        before = (
            kv_transfer_state._KV_CONNECTOR_AGENT,
            parallel_state._TP,
            parallel_state._PP,
            parallel_state._PCP,
            running_engine._connectors,
        )
        kv_transfer_state._KV_CONNECTOR_AGENT, running_engine._connectors = self.connector, self._connectors
        parallel = self.config.parallel_config
        ranks, prefill = parallel.tensor_parallel_size, parallel.prefill_context_parallel_size
        parallel_state._TP = SimpleNamespace(rank_in_group=self.rank % ranks, world_size=ranks)
        parallel_state._PCP = SimpleNamespace(rank_in_group=self.rank // ranks % prefill, world_size=prefill)
        stages = parallel.pipeline_parallel_size
        parallel_state._PP = SimpleNamespace(rank_in_group=self.rank // ranks // prefill, world_size=stages)
        apart = parallel.distributed_executor_backend == "mp" and hasattr(layouts, "set_kv_cache_layout")
        apart = apart and not self.config.model_config.use_mla
        if apart:  # before 0.32, the CPU's attention backend sets it where the model is made: in a rank's own process
            layouts.set_kv_cache_layout("HND")
        try:
            yield
        finally:
            (
                kv_transfer_state._KV_CONNECTOR_AGENT,
                parallel_state._TP,
                parallel_state._PP,
                parallel_state._PCP,
                running_engine._connectors,
            ) = before
            if apart:
                layouts.set_kv_cache_layout(None)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = (self._execute_v2 if self.v2 else self._execute_v1)(step)
        if self.repeats:
            again = KVConnectorModelRunnerMixin.kv_connector_no_forward(step, self.config)
            output = KVOutputAggregator(1).aggregate([copy.copy(output), again])  # it may be vLLM's only empty one
        done = output.kv_connector_output
        if done is not None:
            self.received += sorted(done.finished_recving or ())
        return output

    def _execute_v1(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self.connector is not None:
            self.connector.handle_preemptions(step.kv_connector_metadata)
            if self.writes_at_once:
                assert not self._given(step) & self.jobs.blocks("save"), "a block is overwritten while it is saved"
        self._update(step)
        if not step.total_num_scheduled_tokens:
            if self.connector is None:
                return ModelRunnerOutput([], {})
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(step, self.config)
        self._move_states(step)
        with (
            set_forward_context(dict.fromkeys(self.layers), self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as done,
        ):
            output = self._forward(step)
        output.kv_connector_output = done
        return output

    def _execute_v2(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._update(step)
        if self.hooks is None:
            if not step.total_num_scheduled_tokens:
                return ModelRunnerOutput([], {})
            self._move_states(step)
            return self._forward(step)
        if not step.total_num_scheduled_tokens:
            return self.hooks.no_forward(step)
        self._move_states(step)
        with set_forward_context(dict.fromkeys(self.layers), self.config):
            self.hooks.pre_forward(step)
            output = self._forward(step)
            if hasattr(self.hooks, "finish_forward"):
                self.hooks.finish_forward()
            output.kv_connector_output = self.hooks.post_forward(step.finished_req_ids)
        return output

    def _given(self, step: SchedulerOutput) -> set[int]:
        """Return the blocks that a step gives to requests."""
        held = self.layers.values()
        sizes = {layer.group: layer.cells.shape[2] * self.contexts for layer in held if not layer.is_state}
        cached = step.scheduled_cached_reqs
        tables = [(new.num_computed_tokens, new.block_ids) for new in step.scheduled_new_reqs]
        for name, computed, added in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            tables.append((computed if name in cached.resumed_req_ids else 0, added or ()))
        return {
            block
            for computed, several in tables
            for group, table in enumerate(several)
            for block in table[computed // sizes.get(group, BLOCK) :]
        }

    def _update(self, step: SchedulerOutput) -> None:
        for name in step.finished_req_ids:
            self.held.pop(name, None)
        zeroed = step.new_block_ids_to_zero or []
        copied = [*(getattr(step, "kv_cache_block_copies", None) or ())]
        self.zeroed += len(zeroed)
        touched = {*zeroed, *(target for _, target in copied)}
        assert not touched & self.jobs.blocks("load"), "a block is overwritten after its load has begun"
        assert not touched & self.jobs.blocks("save"), "a block is overwritten while it is saved"
        for layer in self.layers.values():
            if not layer.is_state:  # vLLM zeroes none of states
                layer.pages[zeroed] = 0
            for source, target in copied:
                layer.pages[target] = layer.pages[source]
        for new in step.scheduled_new_reqs:
            if (embeddings := new.prompt_embeds) is not None:
                tokens = embedded(embeddings)
            else:
                assert new.prompt_token_ids is not None
                tokens = seen(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids, new.mm_features)
            tables = [list(table) for table in new.block_ids]
            images = new.mm_features
            self.held[new.req_id] = Held(tokens, tables, lora=new.lora_request, prompt=len(tokens), images=images)
        cached = step.scheduled_cached_reqs
        for name, added, made in zip(cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True):
            held = self.held[name]
            held.forget(held.prompt + made)  # vLLM has thrown away what was computed with blocks that were not loaded
            if name in cached.resumed_req_ids:
                tokens = seen(cached.all_token_ids.get(name, held.tokens), held.images)
                tables = [list(table) for table in added or ()]
                self.held[name] = Held(tokens, tables, lora=held.lora, prompt=held.prompt, images=held.images)
            elif added is not None:
                for table, more in zip(held.tables, added, strict=True):
                    table.extend(more)

    def _move_states(self, step: SchedulerOutput) -> None:
        """Copy states to the blocks in which this step goes on with them."""
        aligned = [layer for layer in self.layers.values() if layer.is_aligned]
        for name, begin in _computed(step).items() if aligned else ():
            held = self.held[name]
            if self.drafts:
                begin = min(begin, len(held.tokens) - 1)
            before = (begin - 1) // self.state_block if held.column is None else held.column
            held.column = after = (begin + step.num_scheduled_tokens[name] - 1) // self.state_block
            if begin and before != after:
                self._copy_states(held, before + held.kept, after)
                held.kept = 0

    def _copy_states(self, held: Held, source: int, target: int) -> None:
        for layer in self.layers.values():
            if layer.is_aligned:
                table = held.tables[layer.group]
                layer.cells[table[target]] = layer.cells[table[source]]

    def _forward(self, step: SchedulerOutput) -> ModelRunnerOutput:
        computed, names = _computed(step), list(step.num_scheduled_tokens)
        for name in names:
            if self.held[name].lora is not None:
                self.load_adapter(self.held[name].lora)
        self._announced.clear()
        self._left.clear()
        sampled = [
            self._compute(
                name, computed[name], step.num_scheduled_tokens[name], step.scheduled_spec_decode_tokens.get(name, ())
            )
            for name in names
        ]
        places = {name: at for at, name in enumerate(names)}
        if not self.pools:
            return ModelRunnerOutput(names, places, sampled)
        pooled = [torch.tensor(each) if each else None for each in sampled]
        return ModelRunnerOutput(names, places, [], pooler_output=pooled)

    def _announce(self, name: str, layer: Layer) -> None:
        """Announce a layer before it is read first: its new KV has been written. That of a drafter is computed after
        the calls around the step."""
        if self.connector is not None and name not in self._announced and not layer.is_draft:
            self._announced.add(name)
            self.connector.wait_for_layer_load(name)

    def _leave(self, name: str, layer: Layer) -> None:
        if self.connector is not None and name not in self._left and not layer.is_draft:
            self._left.add(name)
            self.connector.save_kv_layer(name, layer.registered, None)

    def load_adapter(self, lora: Any) -> bool:
        """Have an adapter loaded, as `LRUCacheWorkerLoRAManager` does."""
        adapter = self.adapters.pop(lora.lora_int_id, None)
        if adapter is None or lora.load_inplace:
            adapter = adapter_of(Path(lora.lora_path))
        self.adapters[lora.lora_int_id] = adapter
        while len(self.adapters) > self.config.lora_config.max_cpu_loras:
            del self.adapters[next(iter(self.adapters))]
        return True

    def _compute(self, name: str, begin: int, count: int, drafts: Sequence[int]) -> list[int]:
        """Read what attention reads for `count` tokens of a request, write theirs, and sample.

        The last ones are `drafts`: those that are what the model would have sampled are kept, and one more is sampled.
        """
        held = self.held[name]
        known = len(held.tokens)
        if self.drafts:  # with asynchronous scheduling, the scheduler knows neither drafts nor how many were kept
            begin = min(begin, known - 1)
            drafts = held.drafts[: len(drafts)]
        fed = [*held.tokens, *drafts][: begin + count]
        digests = held.digests(drafts)
        if held.lora is not None:
            digests = held.adapted(digests, begin, self.adapters[held.lora.lora_int_id])
        self.computed += len(fed) - begin
        for layer_name, layer in self.layers.items():
            table = held.tables[layer.group]
            if not (layer.is_state or layer.is_draft):
                self._write(layer, table, digests, begin, len(fed))
            self._announce(layer_name, layer)
            if layer.is_state:
                self._advance_state(name, layer, table, digests, begin, len(fed), len(fed) - known)
            else:
                first = max(0, begin - layer.window + 1) if layer.window else 0
                self._check(name, layer, table, digests[layer.is_draft :], first, begin)
            self._leave(layer_name, layer)
        made: list[int] = []
        if len(fed) >= known:
            for at in range(known - 1, len(fed)):
                made.append(int(digests[at] % np.uint64(VOCABULARY)))
                if at + 1 < len(fed) and fed[at + 1] != made[-1]:
                    break
            held.tokens += made
            self._keep_states(held, known, len(made) - 1)
        else:
            held.kept = 0
        if self.drafts:
            digests = held.digests()[1:]
            for layer in self.layers.values():
                if layer.is_draft:
                    end = len(held.tokens) - 1 if made else len(fed)
                    self._write(layer, held.tables[layer.group], digests, begin, end)
            held.drafts = expected(held.tokens, self.drafts) if made else []
            if made:
                held.drafts[-1] ^= len(held.tokens) % 2  # now and then the last one is wrong
        return made

    def _check(self, name: str, layer: Layer, table: list[int], digests: np.ndarray, first: int, end: int) -> None:
        if first < end:
            positions, blocks, offsets = self._places(layer, table, first, end)
            content = layer.content(digests[positions], self.weights)
            wrong = (layer.cells[blocks, :, offsets] != content).any((1, 2))
            assert not wrong.any(), (
                f"request {name}, layer {layer.number}: wrong KV at {positions[wrong][:9]} of {end} tokens"
                f" in blocks {sorted({*blocks[wrong].tolist()})}"
            )

    def _write(self, layer: Layer, table: list[int], digests: np.ndarray, begin: int, end: int) -> None:
        positions, blocks, offsets = self._places(layer, table, begin, end)
        layer.cells[blocks, :, offsets] = layer.content(digests[positions], self.weights)

    def _places(
        self, layer: Layer, table: list[int], begin: int, end: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return those tokens from `begin` to `end` that this rank has, their blocks, and where they are in these.

        With decode context parallelism, ranks take turns, as in vLLM's `cp_local_slot`.
        """
        positions, turn = np.arange(begin, end), self.interleave * self.contexts
        positions = positions[positions // self.interleave % self.contexts == self.context]
        block = layer.cells.shape[2] * self.contexts
        offsets = positions % block // turn * self.interleave + positions % self.interleave
        return positions, np.array(table)[positions // block], offsets

    def _advance_state(
        self, name: str, layer: Layer, table: list[int], digests: np.ndarray, begin: int, end: int, drafts: int
    ) -> None:
        """Read the state before token `begin`, and write that before token `end` in its place.

        If the last of these tokens are drafts, write the state before each of them and after the last one, in columns
        that follow each other: how many are kept is not known yet.
        """
        column, kept = 0, 0
        if layer.is_aligned:
            held = self.held[name]
            assert held.column is not None
            column, kept = held.column, held.kept
        if begin:
            expected = layer.content(digests[begin - 1 : begin])[0]
            found = layer.cells[table[column + kept], :, 0]
            assert (found == expected).all(), f"request {name}, layer {layer.number}: wrong state before token {begin}"
        for at in range(max(0, drafts) + 1):
            assert table[column + at] or not layer.is_aligned, f"request {name}: no block for a state of token {end}"
            before = end - max(0, drafts) + at
            layer.cells[table[column + at], :, 0] = layer.content(digests[before - 1 : before])[0]

    def _keep_states(self, held: Held, first: int, kept: int) -> None:
        """Note that `kept` drafts were, from token `first` on; if a block ends there or among them, keep its state."""
        held.kept = kept
        if held.column is None:
            return
        boundary = (first + kept) // self.state_block * self.state_block
        if boundary >= first and held.column + boundary - first != boundary // self.state_block - 1:
            self._copy_states(held, held.column + boundary - first, boundary // self.state_block - 1)
            if held.column == boundary // self.state_block - 1:
                held.kept = 0


def _computed(step: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request were computed before a step."""
    cached = step.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    return computed | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


class OlderWorker:
    """What an executor calls in the process of a rank."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self._runner.execute_model(scheduler_output)

    def sleep(self, level: int = 1) -> None:
        self._unmap()

    def discard(self, tags: tuple[str, ...]) -> None:
        self._unmap()

    def _unmap(self) -> None:
        """Unmap the device's memory: who reads it all the same finds something else."""
        jobs = self._runner.jobs
        self._runner.unmapped.append(bool(jobs.blocks("save") or jobs.blocks("load")))
        for layer in self._runner.layers.values():
            layer.cells[:] = 0xAA

    def wake_up(self, tags: Any = None) -> None:
        pass

    def add_lora(self, lora_request: Any) -> bool:
        return self._runner.load_adapter(lora_request)

    def synchronize_device(self) -> None:
        pass


class WorkerWithHooks(OlderWorker):
    """It tells the connector before it unmaps memory, and after it has mapped it again."""

    def sleep(self, level: int = 1) -> None:
        if has_kv_transfer_group():
            get_kv_transfer_group().unregister_kv_caches()
        self._unmap()

    def discard(self, tags: tuple[str, ...]) -> None:
        if has_kv_transfer_group() and "kv_cache" in tags:
            get_kv_transfer_group().unregister_kv_caches()
        self._unmap()

    def wake_up(self, tags: Any = None) -> None:
        if has_kv_transfer_group() and (tags is None or "kv_cache" in tags):
            get_kv_transfer_group().restore_kv_caches()


# From 0.33 on
HAS_SLEEP_HOOKS = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
SimulatedWorker: Any = WorkerWithHooks if HAS_SLEEP_HOOKS else OlderWorker


class SimulatedExecutor(Executor):
    """Runs the ranks of one engine one after the other, in this process.

    With `bypasses`, it calls the ranks' runners by itself, as vLLM's older executor for Ray does.
    """

    bypasses = False

    def __init__(
        self,
        config: VllmConfig,
        specs: Sequence[dict[str, Any]],
        blocks: int,
        v2: bool,
        heads: int,
        layout: str,
    ) -> None:
        """`specs` are those of the layers of each pipeline stage; `layout` is the one that the backend supports."""
        self._specs, self._blocks, self._v2, self._heads, self._layout = specs, blocks, v2, heads, layout
        super().__init__(config)

    def _init_executor(self) -> None:
        parallel = self.parallel_config
        self._ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size  # of a stage
        assert len(self._specs) == parallel.pipeline_parallel_size
        ranks = range(self._ranks * len(self._specs))
        self.runners = [Runner(self.vllm_config, rank, self._v2, self._heads_of(rank)) for rank in ranks]
        self._sampled: deque[ModelRunnerOutput] = deque()  # of steps that are computed

    def _heads_of(self, rank: int) -> Sequence[int]:
        """Return which heads a rank has: fewer heads than ranks are those of several."""
        ranks = self.parallel_config.tensor_parallel_size
        held = -(-self._heads // ranks)
        first = rank % ranks * self._heads // ranks
        latent = all(isinstance(spec, MLAAttentionSpec) for specs in self._specs for spec in specs.values())
        return (0,) if latent else range(first, first + held)

    def collective_rpc(self, method: Any, *arguments: Any, **named: Any) -> Any:
        given = dict(zip(("timeout", "args", "kwargs"), arguments, strict=False)) | named
        found = []
        for runner in self.runners:
            with runner.current():
                called = getattr(SimulatedWorker(runner), method)
                found.append(called(*(given.get("args") or ()), **(given.get("kwargs") or {})))
        return found

    def take_draft_token_ids(self) -> Any:
        held = self.runners[0].held
        return DraftTokenIds(list(held), [list(each.drafts) for each in held.values()])

    def check_health(self) -> None:
        pass

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [dict(self._specs[runner.rank // self._ranks]) for runner in self.runners]

    def determine_available_memory(self) -> list[int]:
        # Groups overlay each other: the largest one's layers are what a block costs. A stage with fewer layers than
        # another one has room for more blocks.
        kinds = {type(spec) for specs in self._specs for spec in specs.values()}
        pages = max(sum(1 for spec in specs.values() if type(spec) is kind) for specs in self._specs for kind in kinds)
        page = max(spec.page_size_bytes for specs in self._specs for spec in specs.values())
        return [self._blocks * pages * page + page // 2] * len(self.runners)

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[self._layout] for _ in self.runners]

    def set_kv_cache_layout(self, layout_name: str, *more: Any) -> None:
        pass

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        for runner, config in zip(self.runners, kv_cache_configs, strict=True):
            runner.initialize(config)

    def compile_or_warm_up_model(self) -> None:
        pass

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        found = []
        for runner in self.runners:
            with runner.current():
                metadata = runner.connector.get_handshake_metadata() if runner.connector is not None else None
            found.append({divmod(runner.rank, self._ranks): metadata} if metadata is not None else None)
        return found

    @property
    def supported_tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("generate", "embed", "token_embed")

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        outputs = []
        for runner in self.runners:
            with runner.current():
                called = runner if self.bypasses else SimulatedWorker(runner)
                outputs.append(copy.copy(called.execute_model(scheduler_output)))
        samples = len(outputs) - self._ranks  # the first rank of the last stage
        for rank, stage in enumerate(outputs[:samples]):
            outputs[rank] = ModelRunnerOutput.with_kv_conn_output_only(stage.kv_connector_output)
        output = outputs[samples]
        if len(outputs) > 1 and self.kv_output_aggregator is not None:
            output = self.kv_output_aggregator.aggregate(outputs, output_rank=samples)
        if scheduler_output.total_num_scheduled_tokens and not self.runners[0].pools:
            self._sampled.append(output)
            output = None
        return _future(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output = self._sampled.popleft()
        return _future(output) if non_block else output

    def reset_mm_cache(self) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass

    def shutdown(self) -> None:
        for runner in self.runners:
            if runner.connector is not None:
                with runner.current():
                    runner.connector.shutdown()


def _future(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


# The engine.


class AnyTokens(StructuredOutputBackend):
    """Compiles grammars that allow every token, once `ready`."""

    ready = threading.Event()
    ready.set()

    def compile_grammar(self, request_type: Any, grammar_spec: str, **more: Any) -> StructuredOutputGrammar:
        assert self.ready.wait(PATIENCE)
        return AnyToken()

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, self.vocab_size // 32), -1, dtype=torch.int32)

    def destroy(self) -> None:
        pass


class AnyToken(StructuredOutputGrammar):
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        bitmask[batch_index] = -1

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        pass


def _without_models() -> None:
    """Have vLLM believe what it would learn from importing the model's class, which takes a process and 20 seconds."""
    facts = {
        "architecture": "LlamaForCausalLM",
        "is_text_generation_model": True,
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
        "supports_lora": True,
        "supports_pp": True,
        "supported_video_pruning_methods": (),
    }
    names = [field.name for field in dataclasses.fields(registry._ModelInfo)]
    info = registry._ModelInfo(**{name: facts.get(name, False) for name in names})
    registry._ModelRegistry.inspect_model_cls = lambda self, *asked: (info, "LlamaForCausalLM")


MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
}


MLA = {
    "model_type": "deepseek_v2",
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 3,
}


class Engine:
    """One engine, stepped by the test."""

    def __init__(
        self,
        folder: Path,
        name: str,
        endpoint: str | None,
        specs: dict[str, Any] | None = None,
        blocks: int = 64,
        v2: bool = False,
        extra: dict[str, Any] | None = None,
        beside: Sequence[dict[str, Any]] = (),
        transfer: dict[str, Any] | None = None,
        stages: Sequence[int] = (),
        data_parallel_rank: int | None = None,
        heads: int = 0,
        layout: str = "LBHNC",
        mtp: bool = False,
        prefill: tuple[int, int] = (1, 1),
        **options: Any,
    ) -> None:
        """Make an engine with `blocks` device blocks, without our connector where there is no `endpoint`.

        Args:
            extra: settings of our connector.
            beside: other connectors, of which vLLM's MultiConnector has ours as the last one.
            transfer: further fields of vLLM's configuration of connectors.
            stages: how many of the layers each pipeline stage has; one has them all if not given.
            data_parallel_rank: of an engine that has several. They have one configuration, which `run_engine_core`
                changes a little for each.
            heads: of the model, for which vLLM's part of a rank has its share; then the same tokens have the same KV in
                engines with any number of ranks, and else other KV in each rank.
            layout: of KV, from vLLM 0.32 on.
            mtp: whether the drafter, given as Eagle, is MTP: then vLLM knows that its layers are the last ones.
            prefill: the ranks of prefill context parallelism, and then those of decode context parallelism. vLLM
                refuses the former with the runner that it takes on CPUs.
            options: vLLM's engine arguments.
        """
        folder.mkdir(exist_ok=True)
        counted = {"num_attention_heads": 8, "num_key_value_heads": heads} if heads else {}
        if mla := any(isinstance(spec, MLAAttentionSpec) for spec in (specs or {}).values()):
            counted |= MLA
        (folder / "config.json").write_text(json.dumps(MODEL | counted))
        if hasattr(layouts, "set_kv_cache_layout"):
            layouts.set_kv_cache_layout(None)  # forget that of the last engine
        settings = {"endpoint": endpoint, "deadline_ms": 5000, "block_size": BLOCK, "canary_every": 0}
        settings |= {"gate": "off", "overlap": "off"}  # what they do depends on how long things take
        settings |= extra or {}
        ours = {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "kvcache_client.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
        if beside:
            several = {"connectors": [*beside, ours]}
            ours = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": several}
        arguments = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "load_format": "dummy",
            "block_size": BLOCK,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "async_scheduling": False,
            "pipeline_parallel_size": len(stages) or 1,
            "kv_transfer_config": KVTransferConfig(engine_id=name, **(ours | (transfer or {}))) if endpoint else None,
            **options,
        }
        asynchronous = arguments.pop("async_scheduling")
        # vLLM refuses it for stages with the runner that it takes on CPUs.
        config = EngineArgs(**arguments, async_scheduling=asynchronous and not stages).create_engine_config()
        config.parallel_config.worker_cls = f"{__name__}.SimulatedWorker"
        config.scheduler_config.async_scheduling = asynchronous  # vLLM turns it off for CPUs
        if prefill[0] > 1:
            parallel = config.parallel_config
            parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size = prefill
            parallel.world_size *= prefill[0]
        if mtp:  # vLLM makes it of the models that have one
            config.speculative_config.method = "mtp"
        if mla:  # the same
            config.cache_config.enable_prefix_caching = config.scheduler_config.enable_chunked_prefill = True
        if data_parallel_rank is not None:
            config.instance_id = f"instance of {name}"
            config.parallel_config.data_parallel_index = data_parallel_rank
            config.kv_transfer_config.engine_id += f"_dp{data_parallel_rank}"
        if specs is None:
            ranks = config.parallel_config.tensor_parallel_size
            specs = full(heads=-(-heads // ranks), total=heads) if heads else full()
        if any(getattr(spec, "mamba_cache_mode", "none") == "align" for spec in specs.values()):
            config.cache_config.mamba_cache_mode = "align"  # 0.33 turns it off for a model that is not known to need it
        layers = iter(specs.items())
        staged = [dict(itertools.islice(layers, count)) for count in stages or (len(specs),)]
        facts = (staged, blocks, v2, heads, layout)
        self.core = EngineCore(config, lambda config: SimulatedExecutor(config, *facts), log_stats=True)
        assert (self.core.batch_queue is not None) == (asynchronous or len(staged) > 1)
        self.scheduler = self.core.scheduler
        self.runners: list[Runner] = self.core.model_executor.runners
        self.blocks = config.cache_config.num_gpu_blocks
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.stats: list[Any] = []
        self.prefills: dict[str, tuple[int, int, int]] = {}  # computed, cached on the device, loaded; as vLLM reports
        self.published: list[Any] = []  # KV events, where they are enabled
        self.scheduler.kv_event_publisher.publish = lambda batch: self.published.extend(batch.events)
        self._closed = False

    # What the connector knows.

    @property
    def connector(self) -> Any:
        """Our own, also beside others."""
        found = self.scheduler.connector
        return next(each for each in getattr(found, "_connectors", [found]) if type(each).__name__ == CONNECTOR)

    @property
    def counters(self) -> dict[str, int]:
        """Both sides' counts."""
        counts: dict[str, int] = dict(self.connector._scheduler.counters)
        for worker in self.workers:
            for name, count in worker.counters.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    @property
    def workers(self) -> list[Any]:
        """Our connector's side of each rank."""
        found = [getattr(runner.connector, "_connectors", [runner.connector]) for runner in self.runners]
        return [next(each for each in several if type(each).__name__ == CONNECTOR)._worker for several in found]

    @property
    def received(self) -> list[str]:
        """The requests whose loads the first rank has reported, in order."""
        return self.runners[0].received

    @property
    def computed(self) -> int:
        """Tokens that the first rank has computed."""
        return self.runners[0].computed

    @property
    def fenced(self) -> int:
        """Blocks that were given to others while the first rank saved them."""
        return self.runners[0].jobs.fenced

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def delay(self, seconds: float) -> None:
        """Let each copy begin only after so long, as behind others on a busy bus."""
        for thread in self._copiers(ALL):
            thread._copy = _later(thread._copy, seconds)

    @contextlib.contextmanager
    def held_copies(self, ranks: slice = ALL, fail: bool = False) -> Iterator[None]:
        """Let no copy of these ranks begin before the end of the `with`; those that waited for it may `fail` then."""
        until = threading.Event()
        copies = [(thread, thread._copy) for thread in self._copiers(ranks)]
        for thread, copy_now in copies:
            thread._copy = _once(copy_now, until, fail)
        try:
            yield
        finally:
            until.set()
            for thread, copy_now in copies:
                thread._copy = copy_now

    def _copiers(self, ranks: slice) -> list[Any]:
        found = [worker._device for worker in self.workers[ranks]]
        devices = [device for several in found for device in getattr(several, "devices", [several])]
        return [thread for device in devices for thread in (device._saver, device._loader)]

    # Requests.

    def add(
        self,
        name: str,
        prompt: Any,
        max_tokens: int = 1,
        sampling: dict[str, Any] | None = None,
        pooling: PoolingParams | None = None,
        **facts: Any,
    ) -> Request:
        """Add a request that samples, with further parameters, or one that pools. Its prompt may be embeddings."""
        embeddings = prompt if isinstance(prompt, torch.Tensor) else None
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **(sampling or {}))
        request = Request(
            name,
            list(prompt) if embeddings is None else None,
            parameters if pooling is None else None,
            pooling,
            prompt_embeds=embeddings,
            block_hasher=self.core.request_block_hasher,
            **facts,
        )
        if request.structured_output_request is not None:
            manager = self.scheduler.structured_output_manager  # what needs a tokenizer is simulated
            manager.backend, manager._use_async_grammar_compilation = AnyTokens(None, None, VOCABULARY), True
            manager.executor = manager.__dict__.get("executor") or ThreadPoolExecutor(1)
            manager.grammar_init(request)
        if request.mm_features:  # the model's class would have told vLLM the size of its encoder's cache
            self.scheduler.max_num_encoder_input_tokens = 1 << 20
            self.scheduler.encoder_cache_manager = EncoderCacheManager(1 << 20)
        self.outputs[name] = []
        self.core.add_request(request)
        return request

    def abort(self, *names: str) -> None:
        self.core.abort_requests(list(names))

    def step(self) -> bool:
        """Take one step of the engine's core; return whether it has requests left."""
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        for client in (outputs or {}).values():
            if client.scheduler_stats is not None:
                self.stats.append(client.scheduler_stats)
            for output in client.outputs:
                self.outputs[output.request_id] += output.new_token_ids
                if (found := output.prefill_stats) is not None:
                    parts = found.num_computed_tokens, found.num_local_cached_tokens, found.num_external_cached_tokens
                    self.prefills[output.request_id] = parts
                if output.finish_reason is not None:
                    self.finished[output.request_id] = str(output.finish_reason)
        return bool(self.scheduler.has_requests())

    def run(self, until: Callable[[], Any] | None = None) -> None:
        """Step until no request is left, or until something holds."""
        end = time.monotonic() + PATIENCE
        while self.step() if until is None else not until():
            if until is not None:
                self.step()
            assert time.monotonic() < end, "the engine does not come to an end"

    def answered(self) -> None:
        """Wait until the daemon has answered all reservations, which the next step then has."""
        end = time.monotonic() + PATIENCE
        for sent in self.connector._scheduler._saves.waiting:
            while sent.pending is not None and sent.pending.poll() is None:
                assert time.monotonic() < end, "the daemon does not answer"
                time.sleep(0.0002)

    def generate(self, prompt: Any, max_tokens: int = 1, name: str = "", **facts: Any) -> list[int]:
        """Run one request, and one step more, in which vLLM tells the workers that it is over."""
        name = name or f"r{len(self.outputs)}"
        self.add(name, prompt, max_tokens, **facts)
        self.run()
        self.step()
        return self.outputs[name]

    def generate_all(self, prompts: dict[str, list[int]], max_tokens: int) -> None:
        """Run requests together, and one step more."""
        for name, tokens in prompts.items():
            self.add(name, tokens, max_tokens)
        self.run()
        self.step()

    def finish(self) -> None:
        """Abort what is left, and step until vLLM, too, has nothing to do."""
        self.core.resume_scheduler()
        self.abort(*self.scheduler.requests)
        self.run()
        self.step()

    def update_weights(self) -> None:
        for runner in self.runners:
            runner.weights += 100

    def reset(self, running: bool = False, connector: bool = False) -> bool:
        return bool(self.core.reset_prefix_cache(running, connector))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.core.model_executor.shutdown()
            self.scheduler.shutdown()


def _later(copy: Callable[[Any], None], seconds: float) -> Callable[[Any], None]:
    def wait(job: Any) -> None:
        time.sleep(seconds)
        copy(job)

    return wait


def _once(copy_now: Callable[[Any], None], until: threading.Event, fail: bool) -> Callable[[Any], None]:
    def wait(job: Any) -> None:
        assert until.wait(PATIENCE)
        if fail:
            raise CopyError("the bus is gone")
        copy_now(job)

    return wait


def expected(prompt: Sequence[int], tokens: int, adapter: int = 0) -> list[int]:
    """Return what an engine generates after a prompt."""
    made: list[int] = []
    digest = chain(prompt)[-1]
    for _ in range(tokens):
        made.append((digest ^ adapter) % VOCABULARY)
        (digest,) = chain(made[-1:], digest)
    return made


os.environ.setdefault("PYTHONHASHSEED", "0")  # before 0.32 the chain of hashes begins with a random number otherwise
_without_models()
core.freeze_gc_heap = lambda: None  # it collects garbage for each engine, and so does `EngineCore.shutdown`: seconds
