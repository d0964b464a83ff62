"""`kvcache-server plan` beside vLLM's own figures, for models whose config.json is in tests/models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcache_proto.errors import ConfigError
from kvcache_tools.plan.device import device
from kvcache_tools.plan.figures import KV_ITEMS
from kvcache_tools.plan.models import Attention, Latent, State, read_model
from kvcache_tools.plan.pages import LayerGroup, Pages, page, pages, shards, slots, stripes
from kvcache_tools.plan.weights import weight_bytes

HERE = Path(__file__).parent
MODELS = HERE.parent / "models"
MEMORY = 64 << 30
LENGTHS = [1, 129, 5000, 8192]
BLOCK = 128


class Case(NamedTuple):
    model: str
    tp: int
    kv: str
    hybrid: bool = True
    amx: bool = False  # what vLLM is told of the processor: with AMX, it chooses another backend for MLA

    def __str__(self) -> str:
        notes = "-one-table" * (not self.hybrid) + "-amx" * self.amx
        return f"{self.model}-tp{self.tp}-{self.kv}{notes}"


CASES = [
    *(Case("llama-3-8b", 1, "auto"), Case("llama-3-8b", 2, "fp8"), Case("llama-3-8b", 16, "auto")),
    *(Case("llama-3.1-70b", 8, "auto"), Case("llama-2-7b", 1, "auto"), Case("llama-2-7b", 4, "fp8")),
    *(Case("qwen2.5-7b", 4, "auto"), Case("qwen3-8b", 1, "fp8"), Case("qwen3-8b", 8, "auto")),
    *(Case("mistral-7b-v0.1", 1, "auto"), Case("mistral-7b-v0.1", 2, "fp8", hybrid=False)),
    *(Case("mixtral-8x7b", 2, "auto"), Case("phi-4", 2, "auto"), Case("phi-3-mini-4k", 1, "auto")),
    *(Case("gemma-2-9b", 1, "auto"), Case("gemma-3-1b", 1, "auto"), Case("gemma-3-1b", 2, "fp8")),
    *(Case("gemma-3-1b", 1, "auto", hybrid=False), Case("deepseek-v3", 1, "auto"), Case("deepseek-v3", 8, "fp8")),
    *(Case("deepseek-v3", 1, "auto", amx=True), Case("deepseek-v3", 8, "auto", amx=True)),
    *(Case("deepseek-v3.2", 1, "auto"), Case("deepseek-v3.2", 8, "fp8"), Case("glm-5", 8, "auto")),
    *(Case("gpt-oss-20b", 1, "auto"), Case("gpt-oss-20b", 2, "fp8"), Case("gpt-oss-20b", 2, "auto", hybrid=False)),
    *(Case("jamba-v0.1", 1, "auto"), Case("jamba-v0.1", 2, "fp8"), Case("granite-4.0-h-small", 2, "auto")),
    *(Case("gpt-oss-uneven", 1, "auto"), Case("granite-4.0-h-small", 4, "fp8"), Case("nemotron-h-8b", 8, "fp8")),
    *(Case("nemotron-h-8b", 2, "auto"), Case("qwen3-next-80b", 1, "auto"), Case("qwen3-next-80b", 4, "fp8")),
]
# Full attention, windows, MLA and states; the others are long.
FEW = {
    *(Case("llama-3-8b", 2, "fp8"), Case("gpt-oss-uneven", 1, "auto"), Case("deepseek-v3", 1, "auto")),
    *(Case("deepseek-v3", 8, "auto", amx=True), Case("glm-5", 8, "auto"), Case("qwen3-next-80b", 4, "fp8")),
}
assert set(CASES) > FEW
MARKED = [pytest.param(case, marks=() if case in FEW else pytest.mark.long, id=str(case)) for case in CASES]
REFUSED = [Case("phi-4", 4, "auto"), Case("llama-3-8b", 3, "auto"), Case("nemotron-h-8b", 16, "auto")]
UNEVEN = [*["sliding_attention", "full_attention"] * 12, "sliding_attention"]
GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "index_topk_freq": 4,  # most layers have no indexer
    "index_skip_topk_offset": 3,
}
CHANGED = {
    "gpt-oss-uneven": ("gpt-oss-20b", {"num_hidden_layers": 25, "layer_types": UNEVEN}),
    "glm-5": ("deepseek-v3.2", GLM),
}
KINDS = {
    "full": "FullAttentionSpec",
    "sliding": "SlidingWindowSpec",
    "latent": "MLAAttentionSpec",
    "state": "MambaSpec",
}


def plain(name: str) -> dict[str, Any]:
    """The model without its quantisation, whose kernels this host need not have; the KV cache is the same."""
    known, change = CHANGED.get(name, (name, {}))
    config: dict[str, Any] = json.loads((MODELS / f"{known}.json").read_text()) | change
    config.pop("quantization_config", None)
    return config


@pytest.fixture(scope="module")
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """What vLLM makes of the cases of those tests that are selected."""
    folder = tmp_path_factory.mktemp("models")
    here = [item for item in request.session.items if item.path == request.path]
    cases = list({item.callspec.params["case"]: None for item in here if isinstance(item, pytest.Function)})
    asked = []
    for case in cases:
        (folder / case.model).mkdir(exist_ok=True)
        (folder / case.model / "config.json").write_text(json.dumps(plain(case.model)))
        asked.append({**case._asdict(), "model": str(folder / case.model), "memory": MEMORY, "lengths": LENGTHS})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    run = subprocess.run(
        [sys.executable, str(HERE / "page_sizes.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        timeout=1500,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(cases), run.stderr[-4000:]
    return dict(zip(cases, lines, strict=True))


def ours(case: Case, found: dict[str, Any]) -> Pages:
    model = read_model(plain(case.model), case.model)
    return pages(
        model, case.tp, KV_ITEMS["fp8" if case.kv == "fp8" else "bf16"], BLOCK, found["in_flight"], case.hybrid
    )


def kind(group: LayerGroup) -> str:
    if isinstance(group.spec, Attention):
        return KINDS["sliding" if group.spec.window else "full"]
    return KINDS["latent" if isinstance(group.spec, Latent) else "state"]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", MARKED)
def test_pages_groups_and_requests_are_those_of_vllm(case: Case, truth: dict[Case, dict[str, Any]]) -> None:
    found = truth[case]
    assert "error" not in found, found["error"]
    mine = ours(case, found)
    theirs = sorted(map(tuple, found["groups"]))
    assert sorted((group.layers, kind(group), group.block_tokens, group.page) for group in mine.groups) == theirs
    assert mine.block_bytes == found["bytes_per_block"]
    assert [mine.blocks_of(length) for length in LENGTHS] == found["needed"]
    model, item = read_model(plain(case.model)), KV_ITEMS["bf16"]
    states = [page(layer, 0, case.tp, item, model) for layer in model.layers if isinstance(layer, State)]
    assert max(states, default=0) == found["state_bytes"]
    whole = device(mine, MEMORY, found["limit"], LENGTHS[-1])
    assert whole.blocks == found["blocks"]
    small = device(mine, MEMORY // 64, found["limit"], LENGTHS[-1])
    assert small.longest == found["longest_in_small"]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", MARKED)
def test_what_is_cached_is_what_the_connector_would_cache(case: Case, truth: dict[Case, dict[str, Any]]) -> None:
    found = truth[case]
    mine = ours(case, found)
    model, item = read_model(plain(case.model), case.model), KV_ITEMS["fp8" if case.kv == "fp8" else "bf16"]
    assert shards(model, case.tp) * stripes(model, mine) == found["shards"]
    for compress in {False, case.kv == "auto" and model.dtype == "bfloat16"}:
        _, saved = slots(model, mine, case.tp, item, BLOCK, compress)
        theirs = sorted(map(tuple, found["compressed" if compress else "slots"]))
        assert sorted((slot.bytes, slot.window_blocks) for slot in saved) == theirs
    has_mla = any(isinstance(layer, Latent) for layer in model.layers)  # which CPU_MLA cannot continue, and AMX_MLA can
    assert bool(found["declined"]) == (has_mla and not case.amx), found["declined"]


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", MARKED)
def test_the_weights_are_estimated_to_a_few_percent(case: Case, truth: dict[Case, dict[str, Any]]) -> None:
    model = read_model(plain(case.model), case.model)
    estimate = weight_bytes(model, plain(case.model), case.tp)
    assert estimate == pytest.approx(truth[case]["weights"], rel=0.03)


@pytest.mark.timeout(1600)
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_ranks_that_vllm_refuses_are_refused(case: Case, truth: dict[Case, dict[str, Any]]) -> None:
    assert "Error" in truth[case]["error"]
    with pytest.raises(ConfigError, match=f"--tp {case.tp}"):
        shards(read_model(plain(case.model), case.model), case.tp)
