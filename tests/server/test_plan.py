"""`kvcache-server plan`: figures that agree with a real index, and errors that name the field."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

import click.testing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_proto import messages as m
from kvcache_proto.errors import ConfigError
from kvcache_proto.region import plan_geometry
from kvcache_proto.types import GroupSpec, NamespaceSpec, Outcome, Refusal
from kvcache_server.cli import commands
from kvcache_server.config import load
from kvcache_server.core.cache import Cache
from kvcache_tools.plan.figures import Options, figures
from kvcache_tools.plan.host import GIB
from kvcache_tools.plan.models import read_model
from kvcache_tools.plan.weights import weight_bytes
from kvcache_tools.replay.simulated_daemon import sparse_region

MODELS = Path(__file__).parent.parent / "models"
NAMES = sorted(file.stem for file in MODELS.glob("*.json"))
KIB = 1 << 10
WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def config_of(name: str) -> dict[str, Any]:
    return json.loads((MODELS / f"{name}.json").read_text())


def plan(name: str, **options: Any) -> dict[str, Any]:
    return figures(config_of(name), name, Options(**options))


def run(*arguments: str) -> str:
    result = click.testing.CliRunner().invoke(commands, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def blocks_until_one_goes(serve: str, shards: int, shard_bytes: int) -> int:
    """Return how many blocks a daemon with these flags holds before the first eviction."""
    words = shlex.split(serve)
    assert words[:2] == ["kvcache-server", "serve"]
    flags = {flag[2:].replace("-", "_"): value for flag, value in zip(words[2::2], words[3::2], strict=True)}
    config = load(environ={}, flags=flags)
    geometry = plan_geometry(b"r" * 16, config.size, config.page_size)
    cache = Cache(sparse_region(geometry), geometry)
    session = cache.open_session("one", "", 0.0)
    spec = NamespaceSpec("m", (GroupSpec(128, (shard_bytes,) * shards),))
    namespace = cache.handle(session, m.Attach(1, b"", spec, tuple(range(shards))), 0.0).namespace
    stored = 0
    while not cache.eviction.evictions:
        names = [(stored + at).to_bytes(32, "little") for at in range(8)]
        runs = [m.Run([name]) for name in names]
        reserved = cache.handle(session, m.Reserve(1, b"", namespace, runs), 0.0)
        assert set(reserved.answers) == {Refusal.GRANTED}
        settle = m.Settle(
            1, b"", geometry.region_id, reserved.reservation, tuple(range(shards)), int(Outcome.COMMITTED)
        )
        cache.handle(session, settle, 0.0)
        stored += len(names)
    return sum(len(group.visible) for group in cache.namespaces[namespace].groups)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-3-8b", {"ram": 64 * GIB}),
        ("llama-3-8b", {"ram": 64 * GIB, "page_size": 2 << 20}),
        ("llama-3.1-70b", {"ram": 256 * GIB, "tp": 8, "kv_dtype": "fp8"}),
        ("llama-3-8b", {"ram": 256 * GIB, "tp": 16}),
        ("deepseek-v3", {"ram": 160 * GIB, "tp": 8}),
        ("gemma-3-1b", {"ram": 20 * GIB, "leave": 19 * GIB}),
        ("qwen2.5-7b", {"ram": 1 << 30, "leave": (1 << 30) - (100 << 20), "block_tokens": 16, "tp": 4}),
        ("phi-4", {"ram": 40 * GIB, "block_tokens": 48}),
    ],
)
def test_a_daemon_with_the_pasted_flags_holds_exactly_the_planned_blocks(name: str, options: dict[str, Any]) -> None:
    found = plan(name, **options)
    kv = found["kv"]
    kept = blocks_until_one_goes(found["paste"]["daemon"], kv["shards"], kv["shard_bytes"])
    assert kept == found["host"]["blocks"]
    assert found["host"]["tokens"] == kept * kv["block_tokens"]


def test_pages_leave_little_of_the_memory_unused() -> None:
    for name in ("gemma-2-9b", "gemma-3-1b", "llama-3-8b"):
        assert plan(name, ram=512 * GIB)["host"]["unused_share"] < 0.03


@pytest.mark.parametrize(
    ("name", "tp", "kv_dtype", "token_bytes", "shards"),
    [
        ("llama-3-8b", 1, "auto", 128 * KIB, 1),  # 32 layers x 8 heads x (128 + 128) x 2 bytes
        ("llama-3-8b", 4, "fp8", 64 * KIB, 4),
        ("llama-2-7b", 1, "auto", 512 * KIB, 1),  # every head has KV of its own
        ("deepseek-v3", 8, "auto", 61 * 576 * 2, 8),  # one latent vector, the same on each rank
        ("deepseek-v3.2", 8, "auto", 61 * (576 * 2 + 132), 8),  # and what its indexer keeps
        ("deepseek-v3.2", 8, "fp8", 61 * (656 + 132), 8),  # with scales, and the rotary part in 16 bits
        ("gpt-oss-20b", 1, "auto", 24 * KIB, 1),  # half of the layers have a window
        ("jamba-v0.1", 1, "auto", 16 * KIB, 1),  # 4 of 32 layers attend
    ],
)
def test_bytes_per_token(name: str, tp: int, kv_dtype: str, token_bytes: int, shards: int) -> None:
    kv = plan(name, tp=tp, kv_dtype=kv_dtype)["kv"]
    assert (kv["token_bytes"], kv["shards"]) == (token_bytes, shards)
    assert kv["block_bytes"] == kv["shards"] * kv["shard_bytes"] == kv["block_tokens"] * token_bytes


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"layer_types": ["indexed_attention"] * 61}, 61),  # as in a file that transformers has completed
        ({"index_topk_freq": 4}, 16),  # 0, 1, 5, 9, ...
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 17),
        ({"index_topk_pattern": "FSSF", "index_topk_freq": 9}, 59),
        ({"index_topk_pattern": ["F", "S"]}, 60),
    ],
)
def test_layers_without_an_indexer(change: dict[str, Any], layers: int) -> None:
    found = figures(config_of("deepseek-v3.2") | change, "m", Options())
    assert found["kv"]["token_bytes"] == 61 * 576 * 2 + layers * 132


def test_fewer_kv_heads_than_ranks_are_kept_by_each_rank() -> None:
    kv = plan("llama-3-8b", tp=16)["kv"]
    assert kv["block_bytes"] == 2 * 128 * kv["token_bytes"] and kv["copies"] == 2
    assert "each is kept 2 times" in run(str(MODELS / "llama-3-8b.json"), "--tp", "16")


def test_both_cache_types_of_a_plan() -> None:
    device = plan("llama-3-8b", kv_memory=16 * GIB, length=4096)["device"]
    # 16 tokens x 128 KiB a block, of which one is never given away.
    assert (device["bf16"]["blocks"], device["fp8"]["blocks"]) == (8192, 16384)
    assert (device["bf16"]["at_once"], device["fp8"]["at_once"]) == (31, 63)
    assert device["bf16"]["longest"] == 8192  # the model's own limit
    small = plan("llama-3-8b", kv_memory=GIB // 2, length=8192)["device"]
    assert (small["bf16"]["longest"], small["bf16"]["at_once"]) == (255 * 16, 0)
    assert small["fp8"]["longest"] == 511 * 16


def test_windows_are_saved_where_prompts_may_continue() -> None:
    found = plan("gpt-oss-20b", length=65536, ram=64 * GIB)
    (window,) = found["kv"]["suffixes"]
    block = 128 * 12 * 8 * 128 * 2  # tokens x layers x heads x (64 + 64) x 2 bytes
    assert (window["kind"], window["layers"], window["window"], window["bytes"]) == ("sliding", 12, 128, block)
    assert found["kv"]["block_bytes"] == block, "the other half of the layers"
    assert window["conversation_bytes"] == 4 * block, "three checkpoints and the end"
    assert found["host"]["conversations"] == found["host"]["blocks"] // (512 + 4)
    shown = run(str(MODELS / "gpt-oss-20b.json"))
    assert "12 layers, sliding 128 tokens: at the end of a prompt, and at every 16,384 tokens" in shown
    assert "needs vLLM 0.32 or later" in shown and "--kv-transfer-config" in shown


def test_windows_that_overlap_count_once() -> None:
    (window,) = plan("mistral-7b-v0.1", length=32768)["kv"]["suffixes"]
    assert window["bytes"] == 32 * 128 * 32 * 8 * 256 * 2
    assert window["conversation_bytes"] == 8 * window["bytes"], "all of 32,768 tokens, which is eight windows"


@pytest.mark.parametrize(("name", "layers"), [("jamba-v0.1", 28), ("qwen3-next-80b", 36)])
def test_a_state_is_saved_at_the_end_of_a_prompt(name: str, layers: int) -> None:
    found = plan(name)
    (state,) = found["kv"]["suffixes"]
    assert (state["kind"], state["layers"], state["bytes"]) == ("state", layers, state["conversation_bytes"])
    assert found["kv"]["block_tokens"] == found["engine"]["block_size"]
    assert "--mamba-cache-mode align" in found["paste"]["engine"]


def test_every_plan_states_the_limits_of_offloading() -> None:
    shown = run(str(MODELS / "qwen3-8b.json"), "--tp", "2", "--ram", "256GiB", "--length", "4000", "--block-size", "64")
    assert "The KV of each running request must fit on the device" in shown and "is not safe" in shown
    assert '"kv_connector_extra_config": {"block_size": 64}' in shown
    assert "left" in shown and "10%, at least 8.0 GiB, and 8.0 GiB per rank" in shown


def test_json_and_text_agree(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODELS / "phi-4.json").read_text())
    found = json.loads(run(str(tmp_path), "--tp", "2", "--json"))
    assert found == figures(config_of("phi-4"), tmp_path.name, Options(tp=2))


def test_weights_of_quantised_checkpoints() -> None:
    def size(name: str, **quantization: Any) -> float:
        config = config_of(name)
        if quantization:
            config["quantization_config"] = quantization
        return weight_bytes(read_model(config), config, 1) / GIB

    assert size("llama-3-8b", quant_method="awq", bits=4) == pytest.approx(5.3, abs=0.2)
    assert size("deepseek-v3") == pytest.approx(626, rel=0.03)  # fp8: 671 billion
    assert size("gpt-oss-20b") == pytest.approx(13, abs=0.5)  # 4 bits in the experts alone


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_attention_heads": None}, "no num_attention_heads"),
        ({"num_attention_heads": "32"}, "num_attention_heads '32'"),
        ({"num_key_value_heads": -8}, "num_key_value_heads -8"),
        ({"num_hidden_layers": 10**9}, "at most 4,096"),
        ({"architectures": None, "model_type": None}, "not a Hugging Face config.json"),
        ({"is_encoder_decoder": True}, "encoder-decoder models are not supported"),
        ({"index_topk": 2048}, "index_topk"),
        ({"model_type": "deepseek_v32", **WIDTHS, "index_topk_pattern": 5}, "index_topk_pattern 5: a letter per layer"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "no kv_lora_rank"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 32 layers"),
        ({"layer_types": ["dreaming"] * 32}, "'dreaming'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0: an integer from 1 to"),
        ({"num_key_value_heads": 64}, "num_key_value_heads 64: 32 attention heads are no multiple"),
        ({"num_key_value_heads": 7}, "num_key_value_heads 7: 32 attention heads are no multiple"),
        ({"head_dim": 0}, "head_dim 0: an integer from 1 to"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0: an integer from 1 to"),
        ({"torch_dtype": "int3"}, "torch_dtype 'int3': one of bfloat16, float16"),
        ({"dtype": ["float16"]}, "dtype \\['float16'\\]: one of bfloat16, float16"),
        ({"torch_dtype": 5}, "torch_dtype 5: one of bfloat16, float16"),
    ],
)
def test_an_unsupported_file_is_refused_naming_the_field(change: dict[str, Any], says: str) -> None:
    config = {key: value for key, value in (config_of("llama-3-8b") | change).items() if value is not None}
    with pytest.raises(ConfigError, match=says):
        figures(config, "m", Options())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tp", "3"], "does not divide the 32 attention heads"),
        (["--tp", "0"], "tp 0: at least 1"),
        (["--ram", "8GiB"], "are left for the host"),
        (["--ram", "many"], "--ram: size 'many'"),
        (["--block-size", "100"], "a multiple of the engine's expected, 16"),
        (["--utilization", "1.5"], "utilization 1.5"),
        (["--length", "0"], "length 0: at least 1"),
        (["--length", "99999999999999999999"], "length 99999999999999999999: at most"),
        (["--ram", "0"], "ram 0: at least 1"),
        (["--device-memory", "0"], "device 0: at least 1"),
        (["--kv-memory", "0"], "kv_memory 0: at least 1"),
        (["--weights", "0"], "weights 0: at least 1"),
        (["--engine-block-size", "0"], "engine_block 0: at least 1"),
        (["--engines", "99999999999999999999"], "engines 99999999999999999999: at most"),
        (["--ram", "20GiB", "--leave", "19.999GiB", "--page-size", "4KiB"], "at least 2162688 with pages of 4096"),
    ],
)
def test_invalid_flags_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        click.testing.CliRunner().invoke(
            commands, ["plan", str(MODELS / "llama-3-8b.json"), *arguments], catch_exceptions=False
        )


def test_leaving_nothing_for_the_host_is_allowed() -> None:
    host = plan("llama-3-8b", ram=64 * GIB, leave=0)["host"]
    assert (host["leave_bytes"], host["size_bytes"]) == (0, 64 * GIB)
    assert host["leave_rule"]["given"]


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"', "[" * 100_000, "{}", '{"text_config": 3}'])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json|JSON"):
        click.testing.CliRunner().invoke(commands, ["plan", str(tmp_path)], catch_exceptions=False)


ODD = st.one_of(st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=5))
ODD = st.one_of(ODD, st.lists(ODD, max_size=3), st.dictionaries(st.text(max_size=5), ODD, max_size=3), st.just(0))


@given(st.data())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_a_damaged_file_gives_figures_or_a_clear_error(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    config = config_of(name)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(ODD)
    with contextlib.suppress(ConfigError):
        figures(config, name, Options())


@pytest.mark.parametrize("name", NAMES)
def test_what_the_host_holds_with_compression(name: str) -> None:
    """A quarter more of what is attention's, if blocks are larger than pages. KV of other types is not compressed, nor
    beside an index."""
    found = plan(name, kv_dtype="bf16")
    compressed = found["host"]["compressed"]
    if found["model"]["dtype"] != "bfloat16" or "index_topk" in config_of(name):
        assert compressed is None
        return
    more = compressed["conversations"] / found["host"]["conversations"]
    large = found["kv"]["block_bytes"] > 4 * found["host"]["page_bytes"]
    assert 1.0 <= more < 1.32 and (more > 1.25 or "state" in found["model"]["kinds"] or not large)
    assert plan(name, kv_dtype="fp8")["host"]["compressed"] is None
    assert f"{compressed['conversations']:,}   on NVIDIA GPUs, where they are compressed" in run(
        str(MODELS / f"{name}.json"), "--kv-dtype", "bf16"
    )
