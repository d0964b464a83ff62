"""Which engines share a namespace: every fact that changes bytes parts them, nothing else does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_client.engines.vllm.groups import writes_early
from kvcache_client.engines.vllm.identity import (
    RuntimeFacts,
    Share,
    Stored,
    directory_digest,
    has_experts,
    namespace_spec,
    rank_block_bytes,
    shards,
    unsupported_by_head,
    unsupported_reason,
    with_stages,
)
from kvcache_client.engines.vllm.multimodal import unnamed_items
from kvcache_proto.errors import ConfigError
from kvcache_proto.types import SUFFIX, GroupSpec, NamespaceSpec

HERE = RuntimeFacts("0.32.0", "cpu cpu", 32, "vllm-none-hash")


class AttentionSpec:
    def __init__(self, **facts: Any) -> None:
        self.__dict__.update({"block_size": 16, "num_kv_heads": 4, "head_size": 64, "dtype": "bf16", **facts})


class FullAttentionSpec(AttentionSpec): ...


class MLAAttentionSpec(FullAttentionSpec): ...


class RSWASpec(FullAttentionSpec): ...


class SlidingWindowSpec(AttentionSpec): ...


class HfConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("__")}


def vllm_config(model: str = "meta/llama") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            max_model_len=4096,
            seed=0,
            use_mla=False,
            hf_config=HfConfig(_commit_hash="abc", _name_or_path=model, hidden_size=64, rope_theta=1e4),
            get_total_num_kv_heads=lambda: 4,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256", calculate_kv_scales=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        attention_config=SimpleNamespace(backend=None),
        speculative_config=None,
    )


def kv_cache_config(spec: Any = None, groups: int = 1, **facts: Any) -> Any:
    """As 0.32 makes it: two layers as views of one allocation, 8 KiB a block."""
    group = SimpleNamespace(kv_cache_spec=spec or FullAttentionSpec(), layer_names=["a", "b"])
    return SimpleNamespace(
        num_blocks=100,
        kv_cache_tensors=[
            SimpleNamespace(size=100 * 8192, layers=["a", "b"], layer_stride=100 * 4096, block_stride=4096)
        ],
        kv_cache_groups=[group] * groups,
        kv_cache_layout="LBHNC",
        **facts,
    )


def spec_of(
    vllm: Any = None,
    cache: Any = None,
    here: RuntimeFacts = HERE,
    engine_id: str = "e",
    weights: str = "",
    **stored: Any,
) -> NamespaceSpec:
    return namespace_spec(vllm or vllm_config(), cache or kv_cache_config(), here, Stored(**stored), engine_id, weights)


def test_geometry_follows_the_cache() -> None:
    spec = spec_of()
    assert spec.model == "meta/llama"
    assert (spec.groups[0].block_tokens, spec.groups[0].shards, spec.hash_bytes) == (16, (8192,), 32)
    larger = spec_of(blocks_per_slot=4)
    assert (larger.groups[0].block_tokens, larger.groups[0].shards) == (64, (32768,))
    assert larger.id != spec.id


def changed(path: str, value: Any) -> Callable[[Any], Any]:
    def change(config: Any) -> Any:
        *parents, name = path.split(".")
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)
        return config

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.dtype", "torch.float16"),
        ("model_config.quantization", "fp8"),
        ("model_config.hf_config._commit_hash", "def"),
        ("model_config.hf_config.rope_theta", 5e5),
        ("model_config.hf_config.rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("cache_config.cache_dtype", "fp8"),
        ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
        ("cache_config.calculate_kv_scales", True),
        ("attention_config.backend", SimpleNamespace(name="TRITON")),
        ("load_config.load_format", "dummy"),
        ("load_config.load_format", "tensorizer"),
        ("parallel_config.tensor_parallel_size", 2),
        ("speculative_config", SimpleNamespace(method="eagle", model="draft")),
    ],
)
def test_what_changes_the_bytes_parts_namespaces(path: str, value: Any) -> None:
    other = vllm_config()
    changed(path, value)(other)
    assert spec_of(other).id != spec_of().id


def multimodal(folder: Path | None = None, **options: Any) -> Any:
    config = vllm_config(str(folder) if folder else "meta/llama")
    found = {"mm_processor_cache_gb": 4, "mm_processor_kwargs": None, "mm_tensor_ipc": "direct_rpc"}
    config.model_config.multimodal_config = SimpleNamespace(**found | options)
    return config


def test_how_images_become_embeddings_parts_namespaces(tmp_path: Path) -> None:
    """Identifiers of images cover their content and the options of a request, not those of the engine."""
    processor = tmp_path / "preprocessor_config.json"
    kinds = [spec_of(), spec_of(multimodal()), spec_of(multimodal(mm_processor_kwargs={"size": 5}))]
    kinds += [spec_of(multimodal(an_option_of_a_later_version=True))]
    kinds += [spec_of(multimodal(), here=HERE._replace(transformers="5.1"))]
    for text in ("", '{"size": 5}'):
        processor.write_text(text)
        kinds.append(spec_of(multimodal(tmp_path)))
    assert len({spec.id for spec in kinds}) == len(kinds)
    assert spec_of(multimodal(mm_tensor_ipc="torch_shm")).id == kinds[1].id
    assert spec_of(multimodal(), multimodal=False).id == kinds[0].id


def test_images_that_hashes_do_not_name_by_their_content() -> None:
    counted = multimodal(mm_processor_cache_gb=0)
    counted.cache_config.enable_prefix_caching = False
    both_ways, several = multimodal(), multimodal()
    both_ways.model_config.is_mm_prefix_lm = True
    several.model_config.architectures = ["H2OVLChatModel"]
    reasons = [unnamed_items(config) for config in (counted, both_ways, several)]
    assert all(reasons) and len(set(reasons)) == 3
    counted.cache_config.enable_prefix_caching = True
    assert unnamed_items(counted) == unnamed_items(multimodal()) == unnamed_items(vllm_config()) == ""


def test_an_ascend_engine_that_quantizes_what_it_loads_shares_nothing_with_its_producer() -> None:
    quantized = {}
    for consumer in (False, True):
        config = vllm_config()
        config.quant_config = SimpleNamespace(enable_fa_quant=True)
        config.kv_transfer_config = SimpleNamespace(is_kv_consumer=consumer)
        quantized[consumer] = spec_of(config).id
    assert len({*quantized.values(), spec_of().id}) == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.max_model_len", 131072),
        ("model_config.seed", 7),
        ("model_config.hf_config._name_or_path", "/elsewhere/llama"),
        ("model_config.hf_config.transformers_version", "5.9"),
        ("load_config.load_format", "safetensors"),
    ],
)
def test_what_does_not_leaves_them_together(path: str, value: Any) -> None:
    other = vllm_config()
    changed(path, value)(other)
    assert spec_of(other).id == spec_of().id


def test_the_length_limit_counts_where_positions_are_scaled_by_it() -> None:
    short, long = vllm_config(), vllm_config()
    for config in (short, long):
        config.model_config.hf_config.rope_scaling = {"rope_type": "longrope", "short_factor": [1.0]}
    long.model_config.max_model_len = 131072
    assert spec_of(short).id != spec_of(long).id


@pytest.mark.parametrize(
    "other",
    [
        HERE._replace(version="0.23.0"),
        HERE._replace(device="cuda NVIDIA H200"),
        HERE._replace(seed="PYTHONHASHSEED=0"),
    ],
)
def test_surroundings_part_namespaces(other: RuntimeFacts) -> None:
    assert spec_of(here=other).id != spec_of().id


def test_a_patch_release_does_not() -> None:
    assert spec_of(here=HERE._replace(version="0.32.4.dev1")).id == spec_of().id


def test_a_layout_parts_namespaces() -> None:
    cache = kv_cache_config()
    cache.kv_cache_layout = "BLHNC"
    assert spec_of(cache=cache).id != spec_of().id
    old, older = kv_cache_config(), kv_cache_config()
    old.kv_cache_layout = older.kv_cache_layout = None
    assert spec_of(cache=old, here=HERE._replace(layout="NHD")).id != spec_of(cache=older).id


@pytest.mark.parametrize(
    "other", [FullAttentionSpec(dtype="fp8"), FullAttentionSpec(head_size=256), MLAAttentionSpec()]
)
def test_what_a_layer_has_for_a_token_parts_namespaces(other: Any) -> None:
    """Also where blocks have as many bytes: flags of vLLM decide it, too, not only the model's configuration."""
    assert spec_of(cache=kv_cache_config(other)).id != spec_of().id


def test_a_random_seed_is_shared_with_nobody_but_the_engines_own_ranks() -> None:
    random = HERE._replace(seed="")
    assert spec_of(here=random, engine_id="a").id == spec_of(here=random, engine_id="a").id
    assert spec_of(here=random, engine_id="a").id != spec_of(here=random, engine_id="b").id
    assert spec_of(engine_id="a").id == spec_of(engine_id="b").id


def test_weights_of_its_own() -> None:
    spec = spec_of()
    assert spec.with_weights("x").id != spec.id
    assert spec.with_weights("x").id == spec_of(weights="x").id
    assert spec.with_weights("x").with_weights("") == spec


class Checkpoint:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
        header = json.dumps({"w": {"dtype": "F32", "shape": [65536], "data_offsets": [0, 262144]}}).encode()
        self.weights = folder / "model.safetensors"
        self.weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(262144))


def test_a_folder_is_named_by_what_it_holds(tmp_path: Path) -> None:
    one, two = Checkpoint(tmp_path / "one"), Checkpoint(tmp_path / "two")
    assert directory_digest(one.folder) == directory_digest(two.folder)
    same = spec_of(vllm_config(str(two.folder)))
    assert same.identity["checkpoint"] == spec_of(vllm_config(str(one.folder))).identity["checkpoint"]
    assert same.model == "two"

    data = bytearray(two.weights.read_bytes())
    data[-1] ^= 1  # a fine-tune: name, size and header are the same
    two.weights.write_bytes(data)
    assert directory_digest(one.folder) != directory_digest(two.folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_file_changes_the_name(tmp_path: Path, name: str) -> None:
    made = Checkpoint(tmp_path / "one")
    before = directory_digest(made.folder)
    file = made.folder / name
    file.write_bytes(file.read_bytes() + b" ")
    assert directory_digest(made.folder) != before


def test_a_torn_weight_file_is_read_all_the_same(tmp_path: Path) -> None:
    made = Checkpoint(tmp_path / "one")
    made.weights.write_bytes(b"\xff" * 12)
    assert len(directory_digest(made.folder)) == 32


@pytest.mark.parametrize(
    ("ranks", "heads", "count", "replicas"),
    [(1, 4, 1, 1), (2, 4, 2, 1), (4, 4, 4, 1), (8, 4, 4, 2)],
)
def test_shards_follow_the_kv_not_the_ranks(ranks: int, heads: int, count: int, replicas: int) -> None:
    config = vllm_config()
    config.parallel_config.tensor_parallel_size = ranks
    config.model_config.get_total_num_kv_heads = lambda: heads
    split = shards(config, kv_cache_config())
    assert (split.number, split.replicas) == (count, replicas)
    for rank in range(ranks):
        shard = rank // replicas
        assert split.of_rank(rank) == (range(shard, shard + 1), (shard,) if rank % replicas == 0 else ())
    assert len(spec_of(config).groups[0].shards) == count


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_stripes_of_mla_are_written_once_each_and_read_by_all(ranks: int) -> None:
    config = vllm_config()
    config.parallel_config.tensor_parallel_size, config.model_config.use_mla = ranks, True
    split = shards(config, kv_cache_config(MLAAttentionSpec()))
    assert {split.of_rank(rank)[0] for rank in range(ranks)} == {range(8)}
    written = [split.of_rank(rank)[1] for rank in range(ranks)]
    assert sorted(shard for each in written for shard in each) == list(range(8))
    assert max(map(len, written)) - min(map(len, written)) <= 1
    alone = vllm_config()
    alone.model_config.use_mla = True
    assert spec_of(config, kv_cache_config(MLAAttentionSpec())) == spec_of(alone, kv_cache_config(MLAAttentionSpec()))


def spread(ranks: int, contexts: int, prefill: int = 1, heads: int = 0, interleave: int = 1) -> Any:
    """Return the configuration of an engine with context parallelism: with MLA if the model has no number of heads."""
    config = vllm_config()
    config.model_config.use_mla, config.model_config.get_total_num_kv_heads = not heads, lambda: heads
    config.parallel_config = SimpleNamespace(
        tensor_parallel_size=ranks,
        pipeline_parallel_size=1,
        decode_context_parallel_size=contexts,
        prefill_context_parallel_size=prefill,
        cp_kv_cache_interleave_size=interleave,
    )
    return config


@pytest.mark.parametrize(
    ("config", "read", "replicas"),
    [
        (spread(4, 2, heads=2), [0, 1, 2, 3], 1),
        (spread(8, 2, heads=2), [0, 1, 0, 1, 2, 3, 2, 3], 2),
        (spread(8, 4, heads=1), [0, 1, 2, 3, 0, 1, 2, 3], 2),
        (spread(4, 4), [0, 1, 2, 3], 1),
        (spread(4, 2), [0, 1, 0, 1], 2),
        (spread(2, 2, prefill=2), [0, 0, 1, 1], 2),  # vLLM's groups: ranks 0 and 2, ranks 1 and 3
        (spread(2, 4, prefill=2), [0, 2, 1, 3], 1),  # one group: ranks 0, 2, 1, 3
    ],
)
def test_ranks_hold_slices_of_a_block(config: Any, read: list[int], replicas: int) -> None:
    split = shards(config, kv_cache_config(kv_tp_replicas=1))
    parts = max(1, 8 // len(set(read))) if config.model_config.use_mla else 1
    assert (split.number, split.replicas, split.parts) == (len(set(read)) * parts, replicas, parts)
    assert [split.of_rank(rank)[0].start for rank in range(len(read))] == [piece * parts for piece in read]
    written = [split.of_rank(rank)[1] for rank in range(len(read))]
    assert sorted(shard for each in written for shard in each) == list(range(split.number))
    assert parts < replicas or len(set(map(len, written))) == 1, "all save as much"
    assert unsupported_by_head(config, kv_cache_config(), "LBHNC") == (
        "context parallelism spreads the tokens of a block over ranks"
    )
    (group,) = spec_of(config).groups
    tokens = 16 * config.parallel_config.decode_context_parallel_size
    assert (group.block_tokens, group.shards) == (tokens, (8192 // parts,) * split.number)
    assert not writes_early(kv_cache_config(hash_block_size=tokens)), "hits do not end within a block"


def test_slices_are_named() -> None:
    ids = {spec_of(spread(4, contexts, interleave=interleave)).id for contexts in (1, 2, 4) for interleave in (1, 8)}
    assert len(ids) == 5, "the interleave of one slice means nothing"
    older = spread(4, 2)
    older.parallel_config.dcp_kv_cache_interleave_size = 8
    assert spec_of(older) == spec_of(spread(4, 2, interleave=8))
    whole = MLAAttentionSpec(dcp_sharded=False)
    assert spec_of(spread(4, 2), kv_cache_config(whole)) == spec_of(spread(4, 1), kv_cache_config(whole))
    assert spec_of(spread(2, 1, prefill=2)) == spec_of(spread(1, 1)), "all ranks have all"


def test_heads_that_cannot_be_shards_are_named() -> None:
    def spec(**facts: Any) -> Any:
        return FullAttentionSpec(**{"num_kv_heads": 4, "page_size_bytes": 4096, **facts})

    def why(layout: str = "LBHNC", heads: int = 4, cache: Any = None, ranks: int = 1, stages: int = 1) -> str:
        config = vllm_config()
        config.model_config.get_total_num_kv_heads = lambda: heads
        config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = ranks, stages
        return unsupported_by_head(config, kv_cache_config(cache or spec()), layout)

    assert {why(layout) for layout in ("HND", "LBHNC", "BLHNC", "BHLNC")} == {""}
    assert why(ranks=2, heads=8) == why(ranks=4, heads=16) == why(ranks=8, heads=4, cache=spec(num_kv_heads=1)) == ""
    for layout in ("NHD", "LBNHC", "BLNHC", "LHBNC", ""):
        assert "in which the heads of a token are together" in why(layout)
    assert "more than the KV of each head" in why(cache=spec(real_page_size_bytes=4000))
    assert "more than the KV of each head" in why(cache=spec(page_size_bytes=4098))
    assert why(ranks=2) == "the ranks hold 8 different heads, and the model has 4"
    assert why(ranks=8, heads=32, stages=4) == "128 shards: at most 64"
    window = {"page_size_bytes": 4096, "real_page_size_bytes": 4096, "sliding_window": 32}
    assert why(cache=SlidingWindowSpec(num_kv_heads=4, **window)) == ""
    several, config = kv_cache_config(spec(real_page_size_bytes=4096)), vllm_config()
    config.model_config.get_total_num_kv_heads = lambda: 4
    windows = SlidingWindowSpec(num_kv_heads=4, **window)
    several.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=windows, layer_names=["c"]))
    several.kv_cache_tensors.append(SimpleNamespace(size=409600, layers=["c"], layer_stride=409600, block_stride=4096))
    assert unsupported_by_head(config, several, "LBHNC") == ""
    several.kv_cache_tensors[1].layer_stride = 2048
    assert "not evenly spaced" in unsupported_by_head(config, several, "LBHNC")


def test_mla_that_cannot_be_divided_evenly_is_one_shard() -> None:
    config = vllm_config()
    config.model_config.use_mla = True
    odd = kv_cache_config(MLAAttentionSpec())
    odd.kv_cache_tensors[0].layer_stride = odd.kv_cache_tensors[0].block_stride = 4100
    assert shards(config, odd).number == 1
    mixed = kv_cache_config(MLAAttentionSpec())  # blocks before layers, with pages of two sizes
    mixed.kv_cache_tensors = [
        SimpleNamespace(layers=["a"], layer_stride=size, block_stride=8192) for size in (4096, 64)
    ]
    assert shards(config, mixed).number == 1


def test_what_the_engine_says_of_its_replicas_goes_first() -> None:
    config = vllm_config()
    config.parallel_config.tensor_parallel_size = 4
    assert shards(config, kv_cache_config(kv_tp_replicas=2)).number == 2


def test_a_rank_s_bytes_before_and_after_one_allocation() -> None:
    assert rank_block_bytes(kv_cache_config()) == 8192
    several = kv_cache_config()
    several.kv_cache_tensors *= 2  # views of the one allocation, whose size each of them says
    assert rank_block_bytes(several) == 8192
    old = kv_cache_config()
    old.kv_cache_tensors = [SimpleNamespace(size=100 * 4096, shared_by=[name]) for name in "ab"]
    assert rank_block_bytes(old) == 8192
    packed = kv_cache_config()
    packed.kv_cache_tensors = [
        SimpleNamespace(size=100 * 8192, shared_by=[name], offset=at * 4096, block_stride=8192)
        for at, name in enumerate("ab")
    ]
    assert rank_block_bytes(packed) == 8192


def test_shards_of_stages_have_the_sizes_of_their_ranks() -> None:
    """Two stages of two ranks, in which two ranks have one KV head: the first one of each writes it."""
    vllm = vllm_config()
    vllm.parallel_config.tensor_parallel_size, vllm.parallel_config.pipeline_parallel_size = 2, 2
    vllm.model_config.get_total_num_kv_heads = lambda: 1
    spec, split = spec_of(vllm), shards(vllm, kv_cache_config())
    first, second = Share(2, "two layers", (8192,), ()), Share(1, "a layer", (4096,), ())
    assert [split.of_rank(rank)[1] for rank in range(4)] == [(0,), (), (1,), ()]
    staged = with_stages(spec, split, [[first] * 2, [second] * 2])
    assert [group.shards for group in staged.groups] == [(8192, 4096)]
    assert staged.identity["stages"] == "2 + 1 layers"
    drafted = NamespaceSpec(
        "m", [GroupSpec(16, 64, needs_next_block=True), GroupSpec(16, 64, SUFFIX, 1)], spec.identity
    )
    sizes = [Share(1, "a layer", (size, size), ()) for size in (64, 128)]
    one, two = with_stages(drafted, split, [[each] * 2 for each in sizes]).groups
    assert (one, two) == (GroupSpec(16, (64, 128), needs_next_block=True), GroupSpec(16, (64, 128), SUFFIX, 1))
    others = [spec, with_stages(spec, split, [[second] * 2, [first] * 2]), spec_of(vllm_config())]
    assert staged.id not in {other.id for other in others}
    with pytest.raises(ConfigError, match="a pipeline stage has no layer"):
        with_stages(spec, split, [[first] * 2, [second._replace(tables=((0, 1),))] * 2])


def test_what_cannot_be_cached_is_named() -> None:
    assert unsupported_reason(vllm_config(), kv_cache_config()) == ""
    assert unsupported_reason(vllm_config(), kv_cache_config(MLAAttentionSpec())) == ""
    assert unsupported_reason(vllm_config(), kv_cache_config(RSWASpec())).startswith("RSWASpec")
    mixed = SimpleNamespace(block_size=16, kv_cache_specs={"a": FullAttentionSpec(), "b": SlidingWindowSpec()})
    assert unsupported_reason(vllm_config(), kv_cache_config(mixed)).startswith("SlidingWindowSpec")
    assert unsupported_reason(spread(8, 2, heads=2), kv_cache_config(hash_block_size=32)) == ""
    assert unsupported_reason(spread(6, 2, heads=2), kv_cache_config()) == (
        "decode_context_parallel_size 2, by which the number of ranks with the same KV heads cannot be divided"
    )
    pages = {"page_size_bytes": 4096, "real_page_size_bytes": 4096}
    windows = kv_cache_config(FullAttentionSpec(**pages), groups=2)
    windowed = SlidingWindowSpec(sliding_window=64, **pages)
    windows.kv_cache_groups[1] = SimpleNamespace(kv_cache_spec=windowed, layer_names=["b"])
    assert unsupported_reason(spread(8, 2, heads=2), windows) == (
        "decode_context_parallel_size 2 with 2 KV cache groups (FullAttentionSpec, SlidingWindowSpec): only with one "
        "of full attention"
    )
    beside = spread(8, 2, heads=2)
    beside.parallel_config._allow_auto_resolve_cp_interleave_size = True
    beside.kv_transfer_config = SimpleNamespace(has_connector=lambda name: name == "NixlConnector")
    assert "beside a NixlConnector" in unsupported_reason(beside, kv_cache_config())
    alone = copy.deepcopy(vllm_config())
    alone.model_config.use_mla, alone.cache_config.enable_prefix_caching = True, False
    alone.scheduler_config = SimpleNamespace(enable_chunked_prefill=False)
    alone.device_config = SimpleNamespace(device_type="cpu")
    assert "CPU_MLA" in unsupported_reason(alone, kv_cache_config())
    alone.device_config.device_type = "cuda"  # where it was the user who turned both off
    assert unsupported_reason(alone, kv_cache_config()) == ""
    assert (
        unsupported_reason(vllm_config(), kv_cache_config(hash_block_size=8)) == "hashes of 8 tokens for blocks of 16"
    )


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, False),
        ({"num_local_experts": 8}, True),
        ({"text_config": {"n_routed_experts": 256}}, True),
        ({"num_experts": 0, "num_experts_per_tok": None, "id2label": {0: "LABEL_0"}}, False),
    ],
)
def test_experts_are_found_wherever_the_configuration_tells_of_them(facts: dict[str, Any], expected: bool) -> None:
    config = vllm_config()
    config.model_config.hf_config.__dict__.update(facts)
    assert has_experts(config) is expected
