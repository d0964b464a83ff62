"""KV caches as vllm-ascend 0.23 allocates them: keys and values apart, MLA in two tensors, sparse MLA in up to four."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from steps import BLOCK, BLOCKS, Request, Rig, VllmScheduler

from kvcache_client import GroupSpec, NamespaceSpec, Session
from kvcache_client.engines.vllm.identity import layer_spec, rank_block_bytes, unsupported_reason
from kvcache_client.scheduler.views import EngineFacts
from kvcache_client.settings import ConnectorSettings
from kvcache_client.worker.places import RankFacts, Shards
from kvcache_client.worker.worker import Worker

torch = pytest.importorskip("torch")

# Warnings of its packages, which are newer than it expects, are no business of these tests.
pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(3)]
TENSORS = {"dense": 2, "values of another size": 2, "MLA": 2, "sparse MLA": 3, "sparse MLA, C8 indexer": 4, "SFA C8": 3}


def kv_spec(name: str) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

    if "MLA" not in name and "SFA" not in name:
        wide = {"head_size_v": 64} if name == "values of another size" else {}
        return FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=128, dtype=torch.bfloat16, **wide)
    dims = {"MLA": None, "SFA C8": (656, 0, 128)}.get(name, (512, 64, 128))
    return AscendMLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=sum(dims or (512, 64)),
        dtype=torch.bfloat16,
        sparse_head_dim=dims,
        cache_sparse_sfa_c8=name == "SFA C8",
        cache_sparse_li_c8="C8" in name,
    )


@pytest.fixture
def runner(runner_class: Any, monkeypatch: Any) -> Callable[[str], Any]:
    """`runner(name)` returns a model runner with the KV cache configuration of such a model."""
    # Zeroing is computed, which the simulated NPU does not do.
    zeros = torch.zeros

    def without_zeroing(*size: Any, **options: Any) -> Any:
        make = torch.empty if "npu" in str(options.get("device")) else zeros
        return make(*size, **options)

    monkeypatch.setattr(torch, "zeros", without_zeroing)

    def make(name: str) -> Any:
        from vllm.config import CompilationConfig
        from vllm.model_executor.layers.attention import MLAAttention
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm_ascend.attention.attention_v1 import AscendAttentionBackend
        from vllm_ascend.attention.mla_v1 import AscendMLABackend

        spec = kv_spec(name)
        made = object.__new__(runner_class)
        made.device = torch.device("npu:0")
        made.use_compress = made.use_hybrid_blocks = False
        made.use_sparse = getattr(spec, "sparse_head_dim", None) is not None
        made.c8_k_cache_dtype, made.c8_k_scale_cache_dtype = torch.int8, torch.float16
        made.runner_only_attn_layers = set()
        made.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(index_head_dim=128), use_mla=False)
        mla = {}
        for layer in LAYERS:
            mla[layer] = torch.nn.Module.__new__(MLAAttention)
            torch.nn.Module.__init__(mla[layer])
            mla[layer].kv_lora_rank, mla[layer].qk_rope_head_dim = 512, 64
        compilation = CompilationConfig()
        compilation.static_forward_context = mla
        made.vllm_config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(is_kv_consumer=True, is_kv_producer=True),
            quant_config=None,
            compilation_config=compilation,
            model_config=made.model_config,
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )
        size = spec.page_size_bytes * BLOCKS
        made.kv_cache_config = KVCacheConfig(
            BLOCKS, [KVCacheTensor(size, [layer]) for layer in LAYERS], [KVCacheGroupSpec(LAYERS, spec)]
        )
        backend = AscendAttentionBackend if name in ("dense", "values of another size") else AscendMLABackend
        made.attn_groups = [[SimpleNamespace(backend=backend, kv_cache_spec=spec, layer_names=LAYERS)]]
        return made

    return make


class AscendRig(Rig):
    """An engine of one rank, whose KV cache the runner has allocated."""

    def __init__(self, endpoint: str, name: str, runner: Any) -> None:
        config = runner.kv_cache_config
        assert not unsupported_reason(runner.vllm_config, config)
        raw = runner._allocate_kv_cache_tensors(config)
        self.caches = runner._reshape_kv_cache_tensors(config, raw)
        self.tensors = [tensor for layer in LAYERS for tensor in self.caches[layer]]
        for tensor in self.tensors:
            some = torch.randint(0, 255, (tensor.nbytes,), dtype=torch.uint8)
            tensor.view(torch.uint8).view(-1).copy_(some)
        torch.npu.synchronize()
        size = rank_block_bytes(config)
        spec = NamespaceSpec(f"{type(layer_spec(config)).__name__} {size}", (GroupSpec(BLOCK, size),))
        options = ConnectorSettings(endpoint, verify="all")
        sessions = [Session.open(endpoint, engine=name, label=label, deadline=10.0) for label in ("rank", "scheduler")]
        self.worker = Worker(sessions[0], spec, options, Shards(1, 1), 0, RankFacts(size))
        self.worker.register(self.caches, config.num_blocks)
        self.session = sessions[1]
        self.scheduler = VllmScheduler(self.session, spec, options, EngineFacts(BLOCK))
        self.seen = set()

    def block(self, number: int) -> bytes:
        return b"".join(tensor[number].cpu().view(torch.uint8).numpy().tobytes() for tensor in self.tensors)


@pytest.mark.parametrize("name", TENSORS)
def test_blocks_are_saved_and_loaded_byte_by_byte(daemon: Any, runner: Any, name: str) -> None:
    one, two = AscendRig(daemon.endpoint, "one", runner(name)), AscendRig(daemon.endpoint, "two", runner(name))
    try:
        assert len(one.caches[LAYERS[0]]) == TENSORS[name]
        request = Request("r", 4 * BLOCK + 1)
        one.run(request, blocks := [3, 1, 30, 7, 8])
        daemon.wait_status(lambda s: s["pool"]["blocks"] >= 4 and not s["pool"]["blocks_writing"], "the save")
        again = Request("r", 4 * BLOCK + 1, request.block_hashes)
        assert two.scheduler.matched_tokens(again, 0) == (4 * BLOCK, True)
        untouched = two.block(9)
        two.admit(again, places := [5, 31, 2, 0, 9], load=4 * BLOCK)
        two.step()
        assert two.await_loads() == {"r"}
        assert [two.block(at) for at in places[:4]] == [one.block(at) for at in blocks[:4]]
        assert two.block(9) == untouched
        assert two.worker.counters["blocks_verified"] == 4
    finally:
        one.close()
        two.close()


def test_the_connector_is_called_before_new_blocks_are_touched(runner_class: Any, monkeypatch: Any) -> None:
    """That is where blocks that are being saved are guarded: `_update_states` zeroes what is given to requests."""
    from vllm_ascend.worker import model_runner_v1

    calls: list[str] = []

    class Reached(Exception):
        pass

    def update(*_: Any) -> None:
        calls.append("_update_states")
        raise Reached

    connector = SimpleNamespace(handle_preemptions=lambda metadata: calls.append(metadata))
    monkeypatch.setattr(model_runner_v1, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(model_runner_v1, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(model_runner_v1, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    made = object.__new__(runner_class)
    off = SimpleNamespace(enable_return_routed_experts=False, need_timing=False)
    made.vllm_config = SimpleNamespace(model_config=off)
    made.ascend_config = SimpleNamespace(profiling_chunk_config=off)
    made.execute_model_state = made.speculative_config = made.debugger = made.prepare_inputs_event = None
    made.use_async_scheduling = made.supports_mm_inputs = False
    made.num_spec_tokens, made.pcp_size = 0, 1
    made._update_states = update
    with pytest.raises(Reached):
        made.execute_model(SimpleNamespace(kv_connector_metadata="plan", total_num_scheduled_tokens=1))
    assert calls == ["plan", "_update_states"]
