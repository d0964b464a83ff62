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
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import registry
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends import utils as layouts
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvcache_client.settings import CONNECTOR

VERSION = vllm.__version__
BLOCK = 32
HEADS, HEAD, ITEM = 2, 8, 4  # float32
PAGE = 2 * BLOCK * HEADS * HEAD * ITEM
VOCABULARY = 512
PATIENCE = 30.0

# Specifications of the layers.


def full(layers: int = 3, block: int = BLOCK) -> dict[str, Any]:
    """Return layers of full attention."""
    return {f"model.layers.{n}.attn": FullAttentionSpec(**_attention(block)) for n in range(layers)}


def windows(layers: int, window: int, first: int = 0, block: int = BLOCK) -> dict[str, Any]:
    """Return layers of sliding-window attention."""
    spec = SlidingWindowSpec(**_attention(block), sliding_window=window)
    return {f"model.layers.{n}.attn": spec for n in range(first, first + layers)}


def states(layers: int, first: int = 0) -> dict[str, Any]:
    """Return Mamba layers whose states are as large as a page of attention."""
    shapes = ((4, PAGE // ITEM // 8), (PAGE // ITEM // 2,))
    spec = MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=(torch.float32, torch.float32))
    return {f"model.layers.{n}.mixer": spec for n in range(first, first + layers)}


def _attention(block: int) -> dict[str, Any]:
    return {"block_size": block, "num_kv_heads": HEADS, "head_size": HEAD, "dtype": torch.float32}


# What tokens' KV is.


def chain(tokens: Iterable[int]) -> np.ndarray:
    """Return for each token a digest of all tokens up to it."""
    mask = (1 << 64) - 1
    digests = itertools.accumulate(tokens, lambda above, token: hash((above, token)) & mask, initial=7)
    return np.fromiter(itertools.islice(digests, 1, None), np.uint64)


def kv(digests: np.ndarray, layer: int, parts: int, size: int) -> np.ndarray:
    """Return the bytes of a layer for tokens with these digests: [token, part, byte]."""
    salts = np.arange(1, parts * size // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(layer)
    values = (digests[:, None] ^ salts) * (salts | np.uint64(1))
    return values.view(np.uint8).reshape(len(digests), parts, size)


# Device memory.


class Layer(NamedTuple):
    """One layer's memory: what the connector registers, and `cells`, the same bytes as [block, part, token, byte]."""

    number: int
    group: int
    window: int  # 0: all tokens are read
    is_state: bool
    registered: Any
    cells: np.ndarray


def allocate(config: KVCacheConfig) -> dict[str, Layer]:
    """Return the memory that the runner of this version allocates, in the layout that its CPU or GPU backend has."""
    pages = dict(_pages(config))
    layers: dict[str, Layer] = {}
    for group, held in enumerate(config.kv_cache_groups):
        specs = getattr(held.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
            held.layer_names, held.kv_cache_spec
        )
        for name in held.layer_names:
            spec, memory = specs[name], pages[name]
            registered, cells = _views(spec, memory)
            window = getattr(spec, "sliding_window", None) or 0
            is_state = isinstance(spec, MambaSpec)
            layers[name] = Layer(int(name.split(".")[2]), group, window, is_state, registered, cells)
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


def _views(spec: Any, pages: Any) -> tuple[Any, np.ndarray]:
    blocks = len(pages)
    values = pages.view(torch.float32)
    if isinstance(spec, MambaSpec):
        tensors, begin = [], 0
        for shape in spec.shapes:
            end = begin + int(np.prod(shape))
            tensors.append(values[:, begin:end].unflatten(1, shape))
            begin = end
        return tensors, pages.numpy()[:, None, None, : begin * ITEM]
    if hasattr(KVCacheConfig, "transfer_groups"):  # from 0.32 on: [block, head, token, key and value]
        by_head = (blocks, HEADS, spec.block_size, 2 * HEAD)
        return values.unflatten(1, by_head[1:]), _numpy(pages.unflatten(1, (*by_head[1:3], 2 * HEAD * ITEM)))
    if pages.is_contiguous():  # keys and values apart: [2, block, token, head, value]
        apart = values.reshape(2, blocks, spec.block_size, HEADS, HEAD)
        parts = pages.reshape(2, blocks, spec.block_size, HEADS * HEAD * ITEM).permute(1, 0, 2, 3)
        return apart, _numpy(parts)
    inner = (2, spec.block_size, HEADS, HEAD)
    return values.unflatten(1, inner), _numpy(pages.unflatten(1, (*inner[:2], HEADS * HEAD * ITEM)))


def _numpy(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.numpy()
    return array


# The worker.


@dataclasses.dataclass
class Held:
    """What a runner keeps of a request."""

    tokens: list[int]
    tables: list[list[int]]
    prompt: int


class Runner:
    """One rank: vLLM's own calls of the connector around a simulated forward pass.

    With `v2`, in the order of Model Runner V2: it updates its requests, and zeroes blocks, before the connector hears.
    """

    def __init__(self, config: VllmConfig, rank: int, v2: bool) -> None:
        self.config, self.rank, self.v2 = config, rank, v2
        self.layers: dict[str, Layer] = {}
        self.held: dict[str, Held] = {}
        self.connector: Any = None
        self.hooks: ActiveKVConnector | None = None
        self.repeats = False  # whether each step's metadata is bound twice, as some runners do
        self.received: list[str] = []  # requests whose loads were reported, as often as they were
        self.computed = 0  # tokens

    def initialize(self, config: KVCacheConfig) -> None:
        with self.current():
            if self.config.kv_transfer_config is not None:
                self.connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, config)
        self.layers = allocate(config)
        if self.connector is not None:
            caches = {name: layer.registered for name, layer in self.layers.items()}
            with self.current():
                if self.v2:
                    self.hooks = ActiveKVConnector(self.config, caches)
                else:
                    self.connector.register_kv_caches(caches)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Be the process's rank: what vLLM keeps once per process is this one's."""
        before = kv_transfer_state._KV_CONNECTOR_AGENT, parallel_state._TP
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        parallel = self.config.parallel_config
        parallel_state._TP = SimpleNamespace(rank_in_group=self.rank, world_size=parallel.tensor_parallel_size)
        apart = parallel.distributed_executor_backend == "mp" and hasattr(layouts, "set_kv_cache_layout")
        if apart:  # before 0.32, the CPU's attention backend sets it where the model is made: in a rank's own process
            layouts.set_kv_cache_layout("HND")
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT, parallel_state._TP = before
            if apart:
                layouts.set_kv_cache_layout(None)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        with self.current():
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
        self._update(step)
        if not step.total_num_scheduled_tokens:
            if self.connector is None:
                return ModelRunnerOutput([], {})
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(step, self.config)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as done,
        ):
            output = self._forward(step)
        output.kv_connector_output = done
        return output

    def _execute_v2(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._update(step)
        if self.hooks is None:
            return self._forward(step) if step.total_num_scheduled_tokens else ModelRunnerOutput([], {})
        if not step.total_num_scheduled_tokens:
            return self.hooks.no_forward(step)
        self.hooks.pre_forward(step)
        output = self._forward(step)
        if hasattr(self.hooks, "finish_forward"):
            self.hooks.finish_forward()
        output.kv_connector_output = self.hooks.post_forward(step.finished_req_ids)
        return output

    def _update(self, step: SchedulerOutput) -> None:
        for name in step.finished_req_ids:
            self.held.pop(name, None)
        for block in step.new_block_ids_to_zero or ():
            for layer in self.layers.values():
                layer.cells[block] = 0
        for source, target in getattr(step, "kv_cache_block_copies", None) or ():
            for layer in self.layers.values():
                layer.cells[target] = layer.cells[source]
        for new in step.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            tokens = list(getattr(new, "prefill_token_ids", None) or new.prompt_token_ids)
            self.held[new.req_id] = Held(tokens, [list(table) for table in new.block_ids], len(new.prompt_token_ids))
        cached = step.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            held = self.held[name]
            if name in cached.resumed_req_ids:
                held.tables = [list(table) for table in added or ()]
            elif added is not None:
                for table, more in zip(held.tables, added, strict=True):
                    table.extend(more)

    def _forward(self, step: SchedulerOutput) -> ModelRunnerOutput:
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(step.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            begin, count = computed[name], step.num_scheduled_tokens[name]
            sampled.append(self._compute(name, begin, begin + count))
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)

    def _compute(self, name: str, begin: int, end: int) -> list[int]:
        """Read what attention reads for tokens `begin` to `end` of a request, write theirs, and sample."""
        held = self.held[name]
        digests = chain(held.tokens[:end])
        self.computed += end - begin
        for layer in self.layers.values():
            table = held.tables[layer.group]
            if layer.is_state:
                self._advance_state(name, layer, table[0], digests, begin, end)
                continue
            first = max(0, begin - layer.window + 1) if layer.window else 0
            self._check(name, layer, table, digests, first, begin)
            self._write(layer, table, digests, begin, end)
        if end < len(held.tokens):
            return []
        token = int(digests[-1] % np.uint64(VOCABULARY))
        held.tokens.append(token)
        return [token]

    def _check(self, name: str, layer: Layer, table: list[int], digests: np.ndarray, first: int, end: int) -> None:
        if first < end:
            blocks, offsets = self._places(layer, table, first, end)
            _, parts, _, size = layer.cells.shape
            wrong = (layer.cells[blocks, :, offsets] != kv(digests[first:end], layer.number, parts, size)).any((1, 2))
            assert not wrong.any(), (
                f"request {name}, layer {layer.number}: wrong KV at {np.flatnonzero(wrong)[:9] + first} of {end} tokens"
                f" in blocks {sorted({*blocks[wrong].tolist()})}"
            )

    def _write(self, layer: Layer, table: list[int], digests: np.ndarray, begin: int, end: int) -> None:
        blocks, offsets = self._places(layer, table, begin, end)
        _, parts, _, size = layer.cells.shape
        layer.cells[blocks, :, offsets] = kv(digests[begin:end], layer.number, parts, size)

    def _places(self, layer: Layer, table: list[int], begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        block = layer.cells.shape[2]
        positions = np.arange(begin, end)
        return np.array(table)[positions // block], positions % block

    def _advance_state(self, name: str, layer: Layer, block: int, digests: np.ndarray, begin: int, end: int) -> None:
        _, parts, _, size = layer.cells.shape
        if begin:
            expected = kv(digests[begin - 1 : begin], layer.number, parts, size)[0]
            assert (layer.cells[block, :, 0] == expected).all(), f"request {name}: wrong state before token {begin}"
        layer.cells[block, :, 0] = kv(digests[end - 1 : end], layer.number, parts, size)[0]


class SimulatedExecutor(Executor):
    """Runs the ranks of one engine one after the other, in this process."""

    def __init__(self, config: VllmConfig, specs: dict[str, Any], blocks: int, v2: bool) -> None:
        self._specs, self._blocks, self._v2 = specs, blocks, v2
        super().__init__(config)

    def _init_executor(self) -> None:
        ranks = self.parallel_config.tensor_parallel_size
        self.runners = [Runner(self.vllm_config, rank, self._v2) for rank in range(ranks)]
        self._sampled: deque[ModelRunnerOutput] = deque()  # of steps that are computed

    def collective_rpc(self, method: Any, *arguments: Any, **named: Any) -> Any:
        raise AssertionError(f"the simulated worker has no {method}")

    def check_health(self) -> None:
        pass

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [dict(self._specs) for _ in self.runners]

    def determine_available_memory(self) -> list[int]:
        # Groups overlay each other: the largest one's layers are what a block costs.
        pages = max(sum(1 for spec in self._specs.values() if type(spec) is kind) for kind in self._kinds())
        return [self._blocks * pages * PAGE + PAGE // 2] * len(self.runners)

    def _kinds(self) -> set[type]:
        return {type(spec) for spec in self._specs.values()}

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBHNC"] for _ in self.runners]

    def set_kv_cache_layout(self, layout_name: str, *more: Any) -> None:
        pass

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        for runner, config in zip(self.runners, kv_cache_configs, strict=True):
            runner.initialize(config)

    def compile_or_warm_up_model(self) -> None:
        pass

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        found = [runner.connector.get_handshake_metadata() for runner in self.runners if runner.connector]
        return [{(0, rank): metadata} for rank, metadata in enumerate(found) if metadata is not None]

    @property
    def supported_tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("generate",)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        outputs = [runner.execute(scheduler_output) for runner in self.runners]
        output = outputs[0]
        if len(outputs) > 1 and self.kv_output_aggregator is not None:
            output = self.kv_output_aggregator.aggregate([copy.copy(each) for each in outputs])
        if scheduler_output.total_num_scheduled_tokens:
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


def _without_models() -> None:
    """Have vLLM believe what it would learn from importing the model's class, which takes a process and 20 seconds."""
    facts = {
        "architecture": "LlamaForCausalLM",
        "is_text_generation_model": True,
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
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
        **options: Any,
    ) -> None:
        """Make an engine with `blocks` device blocks, without our connector where there is no `endpoint`."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODEL))
        settings = {"endpoint": endpoint, "deadline_ms": 5000, "block_size": BLOCK, "canary_every": 0} | (extra or {})
        transfer = None
        if endpoint is not None:
            transfer = KVTransferConfig(
                kv_connector=CONNECTOR,
                kv_connector_module_path="kvcache_client.connector",
                kv_role="kv_both",
                engine_id=name,
                kv_connector_extra_config=settings,
            )
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
            "kv_transfer_config": transfer,
            **options,
        }
        config = EngineArgs(**arguments).create_engine_config()
        specs = specs if specs is not None else full()
        self.core = EngineCore(config, lambda config: SimulatedExecutor(config, specs, blocks, v2), log_stats=True)
        self.scheduler = self.core.scheduler
        self.runners: list[Runner] = self.core.model_executor.runners
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.stats: list[Any] = []
        self.prefills: dict[str, tuple[int, int, int]] = {}  # computed, cached on the device, loaded; as vLLM reports
        self._closed = False

    # What the connector knows.

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def counters(self) -> dict[str, int]:
        """Both sides' counts."""
        counts: dict[str, int] = dict(self.connector._scheduler.counters)
        for runner in self.runners:
            for name, count in runner.connector._worker.counters.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    @property
    def received(self) -> list[str]:
        """The requests whose loads the first rank has reported, in order."""
        return self.runners[0].received

    @property
    def computed(self) -> int:
        """Tokens that the first rank has computed."""
        return self.runners[0].computed

    def delay(self, seconds: float) -> None:
        """Let each copy begin only after so long, as behind others on a busy bus."""
        for runner in self.runners:
            device = runner.connector._worker._device
            for thread in (device._saver, device._loader):
                thread._copy = _later(thread._copy, seconds)

    # Requests.

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 1, **facts: Any) -> Request:
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, list(prompt), parameters, None, block_hasher=self.core.request_block_hasher, **facts)
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

    def generate(self, prompt: Sequence[int], max_tokens: int = 1, name: str = "") -> list[int]:
        """Run one request, and one step more, in which vLLM tells the workers that it is over."""
        name = name or f"r{len(self.outputs)}"
        self.add(name, prompt, max_tokens)
        self.run()
        self.step()
        return self.outputs[name]

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


def expected(prompt: Sequence[int], tokens: int) -> list[int]:
    """Return what an engine generates after a prompt."""
    made: list[int] = []
    for _ in range(tokens):
        made.append(int(chain([*prompt, *made])[-1] % np.uint64(VOCABULARY)))
    return made


os.environ.setdefault("PYTHONHASHSEED", "0")  # before 0.32 the chain of hashes begins with a random number otherwise
_without_models()
core.freeze_gc_heap = lambda: None  # it collects garbage for each engine, and so does `EngineCore.shutdown`: seconds
